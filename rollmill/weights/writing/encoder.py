"""Encoder: codes chunks in several threads, writes them as packs, and returns the encodings that name the packs.

    rows of the chunk table ─► runs ─► coded side by side ─► packs, in the order of the table ─► uploaded meanwhile

The packs depend only on the bytes, never on the threads, so a repeated attempt finds the packs of the attempt before.
Packs are content-addressed, and nobody reads them until a manifest names them.

Memory beside the weights and their base: the chunks being coded, the pack being filled, and the packs being uploaded.
Each is bounded below, together less than 256 MiB.
"""

from __future__ import annotations

import collections
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import numpy as np

from rollmill.errors import WeightsError
from rollmill.storage.parallel import Uploads
from rollmill.weights.format.codings import Coding, EncodedPayload, Goal, encode_difference, encode_full
from rollmill.weights.format.manifest import (
    Base,
    Encoding,
    Layout,
    Pack,
    Payload,
    TensorEntry,
    chunk_digest,
    digest_bytes,
)
from rollmill.weights.format.object_keys import pack_prefix
from rollmill.weights.format.tensors import WIDTHS, chunk_ranges
from rollmill.weights.reading.weight_store import WeightStore

# A pack is closed before it grows past a quarter of the packs before it, within these bounds, unless it is a single
# payload: a delta travels in several packs, so that the first are checked and written while the last are under way.
SMALLEST_PACK_BYTES, PACK_BYTES = 1 << 20, 32 << 20
RUN_BYTES = 512 << 10  # small chunks are coded together up to this much: fewer calls, and they compress better
UPLOAD_BYTES = 64 << 20  # most bytes being uploaded
CODING_BYTES = 192 << 20  # most scratch memory for coding, or that of one chunk
_MOST_THREADS = 16
_SMALL_BYTES = 8 << 20  # smaller models are coded in one thread: starting more takes longer

_Result = TypeVar("_Result")


class ChunkRow(NamedTuple):
    """One row of the chunk table, before its digest is known."""

    place: int  # in the chunk table
    tensor: str
    chunk: int  # in the tensor
    start: int  # byte range in the tensor
    stop: int
    width: int  # of an element

    @property
    def size(self) -> int:
        return self.stop - self.start


Run = list[ChunkRow]
BytesOf = Callable[[ChunkRow], np.ndarray]  # the bytes of a chunk: flat uint8, a view


class DevicePayloads(NamedTuple):
    """Payloads that were coded elsewhere, such as on a GPU."""

    base: str  # the digest of the version that they start from
    by_place: Mapping[
        int, Future[EncodedPayload | None]
    ]  # by the first place of a run; None: this encoder shall code it


class DeltaBase(NamedTuple):
    """The version a delta starts from."""

    base: Base
    digests: Sequence[str]  # of its whole chunk table
    bytes_of: BytesOf | None  # None: the base could not be read back, so chunks are coded whole
    payloads: Mapping[int, Future[EncodedPayload | None]] = {}  # see `DevicePayloads`


class Part(NamedTuple):
    """Rows of a version that are coded: their packs are in the store, and no manifest names them yet."""

    digests: dict[int, str]  # by place
    delta: Encoding | None
    snapshot: Encoding | None


def rows_of(layout: Layout) -> list[ChunkRow]:
    """The chunk table of tensors with these names, dtypes and shapes."""
    rows: list[ChunkRow] = []
    for name, dtype, shape in layout:
        width = WIDTHS[dtype]
        for chunk, (start, stop) in enumerate(chunk_ranges(shape)):
            rows.append(ChunkRow(len(rows), name, chunk, start * width, stop * width, width))
    return rows


def entries_of(layout: Layout, digests: Sequence[str]) -> tuple[TensorEntry, ...]:
    """The layout with the digest of each chunk."""
    rest = iter(digests)
    return tuple(
        TensorEntry(name=name, dtype=dtype, shape=shape, chunks=tuple(next(rest) for _ in chunk_ranges(shape)))
        for name, dtype, shape in layout
    )


class Encoder:
    """Codes chunks of one line and writes their packs."""

    def __init__(
        self, store: WeightStore, line: str, form: str, goal: Goal = "fast", threads: int | None = None
    ) -> None:
        if threads is not None and threads < 1:
            raise WeightsError(f"a publisher with {threads} threads", hint="leave it out to use the cores there are")
        self._objects, self._line, self._form = store.objects, line, form
        self._goal, self._threads = goal, threads

    def encode(
        self, number: int, rows: Sequence[ChunkRow], new: BytesOf, before: DeltaBase | None, snapshot: bool
    ) -> Part:
        """Code the rows as a delta if there is a version before, and as a snapshot if asked for or if there is none."""
        total = sum(row.size for row in rows)
        threads = 1 if total < _SMALL_BYTES else self._threads or min(_cores(), _MOST_THREADS)
        runs = runs_of(rows)
        prefix = pack_prefix(self._line, self._form, number)
        digests: dict[int, str] = {}
        delta = full = None
        with Uploads(self._objects, bytes_in_flight=UPLOAD_BYTES) as uploads:
            if before is not None:
                delta = self._delta(_PackWriter(uploads, prefix), runs, new, before, digests, threads)
            if snapshot or before is None:
                full = _snapshot(_PackWriter(uploads, prefix), runs, new, digests, threads)
        return Part(digests, delta, full)

    def _delta(
        self,
        packs: _PackWriter,
        runs: list[Run],
        new: BytesOf,
        before: DeltaBase,
        digests: dict[int, str],
        threads: int,
    ) -> Encoding:
        def code(run: Run) -> tuple[EncodedPayload, list[str]]:
            early = before.payloads.get(run[0].place)
            encoded = early.result() if early is not None else None
            if encoded is None:
                encoded = self._code(run, new, before)
            if not encoded.changed:
                return encoded, [before.digests[row.place] for row in run]
            return encoded, [chunk_digest(new(row).data) for row in run]

        changed = 0
        raw = before.bytes_of is None
        for run, (encoded, found) in _in_order(
            code, runs, threads, lambda run: _size(run) * 3 if raw else _size(run) // 2
        ):
            digests.update((row.place, digest) for row, digest in zip(run, found, strict=True))
            changed += encoded.changed
            if encoded.changed:
                packs.add(run, encoded.coding, encoded.payload)
        return packs.finish(changed, before.base)

    def _code(self, run: Run, new: BytesOf, before: DeltaBase) -> EncodedPayload:
        if before.bytes_of is not None and all(_is_same(new(row), before.bytes_of(row)) for row in run):
            return EncodedPayload("sparse", b"", 0)  # frozen tensors: nothing is read
        elements, width = _join(new, run), run[0].width
        if before.bytes_of is None:
            return EncodedPayload("raw", encode_full(elements, width), elements.size // width)
        return encode_difference(_join(before.bytes_of, run), elements, width, self._goal)


def _snapshot(packs: _PackWriter, runs: list[Run], new: BytesOf, digests: dict[int, str], threads: int) -> Encoding:
    known = bool(digests)

    def code(run: Run) -> tuple[bytes, list[str]]:
        payload = encode_full(_join(new, run), run[0].width)
        return payload, [] if known else [chunk_digest(new(row).data) for row in run]

    for run, (payload, found) in _in_order(code, runs, threads, lambda run: _size(run) * 3):
        digests.update((row.place, digest) for row, digest in zip(run, found, strict=False))
        packs.add(run, "raw", payload)
    return packs.finish(sum(row.size // row.width for run in runs for row in run))


class _PackWriter:
    """Collects payloads in the order of the chunk table and hands full packs to be uploaded."""

    def __init__(self, uploads: Uploads, prefix: str) -> None:
        self._uploads, self._prefix = uploads, prefix
        self._open: list[bytes] = []
        self._open_bytes = self._closed_bytes = 0
        self._packs: list[Pack] = []
        self._payloads: list[Payload] = []

    def add(self, run: Run, coding: Coding, payload: bytes) -> None:
        limit = min(max(self._closed_bytes // 4, SMALLEST_PACK_BYTES), PACK_BYTES)
        if self._open and self._open_bytes + len(payload) > limit:
            self._close_pack()
        where = {"pack": len(self._packs), "offset": self._open_bytes, "bytes": len(payload)}
        self._payloads.append(Payload(first=run[0].place, chunks=len(run), coding=coding, **where))
        self._open.append(payload)
        self._open_bytes += len(payload)

    def finish(self, changed_elements: int, base: Base | None = None) -> Encoding:
        if self._open:
            self._close_pack()
        return Encoding(
            base=base, packs=tuple(self._packs), payloads=tuple(self._payloads), changed_elements=changed_elements
        )

    def _close_pack(self) -> None:
        data = self._open[0] if len(self._open) == 1 else b"".join(self._open)
        self._open, self._open_bytes = [], 0
        self._closed_bytes += len(data)
        pack = Pack(digest=digest_bytes(data), bytes=len(data))
        self._uploads.create(f"{self._prefix}{pack.digest}", data)
        self._packs.append(pack)


def runs_of(rows: Sequence[ChunkRow]) -> list[Run]:
    """Rows that follow each other in the chunk table and have one element width, coded together."""
    runs: list[Run] = []
    size = 0
    for row in rows:
        last = runs[-1][-1] if runs else None
        joins = last is not None and last.place + 1 == row.place and last.width == row.width
        if not joins or size + row.size > RUN_BYTES:
            runs.append([])
            size = 0
        runs[-1].append(row)
        size += row.size
    return runs


def _in_order(
    work: Callable[[Run], _Result], runs: list[Run], threads: int, scratch: Callable[[Run], int]
) -> Iterator[tuple[Run, _Result]]:
    """Yield each run with the result of `work`, in order; runs are worked on in parallel within the scratch memory."""
    if threads == 1:
        yield from ((run, work(run)) for run in runs)
        return
    ahead: collections.deque[tuple[Run, Future[_Result]]] = collections.deque()
    held = 0
    with ThreadPoolExecutor(threads, thread_name_prefix="encode") as pool:
        try:
            for run in runs:
                while ahead and (held + scratch(run) > CODING_BYTES or len(ahead) > 2 * threads):
                    held -= scratch(ahead[0][0])
                    yield _finished(ahead)
                ahead.append((run, pool.submit(work, run)))
                held += scratch(run)
            while ahead:
                yield _finished(ahead)
        finally:
            for _, future in ahead:
                future.cancel()


def _finished(ahead: collections.deque[tuple[Run, Future[_Result]]]) -> tuple[Run, _Result]:
    run, future = ahead.popleft()
    return run, future.result()


def _cores() -> int:
    """The cores this process may use, if the system tells."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _size(run: Run) -> int:
    return sum(row.size for row in run)


def _is_same(new: np.ndarray, old: np.ndarray) -> bool:
    """Whether both are the same memory."""
    return new.ctypes.data == old.ctypes.data


def _join(bytes_of: BytesOf, run: Run) -> np.ndarray:
    """A run as one array: several chunks are copied together, a single one is a view."""
    return bytes_of(run[0]) if len(run) == 1 else np.concatenate([bytes_of(row) for row in run])
