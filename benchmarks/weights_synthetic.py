"""A model of any size with weights and updates like the recorded ones, for memory and network measurements.

Shapes are those of a Llama. Weights are drawn with the recorded deviations. An update changes elements with the
probability and by the moves that elements with the same exponent had in the recorded step (`Law`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from benchmarks.recordings import REFERENCE, Recording, exponents, flat, ordered
from rollmill.weights.format.tensors import HostTensor

DEVIATION = 0.02  # of the recorded models at their start
RESIDUAL = 12**-0.5  # a factor for matrices that add to the residual stream
_BLOCK = 1 << 20  # elements drawn at a time
_SIZES = {  # MiB: width, layers
    64: (512, 9),
    256: (1024, 9),
    512: (1024, 21),
    1024: (2048, 9),
}


@dataclass(frozen=True)
class Law:
    """By exponent of the old element: the probability to change, and some of the recorded moves."""

    chances: np.ndarray  # float32 [256]
    moves: np.ndarray  # int16 [256, 4096], in units in the last place

    @classmethod
    def of(cls, recording: Recording, model: str = "dense", rate: str = REFERENCE) -> Law:
        before, after = recording.step(model, rate)
        old, new = flat(before), flat(after)
        changed = np.flatnonzero(old != new)
        exponent, moved = exponents(old[changed]), ordered(new[changed]) - ordered(old[changed])
        total = np.bincount(exponents(old), minlength=256)
        chances = (np.bincount(exponent, minlength=256) / np.maximum(total, 1)).astype(np.float32)
        random = np.random.default_rng(0)
        moves = np.ones((256, 4096), np.int16)
        for value in np.unique(exponent):
            moves[value] = random.choice(np.clip(moved[exponent == value], -32000, 32000), 4096)
        return cls(chances, moves)


def shapes(mebibytes: int) -> dict[str, tuple[int, ...]]:
    width, layers = _SIZES[mebibytes]
    inner = width * 11 // 4
    result: dict[str, tuple[int, ...]] = {"embedding": (16 * width, width), "head": (16 * width, width)}
    result["norm"] = (width,)
    for layer in range(layers):
        result |= {
            f"layers.{layer}.attention_norm": (width,),
            f"layers.{layer}.mlp_norm": (width,),
            f"layers.{layer}.qkv": (width * 3 // 2, width),
            f"layers.{layer}.output": (width, width),
            f"layers.{layer}.mlp.gate_up": (2 * inner, width),
            f"layers.{layer}.mlp.down": (width, inner),
        }
    return result


def draw_weights(mebibytes: int, seed: int = 0) -> dict[str, HostTensor]:
    random = np.random.default_rng(seed)
    tensors = {}
    for name, shape in shapes(mebibytes).items():
        bits = np.empty(int(np.prod(shape)), np.uint16)
        deviation = DEVIATION * (RESIDUAL if name.endswith(("output", "down")) else 1.0)
        for start in range(0, bits.size, _BLOCK):
            part = bits[start : start + _BLOCK]
            values = random.standard_normal(part.size, dtype=np.float32) * np.float32(deviation)
            part[:] = (values if len(shape) > 1 else values + 1).view(np.uint32) >> 16
        tensors[name] = HostTensor("bf16", shape, bits.view(np.uint8))
    return tensors


def update(tensors: dict[str, HostTensor], law: Law, seed: int) -> float:
    """One step in place. Returns the share of changed elements."""
    random = np.random.default_rng(seed)
    changed = total = 0
    for tensor in tensors.values():
        bits = tensor.data.view(np.uint16)
        for start in range(0, bits.size, _BLOCK):
            part = bits[start : start + _BLOCK]
            chance = law.chances[(part >> np.uint16(7)) & np.uint16(0xFF)]
            where = np.flatnonzero(random.random(part.size, dtype=np.float32) < chance)
            old = part[where]
            moves = law.moves[exponents(old), random.integers(0, law.moves.shape[1], where.size)]
            part[where] = unordered(ordered(old) + moves)
            changed += where.size
            total += part.size
    return changed / total


def unordered(integers: np.ndarray) -> np.ndarray:
    """The inverse of `recordings.ordered`."""
    return np.where(integers < 0, (-integers - 1) | 0x8000, integers).astype(np.uint16)
