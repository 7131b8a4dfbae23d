"""The tokens that could be drawn, as bytes: one set per sampled token.

Top-k, top-p, min-p and grammars exclude tokens before a draw. The log-prob of the drawn token is normalised over the
tokens that are kept, so the trainer needs to know them. A set is one of

    1, ids       up to 48 ids, 4 bytes each, little-endian, ascending
    2, bits      one bit per token of the vocabulary, lowest bit first, deflated

An empty byte string means that no set was recorded. A set takes at most one bit per token of the vocabulary and a few
bytes more. Equal sets, which grammars often give, are compressed again in the payload.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np

from rollmill.errors import TrajectoryError

LARGEST_SET = 1 << 17  # bytes; the bits of a vocabulary of a million
_IDS, _BITS = b"\1", b"\2"
_FEW = 48  # ids; a larger set is usually smaller as deflated bits


def encode_kept(bits: np.ndarray) -> bytes:
    """`bits`: uint8 [vocab / 8, rounded up], lowest bit first."""
    ids = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
    if len(ids) <= _FEW:
        return _IDS + ids.astype("<u4").tobytes()
    return _BITS + zlib.compress(bits.tobytes(), 1)


def decode_kept(data: bytes, vocab_size: int) -> np.ndarray:
    """The input of `encode_kept`. Raises TrajectoryError for bytes that it would not have written."""
    size = -(-vocab_size // 8)
    kind, body = data[:1], data[1:]
    if kind == _IDS and len(body) % 4 == 0:
        ids = np.frombuffer(body, "<u4").astype(np.int64)
        if len(ids) and ids.max() < vocab_size:
            bits = np.zeros(size, np.uint8)
            np.bitwise_or.at(bits, ids >> 3, (1 << (ids & 7)).astype(np.uint8))
            return bits
    elif kind == _BITS and len(data) <= LARGEST_SET:
        unpacked = _inflate(body, size)
        if len(unpacked) == size:
            bits = np.frombuffer(unpacked, np.uint8)
            if bits.any() and not (vocab_size % 8 and bits[-1] >> vocab_size % 8):
                return bits
    raise TrajectoryError(f"a set of kept tokens is damaged, or not of a vocabulary of {vocab_size}")


def join_kept(sets: Sequence[bytes]) -> dict[str, np.ndarray]:
    """Sets as the arrays of a `Segment`."""
    sizes = np.array([len(kept) for kept in sets], np.int32)
    return {"kept_sizes": sizes, "kept": np.frombuffer(b"".join(sets), np.uint8)}


def split_kept(sizes: np.ndarray, kept: np.ndarray) -> list[bytes]:
    data, ends = kept.tobytes(), np.cumsum(sizes, dtype=np.int64)
    return [data[end - size : end] for end, size in zip(ends.tolist(), sizes.tolist(), strict=True)]


def holds(bits: np.ndarray, token: int) -> bool:
    return bool(bits[token >> 3] >> (token & 7) & 1)


def _inflate(data: bytes, size: int) -> bytes:
    """b"" if the data is damaged or holds more than `size` bytes."""
    reader = zlib.decompressobj()
    try:
        unpacked = reader.decompress(data, size + 1)
    except zlib.error:
        return b""
    return unpacked if reader.eof and not reader.unused_data else b""
