"""Sizes and speeds of codings on recorded steps: ours and the alternatives, on the same arrays in one run.

Recordings are consecutive bf16 versions of small models in RL, written by `benchmarks.weights_recordings`:

    FOLDER/recording.json                  how many steps of each model at each learning rate
    FOLDER/MODEL/start.safetensors         the version all learning rates start from
    FOLDER/MODEL/LR.NUMBER.safetensors     versions 1, 2, … at one learning rate

Elements are uint16 arrays of bf16 bits. Alternatives are XOR + zstd (as in slime and SkyRL), gaps and absolute values
(as in PULSE) and whole weights. Each of them has a decoder, and tests check the round trip.

Sizes: the tensors of a model are laid end to end and cut into chunks of at most 2^24 elements, as large tensors are.

Speeds at the reference learning rate: the model is repeated end to end and cut into whole chunks of 2^24 elements, so
that small and large recordings are timed on chunks of the same size. Each chunk costs a fixed time beside its bytes, so
the speed depends on its size (docs/log/2026-11-16-weights.md). Each chunk lies in memory of its own and is coded alone,
so repeats compress no better.

Contestants take turns, so that other load on the machine slows all of them. Times are processor time of this process,
system calls included.
"""

from __future__ import annotations

import collections
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numba
import numpy as np
import zstandard
from safetensors.numpy import load_file, save_file

from rollmill.weights.format.codings import (
    SPARSE_CODINGS,
    Coding,
    EncodedPayload,
    Goal,
    decode_changes,
    decode_chunk,
    encode_as,
    encode_difference,
    scatter,
)
from rollmill.weights.format.tensors import CHUNK_ELEMENTS

FOLDER = Path(__file__).parents[1] / ".recordings"
RATES = ("1e-07", "3e-07", "1e-06", "3e-06", "1e-05", "3e-05", "1e-04")
REFERENCE = "1e-06"  # the learning rate of the bars

Version = dict[str, np.ndarray]  # by name: uint16, in the tensor's shape
WIDTH = 2
LEVEL = 1  # of zstd
_LONG_GAP = 0xFFFF  # the gap follows in a stream of 32-bit numbers
CODINGS: tuple[Coding, ...] = ("sparse", "classed", "overwrite", "dense")
XOR = "XOR + zstd-1"
PULSE = "gaps + absolute + zstd-1"
Pair = tuple[np.ndarray, np.ndarray]  # base and new, uint16


@dataclass(frozen=True)
class Recording:
    folder: Path

    @cached_property
    def steps(self) -> dict[str, dict[str, int]]:
        """By model and learning rate."""
        return json.loads((self.folder / "recording.json").read_text())

    def versions(self, model: str, rate: str) -> list[Version]:
        """All versions of one learning rate. The first is the common start."""
        names = ["start", *(f"{rate}.{number + 1}" for number in range(self.steps[model][rate]))]
        return [load_file(self.folder / model / f"{name}.safetensors") for name in names]

    def step(self, model: str, rate: str) -> tuple[Version, Version]:
        """The last recorded step: before and after."""
        before, after = self.versions(model, rate)[-2:]
        return before, after


def write_version(path: Path, version: Version) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(version, path)


def flat(version: Version, names: list[str] | None = None) -> np.ndarray:
    """All elements in one uint16 array, tensors by name."""
    return np.concatenate([version[name].reshape(-1) for name in names or sorted(version)])


def ordered(bits: np.ndarray) -> np.ndarray:
    """bf16 bit patterns as int32 in the order of the numbers: neighbours differ by one unit in the last place."""
    magnitude = (bits & 0x7FFF).astype(np.int32)
    return np.where(bits >> 15, -magnitude - 1, magnitude)


def exponents(bits: np.ndarray) -> np.ndarray:
    return ((bits >> 7) & 0xFF).astype(np.uint8)


def entropy(counts: np.ndarray) -> float:
    """Bits per symbol."""
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log2(shares)).sum())


# --- the race


class Spread(NamedTuple):
    """GB/s of model bytes."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, size: int, seconds: Sequence[float]) -> Spread:
        rates = [size / 1e9 / second for second in seconds]
        return cls(float(np.median(rates)), min(rates), max(rates))

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.least:.2f}–{self.most:.2f})"


def chunks(before: Version, after: Version) -> list[Pair]:
    old, new = flat(before), flat(after)
    count = -(-old.size // CHUNK_ELEMENTS)
    return list(zip(np.array_split(old, count), np.array_split(new, count), strict=True))


def timed_chunks(before: Version, after: Version, size: int) -> list[Pair]:
    """About `size` bytes of the model, repeated end to end, in whole chunks, each in its own memory."""
    old, new = flat(before), flat(after)
    count = max(1, round(size / (CHUNK_ELEMENTS * new.itemsize)))
    places = [np.arange(CHUNK_ELEMENTS) + first for first in range(0, count * CHUNK_ELEMENTS, CHUNK_ELEMENTS)]
    return [(old.take(place, mode="wrap"), new.take(place, mode="wrap")) for place in places]


# --- sizes


def sizes(pairs: list[Pair]) -> dict[str, float]:
    """Bytes of every coding, baseline and bound. `fast` and `small` are the choices of encode_difference."""
    result: dict[str, float] = {}
    for goal in ("fast", "small"):
        result[goal] = sum(len(_encode(old, new, goal).payload) for old, new in pairs)
    for coding in CODINGS:
        result[coding] = sum(len(encode_as(coding, old, new, WIDTH)) for old, new in pairs)
    for name, encode in ((XOR, encode_xor), (PULSE, encode_gaps_absolute)):
        result[name] = sum(len(encode(old, new)) for old, new in pairs)
    result["full zstd-1"] = sum(len(encode_full(new)) for _, new in pairs)
    result["full"] = sum(new.nbytes for _, new in pairs)
    old, new = (np.concatenate(arrays) for arrays in zip(*pairs, strict=True))
    result["independent bound"] = independent_bound(old, new)
    return result


def _encode(old: np.ndarray, new: np.ndarray, goal: Goal) -> EncodedPayload:
    return encode_difference(old.view(np.uint8), new.view(np.uint8), WIDTH, goal)


# --- speeds


class GapsAbsolute:
    def encode(self, old: np.ndarray, new: np.ndarray) -> bytes:
        return encode_gaps_absolute(old, new)

    def decode(self, payload: bytes, weights: np.ndarray) -> None:
        decode_gaps_absolute(payload, weights)


class Contestant(Protocol):
    def encode(self, old: np.ndarray, new: np.ndarray) -> Any: ...

    def decode(self, payload: Any, weights: np.ndarray) -> None:
        """In place: from the base to the new version."""


class Ours:
    def __init__(self, goal: Goal) -> None:
        self._goal = goal

    def encode(self, old: np.ndarray, new: np.ndarray) -> EncodedPayload:
        return _encode(old, new, self._goal)

    def decode(self, payload: EncodedPayload, weights: np.ndarray) -> None:
        chunk = weights.view(np.uint8)
        if payload.coding in SPARSE_CODINGS:
            scatter(chunk, decode_changes(payload.coding, payload.payload, chunk, WIDTH), WIDTH)
        else:
            np.copyto(chunk, decode_chunk(payload.coding, payload.payload, chunk, chunk.size, WIDTH))


def contestants(largest: int) -> dict[str, Contestant]:
    return {
        "fast": Ours("fast"),
        "small": Ours("small"),
        "overwrite": Ours("overwrite"),
        XOR: XorZstd(largest),
        PULSE: GapsAbsolute(),
    }


Taken = dict[str, list[float]]  # by contestant: the seconds of each turn


@dataclass(frozen=True)
class Race:
    """Seconds of every turn. Ratios are computed per turn, because other load slows both sides of it."""

    size: int  # bytes per turn
    encoding: Taken
    decoding: Taken
    scanning: list[float]

    def encode(self, name: str) -> Spread:
        return Spread.of(self.size, self.encoding[name])

    def decode(self, name: str) -> Spread:
        return Spread.of(self.size, self.decoding[name])


def faster(first: Sequence[float], second: Sequence[float]) -> float:
    """How many times faster the first was than the second: the median over turns."""
    return float(np.median(np.array(second) / np.array(first)))


def race(pairs: list[Pair], repeats: int) -> Race:
    """Runs every contestant, and the scan, on one core. Each result is checked."""
    work = [old.copy() for old, _ in pairs]
    encoding, decoding = (collections.defaultdict[str, list[float]](list) for _ in range(2))
    racing, scanning = contestants(max(new.size for _, new in pairs)), list[float]()
    for turn in range(repeats + 1):
        warm = turn > 0  # the first turn compiles and warms up
        for name, contestant in racing.items():
            began = time.process_time()
            payloads = [contestant.encode(old, new) for old, new in pairs]
            encoded = time.process_time()
            for payload, weights in zip(payloads, work, strict=True):
                contestant.decode(payload, weights)
            decoded = time.process_time()
            for weights, (old, new) in zip(work, pairs, strict=True):
                assert warm or np.array_equal(weights, new), f"{name} does not decode to its input"
                np.copyto(weights, old)
            if warm:
                encoding[name].append(encoded - began)
                decoding[name].append(decoded - encoded)
        began = time.process_time()
        for old, new in pairs:
            scan(_words(old), _words(new))
        if warm:
            scanning.append(time.process_time() - began)
    return Race(sum(new.nbytes for _, new in pairs), encoding, decoding, scanning)


@numba.njit(nogil=True)
def scan(old, new):  # type: ignore[no-untyped-def]
    """Reads both once and compares: no encoder can be faster."""
    different = np.uint64(0)
    for index in range(old.size):
        different |= old[index] ^ new[index]
    return different


def _words(array: np.ndarray) -> np.ndarray:
    return array[: array.size // 4 * 4].view(np.uint64)


# --- the alternatives


class XorZstd:
    """XOR with the base, then zstd-1, into buffers that are allocated once: new ones cost a page fault per 4 KiB."""

    def __init__(self, largest: int) -> None:
        self._xor = np.zeros(largest, np.uint16)
        size = 2 * largest
        self._packed = np.zeros(size + (size >> 8) + 4096, np.uint8)  # the largest frame
        self._compressor, self._decompressor = zstandard.ZstdCompressor(LEVEL), zstandard.ZstdDecompressor()

    def encode(self, old: np.ndarray, new: np.ndarray) -> np.ndarray:
        """Returns a payload of its own, as it would be kept to be sent."""
        xor = self._xor[: new.size]
        np.bitwise_xor(old, new, out=xor)
        reader = self._compressor.stream_reader(xor.view(np.uint8).data, size=xor.nbytes)
        return self._packed[: reader.readinto(self._packed.data)].copy()

    def decode(self, payload: np.ndarray, weights: np.ndarray) -> None:
        """In place: `weights` is the base before and the new version afterwards."""
        xor = self._xor[: weights.size]
        size = self._decompressor.stream_reader(payload.data).readinto(xor.view(np.uint8).data)
        assert size == xor.nbytes, "zstd failed"
        np.bitwise_xor(weights, xor, out=weights)


# --- plain versions: encoders allocate their results, decoders work in place


def encode_xor(old: np.ndarray, new: np.ndarray) -> bytes:
    return _compress(old ^ new)


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


def _move_bits(old: np.ndarray, new: np.ndarray) -> float:
    moved = ordered(new) - ordered(old)
    signs, magnitudes = np.bincount(moved < 0, minlength=2), np.bincount(np.abs(moved))
    return moved.size * (entropy(signs) + entropy(magnitudes)) if moved.size else 0.0


def _binary_entropy(share: float) -> float:
    return entropy(np.array([share, 1 - share]))
