"""Fast alternatives to our deltas: XOR + zstd (as in slime and SkyRL), gaps and absolute values (as in PULSE), whole
weights; and lower bounds of the size of a delta.

Elements are uint16 arrays of bf16 bits. Every encoder has a decoder, and tests check the round trip.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import functools

import numpy as np
import zstandard

from benchmarks.recordings import entropy, exponents, ordered

LEVEL = 1
_LONG_GAP = 0xFFFF  # the gap follows in a stream of 32-bit numbers


class XorZstd:
    """XOR with the base, then zstd-1, into buffers that are allocated once: new ones cost a page fault per 4 KiB.

    Uses the system's libzstd if there is one, which is slightly faster than the Python package.
    """

    def __init__(self, largest: int) -> None:
        self._xor = np.zeros(largest, np.uint16)
        self._packed = np.zeros(zstd_bound(2 * largest), np.uint8)
        self._library = libzstd()
        self._compressor, self._decompressor = zstandard.ZstdCompressor(LEVEL), zstandard.ZstdDecompressor()
        if self._library:
            self._context, self._reader = self._library.ZSTD_createCCtx(), self._library.ZSTD_createDCtx()

    @property
    def name(self) -> str:
        return "libzstd" if self._library else "python-zstandard"

    def encode(self, old: np.ndarray, new: np.ndarray) -> np.ndarray:
        """Returns the payload, a view that the next call overwrites."""
        xor = self._xor[: new.size]
        np.bitwise_xor(old, new, out=xor)
        if self._library is None:
            reader = self._compressor.stream_reader(xor.view(np.uint8).data, size=xor.nbytes)
            return self._packed[: reader.readinto(self._packed.data)]
        size = self._library.ZSTD_compressCCtx(
            self._context, self._packed.ctypes.data, self._packed.size, xor.ctypes.data, xor.nbytes, LEVEL
        )
        assert size <= self._packed.size, "zstd failed"
        return self._packed[:size]

    def decode(self, payload: np.ndarray, weights: np.ndarray) -> None:
        """In place: `weights` is the base before and the new version afterwards."""
        xor = self._xor[: weights.size]
        if self._library is None:
            size = self._decompressor.stream_reader(payload.data).readinto(xor.view(np.uint8).data)
        else:
            size = self._library.ZSTD_decompressDCtx(
                self._reader, xor.ctypes.data, xor.nbytes, payload.ctypes.data, payload.size
            )
        assert size == xor.nbytes, "zstd failed"
        np.bitwise_xor(weights, xor, out=weights)


@functools.cache
def libzstd() -> ctypes.CDLL | None:
    path = ctypes.util.find_library("zstd")
    if path is None:
        return None
    library, pointer, size = ctypes.CDLL(path), ctypes.c_void_p, ctypes.c_size_t
    library.ZSTD_createCCtx.restype = library.ZSTD_createDCtx.restype = pointer
    library.ZSTD_compressCCtx.restype = library.ZSTD_decompressDCtx.restype = size
    library.ZSTD_compressCCtx.argtypes = [pointer, pointer, size, pointer, size, ctypes.c_int]
    library.ZSTD_decompressDCtx.argtypes = [pointer, pointer, size, pointer, size]
    return library


def zstd_bound(size: int) -> int:
    """The largest zstd frame for `size` bytes."""
    return size + (size >> 8) + 4096


# --- plain versions: encoders allocate their results, decoders work in place


def encode_xor(old: np.ndarray, new: np.ndarray) -> bytes:
    return _compress(old ^ new)


def decode_xor(payload: bytes, weights: np.ndarray) -> None:
    np.bitwise_xor(weights, np.frombuffer(_decompress(payload), np.uint16), out=weights)


def encode_xor_split(old: np.ndarray, new: np.ndarray) -> bytes:
    """Low and high bytes are separate streams: nearly all high ones are zero."""
    xor = old ^ new
    return _compress(np.concatenate([xor.astype(np.uint8), (xor >> np.uint16(8)).astype(np.uint8)]))


def decode_xor_split(payload: bytes, weights: np.ndarray) -> None:
    low, high = np.frombuffer(_decompress(payload), np.uint8).reshape(2, -1)
    xor = high.astype(np.uint16)
    np.left_shift(xor, np.uint16(8), out=xor)
    np.bitwise_or(xor, low, out=xor)
    np.bitwise_xor(weights, xor, out=weights)


def encode_gaps_absolute(old: np.ndarray, new: np.ndarray) -> bytes:
    """PULSE's idea: 16-bit gaps between the changed elements, and their new values, each stream in its own frame."""
    changed = np.flatnonzero(old != new)
    gaps = np.diff(changed, prepend=-1) - 1
    streams = [
        np.minimum(gaps, _LONG_GAP).astype(np.uint16),
        gaps[gaps >= _LONG_GAP].astype(np.uint32),
        new[changed],
    ]
    frames = [_compress(stream) for stream in streams]
    return b"".join([len(frame).to_bytes(8, "little") + frame for frame in frames])


def decode_gaps_absolute(payload: bytes, weights: np.ndarray) -> None:
    frames, position = [], 0
    for _ in range(3):
        length = int.from_bytes(payload[position : position + 8], "little")
        frames.append(_decompress(payload[position + 8 : position + 8 + length]))
        position += 8 + length
    gaps = np.frombuffer(frames[0], np.uint16).astype(np.int64)
    gaps[gaps == _LONG_GAP] = np.frombuffer(frames[1], np.uint32)
    weights[np.cumsum(gaps + 1) - 1] = np.frombuffer(frames[2], np.uint16)


def encode_full(new: np.ndarray) -> bytes:
    return _compress(new)


def _compress(data: np.ndarray) -> bytes:
    return zstandard.ZstdCompressor(LEVEL).compress(data.reshape(-1).view(np.uint8).data)


def _decompress(frame: bytes) -> bytes:
    return zstandard.ZstdDecompressor().decompress(frame)


# --- bounds


def independent_bound(old: np.ndarray, new: np.ndarray) -> float:
    """The fewest bytes of any coding for which every element changes with the same probability, independent of its
    neighbours and its value: positions, signs and magnitudes of the changes."""
    changed = np.flatnonzero(old != new)
    return (old.size * _binary_entropy(changed.size / old.size) + _move_bits(old[changed], new[changed])) / 8


def exponent_bound(old: np.ndarray, new: np.ndarray) -> float:
    """The same, if probability and magnitudes may depend on the exponent of the old element."""
    exponent = exponents(old)
    total = np.bincount(exponent, minlength=256)
    changed = np.flatnonzero(old != new)
    exponent = exponent[changed]
    bits = 0.0
    for value in np.unique(exponent):
        here = changed[exponent == value]
        bits += total[value] * _binary_entropy(here.size / total[value]) + _move_bits(old[here], new[here])
    return bits / 8


def _move_bits(old: np.ndarray, new: np.ndarray) -> float:
    moved = ordered(new) - ordered(old)
    signs, magnitudes = np.bincount(moved < 0, minlength=2), np.bincount(np.abs(moved))
    return moved.size * (entropy(signs) + entropy(magnitudes)) if moved.size else 0.0


def _binary_entropy(share: float) -> float:
    return entropy(np.array([share, 1 - share]))
