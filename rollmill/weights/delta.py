"""Codings: the bytes of one chunk, alone or as the difference from the same chunk of a base. Lossless, bit for bit.

    raw      byte planes of the elements themselves; needs no base
    dense    byte planes of every element's difference from the base
    sparse   only the elements that changed: gaps between their indices, a sign, and what is not ±1

Differences are counted in units in the last place: elements are mapped onto integers in the order of the numbers they
stand for (a bijection: −0, NaN payloads and subnormals each keep their own integer) and subtracted modulo 2^width, so
that one optimizer step is mostly ±1 and no value needs a special case to come back exactly.

Payloads are untrusted when they are read: `decode_chunk` returns exactly the chunk's number of bytes or raises
WeightsError. That they are the right bytes is checked by their digest, one level up.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Literal, get_args

import numpy as np
import zstandard

from rollmill.errors import WeightsError

Coding = Literal["raw", "dense", "sparse"]
CODINGS: tuple[Coding, ...] = get_args(Coding)

_UNSIGNED: dict[int, np.dtype[Any]] = {1: np.dtype("u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4")}
_SIGNED: dict[int, np.dtype[Any]] = {1: np.dtype("i1"), 2: np.dtype("<i2"), 4: np.dtype("<i4")}
_LEVEL = 1
_FEW, _MANY = 1 / 16, 1 / 2  # changed shares: below the first only `sparse`, above the second only the others can win
_TRIALS, _TRIAL_ELEMENTS = 4, 4096  # codings of many elements are compared on this many stretches of this length
_WIDE_16, _WIDE_32 = 254, 255  # gap bytes that say: the gap itself is in the next wider stream
_LARGEST_MAGNITUDE = 255

_thread = threading.local()  # zstd contexts are dear to make and must not be shared between threads


def encode_full(new: np.ndarray, width: int) -> bytes:
    """`raw` payload of a chunk given as flat uint8."""
    return _pack(_planes(new, width))


def encode_difference(base: np.ndarray, new: np.ndarray, width: int) -> tuple[Coding, bytes, int]:
    """Smallest payload that turns `base` into `new`, its coding, and how many elements changed (0: nothing to send)."""
    old_bits, new_bits = base.view(_UNSIGNED[width]), new.view(_UNSIGNED[width])
    changed = int(np.count_nonzero(old_bits != new_bits))
    if changed == 0:
        return "sparse", b"", 0
    share = changed / new_bits.size
    if share < _FEW:
        coding: Coding = "sparse"
    else:
        coding = _smallest(("sparse", "dense") if share < _MANY else ("dense", "raw"), old_bits, new_bits, width)
    return coding, encode_as(coding, old_bits, new_bits, width), changed


def decode_chunk(
    coding: Coding, payload: bytes | memoryview, base: np.ndarray | None, size: int, width: int
) -> np.ndarray:
    """The chunk (flat uint8, `size` bytes, freshly allocated) that `payload` stands for."""
    if coding != "raw" and base is None:
        raise WeightsError(f"a {coding} payload needs a base")
    try:
        if coding == "raw":
            return _decode_planes(payload, size, width)
        assert base is not None
        if coding == "dense":
            return _decode_dense(payload, base, width)
        return _decode_sparse(payload, base, width)
    except MemoryError:
        raise WeightsError(f"not enough memory to decode a chunk of {size} bytes") from None


def _smallest(candidates: Sequence[Coding], old_bits: np.ndarray, new_bits: np.ndarray, width: int) -> Coding:
    """The coding that is smallest for these elements, judged by a few stretches of them when they are many."""
    if new_bits.size > _TRIALS * _TRIAL_ELEMENTS:
        step = (new_bits.size - _TRIAL_ELEMENTS) // (_TRIALS - 1)
        stretches = [slice(i * step, i * step + _TRIAL_ELEMENTS) for i in range(_TRIALS)]
        old_bits, new_bits = (np.concatenate([bits[s] for s in stretches]) for bits in (old_bits, new_bits))
    return min(candidates, key=lambda coding: len(encode_as(coding, old_bits, new_bits, width)))


def encode_as(coding: Coding, old: np.ndarray, new: np.ndarray, width: int) -> bytes:
    """Payload in a given coding; elements as unsigned integers of their width."""
    if coding == "raw":
        return encode_full(new.view(np.uint8), width)
    if coding == "dense":
        difference = _ordered(new, width) - _ordered(old, width)
        return _pack(_planes(_zigzag(difference, width).view(np.uint8), width))
    changed = np.flatnonzero(old != new)
    return _encode_sparse(old[changed], new[changed], changed, width)


def _encode_sparse(old: np.ndarray, new: np.ndarray, changed: np.ndarray, width: int) -> bytes:
    difference = _ordered(new, width) - _ordered(old, width)
    negative = difference.view(_SIGNED[width]) < 0
    magnitude = np.where(negative, np.negative(difference), difference)
    exceptions = np.flatnonzero(magnitude != 1)
    unusual = magnitude[exceptions]
    escaped = unusual > _LARGEST_MAGNITUDE
    return _pack(
        [
            *_gap_streams(changed),
            np.packbits(negative),
            *_gap_streams(exceptions),
            np.where(escaped, 0, unusual).astype(np.uint8),
            new[exceptions[escaped]].view(np.uint8),
        ]
    )


def _decode_sparse(payload: bytes | memoryview, base: np.ndarray, width: int) -> np.ndarray:
    bits = base.view(_UNSIGNED[width])
    streams = _Streams(payload)
    changed = _read_gaps(streams, bits.size)
    negative = np.unpackbits(streams.exactly((changed.size + 7) // 8), count=changed.size).view(bool)
    exceptions = _read_gaps(streams, changed.size)
    unusual = streams.exactly(exceptions.size)
    escaped = exceptions[unusual == 0]
    literals = streams.exactly(escaped.size * width).view(_UNSIGNED[width])
    streams.end()

    magnitude = np.ones(changed.size, dtype=_UNSIGNED[width])
    magnitude[exceptions] = unusual
    difference = np.where(negative, np.negative(magnitude), magnitude)
    values = _unordered(_ordered(bits[changed], width) + difference, width)
    values[escaped] = literals
    result = bits.copy()
    result[changed] = values
    return result.view(np.uint8)


def _decode_dense(payload: bytes | memoryview, base: np.ndarray, width: int) -> np.ndarray:
    zigzagged = _decode_planes(payload, base.size, width).view(_UNSIGNED[width])
    one = zigzagged.dtype.type(1)
    difference = (zigzagged >> one) ^ np.negative(zigzagged & one)
    return _unordered(_ordered(base.view(_UNSIGNED[width]), width) + difference, width).view(np.uint8)


def _decode_planes(payload: bytes | memoryview, size: int, width: int) -> np.ndarray:
    streams = _Streams(payload)
    result = np.empty(size, dtype=np.uint8)
    for plane in range(width):
        result[plane::width] = streams.exactly(size // width)
    streams.end()
    return result


def _ordered(bits: np.ndarray, width: int) -> np.ndarray:
    """Sign-magnitude bit patterns as integers in numeric order: …, −1 ULP, −0, +0, +1 ULP, …"""
    top = bits.dtype.type(1 << (8 * width - 1))
    negative = (bits.view(_SIGNED[width]) >> (8 * width - 1)).view(bits.dtype)  # all ones or all zeros
    return bits ^ (negative | top)


def _unordered(integers: np.ndarray, width: int) -> np.ndarray:
    top = integers.dtype.type(1 << (8 * width - 1))
    positive = (integers.view(_SIGNED[width]) >> (8 * width - 1)).view(integers.dtype)
    return integers ^ (~positive | top)


def _zigzag(difference: np.ndarray, width: int) -> np.ndarray:
    sign = (difference.view(_SIGNED[width]) >> (8 * width - 1)).view(difference.dtype)
    return (difference << difference.dtype.type(1)) ^ sign


def _planes(data: np.ndarray, width: int) -> list[np.ndarray]:
    return [np.ascontiguousarray(data[plane::width]) for plane in range(width)]


def _gap_streams(indices: np.ndarray) -> list[np.ndarray]:
    """Ascending indices as the numbers skipped between them: one byte each, the long ones in two wider streams."""
    positions = indices.astype(np.int32)  # half the memory traffic; a chunk has far fewer than 2^31 elements
    gaps = np.empty_like(positions)
    gaps[:1] = positions[:1]
    np.subtract(positions[1:], positions[:-1] + 1, out=gaps[1:])
    narrow = np.minimum(gaps, _WIDE_16).astype(np.uint8)
    wide = gaps >= _WIDE_16
    if not wide.any():
        return [narrow, narrow[:0], narrow[:0]]
    very_wide = gaps > 0xFFFF
    narrow[very_wide] = _WIDE_32
    return [
        narrow,
        gaps[wide & ~very_wide].astype("<u2").view(np.uint8),
        gaps[very_wide].astype("<u4").view(np.uint8),
    ]


def _read_gaps(streams: _Streams, limit: int) -> np.ndarray:
    """Indices below `limit`, ascending."""
    narrow = streams.at_most(limit)
    gaps = narrow.astype(np.int64)
    for marker, dtype in ((_WIDE_16, np.dtype("<u2")), (_WIDE_32, np.dtype("<u4"))):
        where = np.flatnonzero(narrow == marker)
        gaps[where] = streams.exactly(where.size * dtype.itemsize).view(dtype)
    indices = np.cumsum(gaps + 1) - 1
    if indices.size and indices[-1] >= limit:
        raise WeightsError(f"a sparse payload changes element {indices[-1]} of {limit}")
    return indices


def _pack(streams: Sequence[np.ndarray]) -> bytes:
    """Streams one after the other, each behind its length and its stored length; equal lengths mean not compressed."""
    if not hasattr(_thread, "compressor"):
        _thread.compressor = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=False)
    parts = []
    for stream in streams:
        data = stream.data
        stored = _thread.compressor.compress(data) if len(data) > 32 else data
        if len(stored) >= len(data):
            stored = data
        parts += [_varint(len(data)), _varint(len(stored)), stored]
    return b"".join(parts)


class _Streams:
    """Reads back what `_pack` wrote, never allocating more than the caller said it expects."""

    def __init__(self, payload: bytes | memoryview) -> None:
        self._payload = memoryview(payload)
        self._position = 0

    def exactly(self, size: int) -> np.ndarray:
        data = self.at_most(size)
        if data.size != size:
            raise WeightsError(f"a payload stream has {data.size} bytes where {size} belong")
        return data

    def at_most(self, size: int) -> np.ndarray:
        length, stored_length = self._read_varint(), self._read_varint()
        stored = self._payload[self._position : self._position + stored_length]
        self._position += stored_length
        if length > size or stored_length > length or len(stored) != stored_length:
            raise WeightsError("a payload is truncated or its lengths contradict each other")
        if stored_length == length:
            return np.frombuffer(stored, dtype=np.uint8)
        return np.frombuffer(_decompress(stored, length), dtype=np.uint8)

    def end(self) -> None:
        if self._position != len(self._payload):
            raise WeightsError(f"a payload has {len(self._payload) - self._position} bytes too many")

    def _read_varint(self) -> int:
        value = shift = 0
        while shift < 35:
            if self._position >= len(self._payload):
                raise WeightsError("a payload is truncated")
            byte = self._payload[self._position]
            self._position += 1
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7
        raise WeightsError("a payload length is not a valid number")


def _decompress(stored: memoryview, length: int) -> bytes:
    if not hasattr(_thread, "decompressor"):
        _thread.decompressor = zstandard.ZstdDecompressor()
    try:
        # The frame's own idea of its size is what zstd allocates, so it is compared before it is believed.
        if zstandard.frame_content_size(stored) != length:
            raise WeightsError("a payload stream contradicts its length")
        return _thread.decompressor.decompress(stored, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise WeightsError(f"a payload stream does not decompress: {error}") from None


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)
