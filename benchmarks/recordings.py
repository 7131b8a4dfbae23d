"""Recorded weights: consecutive bf16 versions of small models in RL, written by `benchmarks.record_deltas`.

    FOLDER/recording.json                  what was recorded: models, learning rates, share of changes
    FOLDER/MODEL/start.safetensors         the version all learning rates start from
    FOLDER/MODEL/LR.NUMBER.safetensors     versions 1, 2, … at one learning rate

Elements are stored as uint16, as they are served. This module does not import torch: its users measure their memory.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

FOLDER = Path(__file__).parents[1] / ".recordings"
RATES = ("1e-07", "3e-07", "1e-06", "3e-06", "1e-05", "3e-05", "1e-04")
REFERENCE = "1e-06"  # the learning rate of the bars

Version = dict[str, np.ndarray]  # by name: uint16, in the tensor's shape


@dataclass(frozen=True)
class Recording:
    folder: Path

    @cached_property
    def about(self) -> dict[str, Any]:
        return json.loads((self.folder / "recording.json").read_text())

    @property
    def models(self) -> list[str]:
        return list(self.about["models"])

    def rates(self, model: str) -> list[str]:
        return list(self.about["models"][model]["rates"])

    def versions(self, model: str, rate: str) -> list[Version]:
        """All versions of one learning rate. The first is the common start."""
        count = len(self.about["models"][model]["rates"][rate])
        names = ["start", *(f"{rate}.{number}" for number in range(1, count + 1))]
        return [load_file(self.folder / model / f"{name}.safetensors") for name in names]

    def step(self, model: str, rate: str) -> tuple[Version, Version]:
        """The last recorded step: before and after."""
        count = len(self.about["models"][model]["rates"][rate])
        names = [f"{rate}.{count - 1}" if count > 1 else "start", f"{rate}.{count}"]
        before, after = (load_file(self.folder / model / f"{name}.safetensors") for name in names)
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


def exponent_entropy(bits: np.ndarray) -> float:
    return entropy(np.bincount(exponents(bits), minlength=256))


def deviation(bits: np.ndarray) -> float:
    """Standard deviation of bf16 values."""
    return float((bits.astype(np.uint32) << 16).view(np.float32).std(dtype=np.float64))


def change_figures(before: np.ndarray, after: np.ndarray) -> dict[str, float]:
    """Shares: of elements that changed, and of those that moved by one unit in the last place."""
    changed = np.flatnonzero(before != after)
    moved = np.abs(ordered(after[changed]) - ordered(before[changed]))
    one = float((moved == 1).mean()) if changed.size else 0.0
    return {"changed": changed.size / before.size, "one_ulp": one}
