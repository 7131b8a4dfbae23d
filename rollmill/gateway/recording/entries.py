"""The entries of the gateway's log as bytes:

    "RMG1" | length of body | crc32 of body | body = length of header | header (JSON) | arrays, as the header lists them

`op` in the header is the kind of entry: open (a session and its facts), turn (one answer), response (a stored response,
see sessions/stored.py), waited (how long its requests have waited for an engine, so far), incomplete (a later answer is
missing from the log), seal (no more turns follow), close (the session was removed from the log), early (feedback that
waits for its session, see early_feedback.py).
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from array import array
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from pydantic_core import to_json

from rollmill.gateway.sessions.segments import Turn
from rollmill.gateway.sessions.sessions import SessionFacts
from rollmill.gateway.wire.answer import Answer
from rollmill.gateway.wire.dialect import Stored
from rollmill.trajectories.allowed_tokens import join_kept, split_kept
from rollmill.trajectories.facts import POLICIES, SPANS
from rollmill.trajectories.packing import StoredArray

_MAGIC = b"RMG1"
_FRAME = struct.Struct("<4sII")
_LENGTH = struct.Struct("<I")
_DTYPES = {code: np.dtype(code).str for code in "hif"}  # of Python's arrays: numpy's take longer to make
# what the header of a turn has of Turn and of Answer as it is
_OF_TURN = ("segment", "messages", "tools", "parent", "cause", "inherited")
_OF_ANSWER = ("message", "finish", "closed", "cached_tokens", "stop")


class LogEntry(NamedTuple):
    op: str
    session: str
    header: dict[str, Any]
    arrays: dict[str, np.ndarray]


def encode_entry(
    op: str, session: str, header: Mapping[str, Any], arrays: Mapping[str, np.ndarray | array[Any]] = {}
) -> bytes:
    listed = [
        [name, _DTYPES[each.typecode], [len(each)]] if isinstance(each, array) else [name, each.dtype.str, each.shape]
        for name, each in arrays.items()
    ]
    text = _to_json({"op": op, "session": session, **header, "arrays": listed})
    body = b"".join([_LENGTH.pack(len(text)), text, *(each.tobytes() for each in arrays.values())])
    return _FRAME.pack(_MAGIC, len(body), zlib.crc32(body)) + body


def _to_json(header: dict[str, Any]) -> bytes:
    """As `json.dumps` would write it for `json.loads`, in a quarter of the time: an answer waits for it."""
    try:
        return to_json(header)
    except ValueError:  # half a surrogate pair, or nested too deep for it
        return json.dumps(header, separators=(",", ":")).encode()


def scan_entries(file: int) -> Iterator[tuple[int, int, LogEntry]]:
    """Yields (begin, end, entry) of every entry of an open file, up to the first truncated or damaged one. One entry at
    a time is in memory."""
    at = 0
    while len(frame := os.pread(file, _FRAME.size, at)) == _FRAME.size:
        magic, length, _ = _FRAME.unpack(frame)
        data = frame + os.pread(file, length, at + _FRAME.size) if magic == _MAGIC else b""
        if _whole(data, 0) is None:
            return
        yield at, at + len(data), _decode(data[_FRAME.size :])
        at += len(data)


def locate_arrays(file: int, begin: int, end: int) -> Iterator[tuple[dict[str, Any], dict[str, StoredArray]]]:
    """The header of each entry between two bytes of an open log, and where its arrays are in the file."""
    while begin < end:
        _, size, _ = _FRAME.unpack(os.pread(file, _FRAME.size, begin))
        at = begin + _FRAME.size
        begin = at + size
        (length,) = _LENGTH.unpack(os.pread(file, _LENGTH.size, at))
        header = json.loads(os.pread(file, length, at + _LENGTH.size))
        at += _LENGTH.size + length
        arrays = {}
        for name, dtype, shape in header.pop("arrays"):
            arrays[name] = StoredArray(file, at, np.dtype(dtype), tuple(shape))
            at += arrays[name].nbytes
        yield header, arrays


def find_whole_entry(data: bytes, start: int) -> int | None:
    """The start of the next undamaged entry, at or after `start`."""
    at = data.find(_MAGIC, start)
    while at >= 0:
        if _whole(data, at) is not None:
            return at
        at = data.find(_MAGIC, at + 1)
    return None


def _whole(data: bytes, at: int) -> int | None:
    if len(data) - at < _FRAME.size:
        return None
    magic, length, checksum = _FRAME.unpack_from(data, at)
    begin = at + _FRAME.size
    if magic != _MAGIC or begin + length > len(data) or zlib.crc32(data[begin : begin + length]) != checksum:
        return None
    return begin + length


def _decode(body: bytes) -> LogEntry:
    (length,) = _LENGTH.unpack_from(body)
    at = _LENGTH.size + length
    header = json.loads(body[_LENGTH.size : at])
    arrays = {}
    for name, dtype, shape in header.pop("arrays"):
        count = int(np.prod(shape, dtype=np.int64))
        arrays[name] = np.frombuffer(body, dtype, count, at).reshape(shape)
        at += arrays[name].nbytes
    return LogEntry(header.pop("op"), header.pop("session"), header, arrays)


def encode_open(facts: SessionFacts) -> bytes:
    return encode_entry("open", facts.trajectory, {"facts": vars(facts)})


def encode_waited(session: str, seconds: float) -> bytes:
    return encode_entry("waited", session, {"seconds": seconds})


def encode_incomplete(facts: SessionFacts, reason: str) -> bytes:
    """Repeats the facts, because the entry that opened the session may be the missing one."""
    return encode_entry("incomplete", facts.trajectory, {"facts": vars(facts), "reason": reason})


def encode_response(stored: Stored, segment: str, number: int) -> bytes:
    """A stored response to answer `number` of a segment. The turns have its messages."""
    header = {"segment": segment, "number": number, "skipped": stored.skipped, "body": stored.body}
    return encode_entry("response", stored.trajectory, header)


def encode_turn(session: str, turn: Turn) -> bytes:
    answer = turn.answer
    header = {
        **{name: getattr(turn, name) for name in _OF_TURN},
        **{name: getattr(answer, name) for name in _OF_ANSWER},
        "policies": [vars(policy) for policy in answer.policies],
        "spans": [{**vars(span), "sampling": vars(span.sampling)} for span in answer.spans],
        "routes": [first for first, _ in answer.routes],
    }
    arrays: dict[str, np.ndarray | array[Any]] = {
        "prompt": array("i", turn.prompt),
        "tokens": array("i", answer.tokens),
        "logprobs": array("f", answer.logprobs),
        "policy": array("h", answer.policy),
    }
    for index, (_, rows) in enumerate(answer.routes):
        arrays[f"routes{index}"] = rows
    if answer.kept:
        arrays |= join_kept(answer.kept)
    return encode_entry("turn", session, header, arrays)


def decode_turn(entry: LogEntry) -> Turn:
    header, arrays = entry.header, entry.arrays
    answer = Answer(
        tokens=arrays["tokens"].tolist(),
        logprobs=arrays["logprobs"].tolist(),
        policy=arrays["policy"].tolist(),
        policies=POLICIES.validate_python(header["policies"]),
        spans=SPANS.validate_python(header["spans"]),
        routes=[(first, arrays[f"routes{index}"]) for index, first in enumerate(header["routes"])],
        kept=split_kept(arrays["kept_sizes"], arrays["kept"]) if "kept" in arrays else [],
        **{name: header[name] for name in _OF_ANSWER},
    )
    given = {name: header[name] for name in _OF_TURN}
    given["parent"] = given["parent"] and tuple(given["parent"])
    return Turn(**given, prompt=arrays["prompt"].tolist(), answer=answer)
