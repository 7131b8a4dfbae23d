"""HostWeights: the bytes of one version in host memory, moved from version to version in place.

The digest of every chunk in memory is known. A leg is applied payload by payload:

    chunk already has its new digest        nothing to do, so an interrupted leg can be applied again
    sparse codings                          changes are written in place and the chunk is hashed; if the digest is
                                            wrong, the old values are restored
    raw, dense, several chunks in one       decoded into other memory, hashed, copied into place

If a digest is wrong, the base chunk decides why: if it still has the digest of the base, the leg is damaged and is not
used; if not, memory was damaged, and only that chunk is read from the store again (chunks.py).
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import NamedTuple

import numpy as np

from rollmill.errors import StorageError, WeightsError
from rollmill.types import Version
from rollmill.weights.format.codings import SPARSE_CODINGS, Changes, decode_changes, scatter
from rollmill.weights.format.manifest import (
    Chunk,
    Encoding,
    Manifest,
    Pack,
    Payload,
    TensorEntry,
    chunk_digest,
    layout_of,
)
from rollmill.weights.format.tensors import HostTensor
from rollmill.weights.reading.chunks import PayloadBytes, decode_run, fetch, join, places, read_chunk
from rollmill.weights.reading.patches import Patch, Patches
from rollmill.weights.reading.read_plan import Have, Leg, LegFailed, LegId, Source, plan_legs

THREADED_BYTES = 64 << 20  # smaller weights are decoded in one thread
SCRATCH_BYTES = 128 << 20  # approximate memory for payloads that are decoded at the same time
_LARGEST_THREADS = 16
_MEMORY_FAULTS = 3  # failed repairs of memory after which `restore` gives up


def restore(
    source: Source, target: Version, host: HostWeights | None = None, patches: Patches | None = None
) -> HostWeights:
    """The weights of `target`, every chunk verified: the given ones, moved there, or new ones.

    `patches`, if given, collects the changes. After an error the weights are at the last good leg or in the middle of
    one; restoring them again, to any version, continues from there.
    """
    avoid: frozenset[LegId] = frozenset()
    failure: LegFailed | None = None
    patches, faults = patches or Patches(0), 0
    while True:
        try:
            legs = plan_legs(source.manifest, source.anchor, target, _recognise(host), avoid)
        except WeightsError as error:
            raise failure or error from None
        try:
            for leg in legs:
                host = _fitting(host, leg)
                host.take(leg, source, patches)
            assert host is not None, "a plan from nothing starts with a snapshot"
            _name(host, source.manifest(target), source, patches)
            return host
        except LegFailed as error:
            failure = failure if failure and failure.memory else error  # later errors follow from the bad memory
            faults += error.memory
            if faults == _MEMORY_FAULTS:
                raise
            if not error.memory:
                avoid |= {error.leg.id}


def _recognise(host: HostWeights | None) -> Have:
    """By root digest alone: another version may have the same bytes."""
    return lambda _, digest: host is not None and host.holds(digest)


def _fitting(host: HostWeights | None, leg: Leg) -> HostWeights:
    if host is None:
        return HostWeights(leg.manifest.tensors)
    if leg.encoding.base is None and not host.fits(leg.manifest):
        host.allocate(leg.manifest.tensors)
    return host


def _name(host: HostWeights, manifest: Manifest, source: Source, patches: Patches) -> None:
    """Set the version of weights that needed no leg: they have the bytes of another version, or had left it."""
    if host.manifest is None:
        host.heal(manifest, source, patches)
    elif host.manifest.version != manifest.version:
        host.rename(manifest)


class _Step(NamedTuple):
    """A leg being applied: its base, its source, and where patches are collected."""

    leg: Leg
    base: Manifest | None
    source: Source
    patches: Patches

    @property
    def chunks(self) -> list[Chunk]:
        return self.leg.manifest.chunks


class _DeltaProgress(NamedTuple):
    """A delta that is taken pack by pack: what was checked and sorted when its first pack came."""

    step: _Step
    payloads: dict[str, list[Payload]]  # by the digest of their pack


class HostWeights:
    """Not thread-safe. `tensors` are read-only views of it; they change when a leg is applied."""

    def __init__(self, layout: tuple[TensorEntry, ...]) -> None:
        self._repairing = threading.Lock()
        self.tensors: dict[str, HostTensor] = {}
        self._memory: dict[str, np.ndarray] = {}
        self.allocate(layout)

    def allocate(self, layout: tuple[TensorEntry, ...]) -> None:
        """Allocate memory for tensors of these shapes, content unknown. The old memory is freed first."""
        self.manifest: Manifest | None = None  # the version it holds; None while it is between two
        self._leaving: Manifest | None = None  # between two versions: the one it started from
        self._begun: _DeltaProgress | None = None  # the last delta that was taken pack by pack
        self._layout = layout_of(layout)
        self._digests: list[str | None] = [None for entry in layout for _ in entry.chunks]  # None: not known
        self.tensors, self._memory = {}, {}
        self.bytes = sum(entry.bytes for entry in layout)
        try:
            self._memory = {entry.name: np.empty(entry.bytes, np.uint8) for entry in layout}
        except MemoryError:
            raise WeightsError(f"not enough memory for {self.bytes} bytes of weights") from None
        self.tensors = {entry.name: self._view(entry) for entry in layout}

    def fits(self, manifest: Manifest) -> bool:
        return self._layout == layout_of(manifest.tensors)

    def holds(self, digest: str) -> bool:
        """Whether a delta from this root digest can be applied: they hold it, or have left it only in part."""
        held = self.manifest or self._leaving
        return held is not None and held.digest == digest

    def copy(self) -> HostWeights:
        """A second copy of the same version, in memory of its own."""
        assert self.manifest is not None, "only a whole version can be copied"
        twin = HostWeights(self.manifest.tensors)
        for name, memory in self._memory.items():
            np.copyto(twin._memory[name], memory)
        twin.manifest, twin._digests = self.manifest, list(self._digests)
        return twin

    def rename(self, manifest: Manifest) -> None:
        """Another version has the same bytes: hold that one."""
        assert self.holds(manifest.digest)
        self.manifest = manifest

    def take(self, leg: Leg, source: Source, patches: Patches | None = None) -> None:
        """Apply one leg. After LegFailed every chunk is either old or new; applying this leg again, or another one,
        continues from there."""
        step = self._start(leg, source, patches or Patches(0))
        wanted = {i for i, chunk in enumerate(step.chunks) if self._digests[i] != chunk.digest}
        payloads = [p for p in leg.encoding.payloads if not wanted.isdisjoint(places(p))]
        try:
            for group in fetch(leg, payloads, source.pack) if payloads else ():
                self._take_payloads(step, group)
            for index in wanted.difference(*map(places, payloads)):
                # no payload, and a wrong digest: an interrupted leg left it like this
                self._settle(step, index, leg.manifest)
            self.manifest, self._leaving = leg.manifest, None
        finally:
            self._end_early()

    def begin(self, leg: Leg, pack: Pack, data: memoryview, source: Source, patches: Patches) -> None:
        """Apply the payloads of one pack of a delta before the other packs have arrived; `take` applies the rest.
        Raises LegFailed as `take` does. What concerns the whole table is checked once per leg: a large model has
        thousands of packs."""
        begun = self._begun
        if begun is None or begun.step.leg.manifest is not leg.manifest or begun.step.base is not self._leaving:
            begun = self._begun = _DeltaProgress(self._start(leg, source, patches), _by_pack(leg.encoding))
        step = begun.step._replace(source=source, patches=patches)
        group = [(p, data[p.offset : p.offset + p.bytes]) for p in begun.payloads[pack.digest]]
        try:
            self._take_payloads(step, group)
        except BaseException:
            self._end_early()
            raise

    def heal(self, manifest: Manifest, source: Source, patches: Patches | None = None) -> int:
        """Hash every chunk and read the wrong ones from the store again. Returns how many were wrong."""
        assert self.fits(manifest)
        step = _Step(Leg(manifest, manifest.kind), manifest, source, patches or Patches(0))
        self._digests = [chunk_digest(self._chunk(chunk).data) for chunk in manifest.chunks]
        self.manifest, self._leaving = None, manifest
        bad = [i for i, chunk in enumerate(manifest.chunks) if self._digests[i] != chunk.digest]
        for index in bad:
            self._settle(step, index, manifest)
        self.manifest, self._leaving = manifest, None
        return len(bad)

    # -- start and end of a leg

    def _start(self, leg: Leg, source: Source, patches: Patches) -> _Step:
        base = leg.encoding.base
        if not self.fits(leg.manifest):
            raise LegFailed(
                leg, "its base has other tensors" if base else "it has other tensors than the weights in memory"
            )
        if base is None:
            self._look_again(leg)
            step = _Step(leg, None, source, patches)
        else:
            held = self.manifest or self._leaving
            if held is None or held.digest != base.digest:
                raise LegFailed(leg, f"its base, version {base.number}, is not the version in memory")
            step = _Step(leg, held, source, patches)
            _check_unchanged(step)
        self.manifest, self._leaving = None, self.manifest or self._leaving
        return step

    def _look_again(self, leg: Leg) -> None:
        """A snapshot repairs memory: chunks that it would not overwrite are hashed again."""
        for index, chunk in enumerate(leg.manifest.chunks):
            if self._digests[index] == chunk.digest:
                self._digests[index] = chunk_digest(self._chunk(chunk).data)

    def _end_early(self) -> None:
        """If the leg failed before it changed anything, the old version is still there."""
        if self.manifest is None and self._leaving is not None:
            table = [chunk.digest for chunk in self._leaving.chunks]
            if self._digests == table:
                self.manifest, self._leaving = self._leaving, None

    # -- payloads

    def _take_payloads(self, step: _Step, group: PayloadBytes) -> None:
        if self.bytes >= THREADED_BYTES:
            return self._take_in_threads(step, group)
        for payload, data in group:
            self._take_payload(step, payload, data)

    def _take_in_threads(self, step: _Step, group: PayloadBytes) -> None:
        """Decoding, writing and hashing release the GIL. Their memory limits how many run at once."""
        threads = min(os.cpu_count() or 1, _LARGEST_THREADS)
        running: dict[Future[None], int] = {}
        with ThreadPoolExecutor(threads, "weights-decode") as pool:
            for payload, data in group:
                cost = _scratch(step, payload)
                while running and (len(running) >= threads or sum(running.values()) + cost > SCRATCH_BYTES):
                    _collect(running)
                running[pool.submit(self._take_payload, step, payload, data)] = cost
            while running:
                _collect(running)

    def _take_payload(self, step: _Step, payload: Payload, data: memoryview) -> None:
        if all(self._digests[i] == step.chunks[i].digest for i in places(payload)):
            return
        try:
            if payload.coding == "raw":
                self._write(step, payload, data)
            elif self._has_bases(step, payload):
                try:
                    self._write(step, payload, data)
                except WeightsError:
                    if not self._repair_bases(step, payload):
                        raise
                    self._write(step, payload, data)
        except BaseException as error:
            # parts may have been written that no patch lists
            step.patches.whole(step.chunks[index].tensor.name for index in places(payload))
            if isinstance(error, WeightsError) and not isinstance(error, LegFailed):
                raise LegFailed(step.leg, error.message) from None
            raise

    def _write(self, step: _Step, payload: Payload, data: memoryview) -> None:
        run = [step.chunks[index] for index in places(payload)]
        if payload.coding in SPARSE_CODINGS:
            self._change(step, payload, run, data)
        else:
            self._replace(step, payload, run, data)

    def _change(self, step: _Step, payload: Payload, run: list[Chunk], data: memoryview) -> None:
        """Sparse codings: write the changes, then check the digest."""
        width = run[0].tensor.width
        views = [self._chunk(chunk) for chunk in run]
        target = join(views)  # one chunk is changed in place, several in a copy
        changes = decode_changes(payload.coding, data, target, width)
        alone = len(run) == 1
        if alone:
            self._digests[payload.first] = None
        before = scatter(target, changes, width)
        pieces = [target] if alone else np.split(target, np.cumsum([chunk.size() for chunk in run])[:-1])
        wrong = next((c for c, piece in zip(run, pieces, strict=True) if chunk_digest(piece.data) != c.digest), None)
        if wrong is not None:
            if alone:
                scatter(target, Changes(changes.indices, before), width)
                self._digests[payload.first] = step.base.chunks[payload.first].digest if step.base else None
            raise LegFailed(step.leg, f"{wrong.tensor.name} has another digest")
        if alone:
            self._digests[payload.first] = run[0].digest
        else:
            self._place(payload, run, pieces)
        _collect_patches(step.patches, run, changes)

    def _replace(self, step: _Step, payload: Payload, run: list[Chunk], data: memoryview) -> None:
        """Other codings: decode beside the chunks, verify, copy."""
        before = {index: self._chunk(chunk) for index, chunk in zip(places(payload), run, strict=True)}
        decoded = decode_run(step.leg, payload, data, before)
        step.patches.whole(step.chunks[i].tensor.name for i in decoded if self._digests[i] != step.chunks[i].digest)
        self._place(payload, run, list(decoded.values()))

    def _place(self, payload: Payload, run: list[Chunk], pieces: list[np.ndarray]) -> None:
        for index, chunk, piece in zip(places(payload), run, pieces, strict=True):
            if self._digests[index] != chunk.digest:
                self._digests[index] = None
                np.copyto(self._chunk(chunk), piece)
                self._digests[index] = chunk.digest

    # -- repairing chunks

    def _has_bases(self, step: _Step, payload: Payload) -> bool:
        """Whether memory holds the base of the payload. If not, an earlier attempt was interrupted here, and the new
        chunks are read from the store instead."""
        assert step.base is not None
        for index in places(payload):
            if self._digests[index] is None:
                self._digests[index] = chunk_digest(self._chunk(step.chunks[index]).data)
                step.patches.whole([step.chunks[index].tensor.name])
        if all(self._digests[index] == step.base.chunks[index].digest for index in places(payload)):
            return True
        for index in places(payload):
            self._settle(step, index, step.leg.manifest)
        return False

    def _repair_bases(self, step: _Step, payload: Payload) -> bool:
        """Repair chunks of the base that went bad in memory. Returns whether there were any."""
        assert step.base is not None
        base = step.base.chunks
        bad = [i for i in places(payload) if chunk_digest(self._chunk(base[i]).data) != base[i].digest]
        for index in bad:
            self._digests[index] = None
            self._settle(step, index, step.base)
        return bool(bad)

    def _settle(self, step: _Step, index: int, manifest: Manifest) -> None:
        """Make a chunk that of the version `manifest`: read it from the store unless memory has it."""
        chunk = manifest.chunks[index]
        if self._digests[index] == chunk.digest:
            return
        try:
            with self._repairing:
                data = read_chunk(step.source, manifest.version, index)
        except (StorageError, WeightsError) as error:
            self._leaving = None  # no delta can start from here
            why = f"{chunk.tensor.name} went bad in memory and cannot be read again: {error.message}"
            raise LegFailed(step.leg, why, memory=True) from None
        self._digests[index] = None
        np.copyto(self._chunk(chunk), data)
        self._digests[index] = chunk.digest
        step.patches.whole([chunk.tensor.name])

    def _chunk(self, chunk: Chunk) -> np.ndarray:
        return self._memory[chunk.tensor.name][chunk.start : chunk.stop]

    def _view(self, entry: TensorEntry) -> HostTensor:
        view = self._memory[entry.name].view()
        view.flags.writeable = False
        return HostTensor(entry.dtype, entry.shape, view)


def _by_pack(encoding: Encoding) -> dict[str, list[Payload]]:
    found: dict[str, list[Payload]] = {pack.digest: [] for pack in encoding.packs}
    for payload in encoding.payloads:
        found[encoding.packs[payload.pack].digest].append(payload)
    return found


def _check_unchanged(step: _Step) -> None:
    """Raise LegFailed unless every chunk without a payload has the same digest in both tables."""
    assert step.base is not None
    covered = set(itertools.chain.from_iterable(map(places, step.leg.encoding.payloads)))
    for index, (new, old) in enumerate(zip(step.chunks, step.base.chunks, strict=True)):
        if new.digest != old.digest and index not in covered:
            raise LegFailed(step.leg, f"{new.tensor.name} is marked unchanged but has another digest")


def _collect(running: dict[Future[None], int]) -> None:
    done, _ = wait(running, return_when=FIRST_COMPLETED)
    for future in done:
        del running[future]
        future.result()


def _scratch(step: _Step, payload: Payload) -> int:
    """Approximate memory for decoding a payload: by its bytes for lists of changes, else by the size of its chunks."""
    size = sum(step.chunks[index].size() for index in places(payload))
    if payload.coding in ("sparse", "overwrite"):
        return 32 * payload.bytes + (size if payload.chunks > 1 else 0)
    return 4 * size


def _collect_patches(patches: Patches, run: list[Chunk], changes: Changes) -> None:
    for chunk, piece in zip(run, _split(changes, run), strict=True):
        if piece.indices.size:
            width = chunk.tensor.width
            patches.add(chunk.tensor.name, Patch(chunk.start // width, *piece), chunk.tensor.bytes)


def _split(changes: Changes, run: list[Chunk]) -> Iterator[Changes]:
    """Split the changes of chunks that were coded together into the changes of each."""
    if len(run) == 1:
        yield changes
        return
    offset = 0
    for chunk in run:
        end = offset + chunk.size() // chunk.tensor.width
        first, last = np.searchsorted(changes.indices, [offset, end])
        yield Changes(changes.indices[first:last] - np.uint32(offset), changes.values[first:last])
        offset = end
