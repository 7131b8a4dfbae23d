"""Publisher: commits versions of one line in one form. The trainer holds one.

Order of a publish: write the packs (named by their digest), check that no other process took over the line, create the
manifest. Only then does the base become the new version. A publisher that dies at any point leaves either the whole
version or objects that nobody reads; publishing the same number again with the same weights completes or confirms it.
line_writer.py says what happens to two publishers of one line; sharded.py is for a trainer with many ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rollmill.errors import WeightsError
from rollmill.types import Version
from rollmill.weights.format.codings import Goal
from rollmill.weights.format.manifest import Base, Manifest, describe, layout_of, root_digest
from rollmill.weights.format.tensors import HostTensor, Tensors
from rollmill.weights.reading.weight_store import WeightStore
from rollmill.weights.writing.encoder import Before, BytesOf, Encoder, Made, Row, entries_of, rows_of
from rollmill.weights.writing.line_writer import Writer


class Publisher:
    """Versions are numbered without gaps. Each has a delta; every `snapshot_every` numbers there is a snapshot too.

    `goal` chooses the coding of deltas: quick to make ("fast"), "small", or without a base ("overwrite").
    """

    def __init__(
        self,
        store: WeightStore,
        line: str,
        form: str = "bf16",
        snapshot_every: int = 25,
        goal: Goal = "fast",
        threads: int | None = None,
        keeps: bool = False,
    ) -> None:
        """`keeps`: the tensors of a version become the base as they are, without a copy. Nobody may change them."""
        self.snapshot_every = checked_snapshot_every(snapshot_every)
        self._writer = Writer(store, line, form)
        self.store, self.line, self.form, self.goal = store, line, form, goal
        self.last: Manifest | None = None  # the newest version of the line as far as this publisher knows
        self.problem: str | None = None  # why the newest version cannot be the base, if it cannot
        self._encoder = Encoder(store, line, form, goal, threads)
        self._keeps = keeps
        self._base: dict[str, HostTensor] | None = None  # the weights of `last`; private and writeable unless `keeps`
        self._resumed = False

    @property
    def epoch(self) -> int:
        """The epoch this publisher created when it took over the line; 0 before."""
        return self._writer.epoch

    def resume(self) -> Manifest | None:
        """Take over the line: restore the base from the newest committed version, verified.

        Earlier publishers are fenced. If the version cannot be read back, training goes on: the next version is then a
        snapshot, from which engines recover too.
        """
        self.last, self._base, self.problem = self._writer.take_over(), None, None
        self._resumed = True
        if self.last is not None:
            try:
                self._base = _taken(self.store.load(self.last.version, self.form))
            except WeightsError as error:
                self.problem = str(error)
        return self.last

    def publish(
        self,
        number: int,
        tensors: Tensors,
        parent: Version | None = None,
        metadata: Mapping[str, Any] | None = None,
        made: Made | None = None,
    ) -> Manifest:
        """Commit version `number`. Its parent is the previous number unless another version, of any line, is named.
        `made`: payloads of its delta; those of another base than the newest version are not used.

        If the number exists with the same weights, the existing manifest is returned; other weights are an error.
        """
        self._writer.refuse_if_fenced()
        if not self._resumed:
            self.resume()
        self._writer.check()
        known = self.last.number if self.last else None
        head = self.store.head(self.line, self.form, after=known)
        if head is not None and number <= head:
            return self._confirm(number, tensors)
        if head != known:
            self._writer.check()
            raise self._overtaken(head)
        self._writer.check_number(number, self.last)
        manifest = self._write(number, tensors, parent, metadata or {}, made)
        if not self._writer.commit(manifest):
            return self._confirm(number, tensors)
        self._promote(manifest, tensors)
        return manifest

    def _write(
        self, number: int, tensors: Tensors, parent: Version | None, metadata: Mapping[str, Any], made: Made | None
    ) -> Manifest:
        layout = layout_of(tensors)
        before = None
        if self._base is not None and self.last is not None and layout_of(self.last.tensors) == layout:
            base = Base(number=self.last.number, digest=self.last.digest)
            before = Before(base, [chunk.digest for chunk in self.last.chunks], _bytes_of(self._base))
            if made is not None and made.base == base.digest:
                before = before._replace(made=made.payloads)
        snapshot = number % self.snapshot_every == 0
        coded = self._encoder.encode(number, rows_of(layout), _bytes_of(tensors), before, snapshot)
        entries = entries_of(layout, [coded.digests[place] for place in range(len(coded.digests))])
        return self._writer.manifest(number, entries, (coded.delta, coded.snapshot), self.last, parent, metadata)

    def _confirm(self, number: int, tensors: Tensors) -> Manifest:
        manifest = self.store.manifest(Version(self.line, number), self.form)
        digest = root_digest(describe(tensors))
        if digest != manifest.digest:
            self._writer.check()  # published by a process that fenced us since, or by a late writer that we fenced
            raise self._writer.diverged(manifest, f"{digest[:16]}…")
        if self.last is None or manifest.number > self.last.number:
            self._promote(manifest, tensors)
        return manifest

    def _overtaken(self, head: int | None) -> WeightsError:
        newest = self.store.manifest(Version(self.line, head), self.form) if head is not None else None
        writer = f" by {newest.writer} (epoch {newest.epoch})" if newest else ""
        return WeightsError(
            f"{self.line} has moved to version {head}{writer} while this publisher was at "
            f"{self.last.number if self.last else 'the beginning'}: two writers on one line",
            hint="stop one of them; resume() takes over the line at its head",
        )

    def _promote(self, manifest: Manifest, tensors: Tensors) -> None:
        """Make the committed version the base. Only chunks that differ are copied, or nothing with `keeps`."""
        if self._keeps:
            self._base = dict(tensors)
        elif self._base is not None and self.last is not None and layout_of(self.last.tensors) == layout_of(tensors):
            for old, new in zip(self.last.chunks, manifest.chunks, strict=True):
                if old.digest != new.digest:
                    part = slice(new.start, new.stop)
                    np.copyto(self._base[new.tensor.name].data[part], tensors[new.tensor.name].data[part])
        else:
            self._base = None  # freed before the copy is made: memory holds one base
            self._base = _owned(tensors)
        self.last, self.problem = manifest, None


def checked_snapshot_every(snapshot_every: int) -> int:
    if snapshot_every < 1:
        raise WeightsError(f"snapshot_every is {snapshot_every}", hint="1 makes every version a snapshot")
    return snapshot_every


def _bytes_of(tensors: Tensors) -> BytesOf:
    def bytes_of(row: Row) -> np.ndarray:
        return tensors[row.tensor].data[row.start : row.stop]

    return bytes_of


def _taken(tensors: dict[str, HostTensor]) -> dict[str, HostTensor]:
    """Make loaded weights writeable, without a copy: nobody else uses them."""
    for tensor in tensors.values():
        tensor.data.flags.writeable = True
    return tensors


def _owned(tensors: Tensors) -> dict[str, HostTensor]:
    return {name: HostTensor(tensor.dtype, tensor.shape, tensor.data.copy()) for name, tensor in tensors.items()}
