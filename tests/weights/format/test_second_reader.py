"""FORMAT.md is enough to read a store: the second reader, written from it, gets the same bytes as WeightStore."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import numpy as np
import pytest

from rollmill.storage.objects import Objects
from rollmill.types import Version
from rollmill.weights import HostTensor, Publisher, Tensors, WeightStore
from rollmill.weights.format.codings import CODINGS, encode_as
from rollmill.weights.format.kernels.plain import UNSIGNED, magnitude_bytes
from rollmill.weights.format.tensors import WIDTHS, chunk_ranges
from tests.weights.format import second_reader

SHAPES = {"bf16": (300, 133), "fp16": (70, 9), "fp32": (41, 7), "int32": (), "fp4x2": (65, 32), "uint8": (0, 4)}
SHAPES |= {"fp8_e4m3": (130, 17), "fp8_e5m2": (5,), "int8": (3, 3, 3)}


def make_weights() -> dict[str, HostTensor]:
    """Every dtype, with names that JSON escapes."""
    random = np.random.default_rng(0)
    weights = {}
    for dtype, shape in SHAPES.items():
        size = int(np.prod(shape)) * WIDTHS[dtype]
        bits = random.normal(0, 0.02, int(np.prod(shape))).astype(np.float32).view("<u4")
        data = (bits >> np.uint32(32 - 8 * WIDTHS[dtype])).astype(UNSIGNED[WIDTHS[dtype]]).view(np.uint8)
        assert data.size == size
        weights[f'läyer/"{dtype}"'] = HostTensor(dtype, shape, data)
    return weights


def step(weights: Tensors, seed: int, share: float) -> dict[str, HostTensor]:
    """Elements move by one, by a few, or to any value; small ones more often than large ones."""
    random = np.random.default_rng(seed)
    moved = {}
    for name, tensor in weights.items():
        bits = tensor.data.view(UNSIGNED[tensor.width]).copy()
        small = magnitude_bytes(bits) < np.median(magnitude_bytes(bits)) if bits.size else np.empty(0, bool)
        chosen = random.random(bits.size) < np.where(small, share, share**2)
        steps = random.choice(np.array([1, 1, 1, 2**32 - 1, 5, 70_001]), bits.size).astype(bits.dtype)
        bits[chosen] += steps[chosen]
        moved[name] = HostTensor(tensor.dtype, tensor.shape, bits.view(np.uint8))
    return moved


def codings_of(store: Path) -> set[str]:
    found = set()
    for path in store.glob("weights/*/*/manifests/*.manifest"):
        manifest = json.loads(path.read_bytes().split(b"\n")[0])
        for encoding in filter(None, (manifest["snapshot"], manifest["delta"])):
            found |= {payload["coding"] for payload in encoding["payloads"]}
    return found


def assert_read_alike(store: Path, line: str, number: int, weights: Tensors) -> None:
    read = second_reader.read_version(store, line, "mixed", number)
    assert read.keys() == weights.keys()
    assert all(np.array_equal(read[name], weights[name].data) for name in weights)


def test_both_readers_read_every_version(tmp_path: Path) -> None:
    store = WeightStore(Objects.open(tmp_path))
    for goal in ("fast", "small", "overwrite"):
        publisher = Publisher(store, goal, "mixed", snapshot_every=4, goal=goal)
        weights = make_weights()
        for number, share in enumerate((0, 0.02, 0.3, 1, 1, 0.001, 0)):
            weights = step(weights, number, share)
            publisher.publish(number, weights)
            assert_read_alike(tmp_path, goal, number, weights)
            loaded = store.load(Version(goal, number), "mixed")
            assert all(np.array_equal(loaded[name].data, weights[name].data) for name in weights)
    assert {"raw", "sparse", "classed", "overwrite"} <= codings_of(tmp_path)


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("coding", CODINGS)
def test_both_readers_read_every_coding(coding: str, width: int) -> None:
    random = np.random.default_rng(width)
    for share in (0, 0.004, 0.2, 1):
        old = random.normal(0, 0.02, 2000).astype(np.float32).view("<u4") >> np.uint32(32 - 8 * width)
        old = old.astype(UNSIGNED[width])
        chosen = random.random(old.size) < share
        steps = random.choice(np.array([1, 1, 1, 2**32 - 1, 2, 254, 255, 256, 70_001]), old.size).astype(old.dtype)
        new = np.where(chosen, old + steps, old).astype(old.dtype)
        payload = encode_as(coding, old, new, width)  # type: ignore[arg-type]
        assert np.array_equal(second_reader.decode(coding, second_reader.Streams(payload), old), new)


def test_both_readers_cut_the_same_chunks() -> None:
    many = [(), (0,), (1,), (5, 0, 3), (1 << 25,), ((1 << 24) + 1, 3), (300, 1 << 17), (129, 1 << 17), (127, 1 << 17)]
    many += [(3, 5, 1 << 23), (2, 3, (1 << 24) + 5), (7, 300, 70_001), (1000, 65_537), (2, 1 << 24)]
    for shape in many:
        assert second_reader.chunk_ranges(list(shape), 1) == list(chunk_ranges(shape))


def test_an_anchor_is_read_where_a_snapshot_is_not_kept(tmp_path: Path) -> None:
    from rollmill.weights.regions.anchors import AnchorBuilder

    store = WeightStore(Objects.open(tmp_path))
    publisher = Publisher(store, "rl", "mixed", goal="small")
    weights = make_weights()
    for number in range(5):
        weights = step(weights, number, 0.05)
        publisher.publish(number, weights)
    assert AnchorBuilder(store, "rl", "mixed", every=3).poll() == 3
    for path in [*tmp_path.glob("weights/rl/mixed/*/000000000[012]*")]:
        path.unlink()
    assert_read_alike(tmp_path, "rl", 4, weights)


def test_it_refuses_what_is_damaged(tmp_path: Path) -> None:
    publisher = Publisher(WeightStore(Objects.open(tmp_path)), "rl", "mixed")
    publisher.publish(0, make_weights())
    (pack,) = tmp_path.glob("weights/rl/mixed/packs/*")
    pack.write_bytes(pack.read_bytes()[:-1] + b"\0\0")
    with pytest.raises(AssertionError):
        second_reader.read_version(tmp_path, "rl", "mixed", 0)


def test_it_imports_nothing_of_ours() -> None:
    tree = ast.parse(Path(second_reader.__file__).read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.module and not node.module.startswith(("rollmill", "tests"))
        if isinstance(node, ast.Import):
            assert not any(name.name.startswith(("rollmill", "tests")) for name in node.names)
