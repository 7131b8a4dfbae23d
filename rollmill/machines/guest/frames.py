"""Frames on a machine's socket: a small, strict JSON header and raw bytes, each with its length in front."""

from __future__ import annotations

import errno
import json
import math
import os
import struct
from typing import Any

LENGTHS = struct.Struct("!II")
MAX_HEADER = 1 << 20
MAX_BODY = 1 << 28


class WireError(Exception):
    """The other side sent something that is no frame."""


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is not a finite number")
    return number


# made once: json.dumps and json.loads would make new ones for each frame
_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
_decode = json.JSONDecoder(parse_float=_finite, parse_constant=_finite).raw_decode  # `decode` also skips white space


def pack(header: dict[str, Any], body: bytes = b"") -> bytes:
    """OSError for what no frame can carry: EINVAL, E2BIG or EFBIG."""
    try:
        text = _encode(header).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise OSError(errno.EINVAL, f"this cannot be asked of a machine: {error}") from None
    if len(text) > MAX_HEADER:
        raise OSError(errno.E2BIG, f"arguments of {len(text)} bytes; at most {MAX_HEADER}")
    if len(body) > MAX_BODY:
        raise OSError(errno.EFBIG, f"{len(body)} bytes of data; at most {MAX_BODY}")
    return LENGTHS.pack(len(text), len(body)) + text + body


def unpack_lengths(data: bytes) -> tuple[int, int]:
    header, body = LENGTHS.unpack(data)
    if header > MAX_HEADER or body > MAX_BODY:
        raise WireError(f"a frame of {header} + {body} bytes")
    return header, body


def unpack_header(data: bytes) -> dict[str, Any]:
    try:
        text = data.decode()
        header, end = _decode(text)
        if end != len(text):
            raise ValueError
    except (ValueError, RecursionError):
        raise WireError("a header that is not JSON") from None
    if not isinstance(header, dict):
        raise WireError("a header that is not an object")
    return header


def unpack(frame: bytes) -> tuple[dict[str, Any], bytes]:
    """Header and body of a whole frame."""
    if len(frame) < LENGTHS.size:
        raise WireError("a frame is cut short")
    head, body = unpack_lengths(frame[: LENGTHS.size])
    start = LENGTHS.size + head
    if len(frame) != start + body:
        raise WireError("a frame has not the length that it names")
    return unpack_header(frame[LENGTHS.size : start]), frame[start:]


def send(connection: int, frame: bytes) -> None:
    """Write all of a frame to an open file. Blocks."""
    sent = os.write(connection, frame)
    rest = memoryview(frame)
    while sent < len(frame):
        sent += os.write(connection, rest[sent : sent + (1 << 20)])


def receive(connection: int) -> tuple[dict[str, Any], bytes] | None:
    """The next frame from an open file, or None when the other side has gone. Blocks."""
    lengths = _receive_exactly(connection, LENGTHS.size)
    if lengths is None:
        return None
    header_length, body_length = unpack_lengths(lengths)
    data = _receive_exactly(connection, header_length + body_length)
    return None if data is None else (unpack_header(data[:header_length]), data[header_length:])


def _receive_exactly(connection: int, count: int) -> bytes | None:
    data = os.read(connection, min(count, 1 << 20))
    if len(data) == count:
        return data
    parts = [data]
    missing = count - len(data)
    while missing:
        part = os.read(connection, min(missing, 1 << 20))
        if not part:
            return None
        parts.append(part)
        missing -= len(part)
    return b"".join(parts)
