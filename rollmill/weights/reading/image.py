"""Image: the bytes of one version in host memory, brought from version to version in place.

What is in memory is known chunk by chunk, by digest. A leg is taken payload by payload:

    chunk already has its new digest        nothing to do: a leg that was cut short is simply taken again
    sparse codings                          changes are written in place, the chunk is hashed; where the digest is
                                            wrong, the old values are put back
    raw, dense, several chunks in one       decoded beside the chunk, hashed, copied into place

When a digest is wrong, the chunk as it was decides whose fault it is: if it still hashes to what the base should be,
the leg is damaged and is given up; if not, memory was, and that one chunk is read from the store again (chunks.py).
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
from rollmill.weights.format.manifest import Chunk, Manifest, Pack, Payload, TensorEntry, chunk_digest, layout_of
from rollmill.weights.format.tensors import HostTensor
from rollmill.weights.reading.chunks import Fetched, decode_run, fetch, join, places, read_chunk
from rollmill.weights.reading.patches import Patch, Patches
from rollmill.weights.reading.plan import Have, Leg, LegFailed, LegId, Source, plan_legs

THREADED_BYTES = 64 << 20  # smaller weights are not worth a thread
SCRATCH_BYTES = 128 << 20  # what payloads that are decoded at the same time may need, roughly
_LARGEST_THREADS = 16
_MEMORY_FAULTS = 3  # repairs of bad memory that may fail in one `restore`: more is no accident


def restore(source: Source, target: Version, image: Image | None = None, patches: Patches | None = None) -> Image:
    """An image of `target`, every chunk verified: the given one, brought there, or a new one.

    `patches` collects what changed, if given. An error leaves the image wherever the last good leg led, or in the
    middle of one; restoring it again, to whatever version, goes on from there.
    """
    avoid: frozenset[LegId] = frozenset()
    failure: LegFailed | None = None
    patches, faults = patches or Patches(0), 0
    while True:
        try:
            legs = plan_legs(source.manifest, source.anchor, target, _recognise(image), avoid)
        except WeightsError as error:
            raise failure or error from None
        try:
            for leg in legs:
                image = _fitting(image, leg)
                image.take(leg, source, patches)
            assert image is not None, "a plan from nothing starts with a snapshot"
            _name(image, source.manifest(target), source, patches)
            return image
        except LegFailed as error:
            failure = failure if failure and failure.memory else error  # where bad memory leads is not worth telling
            faults += error.memory
            if faults == _MEMORY_FAULTS:
                raise
            if not error.memory:
                avoid |= {error.leg.id}


def _recognise(image: Image | None) -> Have:
    """By the root digest alone: the same bytes may have another version's name."""
    return lambda _, digest: image is not None and image.holds(digest)


def _fitting(image: Image | None, leg: Leg) -> Image:
    if image is None:
        return Image(leg.manifest.tensors)
    if leg.encoding.base is None and not image.fits(leg.manifest):
        image.allocate(leg.manifest.tensors)
    return image


def _name(image: Image, manifest: Manifest, source: Source, patches: Patches) -> None:
    """No leg was needed: the image has these bytes under another name, or was half on its way from here."""
    if image.manifest is None:
        image.heal(manifest, source, patches)
    elif image.manifest.version != manifest.version:
        image.rename(manifest)


class _Step(NamedTuple):
    """A leg on the way: what it starts from, where it reads, and who collects what changes."""

    leg: Leg
    base: Manifest | None
    source: Source
    patches: Patches

    @property
    def chunks(self) -> list[Chunk]:
        return self.leg.manifest.chunks


class Image:
    """Called from one thread at a time. `tensors` are read-only views of it: they change when a leg is taken."""

    def __init__(self, layout: tuple[TensorEntry, ...]) -> None:
        self._repairing = threading.Lock()
        self.tensors: dict[str, HostTensor] = {}
        self._memory: dict[str, np.ndarray] = {}
        self.allocate(layout)

    def allocate(self, layout: tuple[TensorEntry, ...]) -> None:
        """Memory for tensors of these shapes, with nothing known in it; what was held before is given up first."""
        self.manifest: Manifest | None = None  # the version it holds; None while it is between two
        self._leaving: Manifest | None = None  # between two versions: the one it comes from
        self._layout = layout_of(layout)
        self._digests: list[str | None] = [None for entry in layout for _ in entry.chunks]  # None: not known
        self.tensors, self._memory = {}, {}
        try:
            self._memory = {entry.name: np.empty(entry.bytes, np.uint8) for entry in layout}
        except MemoryError:
            size = sum(entry.bytes for entry in layout)
            raise WeightsError(f"not enough memory for {size} bytes of weights") from None
        self.tensors = {entry.name: self._view(entry) for entry in layout}

    @property
    def bytes(self) -> int:
        return sum(memory.nbytes for memory in self._memory.values())

    def fits(self, manifest: Manifest) -> bool:
        return self._layout == layout_of(manifest.tensors)

    def holds(self, digest: str) -> bool:
        """Whether a delta from the version with this root digest can be taken: it is held, or only half left."""
        held = self.manifest or self._leaving
        return held is not None and held.digest == digest

    def copy(self) -> Image:
        """A second image of the same version, in memory of its own."""
        assert self.manifest is not None, "only a whole version is worth copying"
        twin = Image(self.manifest.tensors)
        for name, memory in self._memory.items():
            np.copyto(twin._memory[name], memory)
        twin.manifest, twin._digests = self.manifest, list(self._digests)
        return twin

    def rename(self, manifest: Manifest) -> None:
        """The same bytes under another version's name."""
        assert self.holds(manifest.digest)
        self.manifest = manifest

    def take(self, leg: Leg, source: Source, patches: Patches | None = None) -> None:
        """Go along one leg. LegFailed leaves every chunk either as it was or as it should be, and taking the leg again,
        or another one, goes on from there."""
        step = self._start(leg, source, patches or Patches(0))
        wanted = {i for i, chunk in enumerate(step.chunks) if self._digests[i] != chunk.digest}
        payloads = [p for p in leg.encoding.payloads if not wanted.isdisjoint(places(p))]
        try:
            for group in fetch(leg, payloads, source.pack) if payloads else ():
                self._take_payloads(step, group)
            for index in wanted.difference(*map(places, payloads)):
                # no payload, and not what it should be: left behind by a leg that was cut short
                self._settle(step, index, leg.manifest)
            self.manifest, self._leaving = leg.manifest, None
        finally:
            self._end_early()

    def begin(self, leg: Leg, pack: Pack, data: memoryview, source: Source, patches: Patches) -> None:
        """Take the payloads of one pack of a delta while its others are still on their way; `take` does the rest.
        LegFailed as there."""
        step = self._start(leg, source, patches)
        index = leg.encoding.packs.index(pack)
        group = [(p, data[p.offset : p.offset + p.bytes]) for p in leg.encoding.payloads if p.pack == index]
        try:
            self._take_payloads(step, group)
        finally:
            self._end_early()

    def heal(self, manifest: Manifest, source: Source, patches: Patches | None = None) -> int:
        """Hash every chunk and read those that are not of this version from the store. Returns how many were not."""
        assert self.fits(manifest)
        step = _Step(Leg(manifest, manifest.kind), manifest, source, patches or Patches(0))
        self._digests = [chunk_digest(self._chunk(chunk).data) for chunk in manifest.chunks]
        self.manifest, self._leaving = None, manifest
        bad = [i for i, chunk in enumerate(manifest.chunks) if self._digests[i] != chunk.digest]
        for index in bad:
            self._settle(step, index, manifest)
        self.manifest, self._leaving = manifest, None
        return len(bad)

    # -- a leg's beginning and end

    def _start(self, leg: Leg, source: Source, patches: Patches) -> _Step:
        base = leg.encoding.base
        if not self.fits(leg.manifest):
            raise LegFailed(leg, "its base has other tensors" if base else "it has other tensors than the image")
        if base is None:
            self._look_again(leg)
            step = _Step(leg, None, source, patches)
        else:
            held = self.manifest or self._leaving
            if held is None or held.digest != base.digest:
                raise LegFailed(leg, f"its base, version {base.number}, is not what is held")
            step = _Step(leg, held, source, patches)
            _check_unchanged(step)
        self.manifest, self._leaving = None, self.manifest or self._leaving
        return step

    def _look_again(self, leg: Leg) -> None:
        """A snapshot heals: what it would leave in place because it seems right is hashed again."""
        for index, chunk in enumerate(leg.manifest.chunks):
            if self._digests[index] == chunk.digest:
                self._digests[index] = chunk_digest(self._chunk(chunk).data)

    def _end_early(self) -> None:
        """A leg that failed before it changed anything leaves the version as it was."""
        if self.manifest is None and self._leaving is not None:
            table = [chunk.digest for chunk in self._leaving.chunks]
            if self._digests == table:
                self.manifest, self._leaving = self._leaving, None

    # -- payloads

    def _take_payloads(self, step: _Step, group: Fetched) -> None:
        if self.bytes >= THREADED_BYTES:
            return self._take_in_threads(step, group)
        for payload, data in group:
            self._take_payload(step, payload, data)

    def _take_in_threads(self, step: _Step, group: Fetched) -> None:
        """Decoding, writing and hashing release the interpreter; the memory they need bounds how many at once."""
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
            # what was written until now may be no list of changes that anyone has
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
        """Sparse codings: write the changes, then look whether they were right."""
        width = run[0].tensor.width
        views = [self._chunk(chunk) for chunk in run]
        target = join(views)  # one chunk is changed in place, several in a copy of all of them
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

    # -- chunks that are not what they should be

    def _has_bases(self, step: _Step, payload: Payload) -> bool:
        """Whether memory has what the payload starts from. If not, an attempt was cut short in the middle of it: then
        the chunks are made what the leg wants without it."""
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
        """Whether chunks of the base in memory were wrong; they are right now."""
        assert step.base is not None
        base = step.base.chunks
        bad = [i for i in places(payload) if chunk_digest(self._chunk(base[i]).data) != base[i].digest]
        for index in bad:
            self._digests[index] = None
            self._settle(step, index, step.base)
        return bool(bad)

    def _settle(self, step: _Step, index: int, manifest: Manifest) -> None:
        """Make sure that a chunk is that of a version, by reading it from the store if it is not."""
        chunk = manifest.chunks[index]
        if self._digests[index] == chunk.digest:
            return
        try:
            with self._repairing:
                data = read_chunk(step.source, manifest.version, index)
        except (StorageError, WeightsError) as error:
            self._leaving = None  # no delta can start from this
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


def _check_unchanged(step: _Step) -> None:
    """Chunks without a payload are as in the base: the two tables must say so too."""
    assert step.base is not None
    covered = set(itertools.chain.from_iterable(map(places, step.leg.encoding.payloads)))
    for index, (new, old) in enumerate(zip(step.chunks, step.base.chunks, strict=True)):
        if new.digest != old.digest and index not in covered:
            raise LegFailed(step.leg, f"{new.tensor.name} is said to be unchanged and has another digest")


def _collect(running: dict[Future[None], int]) -> None:
    done, _ = wait(running, return_when=FIRST_COMPLETED)
    for future in done:
        del running[future]
        future.result()


def _scratch(step: _Step, payload: Payload) -> int:
    """Roughly the memory that decoding a payload takes: by its changes if it is a list of them, else by its chunks."""
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
    """Changes of chunks that were coded together, as changes of each."""
    if len(run) == 1:
        yield changes
        return
    offset = 0
    for chunk in run:
        end = offset + chunk.size() // chunk.tensor.width
        first, last = np.searchsorted(changes.indices, [offset, end])
        yield Changes(changes.indices[first:last] - np.uint32(offset), changes.values[first:last])
        offset = end
