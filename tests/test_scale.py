"""Laws of growth, not seconds: what is counted at N and at 8 N. Counts are the same on every machine.

`steps(call)` counts the instructions of Python code of the package, `Counted` the elements that numpy looks at, and
`Requests` the requests to an object store. A linear law multiplies them by 8, a quadratic one by 64.
"""

import gc
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import rollmill
from benchmarks.growth import Requests, shards_of, version_of
from rollmill.inference.engine_sections import EnginesSection, engine_specs
from rollmill.storage.objects import Objects
from rollmill.training.parallel import token_split as split_module
from rollmill.training.parallel.chunk_exchange import plan_parcels
from rollmill.types import Version
from rollmill.weights import HostTensor, Publisher, WeightStore
from rollmill.weights.format.manifest import Pack
from rollmill.weights.format.object_keys import pack_prefix
from rollmill.weights.reading.host_weights import HostWeights
from rollmill.weights.reading.patches import Patches
from rollmill.weights.reading.read_plan import Leg, Source
from rollmill.weights.regions.collection import collect
from rollmill.weights.writing.publisher import Peers
from tests.weights.ranks import own_chunks, together

FEW, MANY = 16, 128
LINEAR = 8 * 1.5  # room for sorting and for fixed costs


def steps(call: Callable[[], object]) -> int:
    """How many instructions of the package's Python code a call takes, in this thread."""
    home, count = rollmill.__path__[0], 0

    def trace(frame: Any, event: str, _: object) -> Any:
        nonlocal count
        if not frame.f_code.co_filename.startswith(home):
            return None
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


class Counted(np.ndarray):
    """An array that counts the elements of every operation on it."""

    elements = 0

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **settings: Any) -> Any:
        Counted.elements += max(np.size(each) for each in inputs)
        return getattr(ufunc, method)(*map(_plain, inputs), **settings)

    def __array_function__(self, function: Any, types: Any, arguments: Any, settings: Any) -> Any:
        Counted.elements += self.size
        return function(*map(_plain, arguments), **settings)


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value.view(np.ndarray) if isinstance(value, Counted) else value


def counted(objects: Objects) -> tuple[Objects, Requests]:
    requests = Requests(objects)
    return Objects(requests, "memory://"), requests


# -- ranks


def test_a_micro_batch_is_split_in_time_linear_in_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    def cost(ranks: int) -> int:
        rows_M = np.arange(0, 64 * ranks, 2)
        with monkeypatch.context() as patch:
            patch.setattr(split_module.np, "empty", lambda *a: np.zeros(*a).view(Counted))
            Counted.elements = 0
            cut = split_module.split([32] * (2 * ranks), rows_M, ranks, 1)
        assert cut.target_counts == [32] * ranks
        return Counted.elements

    assert cost(MANY) <= LINEAR * cost(FEW)


def test_sequences_find_their_ranks_in_time_linear_in_both() -> None:
    class Length(int):
        compared = 0

        def __lt__(self, other: int) -> bool:
            Length.compared += 1
            return int(self) < int(other)

        def __add__(self, other: int) -> "Length":
            return Length(int(self) + int(other))

        __radd__ = __add__

        def __neg__(self) -> int:
            return -int(self)

    def cost(ranks: int) -> int:
        Length.compared = 0
        split_module._groups([Length(1 + index % 7) for index in range(4 * ranks)], ranks)
        return Length.compared

    assert cost(MANY) <= 2 * LINEAR * max(cost(FEW), 1)  # of a heap: N · log N


def test_who_publishes_which_chunk_is_planned_in_time_linear_in_chunks_and_ranks() -> None:
    def cost(ranks: int) -> int:
        layout = (("a.weight", "bf16", (64 * ranks, 1 << 20)),)
        return steps(lambda: plan_parcels(layout, {"a.weight": shards_of(64 * ranks, ranks)}))

    assert cost(MANY) <= LINEAR * cost(FEW)


def test_a_version_of_more_ranks_takes_no_more_requests_per_rank() -> None:
    def cost(size: int) -> int:
        objects, requests = counted(Objects.open("memory://"))
        tensors = {f"t{rank:03d}": HostTensor("bf16", (8,), np.full(16, rank, np.uint8)) for rank in range(size)}

        def publish(ranks: Peers) -> None:
            Publisher(WeightStore(objects), "rl", ranks=ranks).publish(0, own_chunks(tensors, ranks.rank, size))

        together(size, publish)
        return sum(requests.count.values())

    assert cost(MANY) <= LINEAR * cost(FEW)


# -- engines


def test_engines_get_their_names_in_time_linear_in_their_number() -> None:
    def cost(count: int) -> int:
        tables = [
            EnginesSection.model_validate({"kind": "embedded", "region": f"r{i}", "count": count}) for i in (1, 2)
        ]
        assert engine_specs(tables)[-1].name == f"r2-{count}"
        return steps(lambda: engine_specs(tables))

    assert cost(MANY) <= LINEAR * cost(FEW)


# -- weights


def test_a_pack_that_arrives_costs_its_own_chunks_not_the_whole_table() -> None:
    def cost(count: int) -> int:
        base, packs = version_of(0, count, None)
        after, more = version_of(1, count, base)
        read = {**packs, **more}

        def pack_of(_: object, pack: Pack) -> bytes:
            return read[pack.digest]

        source = Source({base.version: base, after.version: after}.__getitem__, lambda _: None, pack_of, pytest.fail)
        host = HostWeights(base.tensors)
        host.take(Leg(base, "snapshot"), source)
        leg, patches = Leg(after, "delta"), Patches()
        spent = steps(
            lambda: [
                host.begin(leg, pack, memoryview(read[pack.digest]), source, patches) for pack in leg.encoding.packs
            ]
        )
        host.take(leg, source, patches)
        assert host.manifest is after
        return spent

    assert cost(MANY) <= LINEAR * cost(FEW)


def test_collection_asks_for_no_object_by_itself() -> None:
    def cost(count: int) -> Counter[str]:
        objects, requests = counted(Objects.open("memory://"))
        store = WeightStore(objects)
        tensors = {"w": HostTensor("bf16", (64,), np.zeros(128, np.uint8))}
        publisher = Publisher(store, "rl")
        for number in range(3):
            tensors["w"].data[number] ^= 1
            publisher.publish(number, tensors)
        for number in range(count):
            objects.put(f"weights/rl/bf16/packs/{number % 3:010d}-{number:064x}", b"left by an attempt that died")
        requests.count.clear()
        collect(store, "rl", keep=1, dry_run=True)
        return requests.count

    assert cost(MANY) == cost(FEW)


def test_collection_removes_objects_of_a_version_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollmill.weights.regions.collection.ABANDONED_SECONDS", -1.0)

    def cost(count: int) -> int:
        objects, requests = counted(Objects.open("memory://"))
        store, publisher = WeightStore(objects), Publisher(WeightStore(objects), "rl", snapshot_every=1)
        tensors = {"w": HostTensor("bf16", (64,), np.zeros(128, np.uint8))}
        for number in range(3):
            tensors["w"].data[number] ^= 1
            publisher.publish(number, tensors)
        for number in range(count):
            objects.put(f"weights/rl/bf16/packs/{number % 3:010d}-{number:064x}", b"left by an attempt that died")
        requests.count.clear()
        assert collect(store, "rl", keep=1).removed == (0, 1)
        return requests.count["delete"]

    assert cost(MANY) == cost(FEW)


def test_packs_of_a_version_are_looked_for_at_the_same_time() -> None:
    objects = Objects.open("memory://")
    manifest, packs = version_of(0, 16, None)
    for digest, data in packs.items():
        objects.put(f"{pack_prefix('rl', 'bf16', 0)}{digest}", data)
    together = threading.Barrier(8)  # breaks unless half of them are asked for at once

    class Slow(Requests):
        def stat(self, key: str) -> Any:
            together.wait(30)
            return self._behind.stat(key)

    store = WeightStore(Objects(Slow(objects), "memory://"))
    assert store.has_snapshot(manifest)


def test_manifests_in_memory_are_bounded_by_their_bytes() -> None:
    def kept(count: int) -> int:
        store = WeightStore(Objects.open("memory://"))
        publisher = Publisher(store, "rl", snapshot_every=1)
        tensors = {"w": HostTensor("bf16", (64,), np.zeros(128, np.uint8))}
        for number in range(count):
            publisher.publish(number, tensors, metadata={"large": "x" * (1 << 20)})
        reader = WeightStore(store.objects)
        found = [weakref.ref(reader.manifest(Version("rl", number))) for number in range(count)]
        gc.collect()
        return sum(each() is not None for each in found)

    assert kept(FEW) == kept(4 * FEW) <= 8
