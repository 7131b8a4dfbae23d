"""Sizes and speeds of codings on recorded steps: ours and the alternatives, on the same arrays in one run.

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
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from benchmarks import weights_baselines as baselines
from benchmarks.recordings import Version, flat
from rollmill.weights.format.codings import (
    SPARSE_CODINGS,
    Coding,
    Encoded,
    Goal,
    decode_changes,
    decode_chunk,
    encode_as,
    encode_difference,
    scatter,
)
from rollmill.weights.format.tensors import CHUNK_ELEMENTS

WIDTH = 2
CODINGS: tuple[Coding, ...] = ("sparse", "classed", "overwrite", "dense")
XOR = "XOR + zstd-1"
XOR_PLAIN = "XOR + zstd-1, allocating"
PULSE = "gaps + absolute + zstd-1"
Pair = tuple[np.ndarray, np.ndarray]  # base and new, uint16


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
    for name, encode in (
        (XOR, baselines.encode_xor),
        ("XOR + split + zstd-1", baselines.encode_xor_split),
        (PULSE, baselines.encode_gaps_absolute),
    ):
        result[name] = sum(len(encode(old, new)) for old, new in pairs)
    result["full zstd-1"] = sum(len(baselines.encode_full(new)) for _, new in pairs)
    result["full"] = sum(new.nbytes for _, new in pairs)
    old, new = (np.concatenate(arrays) for arrays in zip(*pairs, strict=True))
    result["independent bound"] = baselines.independent_bound(old, new)
    result["exponent bound"] = baselines.exponent_bound(old, new)
    return result


def picks(pairs: list[Pair]) -> dict[str, str]:
    return {goal: "/".join(sorted({_encode(*pair, goal).coding for pair in pairs})) for goal in ("fast", "small")}


def _encode(old: np.ndarray, new: np.ndarray, goal: Goal) -> Encoded:
    return encode_difference(old.view(np.uint8), new.view(np.uint8), WIDTH, goal)


# --- speeds


class Contestant(Protocol):
    def encode(self, old: np.ndarray, new: np.ndarray) -> Any: ...

    def decode(self, payload: Any, weights: np.ndarray) -> None:
        """In place: from the base to the new version."""


class Ours:
    def __init__(self, goal: Goal) -> None:
        self._goal = goal

    def encode(self, old: np.ndarray, new: np.ndarray) -> Encoded:
        return _encode(old, new, self._goal)

    def decode(self, payload: Encoded, weights: np.ndarray) -> None:
        chunk = weights.view(np.uint8)
        if payload.coding in SPARSE_CODINGS:
            scatter(chunk, decode_changes(payload.coding, payload.payload, chunk, WIDTH), WIDTH)
        else:
            np.copyto(chunk, decode_chunk(payload.coding, payload.payload, chunk, chunk.size, WIDTH))


class Preallocated:
    """XOR + zstd-1 into preallocated buffers. Payloads are kept, as they would be to send them."""

    def __init__(self, largest: int) -> None:
        self._coder = baselines.XorZstd(largest)

    def encode(self, old: np.ndarray, new: np.ndarray) -> np.ndarray:
        return self._coder.encode(old, new).copy()

    def decode(self, payload: np.ndarray, weights: np.ndarray) -> None:
        self._coder.decode(payload, weights)


class Plain:
    def __init__(
        self,
        encode: Callable[[np.ndarray, np.ndarray], bytes],
        decode: Callable[[bytes, np.ndarray], None],
    ) -> None:
        self.encode, self.decode = encode, decode


def contestants(largest: int) -> dict[str, Contestant]:
    return {
        "fast": Ours("fast"),
        "small": Ours("small"),
        "overwrite": Ours("overwrite"),
        XOR: Preallocated(largest),
        XOR_PLAIN: Plain(baselines.encode_xor, baselines.decode_xor),
        "XOR + split + zstd-1": Plain(baselines.encode_xor_split, baselines.decode_xor_split),
        PULSE: Plain(baselines.encode_gaps_absolute, baselines.decode_gaps_absolute),
    }


Taken = dict[str, list[float]]  # by contestant: the seconds of each turn


@dataclass(frozen=True)
class Race:
    """Seconds of every turn. Ratios are computed per turn, because other load slows both sides of it."""

    size: int  # bytes per turn
    encoding: Taken
    decoding: Taken
    scans: Taken  # reading base and new once and comparing: no encoder can be faster

    def encode(self, name: str) -> Spread:
        return Spread.of(self.size, self.encoding[name])

    def decode(self, name: str) -> Spread:
        return Spread.of(self.size, self.decoding[name])

    @property
    def best_scan(self) -> str:
        return min(self.scans, key=lambda name: float(np.median(self.scans[name])))


def faster(first: Sequence[float], second: Sequence[float]) -> float:
    """How many times faster the first was than the second: the median over turns."""
    return float(np.median(np.array(second) / np.array(first)))


def race(pairs: list[Pair], repeats: int) -> Race:
    """Runs every contestant, and the scan, on one core. Each result is checked."""
    work = [old.copy() for old, _ in pairs]
    encoding, decoding, scans = (collections.defaultdict[str, list[float]](list) for _ in range(3))
    racing, scanning = contestants(max(new.size for _, new in pairs)), _scans()
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
        for name, scan in scanning.items():
            began = time.process_time()
            for old, new in pairs:
                scan(old, new)
            if warm:
                scans[name].append(time.process_time() - began)
    return Race(sum(new.nbytes for _, new in pairs), encoding, decoding, scans)


# --- what this machine can do


def _scans() -> dict[str, Callable[[np.ndarray, np.ndarray], Any]]:
    """Several ways to scan. The fastest counts."""
    ways: dict[str, Callable[[np.ndarray, np.ndarray], Any]] = {"numpy": lambda a, b: np.count_nonzero(a != b)}
    compiled = _compiled_scan()
    if compiled is not None:
        ways["compiled"] = lambda a, b: compiled(_words(a), _words(b))
    return ways


def _words(array: np.ndarray) -> np.ndarray:
    return array[: array.size // 4 * 4].view(np.uint64)


def _compiled_scan() -> Callable[[np.ndarray, np.ndarray], Any] | None:
    try:
        import numba
    except ImportError:
        return None

    @numba.njit(nogil=True)
    def scan(old, new):
        different = np.uint64(0)
        for index in range(old.size):
            different |= old[index] ^ new[index]
        return different

    return scan


def take_turns(calls: dict[str, Callable[[], Any]], repeats: int) -> Taken:
    """Seconds of each call. The calls take turns, after one warm-up round."""
    taken: Taken = {name: [] for name in calls}
    for turn in range(repeats + 1):
        for name, call in calls.items():
            began = time.process_time()
            call()
            if turn:
                taken[name].append(time.process_time() - began)
    return taken
