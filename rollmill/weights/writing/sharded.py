"""Parts: a trainer in several processes publishes without gathering. Each rank writes the chunks it owns.

    every rank     publish_part(n, chunks)   codes and uploads its chunks, then writes what they are: its part
    one of them    commit_parts(n)           waits for all parts, checks that they are the version, creates the manifest
    every rank     settle(n)                 waits for the manifest; only then does its base move on

The manifest is the one that a single publisher would have written, with other packs. Parts carry the epoch of the run
that wrote them, so parts of a run that died are never used. Whichever rank dies, and whenever, the version exists with
all its chunks or not at all; a run that starts again publishes the same number again.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, NamedTuple

import numpy as np
from pydantic import Field

from rollmill.errors import ObjectExists, WeightsError
from rollmill.strict import StrictModel
from rollmill.types import Version
from rollmill.weights.format.codings import Goal
from rollmill.weights.format.manifest import (
    Base,
    ChunkDigest,
    Count,
    Encoding,
    Layout,
    Manifest,
    Name,
    Payload,
    chunk_digest,
    layout_of,
    seal,
    unseal,
)
from rollmill.weights.format.object_keys import form_folder, manifest_key
from rollmill.weights.reading.chunks import read_chunks
from rollmill.weights.reading.weight_store import WeightStore
from rollmill.weights.writing.encoder import Before, Encoder, Row, entries_of, rows_of
from rollmill.weights.writing.line_writer import Writer
from rollmill.weights.writing.publisher import checked_snapshot_every

ChunkKey = tuple[str, int]  # name of a tensor, and which of its chunks
Chunks = Mapping[ChunkKey, "bytes | memoryview | np.ndarray"]
WAIT_SECONDS = 600.0
_REQUESTS = 64  # parts that are read at a time


class Part(StrictModel):
    """What one rank wrote of a version. Places are rows of the chunk table of the whole version."""

    format: Literal[2] = 2
    line: Name
    number: Count
    form: Name
    epoch: Count
    rank: Count
    world: Count
    places: tuple[Count, ...]
    digests: tuple[ChunkDigest, ...] = Field(description="digests of the chunks at these places")
    delta: Encoding | None
    snapshot: Encoding | None


class Standing(NamedTuple):
    """Where a run of ranks begins. One rank takes the line over and gives this to the others."""

    epoch: int
    head: int | None


class PartPublisher:
    """One rank. `layout` are the names, dtypes and shapes of all tensors, the same on every rank."""

    def __init__(
        self,
        store: WeightStore,
        line: str,
        layout: Layout,
        rank: int,
        world: int,
        form: str = "bf16",
        snapshot_every: int = 25,
        goal: Goal = "fast",
        threads: int | None = None,
    ) -> None:
        if not 0 <= rank < world:
            raise WeightsError(f"rank {rank} of {world}", hint="ranks count from 0")
        self.store, self.line, self.form = store, line, form
        self.rank, self.world = rank, world
        self.snapshot_every = checked_snapshot_every(snapshot_every)
        self.last: Manifest | None = None
        self.problem: str | None = None  # why there is no base; its chunks are then coded whole
        self._layout = tuple(sorted(layout))
        self._rows = rows_of(self._layout)
        self._writer = Writer(store, line, form)
        self._encoder = Encoder(store, line, form, goal, threads)
        self._base: dict[int, np.ndarray] | None = None  # by place: copies of the chunks this rank owns
        self._waiting: tuple[Part, dict[int, np.ndarray]] | None = None  # written, commit not seen yet

    def resume(self, owned: Iterable[ChunkKey], standing: Standing | None = None) -> Standing:
        """Start at the head of the line. Without `standing` this rank takes over the line; exactly one rank does.

        `owned` are the chunks it is going to publish. Only these are read back and verified.
        """
        if standing is None:
            self.last = self._writer.take_over()
        else:
            self._writer.epoch = standing.epoch
            head = standing.head
            self.last = self.store.manifest(Version(self.line, head), self.form) if head is not None else None
        self._base, self._waiting, self.problem = None, None, None
        if self.last is not None and layout_of(self.last.tensors) == self._layout:
            try:
                places = {row.place for row in self._owned_rows(owned)}
                found = read_chunks(self.store.source(self.form), self.last.version, places)
                # copies of their own: what is read may be part of a larger run
                self._base = {place: found.pop(place).copy() for place in sorted(places)}
            except WeightsError as error:
                self.problem = str(error)
        return Standing(self._writer.epoch, self.last.number if self.last else None)

    def publish_part(self, number: int, chunks: Chunks) -> Part | None:
        """Code and upload the chunks of this rank. They must not change until `settle`.

        Returns None if the version is already published with these chunks.
        """
        rows = self._owned_rows(chunks)
        new = {row.place: _flat(chunks[row.tensor, row.chunk], row) for row in rows}
        self._writer.check()
        if self.last is not None and number <= self.last.number:
            self._confirm(number, new)
            return None
        self._writer.check_number(number, self.last)
        coded = self._encoder.encode(
            number, rows, lambda row: new[row.place], self._before(new), number % self.snapshot_every == 0
        )
        part = Part(
            line=self.line,
            number=number,
            form=self.form,
            epoch=self._writer.epoch,
            rank=self.rank,
            world=self.world,
            places=tuple(new),
            digests=tuple(coded.digests[place] for place in new),
            delta=coded.delta,
            snapshot=coded.snapshot,
        )
        self._write(part)
        self._waiting = part, new
        return part

    def commit_parts(
        self,
        number: int,
        parent: Version | None = None,
        metadata: Mapping[str, Any] | None = None,
        wait: float = WAIT_SECONDS,
    ) -> Manifest:
        """Create the manifest from the parts of all ranks. One rank calls it, after its own `publish_part`."""
        version = Version(self.line, number)
        if self.last is not None and number <= self.last.number:
            return self.store.manifest(version, self.form)
        self._writer.check_number(number, self.last)
        parts = self._read_parts(number, wait)
        digests = self._joined_digests(parts)
        entries = entries_of(self._layout, digests)
        encodings = _joined([part.delta for part in parts]), _joined([part.snapshot for part in parts])
        manifest = self._writer.manifest(number, entries, encodings, self.last, parent, metadata or {})
        self._check_unchanged(manifest)
        if not self._writer.commit(manifest):
            there = self.store.manifest(version, self.form)
            if there.digest != manifest.digest:
                self._writer.check()
                raise self._writer.diverged(there, f"{manifest.digest[:16]}…")
            return there
        return manifest

    def settle(self, number: int, wait: float = WAIT_SECONDS) -> Manifest:
        """Wait until the version is committed, then make it this rank's base."""
        version = Version(self.line, number)
        if _wait_for(self.store, manifest_key(version, self.form), wait) is None:
            self._writer.check()
            raise WeightsError(
                f"{version} ({self.form}) was not committed within {wait:g} s",
                hint="the rank that commits says what it waits for; settle can be called again",
            )
        manifest = self.store.manifest(version, self.form)
        if self._waiting is None or self._waiting[0].number != number:
            return manifest
        part, new = self._waiting
        self._compare(manifest, dict(zip(part.places, part.digests, strict=True)))
        self._promote(manifest, new)
        return manifest

    def _before(self, new: dict[int, np.ndarray]) -> Before | None:
        last, base = self.last, self._base
        if last is None or layout_of(last.tensors) != self._layout:
            return None
        known = base if base is not None and base.keys() == new.keys() else None
        return Before(
            Base(number=last.number, digest=last.digest),
            [chunk.digest for chunk in last.chunks],
            (lambda row: known[row.place]) if known is not None else None,
        )

    def _promote(self, manifest: Manifest, new: dict[int, np.ndarray]) -> None:
        old = self.last.chunks if self.last and layout_of(self.last.tensors) == self._layout else None
        if self._base is not None and self._base.keys() == new.keys() and old is not None:
            for place, data in new.items():
                if manifest.chunks[place].digest != old[place].digest:
                    np.copyto(self._base[place], data)
        else:
            self._base = None  # before the copy is made: there is never more than one
            self._base = {place: data.copy() for place, data in new.items()}
        self.last, self.problem, self._waiting = manifest, None, None

    def _confirm(self, number: int, new: dict[int, np.ndarray]) -> None:
        manifest = self.store.manifest(Version(self.line, number), self.form)
        self._compare(manifest, {place: chunk_digest(data.data) for place, data in new.items()})

    def _compare(self, manifest: Manifest, digests: dict[int, str]) -> None:
        """Raise WeightsError unless the version has these chunks: another writer published it then."""
        if layout_of(manifest.tensors) != self._layout or any(
            manifest.chunks[place].digest != digest for place, digest in digests.items()
        ):
            raise self._writer.diverged(manifest, f"other chunks on rank {self.rank}")

    def _owned_rows(self, keys: Iterable[ChunkKey]) -> list[Row]:
        """In the order of the chunk table."""
        known = {(row.tensor, row.chunk): row for row in self._rows}
        wanted = list(keys)
        for tensor, chunk in wanted:
            if (tensor, chunk) not in known:
                raise WeightsError(f"there is no chunk {chunk} of {tensor!r}", hint="is the layout that of the model?")
        return sorted(known[key] for key in wanted)

    def _write(self, part: Part) -> None:
        key = part_key(self.line, self.form, part.number, part.epoch, part.rank)
        try:
            self.store.objects.create(key, seal(part))
        except ObjectExists:  # this rank began again within the same run
            there = self._parse(self.store.objects.get(key), part.number, part.rank)
            if (there.places, there.digests) != (part.places, part.digests):
                raise WeightsError(
                    f"rank {part.rank} wrote other chunks of {Version(self.line, part.number)} before",
                    hint="its weights came out differently the second time; start the whole run again",
                ) from None

    def _read_parts(self, number: int, wait: float) -> list[Part]:
        """The parts of all ranks, in the order of ranks. WeightsError names the ranks that are missing."""
        deadline = time.monotonic() + wait
        keys = [part_key(self.line, self.form, number, self._writer.epoch, rank) for rank in range(self.world)]
        with ThreadPoolExecutor(_REQUESTS, thread_name_prefix="parts") as pool:  # one by one, 512 ranks took 25 s
            found = list(pool.map(lambda key: _wait_for(self.store, key, deadline - time.monotonic()), keys))
        missing = [rank for rank, data in enumerate(found) if data is None]
        if missing:
            raise WeightsError(
                f"{Version(self.line, number)} ({self.form}) cannot be committed: no part of rank "
                f"{', '.join(map(str, missing))} within {wait:g} s",
                hint="see the log of that rank; nothing was published, and the number can be published again",
            )
        parts = [self._parse(data, number, rank) for rank, data in enumerate(found) if data is not None]
        base = Base(number=self.last.number, digest=self.last.digest) if self.last else None
        for part in parts:
            if (part.delta is None, part.snapshot is None) != (parts[0].delta is None, parts[0].snapshot is None) or (
                part.delta is not None and part.delta.base != base
            ):
                raise WeightsError(
                    f"rank {part.rank} coded {Version(self.line, number)} from another version than this rank",
                    hint="all ranks must resume from the standing of the rank that took over the line",
                )
        return parts

    def _parse(self, data: bytes, number: int, rank: int) -> Part:
        version = Version(self.line, number)
        where = f"the part of rank {rank} of {version} ({self.form})"
        hint = "start the run again: it writes all parts again"
        part = unseal(data, Part, where, hint)
        expected = (version.line, number, self.form, self._writer.epoch, rank, self.world)
        if (part.line, part.number, part.form, part.epoch, part.rank, part.world) != expected:
            raise WeightsError(f"{where} belongs to another one", hint=hint)
        own = set(part.places)
        covered = _covered(part.delta) + _covered(part.snapshot)
        if list(part.places) != sorted(own) or len(part.digests) != len(own) or not own.issuperset(covered):
            raise WeightsError(f"{where} contradicts itself", hint=hint)
        return part

    def _joined_digests(self, parts: Sequence[Part]) -> list[str]:
        """The digests of the whole chunk table. Raises WeightsError unless the parts have each chunk exactly once."""
        owner: dict[int, int] = {}
        digests = [""] * len(self._rows)
        for part in parts:
            for place, digest in zip(part.places, part.digests, strict=True):
                if place in owner or place >= len(digests):
                    also = f"rank {owner[place]} and rank {part.rank}" if place in owner else f"rank {part.rank}"
                    name = self._name(place) if place in owner else f"row {place}"
                    raise WeightsError(
                        f"{name} was published by {also}", hint="each chunk has one owner, by the layout of all ranks"
                    )
                owner[place], digests[place] = part.rank, digest
        missing = [row.place for row in self._rows if row.place not in owner]
        if missing:
            raise WeightsError(
                f"no rank published {self._name(missing[0])}, {len(missing)} chunks in all",
                hint="each chunk has one owner, by the layout of all ranks",
            )
        return digests

    def _check_unchanged(self, manifest: Manifest) -> None:
        if manifest.delta is None or self.last is None:
            return
        covered = set(_covered(manifest.delta))
        for place, (new, old) in enumerate(zip(manifest.chunks, self.last.chunks, strict=True)):
            if new.digest != old.digest and place not in covered:
                raise WeightsError(f"{self._name(place)} has another digest than before, and no rank sent its changes")

    def _name(self, place: int) -> str:
        return f"chunk {self._rows[place].chunk} of {self._rows[place].tensor}"


def part_key(line: str, form: str, number: int, epoch: int, rank: int) -> str:
    return f"{form_folder(line, form)}/parts/{number:010d}-{epoch:010d}-{rank:05d}.part"


def _joined(encodings: Sequence[Encoding | None]) -> Encoding | None:
    """Join the encodings of all ranks: packs one after the other, payloads in the order of the chunk table."""
    found = [encoding for encoding in encodings if encoding is not None]
    if not found:
        return None
    first_packs = itertools.accumulate((len(encoding.packs) for encoding in found), initial=0)
    payloads = [
        payload.model_copy(update={"pack": payload.pack + first})
        for encoding, first in zip(found, first_packs, strict=False)
        for payload in encoding.payloads
    ]
    return Encoding(
        base=found[0].base,
        packs=tuple(pack for encoding in found for pack in encoding.packs),
        payloads=tuple(sorted(payloads, key=_first)),
        changed_elements=sum(encoding.changed_elements for encoding in found),
    )


def _first(payload: Payload) -> int:
    return payload.first


def _covered(encoding: Encoding | None) -> list[int]:
    payloads = encoding.payloads if encoding else ()
    return [place for payload in payloads for place in range(payload.first, payload.first + payload.chunks)]


def _flat(data: bytes | memoryview | np.ndarray, row: Row) -> np.ndarray:
    """The bytes of a chunk as the caller has them, without a copy."""
    flat = data.reshape(-1).view(np.uint8) if isinstance(data, np.ndarray) else np.frombuffer(data, np.uint8)
    if flat.size != row.size:
        raise WeightsError(f"chunk {row.chunk} of {row.tensor} has {row.size} bytes, not {flat.size}")
    return flat


def _wait_for(store: WeightStore, key: str, seconds: float) -> bytes | None:
    """The object, if it exists within `seconds`."""
    deadline = time.monotonic() + seconds
    while (data := store.objects.wait_for(key, min(max(deadline - time.monotonic(), 0.0), 5.0))) is None:
        if time.monotonic() >= deadline:
            return None
        time.sleep(0.02)  # a store may answer at once
    return data
