"""The expert routes of a session that is being sealed: from the log to the payload, without holding them in memory.

The gateway does not keep routes in memory: a million tokens with 60 layers of 8 experts have 480 MB of them. Each
position has the routes of its first record, because its token was sampled with them. A later record comes from
computing the context again, after an eviction or on another engine. A child segment takes the routes of shared
positions from its parent; those that the parent does not have are stored with the child.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from rollmill.gateway.recording.entries import locate_arrays
from rollmill.gateway.sessions.segments import OpenSegment
from rollmill.trajectories.packing import Array, StoredArray, pieces

_Source = tuple[int, StoredArray]  # first position, rows


def gather_routes(
    segments: Iterable[OpenSegment], log: int, extents: Sequence[tuple[int, int]], scratch: int
) -> dict[str, dict[str, Array]]:
    """The arrays `routes`, `routes_valid`, `routes_at` and `routes_more` of each segment, for `write_trajectory`. The
    routes are copied from the log (an open file, and where the entries of the session are) to the file `scratch`."""
    sources: dict[str, list[_Source]] = {}
    for begin, end in extents:
        for header, arrays in locate_arrays(log, begin, end):
            for index, first in enumerate(header.get("routes", ())):
                sources.setdefault(header["segment"], []).append((first, arrays[f"routes{index}"]))
    gathered: dict[str, _Gathered | None] = {}
    at = 0
    for segment in segments:
        parent = gathered[segment.parent.id] if segment.parent else None
        own = gathered[segment.id] = _gather(segment, sources.get(segment.id, []), parent, scratch, at)
        at += own.routes.nbytes if own else 0
    return {id: own.arrays() for id, own in gathered.items() if own is not None}


@dataclass
class _Gathered:
    offset: int  # tokens shared with the parent
    routes: StoredArray  # of the other tokens
    valid: np.ndarray  # bool, of all tokens
    more: dict[int, np.ndarray]  # routes of shared positions that the parent does not have

    def arrays(self) -> dict[str, Array]:
        found: dict[str, Array] = {"routes": self.routes, "routes_valid": self.valid}
        if self.offset:
            empty = np.empty((0, *self.routes.shape[1:]), self.routes.dtype)
            at = sorted(self.more)
            found["routes_at"] = np.array(at, np.int32)
            found["routes_more"] = np.stack([self.more[position] for position in at]) if at else empty
        return found

    def put(self, first: int, rows: np.ndarray) -> None:
        shared = max(0, min(len(rows), self.offset - first))
        self.more |= {first + index: rows[index] for index in range(shared)}
        if shared < len(rows):
            self.routes.write(first + shared - self.offset, rows[shared:])


def _gather(
    segment: OpenSegment, sources: list[_Source], parent: _Gathered | None, scratch: int, at: int
) -> _Gathered | None:
    like = sources[0][1] if sources else parent.routes if parent else None
    if like is None:
        return None
    length, offset = segment.length, segment.offset
    routes = StoredArray(scratch, at, like.dtype, (length - offset, *like.shape[1:]))
    routes.allocate()
    own = _Gathered(offset, routes, np.zeros(length, np.bool_), {})
    if parent is not None and _alike(parent.routes, like):
        own.valid[:offset] = parent.valid[:offset]
    for first, rows in sources:
        if not _alike(rows, like):  # of another model
            continue
        count = max(0, min(len(rows), length - first))  # an answer cut at a stop string has rows for dropped tokens
        for begin, end in _runs(~own.valid[first : first + count]):
            for low, high in pieces(begin, end, rows.row_bytes):
                own.put(first + low, rows.rows(low, high))
        own.valid[first : first + count] = True
    return own


def _alike(one: StoredArray, other: StoredArray) -> bool:
    return one.dtype == other.dtype and one.shape[1:] == other.shape[1:]


def _runs(mask: np.ndarray) -> Iterator[tuple[int, int]]:
    """(begin, end) of each run of true values."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8)))
    yield from zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)
