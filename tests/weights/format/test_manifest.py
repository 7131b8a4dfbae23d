import json
import math
from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmill.errors import WeightsError
from rollmill.storage.objects import Objects
from rollmill.types import Version
from rollmill.weights import HostTensor, Publisher, WeightStore
from rollmill.weights.format.manifest import describe, parse_manifest, root_digest, seal
from rollmill.weights.format.tensors import CHUNK_ELEMENTS, WIDTHS, chunk_ranges
from tests.weights.build import make_tensors, train_step


@given(st.lists(st.integers(0, 5000), max_size=4).map(tuple))
@settings(max_examples=200, deadline=None)
def test_chunks_cover_a_tensor_exactly(shape: tuple[int, ...]) -> None:
    if math.prod(shape) > CHUNK_ELEMENTS * 2000:
        return
    ranges = chunk_ranges(shape)
    assert [start for start, _ in ranges] == [0, *(stop for _, stop in ranges)][: len(ranges)]
    assert (ranges[-1][1] if ranges else 0) == math.prod(shape)
    assert all(0 < stop - start <= CHUNK_ELEMENTS for start, stop in ranges)


def test_chunks_are_whole_rows_and_whole_quantisation_blocks() -> None:
    ranges = chunk_ranges((100_000, 7168))
    assert all(start % (128 * 7168) == 0 for start, _ in ranges)
    assert chunk_ranges((384, 2048, 7168)) == tuple((i * 2048 * 7168, (i + 1) * 2048 * 7168) for i in range(384))
    assert all(start % 7168 == 0 for start, _ in chunk_ranges((2, 100_000, 7168)))  # a row larger than a chunk
    assert max(WIDTHS.values()) * CHUNK_ELEMENTS == 64 << 20


def test_the_root_digest_depends_on_every_byte_and_name_and_on_nothing_else() -> None:
    tensors = make_tensors()
    root = root_digest(describe(tensors))
    assert root == root_digest(describe(dict(reversed(tensors.items()))))
    for name in tensors:
        data = tensors[name].data.copy()
        data[-1] ^= 1
        assert root != root_digest(describe({**tensors, name: HostTensor("bf16", tensors[name].shape, data)}))
        renamed = {f"{other}.x" if other == name else other: tensor for other, tensor in tensors.items()}
        assert root != root_digest(describe(renamed))
        other_dtype = HostTensor("fp16", tensors[name].shape, tensors[name].data)
        assert root != root_digest(describe({**tensors, name: other_dtype}))
    reshaped = HostTensor("bf16", (64, 300), tensors["embed.weight"].data)
    assert root != root_digest(describe({**tensors, "embed.weight": reshaped}))


def test_host_tensors_are_checked() -> None:
    for dtype, shape, data in (
        ("bf17", (1,), np.zeros(2, np.uint8)),
        ("bf16", (2,), np.zeros(2, np.uint8)),
        ("bf16", (2,), np.zeros(2, np.uint16)),
        ("bf16", (2, 1), np.zeros((2, 2), np.uint8)),
        ("bf16", (2,), np.zeros(8, np.uint8)[::2]),
    ):
        with pytest.raises(WeightsError):
            HostTensor(dtype, shape, data)


@pytest.fixture
def manifest_bytes(tmp_path: Path) -> bytes:
    objects = Objects.open(tmp_path)
    publisher = Publisher(WeightStore(objects), "rl", snapshot_every=1)
    publisher.publish(0, make_tensors())
    publisher.publish(1, train_step(make_tensors(), 1), metadata={"step": 7, "note": "ä"})
    return objects.get("weights/rl/bf16/manifests/0000000001.manifest")


def test_a_manifest_survives_the_round_trip(manifest_bytes: bytes) -> None:
    manifest = parse_manifest(manifest_bytes, Version("rl", 1), "bf16")
    assert seal(manifest) == manifest_bytes
    assert (manifest.version, manifest.parent, manifest.kind, manifest.step) == (
        Version("rl", 1),
        Version("rl", 0),
        "snapshot",
        7,
    )
    assert manifest.density == pytest.approx(0.02, rel=0.2)
    assert manifest.full_bytes == sum(tensor.data.size for tensor in make_tensors().values())


def test_any_damaged_byte_is_noticed(manifest_bytes: bytes) -> None:
    random = np.random.default_rng(0)
    damaged = [manifest_bytes[:length] for length in (0, 1, 100, len(manifest_bytes) - 1)] + [manifest_bytes + b"x"]
    for bit in random.integers(0, len(manifest_bytes) * 8, 300):
        changed = bytearray(manifest_bytes)
        changed[bit // 8] ^= 1 << (bit % 8)
        damaged.append(bytes(changed))
    for data in damaged:
        with pytest.raises(WeightsError, match="damaged"):
            parse_manifest(data, Version("rl", 1), "bf16")


def test_a_manifest_under_another_key_is_refused(manifest_bytes: bytes) -> None:
    for version, form in ((Version("rl", 2), "bf16"), (Version("sft", 1), "bf16"), (Version("rl", 1), "fp8")):
        with pytest.raises(WeightsError):
            parse_manifest(manifest_bytes, version, form)


def lie(fields: dict, path: str, value: object) -> None:
    *parents, leaf = path.split(".")
    for parent in parents:
        fields = fields[int(parent) if parent.isdigit() else parent]
    fields[int(leaf) if leaf.isdigit() else leaf] = value  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("digest", "0" * 64),
        ("format", 1),
        ("tensors.0.chunks.0", "0" * 32),
        ("tensors.0.chunks.0", "0" * 64),
        ("tensors.0.dtype", "bf17"),
        ("tensors.0.shape", [1 << 52, 1 << 52]),
        ("tensors.0.shape", [-1]),
        ("tensors.0.name", "zzz"),
        ("snapshot.payloads.0.pack", 9),
        ("snapshot.payloads.0.bytes", 1 << 40),
        ("snapshot.payloads.0.offset", -1),
        ("snapshot.payloads.0.coding", "sparse"),
        ("snapshot.payloads.0.chunks", 1 << 40),
        ("snapshot.payloads", []),
        ("delta.payloads.0.first", 3),
        ("delta.payloads.0.coding", "pickle"),
        ("delta.base", None),
        ("delta.base.number", 1),
        ("snapshot", None),
        ("line", "../x"),
        ("number", 1.5),
        ("first", 2),
        ("origin_line", "sft"),
        ("parent_line", None),
        ("unknown", 1),
    ],
)
def test_contradictions_are_refused_even_when_sealed(manifest_bytes: bytes, path: str, value: object) -> None:
    """Another region may send anything: a valid seal proves nothing about the content."""
    fields = json.loads(manifest_bytes.partition(b"\n")[0])
    lie(fields, path, value)
    if path == "snapshot":
        fields["delta"] = None
    body = json.dumps(fields).encode()
    with pytest.raises(WeightsError):
        parse_manifest(body + b"\n" + blake3(body).hexdigest().encode() + b"\n", Version("rl", 1), "bf16")
