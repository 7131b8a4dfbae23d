"""A sealed trajectory as bytes: one safetensors file inside one zstd frame.

    record            uint8    the JSON of `_Record`: ids, provenance, messages; policies and spans of each segment
    N.tokens          int32    [T - offset]   of segment N; its parent stores what they share
    N.sampled         bool     [T - offset]
    N.logprobs        float32  [T - offset]
    N.policy          int16    [T - offset]
    N.routes          uint8 or uint16 [T - offset, moe layers, k], absent for a dense model
    N.routes_valid    bool     [T]
    N.routes_at       int32    [M]            shared positions whose routes are not those of the parent
    N.routes_more     as N.routes, [M, moe layers, k]: their routes
    N.kept_sizes      int32    [T - offset]   bytes of each token's set in N.kept; absent if no set was recorded
    N.kept            uint8    the tokens that could be drawn, where some were excluded: see allowed_tokens.py

Version 1 stored all arrays but tokens whole, and no routes_at and routes_more. Version 2 had no kept sets, no
penalties and no min_p.

Payloads come from other regions and from object stores that others may write to, so decoding trusts nothing: whatever
`decode_trajectory` returns satisfies every invariant of `check_trajectory`, and anything else raises TrajectoryError.
Encoding checks the same, so nothing is sealed that could not be read again. State, reason and rewards are facts of the
index, not of the payload: a decoded trajectory is `finished`, and `TrajectoryStore.load` fills in the rest.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import IO, Any, Literal, NoReturn

import numpy as np
import safetensors
import zstandard
from pydantic import ConfigDict, TypeAdapter

from rollmill.strict import parse_json
from rollmill.trajectories.facts import DTYPES, STRICT, to_plain
from rollmill.trajectories.invariants import check_trajectory, refuse_record
from rollmill.trajectories.packing import Array, packed_bytes, pieces, read_arrays, write_arrays
from rollmill.types import Cause, PolicyRef, Segment, Span, TrafficClass, Trajectory, TrajectoryState

MAX_PAYLOAD_BYTES = 2 << 30  # uncompressed; a million tokens with 60 layers of 8 experts in 16 bits are about 1 GB
MAX_EXPANDED_BYTES = 8 << 30  # with what segments share copied into each of them
_MORE_ROUTES = ("routes_at", "routes_more")
_UNSHARED = {"sampled": False, "logprobs": np.nan, "policy": -1, "kept_sizes": 0}  # of tokens of the parent


@dataclass
class _SegmentRecord:
    id: str
    policies: list[PolicyRef]
    spans: list[Span]
    parent: tuple[str, int] | None
    cause: Cause


@dataclass
class _Record:
    __pydantic_config__ = ConfigDict(**STRICT, extra="forbid")

    version: Literal[1, 2, 3]
    id: str
    task_id: str
    group_id: str
    traffic: TrafficClass
    messages: list[dict[str, Any]]
    provenance: dict[str, Any]
    segments: list[_SegmentRecord]


_RECORD = TypeAdapter(_Record)


def encode_trajectory(trajectory: Trajectory) -> bytes:
    """The payload of a sealed trajectory. Raises TrajectoryError if the record is inconsistent."""
    out = io.BytesIO()
    write_trajectory(trajectory, out)
    return out.getvalue()


def write_trajectory(trajectory: Trajectory, out: IO[bytes], routes: Mapping[str, Mapping[str, Array]] = {}) -> None:
    """As `encode_trajectory`, to a file. `routes`: the routes, routes_valid, routes_at and routes_more of segments by
    id, whose routes are not in the trajectory because they are too large for memory."""
    check_trajectory(trajectory)
    arrays: dict[str, Array] = {"record": np.frombuffer(_record_json(trajectory), np.uint8)}
    segments = {segment.id: segment for segment in trajectory.segments}
    room = MAX_EXPANDED_BYTES
    for index, segment in enumerate(trajectory.segments):
        own = _own_arrays(segment, segments[segment.parent[0]] if segment.parent else None)
        own |= routes.get(segment.id, {})
        room -= len(segment.tokens) * _bytes_per_token(own.get("routes"))
        room -= 0 if segment.kept is None else segment.kept.nbytes
        if room < 0:  # `decode_trajectory` would refuse it
            refuse_record(trajectory.id, f"its segments would take more than {MAX_EXPANDED_BYTES} bytes when read")
        arrays |= {f"{index}.{name}": array for name, array in own.items()}
    size = packed_bytes(arrays)
    if size > MAX_PAYLOAD_BYTES:
        refuse_record(trajectory.id, f"{size} bytes, over the limit of {MAX_PAYLOAD_BYTES}")
    write_arrays(out, arrays)


def decode_trajectory(data: bytes) -> Trajectory:
    """The input of `encode_trajectory`, bit for bit. Raises TrajectoryError for bytes it would not have written."""
    arrays = _unpack(data)
    described = arrays.pop("record", None)
    if described is None or described.dtype != np.uint8:
        refuse_record("payload", "the record is missing")
    record = _parse_record(described.tobytes())
    segments: dict[str, Segment] = {}
    room = MAX_EXPANDED_BYTES
    for index, facts in enumerate(record.segments):
        if facts.id in segments:
            refuse_record(record.id, f"two segments with the id {facts.id!r}")
        own = {name: arrays.pop(f"{index}.{name}", None) for name in (*DTYPES, *_MORE_ROUTES)}
        refuse = partial(refuse_record, f"{record.id}: segment {facts.id!r}")
        whole = _expand(own, facts.parent, segments, room, refuse) if record.version > 1 else own
        if record.version == 1:
            whole["tokens"] = _whole_tokens(record.id, own["tokens"], own["sampled"], facts, segments)
        room -= sum(array.nbytes for array in whole.values() if array is not None)
        segments[facts.id] = Segment(**vars(facts), **{name: whole[name] for name in DTYPES})  # type: ignore[arg-type]
    if arrays:
        refuse_record(record.id, f"arrays without a segment: {', '.join(sorted(arrays)[:5])}")
    trajectory = Trajectory(
        id=record.id,
        segments=list(segments.values()),
        task_id=record.task_id,
        group_id=record.group_id,
        state=TrajectoryState.finished,
        traffic=record.traffic,
        messages=record.messages,
        provenance=record.provenance,
    )
    check_trajectory(trajectory)
    return trajectory


def seal_facts(trajectory: Trajectory) -> dict[str, Any]:
    """The facts of the segments that the index keeps: the keyword arguments of `TrajectoryStore.finish`."""
    segments = trajectory.segments
    policies = [policy for segment in segments for policy in segment.policies]
    newest = max(policies, key=lambda policy: policy.number, default=None)
    return {
        "tokens": sum(len(segment.tokens) - (segment.parent[1] if segment.parent else 0) for segment in segments),
        "sampled_tokens": sum(int(segment.sampled.sum()) for segment in segments),
        "segments": len(segments),
        "turns": sum(len(segment.spans) for segment in segments),
        "line": newest.line if newest else None,
        "form": newest.form if newest else None,
        "oldest_version": min((policy.number for policy in policies), default=None),
        "newest_version": newest.number if newest else None,
        "causes": ",".join(dict.fromkeys(segment.cause for segment in segments)),
        "regions": ",".join(dict.fromkeys(span.region for segment in segments for span in segment.spans)),
    }


def _record_json(trajectory: Trajectory) -> bytes:
    record = {
        name: getattr(trajectory, name) for name in _Record.__annotations__ if name not in ("version", "segments")
    }
    record["version"] = 3
    record["segments"] = [
        {name: getattr(segment, name) for name in _SegmentRecord.__annotations__} for segment in trajectory.segments
    ]
    try:
        text = json.dumps(record, default=to_plain, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        refuse_record(trajectory.id, f"its messages or provenance are not JSON: {error}")
    # a lone surrogate cannot be encoded; messages are for people to read, so a question mark replaces it
    data = text.encode("utf-8", "replace")
    _parse_record(data)  # a record that cannot be read again is not written
    return data


def _unpack(data: bytes) -> dict[str, np.ndarray]:
    try:
        # decompress() allocates the stated size at once and stops there, so the frame must state it
        size = zstandard.frame_content_size(data)
        if not 0 <= size <= MAX_PAYLOAD_BYTES:
            stated = f"{size} bytes, over the limit of {MAX_PAYLOAD_BYTES}" if size >= 0 else "an unknown size"
            refuse_record("payload", f"would unpack to {stated}")
        return read_arrays(data)
    except KeyError as error:
        refuse_record("payload", f"an array has the type {error.args[0]}")
    except (zstandard.ZstdError, safetensors.SafetensorError, ValueError, OverflowError) as error:
        refuse_record("payload", f"damaged or truncated: {error}")


def _parse_record(data: bytes) -> _Record:
    try:
        return parse_json(data, _RECORD)
    except ValueError as error:
        refuse_record("payload", f"the record is malformed: {error}")


def _own_arrays(segment: Segment, parent: Segment | None) -> dict[str, Array]:
    """The arrays of a segment as they are stored: without what it shares with its parent."""
    offset = segment.parent[1] if segment.parent else 0
    own: dict[str, Array] = {
        name: array[offset:] for name in ("tokens", *_UNSHARED) if (array := getattr(segment, name)) is not None
    }
    if segment.kept is not None:
        own["kept"] = segment.kept
    if segment.routes is None or segment.routes_valid is None:
        return own
    own |= {"routes": segment.routes[offset:], "routes_valid": segment.routes_valid}
    if offset:
        shared = inherited_routes(parent, segment.routes)
        at = [
            begin
            + np.flatnonzero((segment.routes[begin:end] != (0 if shared is None else shared[begin:end])).any((1, 2)))
            for begin, end in pieces(0, offset, max(1, segment.routes[:1].nbytes))
        ]
        positions = np.concatenate(at).astype(np.int32)
        own |= {"routes_at": positions, "routes_more": segment.routes[positions]}
    return own


def _bytes_per_token(routes: Array | None) -> int:
    """Of all arrays of a segment."""
    return 16 + (math.prod(routes.shape[1:]) * routes.dtype.itemsize if routes is not None else 0)


def inherited_routes(parent: Segment | None, like: np.ndarray) -> np.ndarray | None:
    """The routes of the parent, if they have the type and the layers of these."""
    if parent is None or parent.routes is None:
        return None
    same = parent.routes.dtype == like.dtype and parent.routes.shape[1:] == like.shape[1:]
    return parent.routes if same else None


def _expand(
    own: dict[str, np.ndarray | None],
    parent: tuple[str, int] | None,
    earlier: Mapping[str, Segment],
    room: int,
    refuse: Callable[[str], NoReturn],
) -> dict[str, np.ndarray | None]:
    """The whole arrays of a segment, with what it shares with its parent. Checks what it needs for copying; the rest is
    for `check_trajectory`."""
    name, offset = parent or ("", 0)
    tokens, routes = own["tokens"], own["routes"]
    shared = earlier[name].tokens if name in earlier else np.empty(0, np.int32)
    if tokens is None or tokens.dtype != np.int32 or tokens.ndim != 1:
        refuse("tokens are missing or not a row of int32")
    if not 0 <= offset <= len(shared):
        refuse(f"it refers to {offset} tokens of {name!r}, which are not there")
    # many references to one long parent could use any amount of memory
    if _bytes_per_token(routes) * (offset + len(tokens)) > room:
        refuse(f"the trajectory would take more than {MAX_EXPANDED_BYTES} bytes")
    whole: dict[str, np.ndarray | None] = {"tokens": np.concatenate([shared[:offset], tokens])}
    for kind, empty in _UNSHARED.items():
        array = own[kind]
        if array is None or not offset:
            whole[kind] = array
            continue
        if array.shape != tokens.shape or array.dtype.name not in DTYPES[kind]:
            refuse(f"{kind} is {array.dtype.name} with shape {array.shape} for {len(tokens)} tokens of its own")
        whole[kind] = np.concatenate([np.full(offset, empty, array.dtype), array])
    whole["routes"] = _expand_routes(own, offset, len(tokens), earlier.get(name), refuse)
    whole |= {name: own[name] for name in ("routes_valid", "kept")}
    return whole


def _expand_routes(
    own: dict[str, np.ndarray | None],
    offset: int,
    count: int,
    parent: Segment | None,
    refuse: Callable[[str], NoReturn],
) -> np.ndarray | None:
    routes, at, more = own["routes"], own["routes_at"], own["routes_more"]
    if (routes is None or not offset) and (at is not None or more is not None):
        refuse("routes of shared tokens without shared tokens or without routes")
    if routes is None or not offset:
        return routes
    if routes.ndim != 3 or len(routes) != count:
        refuse(f"routes has shape {routes.shape} for {count} tokens of its own")
    if at is None or at.dtype != np.int32 or at.ndim != 1 or (len(at) and not 0 <= at.min() <= at.max() < offset):
        refuse("routes_at is not a row of shared positions")
    if more is None or more.dtype != routes.dtype or more.shape != (len(at), *routes.shape[1:]):
        refuse("routes_more does not fit routes_at and routes")
    whole = np.zeros((offset + count, *routes.shape[1:]), routes.dtype)
    shared = inherited_routes(parent, routes)
    if shared is not None:
        whole[:offset] = shared[:offset]
    whole[at] = more
    whole[offset:] = routes
    return whole


def _whole_tokens(
    trajectory_id: str,
    own: np.ndarray | None,
    sampled: np.ndarray | None,
    described: _SegmentRecord,
    earlier: dict[str, Segment],
) -> np.ndarray:
    """The tokens of a segment, with the prefix it shares with its parent."""
    name, offset = described.parent or ("", 0)
    shared = earlier[name].tokens if name in earlier else np.empty(0, np.int32)
    if own is None or own.dtype != np.int32 or own.ndim != 1:
        refuse_record(trajectory_id, f"segment {described.id!r}: tokens are missing or not a row of int32")
    if not 0 <= offset <= len(shared):
        where = f"segment {described.id!r}"
        refuse_record(trajectory_id, f"{where} refers to {offset} tokens of {name!r}, which are not there")
    # checked before copying: a chain of references to one long parent could use any amount of memory
    if sampled is None or sampled.shape != (offset + len(own),):
        refuse_record(trajectory_id, f"segment {described.id!r}: sampled is missing or not as long as the tokens")
    return np.concatenate([shared[:offset], own])
