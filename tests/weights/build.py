"""Weights of a small model, and a simulated training step."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from rollmill.storage.objects import Objects
from rollmill.weights import HostTensor, Publisher, Tensors, WeightStore

SHAPES = {
    "embed.weight": (300, 64),
    "layers.0.experts": (4, 64, 64),
    "layers.0.norm": (64,),
    "layers.1.experts": (4, 64, 64),
    "scale": (),
}


def bf16(values: np.ndarray) -> np.ndarray:
    bits = values.astype(np.float32).reshape(-1).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16).view(np.uint8)


def make_tensors(seed: int = 0, shapes: dict[str, tuple[int, ...]] | None = None) -> dict[str, HostTensor]:
    random = np.random.default_rng(seed)
    shapes = SHAPES if shapes is None else shapes
    return {name: HostTensor("bf16", shape, bf16(random.normal(0, 0.02, shape))) for name, shape in shapes.items()}


def train_step(tensors: Tensors, seed: int, share: float = 0.02) -> dict[str, HostTensor]:
    """Moves a share of the elements by a few units in the last place."""
    random = np.random.default_rng(seed)
    moved = {}
    for name, tensor in tensors.items():
        bits = tensor.data.view(np.uint16).copy()
        chosen = random.random(bits.size) < share
        bits[chosen] += random.choice(np.array([1, 1, 1, 65535, 2, 700], dtype=np.uint16), int(chosen.sum()))
        moved[name] = HostTensor(tensor.dtype, tensor.shape, bits.view(np.uint8))
    return moved


def history(length: int) -> list[dict[str, HostTensor]]:
    versions = [make_tensors()]
    for number in range(1, length):
        versions.append(train_step(versions[-1], number))
    return versions


def publish_line(path: Path, length: int, line: str = "rl", snapshot_every: int = 25) -> list[dict[str, HostTensor]]:
    versions = history(length)
    publisher = Publisher(WeightStore(Objects.open(path)), line, snapshot_every=snapshot_every)
    for number, tensors in enumerate(versions):
        publisher.publish(number, tensors)
    return versions


def same(left: Tensors, right: Tensors) -> bool:
    return left.keys() == right.keys() and all(
        (left[name].dtype, left[name].shape) == (right[name].dtype, right[name].shape)
        and np.array_equal(left[name].data, right[name].data)
        for name in left
    )


def delta_pack(path: Path, number: int, line: str = "rl") -> Path:
    """The file with the payloads of a version that was published as a delta."""
    (pack,) = (path / "weights" / line / "bf16" / "packs").glob(f"{number:010d}-*")
    return pack
