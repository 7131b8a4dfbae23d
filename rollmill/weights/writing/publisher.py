"""Publisher: commits versions of one line in one form. A trainer holds one, or one on each of its ranks.

    every rank     codes and uploads the chunks that it owns, as packs named by their digest
    the first      joins what the ranks wrote, checks that no other process took over the line, creates the manifest
    every rank     only then makes the version the base of its next delta

Ranks exchange digests and the places of payloads, no weights. The manifest is the one that a single process would have
written, with other packs. A publisher that dies at any point leaves either the whole version or objects that nobody
reads; publishing the same number again with the same weights completes or confirms it. line_writer.py says what happens
to two publishers of one line.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from rollmill.errors import WeightsError
from rollmill.types import Version
from rollmill.weights.format.codings import Goal
from rollmill.weights.format.manifest import Base, Encoding, Layout, Manifest, Payload, chunk_digest, layout_of
from rollmill.weights.format.tensors import Tensors
from rollmill.weights.reading.chunks import read_chunks
from rollmill.weights.reading.weight_store import WeightStore
from rollmill.weights.writing.encoder import ChunkRow, DeltaBase, DevicePayloads, Encoder, Part, entries_of, rows_of
from rollmill.weights.writing.line_writer import Writer

ChunkKey = tuple[str, int]  # name of a tensor, and which of its chunks
ChunkBytes = dict[int, np.ndarray]  # flat uint8, by place in the chunk table
T = TypeVar("T")


class Peers(Protocol):
    """The ranks that publish a line together, as one of them sees them. Both methods are collective."""

    @property
    def first(self) -> bool: ...
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def from_first(self, value: T) -> T:
        """The first rank's value, on every rank."""
        ...

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in order of rank."""
        ...


class Alone:
    """The only rank."""

    first, rank, size = True, 0, 1

    def from_first(self, value: T) -> T:
        return value

    def gather(self, value: T) -> list[T]:
        return [value]


class OwnChunks(NamedTuple):
    """A version as one of several ranks has it."""

    layout: Layout  # names, dtypes and shapes of all tensors, the same on every rank
    chunks: Mapping[ChunkKey, np.ndarray]  # those that this rank publishes


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
        ranks: Peers | None = None,
    ) -> None:
        """`keeps`: the bytes of a version become the base as they are, without a copy. Nobody may change them.
        `ranks`: those that publish together; all call `resume`, `publish` and `matches`. None: this process alone."""
        if snapshot_every < 1:
            raise WeightsError(f"snapshot_every is {snapshot_every}", hint="1 makes every version a snapshot")
        self.snapshot_every = snapshot_every
        self._writer = Writer(store, line, form)
        self.store, self.line, self.form, self.goal = store, line, form, goal
        self.last: Manifest | None = None  # the newest version of the line as far as this publisher knows
        self.problem: str | None = None  # why the newest version cannot be the base, if it cannot
        self._encoder = Encoder(store, line, form, goal, threads)
        self._keeps = keeps
        self._ranks: Peers = ranks or Alone()
        self._base: ChunkBytes | None = None  # this rank's chunks of `last`; private and writeable unless `keeps`
        self._resumed = False

    @property
    def epoch(self) -> int:
        """The epoch that was created when the line was taken over; 0 before."""
        return self._writer.epoch

    def resume(self, owned: Collection[ChunkKey] | None = None) -> Manifest | None:
        """Take over the line: restore the base from the newest committed version, verified.

        `owned`: the chunks that this rank publishes; only these are read. None: all. Earlier publishers are fenced. If
        the version cannot be read back, training goes on: the next version is then a snapshot, from which engines
        recover too. Of several ranks, one that cannot read its chunks sends them whole.
        """
        taken = (self._writer.take_over(), self._writer.epoch) if self._ranks.first else (None, 0)
        self.last, self._writer.epoch = self._ranks.from_first(taken)
        self._base, self.problem, self._resumed = None, None, True
        if self.last is not None:
            try:
                self._base = self._read_base(self.last, owned)
            except WeightsError as error:
                self.problem = str(error)
        return self.last

    def _read_base(self, last: Manifest, owned: Collection[ChunkKey] | None) -> ChunkBytes:
        rows = rows_of(layout_of(last.tensors))
        if owned is not None:
            places = {row.place for row in rows if (row.tensor, row.chunk) in owned}
            found = read_chunks(self.store.source(self.form), last.version, places)
            # copies of their own: what is read may be part of a larger run
            return {place: found.pop(place).copy() for place in sorted(places)}
        tensors = self.store.load(last.version, self.form)
        for tensor in tensors.values():
            tensor.data.flags.writeable = True  # nobody else uses them
        return {row.place: tensors[row.tensor].data[row.start : row.stop] for row in rows}

    def publish(
        self,
        number: int,
        weights: Tensors | OwnChunks,
        parent: Version | None = None,
        metadata: Mapping[str, Any] | None = None,
        payloads: DevicePayloads | None = None,
    ) -> Manifest:
        """Commit version `number`. Its parent is the previous number unless another version, of any line, is named.
        `payloads`: payloads of its delta; those of another base than the newest version are not used.

        If the number exists with the same weights, the existing manifest is returned; other weights are an error.
        """
        self._writer.refuse_if_fenced()
        if not self._resumed:
            self.resume(None if isinstance(weights, Mapping) else weights.chunks.keys())
        self._writer.check()
        known = self.last.number if self.last else None
        probed = self.store.head(self.line, self.form, after=known) if self._ranks.first else None
        head = self._ranks.from_first(probed)
        if head is not None and number <= head:
            return self._confirm(number, weights)
        if head is not None and head != known:
            self._writer.check()
            raise self._overtaken(head)
        self._writer.check_number(number, self.last)
        layout, rows, new = _placed(weights)
        before = self._delta_base(layout, new, payloads)
        snapshot = number % self.snapshot_every == 0
        parts = self._ranks.gather(self._encoder.encode(number, rows, lambda row: new[row.place], before, snapshot))
        made = self._commit(number, layout, parts, parent, metadata or {}) if self._ranks.first else None
        manifest = self._ranks.from_first(made)
        if manifest is None:
            return self._confirm(number, weights)
        self._promote(manifest, layout, new)
        return manifest

    def matches(self, manifest: Manifest, weights: Tensors | OwnChunks) -> bool:
        """Whether these are the bytes of that version, on all ranks."""
        return all(self._ranks.gather(_same_bytes(manifest, weights)))

    def _delta_base(self, layout: Layout, new: ChunkBytes, payloads: DevicePayloads | None) -> DeltaBase | None:
        if self.last is None or layout_of(self.last.tensors) != layout:
            return None
        known = self._base if self._base is not None and self._base.keys() == new.keys() else None
        if known is None and self._ranks.size == 1:
            return None
        base = Base(number=self.last.number, digest=self.last.digest)
        early = payloads.by_place if payloads is not None and payloads.base == base.digest else {}
        digests = [chunk.digest for chunk in self.last.chunks]
        return DeltaBase(base, digests, None if known is None else lambda row: known[row.place], early)

    def _commit(
        self,
        number: int,
        layout: Layout,
        parts: Sequence[Part],
        parent: Version | None,
        metadata: Mapping[str, Any],
    ) -> Manifest | None:
        """Create the manifest from what all ranks wrote. None: the number is taken."""
        entries = entries_of(layout, _joined_digests(rows_of(layout), parts))
        encodings = _joined([part.delta for part in parts]), _joined([part.snapshot for part in parts])
        manifest = self._writer.manifest(number, entries, encodings, self.last, parent, metadata)
        return manifest if self._writer.commit(manifest) else None

    def _confirm(self, number: int, weights: Tensors | OwnChunks) -> Manifest:
        manifest = self.store.manifest(Version(self.line, number), self.form)
        if not _same_bytes(manifest, weights):
            self._writer.check()  # published by a process that fenced us since, or by a late writer that we fenced
            where = f" on rank {self._ranks.rank}" if self._ranks.size > 1 else ""
            raise self._writer.diverged(manifest, f"other chunks{where}")
        if self.last is None or manifest.number > self.last.number:
            layout, _, new = _placed(weights)
            self._promote(manifest, layout, new)
        return manifest

    def _overtaken(self, head: int) -> WeightsError:
        newest = self.store.manifest(Version(self.line, head), self.form)
        return WeightsError(
            f"{self.line} has moved to version {head} by {newest.writer} (epoch {newest.epoch}) while this publisher "
            f"was at {self.last.number if self.last else 'the beginning'}: two writers on one line",
            hint="stop one of them; resume() takes over the line at its head",
        )

    def _promote(self, manifest: Manifest, layout: Layout, new: ChunkBytes) -> None:
        """Make the committed version the base. Only chunks that differ are copied, or nothing with `keeps`."""
        base, last = self._base, self.last
        if self._keeps:
            self._base = new
        elif base is not None and base.keys() == new.keys() and last and layout_of(last.tensors) == layout:
            for place, data in new.items():
                if last.chunks[place].digest != manifest.chunks[place].digest:
                    np.copyto(base[place], data)
        else:
            self._base = base = None  # freed before the copy is made: memory holds one base
            self._base = {place: data.copy() for place, data in new.items()}
        self.last, self.problem = manifest, None


def _placed(weights: Tensors | OwnChunks) -> tuple[Layout, list[ChunkRow], ChunkBytes]:
    """The layout of the version, and the rows of this rank with their bytes, in the order of the chunk table."""
    if isinstance(weights, Mapping):
        layout = layout_of(weights)
        rows = rows_of(layout)
        return layout, rows, {row.place: weights[row.tensor].data[row.start : row.stop] for row in rows}
    layout = tuple(sorted(weights.layout))
    known = {(row.tensor, row.chunk): row for row in rows_of(layout)}
    for tensor, chunk in weights.chunks.keys() - known.keys():
        raise WeightsError(f"there is no chunk {chunk} of {tensor!r}", hint="is the layout that of the model?")
    rows = sorted(known[key] for key in weights.chunks)
    for row in rows:
        if weights.chunks[row.tensor, row.chunk].size != row.size:
            size = weights.chunks[row.tensor, row.chunk].size
            raise WeightsError(f"chunk {row.chunk} of {row.tensor} has {row.size} bytes, not {size}")
    return layout, rows, {row.place: weights.chunks[row.tensor, row.chunk] for row in rows}


def _same_bytes(manifest: Manifest, weights: Tensors | OwnChunks) -> bool:
    layout, _, own = _placed(weights)
    return layout_of(manifest.tensors) == layout and all(
        manifest.chunks[place].digest == chunk_digest(data.data) for place, data in own.items()
    )


def _joined_digests(rows: Sequence[ChunkRow], parts: Sequence[Part]) -> list[str]:
    """The digests of the whole chunk table. Raises WeightsError unless the ranks have each chunk exactly once."""
    owner: dict[int, int] = {}
    for rank, part in enumerate(parts):
        for place in part.digests:
            if place in owner:
                raise _unowned(rows[place], f"was published by rank {owner[place]} and rank {rank}")
            owner[place] = rank
    missing = [row for row in rows if row.place not in owner]
    if missing:
        raise _unowned(missing[0], f"was published by no rank, like {len(missing) - 1} others")
    return [parts[owner[row.place]].digests[row.place] for row in rows]


def _unowned(row: ChunkRow, why: str) -> WeightsError:
    hint = "each chunk has one owner, by the layout of all ranks"
    return WeightsError(f"chunk {row.chunk} of {row.tensor} {why}", hint=hint)


def _joined(encodings: Sequence[Encoding | None]) -> Encoding | None:
    """Join the encodings of all ranks: packs one after the other, payloads in the order of the chunk table."""
    found = [encoding for encoding in encodings if encoding is not None]
    if len(found) < 2:
        return found[0] if found else None
    first_packs = itertools.accumulate((len(encoding.packs) for encoding in found), initial=0)
    payloads: list[Payload] = [
        payload.model_copy(update={"pack": payload.pack + first})
        for encoding, first in zip(found, first_packs, strict=False)
        for payload in encoding.payloads
    ]
    return Encoding(
        base=found[0].base,
        packs=tuple(pack for encoding in found for pack in encoding.packs),
        payloads=tuple(sorted(payloads, key=lambda payload: payload.first)),
        changed_elements=sum(encoding.changed_elements for encoding in found),
    )
