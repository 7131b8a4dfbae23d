"""Rows are read without the rest of a version, and verified."""

from pathlib import Path

import numpy as np
import pytest

from rollmill.errors import WeightsError
from rollmill.storage.objects import Objects
from rollmill.types import Version
from rollmill.weights import HostTensor, WeightStore
from rollmill.weights.format import tensors as tensors_module
from rollmill.weights.reading import chunks as ranges
from rollmill.weights.reading.chunks import RowRange, read_rows
from tests.weights.build import SHAPES, delta_pack, publish_line

GROUPS: list[dict[str, RowRange]] = [
    {"embed.weight": (37, 203)},
    {"layers.0.experts": (1, 3), "layers.0.norm": (0, 64)},
    {"scale": (0, 1)},
    {"layers.1.experts": (2, 2)},
]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tensors_module, "CHUNK_ELEMENTS", 1024)
    tensors_module.chunk_ranges.cache_clear()
    yield
    tensors_module.chunk_ranges.cache_clear()


@pytest.mark.parametrize("batch_bytes", [1, 9000, 1 << 30])
def test_rows_of_a_version(batch_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranges, "BATCH_BYTES", batch_bytes)
    versions = publish_line(tmp_path, 5, snapshot_every=3)
    store = WeightStore(Objects.open(tmp_path))
    for number in (0, 2, 4):
        found = list(read_rows(store.source(), Version("rl", number), GROUPS))
        assert [group.keys() for group in found] == [group.keys() for group in GROUPS]
        for wanted, group in zip(GROUPS, found, strict=True):
            for name, (start, stop) in wanted.items():
                check_rows(group[name], versions[number][name], start, stop)
    assert not list(read_rows(store.source(), Version("rl", 4), []))


def check_rows(found: HostTensor, whole: HostTensor, start: int, stop: int) -> None:
    row = whole.data.size // (whole.shape[0] if whole.shape else 1)
    assert found.shape == ((stop - start, *whole.shape[1:]) if whole.shape else ())
    np.testing.assert_array_equal(found.data, whole.data[start * row : stop * row])


def test_few_rows_are_few_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollmill.weights.writing.encoder.RUN_BYTES", 1)
    publish_line(tmp_path, 1)
    store = WeightStore(Objects.open(tmp_path))
    total = store.manifest(Version("rl", 0)).bytes
    read: list[int] = []
    range_of = Objects.get_range
    monkeypatch.setattr(Objects, "get_range", lambda *call: read.append(call[3]) or range_of(*call))
    rows = SHAPES["embed.weight"][0] // 10
    list(read_rows(store.source(), Version("rl", 0), [{"embed.weight": (0, rows)}]))
    assert 0 < sum(read) < total / 10


def test_rows_of_a_damaged_version_are_not_returned(tmp_path: Path) -> None:
    publish_line(tmp_path, 2)
    pack = delta_pack(tmp_path, 1)
    pack.write_bytes(bytes(len(pack.read_bytes())))
    store = WeightStore(Objects.open(tmp_path))
    with pytest.raises(WeightsError, match="delta of rl@1"):
        list(read_rows(store.source(), Version("rl", 1), GROUPS))
    assert len(list(read_rows(store.source(), Version("rl", 0), GROUPS))) == len(GROUPS)
