"""Publisher: commits versions of one line in one form. The trainer holds one.

Order of a publish: packs (named by their digest), then the manifest, create-only. Only when the manifest is there does
the base move on. A publisher that dies at any point leaves either the whole version or nothing anyone looks at, and
publishing the same number again with the same weights completes or confirms it.
"""

from __future__ import annotations

import os
import socket
import time
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from pydantic import ValidationError

from rollmill.errors import ObjectExists, WeightsError
from rollmill.types import Version
from rollmill.weights.delta import Coding, encode_difference, encode_full
from rollmill.weights.manifest import (
    Base,
    Chunk,
    Encoding,
    Manifest,
    Pack,
    Payload,
    TensorEntry,
    chunk_table,
    describe,
    digest_bytes,
    layout_of,
    root_digest,
)
from rollmill.weights.store import WeightStore, manifest_key, valid_name
from rollmill.weights.tensors import HostTensor, Tensors

PACK_BYTES = 32 << 20  # a pack is closed once it is at least this large
RUN_BYTES = 512 << 10  # small chunks are coded together up to this much: fewer calls, and they compress better


class Publisher:
    """`publish` numbers a line without gaps; a snapshot every `snapshot_every` numbers, deltas always."""

    def __init__(self, store: WeightStore, line: str, form: str = "bf16", snapshot_every: int = 25) -> None:
        if snapshot_every < 1:
            raise WeightsError(f"snapshot_every is {snapshot_every}", hint="1 makes every version a snapshot")
        self.store, self.line, self.form = store, valid_name(line), valid_name(form)
        self.snapshot_every = snapshot_every
        self.last: Manifest | None = None  # the newest version of the line as far as this publisher knows
        self.problem: str | None = None  # why the newest version cannot serve as a base, if it cannot
        self._base: dict[str, HostTensor] | None = None  # private, writeable copy of the weights of `last`
        self._resumed = False
        self._writer = f"{socket.gethostname()[:100]}:{os.getpid()}:{uuid.uuid4().hex[:8]}"
        self._epoch = 0

    def resume(self) -> Manifest | None:
        """Take the line over where it stands: rebuild the base from the newest committed version, verified.

        A version that cannot be read back is no reason to stop training: the next one is then a snapshot of its own,
        which is also what heals the engines.
        """
        self._resumed, self._base, self.problem = True, None, None
        number = self.store.head(self.line, self.form)
        if number is None:
            self.last = None
            return None
        self.last = self.store.manifest(Version(self.line, number), self.form)
        self._epoch = self.last.epoch + 1
        try:
            self._base = _owned(self.store.load(self.last.version, self.form))
        except WeightsError as error:
            self.problem = str(error)
        return self.last

    def publish(
        self, number: int, tensors: Tensors, parent: Version | None = None, metadata: Mapping[str, Any] | None = None
    ) -> Manifest:
        """Commit version `number`. Its parent is the previous number unless another version, of any line, is named.

        A number that exists is compared: same weights, and the existing manifest is the answer; others are an error.
        """
        if not self._resumed:
            self.resume()
        known = self.last.number if self.last else None
        head = self.store.head(self.line, self.form, after=known)
        if head is not None and number <= head:
            return self._confirm(number, tensors)
        if head != known:
            raise self._overtaken(head)
        if known is not None and number != known + 1:
            raise WeightsError(
                f"{self.line} stands at {known}, so {number} cannot be published: numbers follow each other",
                hint="a line that should go on from an earlier version needs a new name; its parent can be any version",
            )
        manifest = self._write(number, tensors, parent or (self.last.version if self.last else None), metadata or {})
        self._promote(manifest, tensors)
        return manifest

    def _write(self, number: int, tensors: Tensors, parent: Version | None, metadata: Mapping[str, Any]) -> Manifest:
        delta: Encoding | None = None
        if self._base is not None and self.last is not None and layout_of(self.last.tensors) == layout_of(tensors):
            entries, delta = self._encode_delta(number, self.last, self._base, tensors)
        else:
            entries = describe(tensors)
        snapshot = None
        if delta is None or number % self.snapshot_every == 0:
            snapshot = self._encode_snapshot(number, entries, tensors)
        manifest = self._manifest(number, entries, snapshot, delta, parent, metadata)
        try:
            self.store.objects.create(manifest_key(manifest.version, self.form), manifest.to_bytes())
        except ObjectExists:  # somebody was faster since we looked
            return self._confirm(number, tensors)
        return manifest

    def _manifest(
        self,
        number: int,
        entries: tuple[TensorEntry, ...],
        snapshot: Encoding | None,
        delta: Encoding | None,
        parent: Version | None,
        metadata: Mapping[str, Any],
    ) -> Manifest:
        try:
            return Manifest(
                line=self.line,
                number=number,
                form=self.form,
                parent_line=parent.line if parent else None,
                parent_number=parent.number if parent else None,
                digest=root_digest(entries),
                tensors=entries,
                snapshot=snapshot,
                delta=delta,
                metadata=dict(metadata),
                writer=self._writer,
                epoch=self._epoch,
                created_at=time.time(),
            )
        except ValidationError as error:
            problem = error.errors()[0]
            where = ".".join(map(str, problem["loc"]))
            raise WeightsError(
                f"{Version(self.line, number)} cannot be published: {where}: {problem['msg']}",
                hint="metadata must be plain JSON values, numbers count from 0",
            ) from None

    def _encode_delta(
        self, number: int, last: Manifest, base: dict[str, HostTensor], tensors: Tensors
    ) -> tuple[tuple[TensorEntry, ...], Encoding]:
        packs = _PackWriter(self.store, self.line, self.form, number)
        digests, changed_elements = [], 0
        for first, run in _runs(last.chunks):
            coding, payload, changed = encode_difference(_join(base, run), _join(tensors, run), run[0].tensor.width)
            changed_elements += changed
            if changed:
                packs.add(first, len(run), coding, payload)
                digests += [digest_bytes(_bytes_of(tensors, chunk).data) for chunk in run]
            else:
                digests += [chunk.digest for chunk in run]
        rest = iter(digests)
        entries = tuple(e.model_copy(update={"chunks": tuple(next(rest) for _ in e.chunks)}) for e in last.tensors)
        return entries, packs.finish(changed_elements, Base(number=last.number, digest=last.digest))

    def _encode_snapshot(self, number: int, entries: tuple[TensorEntry, ...], tensors: Tensors) -> Encoding:
        packs = _PackWriter(self.store, self.line, self.form, number)
        for first, run in _runs(chunk_table(entries)):
            packs.add(first, len(run), "raw", encode_full(_join(tensors, run), run[0].tensor.width))
        return packs.finish(sum(tensor.elements for tensor in tensors.values()))

    def _confirm(self, number: int, tensors: Tensors) -> Manifest:
        manifest = self.store.manifest(Version(self.line, number), self.form)
        digest = root_digest(describe(tensors))
        if digest != manifest.digest:
            raise WeightsError(
                f"{manifest.version} ({self.form}) has diverged: {manifest.writer} (epoch {manifest.epoch}) published "
                f"{manifest.digest[:16]}…, and this writer (epoch {self._epoch}) has {digest[:16]}…",
                hint="one trainer per line; to go on with these weights, start a new line from the last common version",
            )
        if self.last is None or manifest.number > self.last.number:
            self._promote(manifest, tensors)
        return manifest

    def _overtaken(self, head: int | None) -> WeightsError:
        newest = self.store.manifest(Version(self.line, head), self.form) if head is not None else None
        writer = f" by {newest.writer} (epoch {newest.epoch})" if newest else ""
        return WeightsError(
            f"{self.line} has moved to version {head}{writer} while this publisher stood at "
            f"{self.last.number if self.last else 'the beginning'}: two writers on one line",
            hint="stop one of them; resume() takes the line over where it stands",
        )

    def _promote(self, manifest: Manifest, tensors: Tensors) -> None:
        """The base moves only now: the version is committed."""
        if self._base is not None and self.last is not None and layout_of(self.last.tensors) == layout_of(tensors):
            for old, new in zip(self.last.tensors, manifest.tensors, strict=True):
                if old.chunks != new.chunks:
                    np.copyto(self._base[old.name].data, tensors[old.name].data)
        else:
            self._base = _owned(tensors)
        self.last, self.problem = manifest, None


class _PackWriter:
    """Collects payloads in the order of the chunk table and writes full packs as it goes."""

    def __init__(self, store: WeightStore, line: str, form: str, number: int) -> None:
        self._objects = store.objects
        self._folder = f"weights/{line}/{form}/packs/{number:010d}"
        self._open: list[bytes] = []
        self._open_bytes = 0
        self._packs: list[Pack] = []
        self._payloads: list[Payload] = []

    def add(self, first: int, chunks: int, coding: Coding, payload: bytes) -> None:
        where = {"pack": len(self._packs), "offset": self._open_bytes, "bytes": len(payload)}
        self._payloads.append(Payload(first=first, chunks=chunks, coding=coding, **where))
        self._open.append(payload)
        self._open_bytes += len(payload)
        if self._open_bytes >= PACK_BYTES:
            self._close_pack()

    def finish(self, changed_elements: int, base: Base | None = None) -> Encoding:
        if self._open:
            self._close_pack()
        return Encoding(
            base=base, packs=tuple(self._packs), payloads=tuple(self._payloads), changed_elements=changed_elements
        )

    def _close_pack(self) -> None:
        data = b"".join(self._open)
        pack = Pack(digest=digest_bytes(data), bytes=len(data))
        key = f"{self._folder}-{pack.digest}"
        try:
            self._objects.create(key, data)
        except ObjectExists:  # left by a publish that was cut short, with the same bytes unless it was damaged since
            if self._objects.head(key) != len(data):
                self._objects.put(key, data)
        self._packs.append(pack)
        self._open, self._open_bytes = [], 0


def _runs(chunks: list[Chunk]) -> Iterator[tuple[int, list[Chunk]]]:
    """The chunk table cut into runs of one element width that are coded together, each with its first index."""
    run: list[Chunk] = []
    size = 0
    for index, chunk in enumerate(chunks):
        if run and (size + chunk.size() > RUN_BYTES or chunk.tensor.width != run[0].tensor.width):
            yield index - len(run), run
            run, size = [], 0
        run.append(chunk)
        size += chunk.size()
    if run:
        yield len(chunks) - len(run), run


def _bytes_of(tensors: Tensors, chunk: Chunk) -> np.ndarray:
    return tensors[chunk.tensor.name].data[chunk.start : chunk.stop]


def _join(tensors: Tensors, run: list[Chunk]) -> np.ndarray:
    parts = [_bytes_of(tensors, chunk) for chunk in run]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _owned(tensors: Tensors) -> dict[str, HostTensor]:
    return {name: HostTensor(tensor.dtype, tensor.shape, tensor.data.copy()) for name, tensor in tensors.items()}
