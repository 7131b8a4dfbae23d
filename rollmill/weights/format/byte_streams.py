"""Streams: the parts of a payload, one after the other, each compressed if that helps.

Each stream is its length, its stored length (both LEB128) and the stored bytes. Equal lengths mean that it is not
compressed; otherwise it is one zstd frame that names its content size. Input is untrusted: nothing larger than the
caller expects is allocated, and anything that does not fit raises WeightsError.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

import numpy as np
import zstandard

from rollmill.errors import WeightsError

_SHORT = 32  # bytes; shorter streams do not compress
_LONG = 1 << 18  # bytes; longer streams are first tried on samples, because signs and mantissas do not compress
_STRETCH, _STRETCHES = 4096, 16


class _Contexts(threading.local):
    """zstd contexts are expensive to make and must not be shared between threads."""

    def __init__(self) -> None:
        # Streams are noise with a skewed distribution: an apparent match costs more than its literals. A tiny table of
        # long matches finds runs and little else, which is faster and smaller than the settings of a level.
        parameters = zstandard.ZstdCompressionParameters.from_level(1, hash_log=6, min_match=7)
        self.compressor = zstandard.ZstdCompressor(compression_params=parameters)
        self.decompressor = zstandard.ZstdDecompressor()


_contexts = _Contexts()


def pack_streams(streams: Iterable[np.ndarray]) -> bytes:
    """Joins streams given as flat uint8 arrays. Each is used before the next one is requested."""
    parts: list[bytes] = []
    for stream in streams:
        stored = _compress(stream)
        if stored is None or len(stored) >= stream.size:
            stored = stream.tobytes()
        parts += [_varint(stream.size), _varint(len(stored)), stored]
    return b"".join(parts)


def _compress(stream: np.ndarray) -> bytes | None:
    """None if compression does not help."""
    if stream.size <= _SHORT:
        return None
    if stream.size >= _LONG:
        starts = np.linspace(0, stream.size - _STRETCH, _STRETCHES).astype(np.int64)
        sample = np.concatenate([stream[start : start + _STRETCH] for start in starts])
        if len(_contexts.compressor.compress(sample.data)) >= sample.size:
            return None
    return _contexts.compressor.compress(stream.data)


class Streams:
    """Reads what `pack_streams` wrote. Never allocates more than the caller expects."""

    def __init__(self, payload: bytes | memoryview) -> None:
        self._payload = memoryview(payload)
        self._position = 0

    def exactly(self, size: int) -> np.ndarray:
        data = self.at_most(size)
        if data.size != size:
            raise WeightsError(f"a payload stream has {data.size} bytes instead of {size}")
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
    try:
        # zstd allocates the size that the frame claims, so it is compared first.
        if zstandard.frame_content_size(stored) != length:
            raise WeightsError("a payload stream contradicts its length")
        return _contexts.decompressor.decompress(stored, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise WeightsError(f"a payload stream does not decompress: {error}") from None


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)
