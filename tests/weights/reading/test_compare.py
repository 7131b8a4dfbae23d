from pathlib import Path

import numpy as np
import pytest
import torch

from rollmill.storage.objects import Objects
from rollmill.types import Version
from rollmill.weights import HostTensor, Publisher, Tensors, WeightStore
from rollmill.weights.reading.compare import _FP8, Comparison, compare
from tests.weights.build import make_tensors, train_step


def comparison(path: Path, old: Tensors, new: Tensors) -> Comparison:
    """Compares through a real store, with each version on its own line."""
    store = WeightStore(Objects.open(path))
    for line, tensors in (("a", old), ("b", new)):
        Publisher(store, line).publish(0, tensors)
    a, b = Version("a", 0), Version("b", 0)
    told: list[int] = []
    found = compare(
        store.manifest(a), store.manifest(b), lambda: store.load(a), lambda: store.load(b), advance=told.append
    )
    assert sum(told) == sum(new[change.name].data.size for change in found.tensors)
    return found


def tensor(dtype: str, *bits: int) -> HostTensor:
    width = {"fp32": 4, "int32": 4, "bf16": 2, "fp16": 2}.get(dtype, 1)
    return HostTensor(dtype, (len(bits),), np.array(bits, dtype=f"<u{width}").view(np.uint8))


def test_the_changes_of_a_training_step(tmp_path: Path) -> None:
    old = make_tensors()
    new = train_step(old, 1)
    found = comparison(tmp_path, old, new)
    assert not found.same and not found.added and not found.removed and not found.reshaped
    for change in found.tensors:
        before, after = (side[change.name].data.view(np.uint16).astype(np.int64) for side in (old, new))
        assert change.changed == np.count_nonzero(before != after)
        assert change.by_one == np.count_nonzero(np.abs(before - after) == 1)
        assert change.largest_ulp == np.abs(before - after).max(initial=0)
        values = [torch.from_numpy(side[change.name].data.copy()).view(torch.bfloat16).double() for side in (old, new)]
        assert change.largest_value == pytest.approx(float((values[1] - values[0]).abs().max()), abs=0)
    assert found.total.changed == sum(change.changed for change in found.tensors) > 0
    assert found.total.share == found.total.changed / sum(tensor.elements for tensor in old.values())


def test_tensors_that_are_added_removed_or_reshaped(tmp_path: Path) -> None:
    old = make_tensors(shapes={"a": (4, 4), "b": (4, 4), "c": (8,)})
    new = {**make_tensors(shapes={"a": (4, 4), "d": (2,)}), "c": HostTensor("bf16", (2, 4), old["c"].data)}
    found = comparison(tmp_path, old, new)
    assert (found.added, found.removed, found.reshaped) == (("d",), ("b",), ("c",))
    assert [change.name for change in found.tensors] == ["a"] and not found.same


def test_equal_versions_are_not_read(tmp_path: Path) -> None:
    store = WeightStore(Objects.open(tmp_path))
    manifest = Publisher(store, "a").publish(0, make_tensors())

    def never() -> Tensors:
        raise AssertionError("read")

    assert compare(manifest, manifest, never, never).same


@pytest.mark.parametrize(
    ("dtype", "old", "new", "expected"),
    [
        # changed, by one, largest in ULP, largest value, not finite
        ("bf16", [0x0000, 0x3F80], [0x8000, 0x3F80], (1, 1, 1, 0.0, 0)),  # −0 is another number than +0
        ("bf16", [0x0001], [0x8001], (1, 0, 3, 2 * 2.0**-133, 0)),
        ("bf16", [0x3F80, 0x3F80], [0x7F80, 0x7FC1], (2, 0, 0x7FC1 - 0x3F80, 0.0, 2)),
        ("fp16", [0x3C00], [0x3BFF], (1, 1, 1, 2.0**-11, 0)),
        ("fp32", [0x3F800000], [0xBF800000], (1, 0, 2 * 0x3F800000 + 1, 2.0, 0)),
        ("fp8_e4m3", [0x38, 0x38], [0x39, 0xFF], (2, 1, 0x38 + 0x7F + 1, 0.125, 1)),
        ("fp8_e5m2", [0x3C], [0x7C], (1, 0, 0x40, 0.0, 1)),
        ("int8", [0x7F], [0x80], (1, 0, 255, 255.0, 0)),
        ("uint8", [0x7F], [0x80], (1, 1, 1, 1.0, 0)),
        ("int32", [0x00000000], [0xFFFFFFFF], (1, 1, 1, 1.0, 0)),
    ],
)
def test_every_dtype_is_counted_in_its_own_units(
    tmp_path: Path, dtype: str, old: list[int], new: list[int], expected: tuple[float, ...]
) -> None:
    total = comparison(tmp_path, {"w": tensor(dtype, *old)}, {"w": tensor(dtype, *new)}).total
    assert (total.changed, total.by_one, total.largest_ulp, total.largest_value, total.not_finite) == expected


@pytest.mark.parametrize(("dtype", "theirs"), [("fp8_e4m3", torch.float8_e4m3fn), ("fp8_e5m2", torch.float8_e5m2)])
def test_fp8_values_are_those_of_the_reference(dtype: str, theirs: torch.dtype) -> None:
    reference = torch.arange(256, dtype=torch.uint8).view(theirs).double().numpy()
    np.testing.assert_array_equal(_FP8[dtype], reference)
