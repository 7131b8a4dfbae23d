"""How costs grow with what there is: 10^3 to 10^6, and the slope of each law as a bar. `python -m benchmarks.growth`

Laws of the index and the ledger say what a run asks for all the time, by the trajectories it has. The database is
SQLite, or the PostgreSQL of `--database URL`, which gets a schema for each size; it is filled with committed steps of
eight groups of eight. Laws of task files, weights, ranks and engines follow.

A slope of 1 is linear, 0 constant, 2 quadratic: it is that of the straight line through the logarithms. Times are CPU
seconds of this process, the best of three; with `--database` what a client of PostgreSQL waits. tests/test_scale.py
holds the same laws by counting; this shows what they cost. `--only NAME` measures one.
"""

from __future__ import annotations

import argparse
import atexit
import functools
import json
import math
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import sqlalchemy as sa

from benchmarks.output import at_most, finish
from rollmill.environments.sampler import Draw, Results, Sampler
from rollmill.environments.samplers.frontier import Frontier, FrontierConfig
from rollmill.environments.samplers.uniform import Uniform
from rollmill.environments.tasks.jsonl import JsonlTasks
from rollmill.environments.tasks.task_splits import TaskFileConfig
from rollmill.feedback.collect import Conversations
from rollmill.inference.engine_sections import EnginesSection, engine_specs
from rollmill.storage import tables
from rollmill.storage.database import open_database
from rollmill.storage.objects import Objects
from rollmill.training.parallel.chunk_exchange import plan_parcels
from rollmill.training.parallel.sharding import Rows
from rollmill.training.parallel.token_split import split
from rollmill.trajectories.admission import Experience, Member
from rollmill.trajectories.changes import trajectory_rows
from rollmill.trajectories.ledger import Ledger, NewGroup
from rollmill.trajectories.staleness import Pace
from rollmill.trajectories.trajectory_store import TrajectoryStore
from rollmill.types import Grade
from rollmill.weights.format.codings import encode_full
from rollmill.weights.format.manifest import (
    Base,
    Encoding,
    Manifest,
    Pack,
    Payload,
    chunk_digest,
    digest_bytes,
    parse_manifest,
    root_digest,
    seal,
)
from rollmill.weights.format.tensors import HostTensor
from rollmill.weights.reading.host_weights import HostWeights
from rollmill.weights.reading.patches import Patches
from rollmill.weights.reading.read_plan import Leg, Source
from rollmill.weights.reading.weight_store import WeightStore
from rollmill.weights.regions.collection import collect
from rollmill.weights.writing.encoder import entries_of
from rollmill.weights.writing.publisher import Publisher


class Law(NamedTuple):
    name: str
    of: str  # what is counted along the axis
    unit: str
    sizes: Sequence[int]
    cost: Callable[[int], float]
    slope: float  # the bar


def slope_of(sizes: Sequence[int], costs: Sequence[float]) -> float:
    """Of the least squares through the logarithms."""
    x, y = ([math.log(max(each, 1e-9)) for each in values] for values in (sizes, costs))
    middle_x, middle_y = sum(x) / len(x), sum(y) / len(y)
    rise = sum((a - middle_x) * (b - middle_y) for a, b in zip(x, y, strict=True))
    return rise / sum((a - middle_x) ** 2 for a in x)


RUN, SIZE, PER_STEP = "run", 8, 8
SIZES = (1_000, 10_000, 100_000, 1_000_000)
_CHUNK = 4_000  # groups per transaction
database: str | None = None  # PostgreSQL


def rows(groups: range) -> Iterator[tuple[sa.Table, list[dict[str, Any]]]]:
    named = [(number, f"g-{number:06d}", number // PER_STEP + 1) for number in groups]
    members = [(id, f"{id}-{member}", step, number) for number, id, step in named for member in range(SIZE)]
    state = {"run": RUN, "traffic": "rollout", "state": "graded", "provenance": "{}", "family": "f", "reward": 1.0}
    group = {"run": RUN, "size": SIZE, "state": "final"}
    entry = {"run": RUN, "state": "trained"}

    def made(number: int) -> dict[str, Any]:
        return {"task_id": f"t-{number % 99}", "created_at": float(number)}

    yield (
        tables.groups,
        [{**group, **made(n), "id": id, "min_version": step - 1, "step": step} for n, id, step in named],
    )
    yield tables.trajectories, [{**state, **made(n), "id": id, "group_id": of} for of, id, _, n in members]
    yield tables.ledger, [{**entry, "trajectory": id, "group_id": of, "step": step} for of, id, step, _ in members]


def empty(name: str) -> TrajectoryStore:
    """An index without anything in it."""
    directory = Path(tempfile.mkdtemp(prefix="growth-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    url = f"sqlite:///{directory}/mill.db"
    if database:
        with sa.create_engine(database).begin() as connection:
            connection.exec_driver_sql(f"DROP SCHEMA IF EXISTS {name} CASCADE")
            connection.exec_driver_sql(f"CREATE SCHEMA {name}")
        url = f"{database}{'&' if '?' in database else '?'}options=-csearch_path%3D{name}"
    return TrajectoryStore(open_database(url), Objects.open(directory / "store"))


@functools.cache
def filled(trajectories: int) -> tuple[Ledger, TrajectoryStore]:
    store = empty(f"growth_{trajectories}")
    engine = store._engine
    ledger, groups = Ledger(engine, RUN), max(PER_STEP, trajectories // SIZE)
    last = groups // PER_STEP
    step = {"run": RUN, "line": "rl", "created_at": 0.0}
    with engine.begin() as connection:
        connection.execute(tables.steps.insert(), [{**step, "number": n, "groups": "[]"} for n in range(1, last + 2)])
        commits = [{**step, "step": n, "number": n, "digest": "d"} for n in range(1, last + 1)]
        connection.execute(tables.commits.insert(), commits)
        connection.execute(tables.runs.update().values(started=groups))
    for start in range(0, groups, _CHUNK):
        with engine.begin() as connection:
            for table, values in rows(range(start, min(groups, start + _CHUNK))):
                connection.execute(table.insert(), values)
    analyse(engine)
    return ledger, store


def analyse(engine: sa.Engine) -> None:
    """What PostgreSQL does by itself within a minute: without statistics it plans for empty tables."""
    if engine.dialect.name == "postgresql":
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.exec_driver_sql("ANALYZE")


def milliseconds(ask: Callable[[Ledger, TrajectoryStore], object], trajectories: int) -> float:
    """Of one call, the best of three times twenty: CPU time, or what a client of PostgreSQL waits."""
    ledger, store = filled(trajectories)
    clock = time.perf_counter if database else time.process_time
    best = float("inf")
    for _ in range(3):
        began = clock()
        for _ in range(20):
            ask(ledger, store)
        best = min(best, (clock() - began) / 20)
    return best * 1e3


def start(ledger: Ledger, _: TrajectoryStore) -> object:
    def name(index: int) -> NewGroup:
        return NewGroup(f"s-{index}", "t", [f"s-{index}-{member}" for member in range(SIZE)])

    assert ledger.start_group(name, pace=Pace(1_000, SIZE, 0))
    return None


ASKED: dict[str, Callable[[Ledger, TrajectoryStore], object]] = {
    "results_of_a_step": lambda ledger, _: ledger.results(7, 8),
    "groups_started": lambda ledger, _: ledger.groups_started(),
    "a_step": lambda ledger, _: ledger.step(8),
    "entries_of_a_trajectory": lambda _, store: store.entries("g-000001-1"),
    "start_group": start,
}


def one(index: int) -> NewGroup:
    return NewGroup(f"o-{index}", "t", [f"o-{index}-0"])


def look(groups: int) -> float:
    """Milliseconds of a look at the open groups after one more has started: the trainer looks ten times per second."""
    ledger = Ledger(empty(f"look_{groups}")._engine, RUN)
    pace = Pace(1_000_000, 1, 0)
    for _ in range(groups):
        ledger.start_group(one, pace=pace)
    seen, _ = ledger.changed_groups(None)
    costs = []
    for _ in range(20):
        ledger.start_group(one, pace=pace)
        began = time.perf_counter()
        seen, found = ledger.changed_groups(seen)
        costs.append((time.perf_counter() - began) * 1e3)
        assert len(found) == 1
    return min(costs)


def admit(groups: int) -> float:
    """Seconds of the admission of this many conversations of production."""
    ledger = Ledger(empty(f"admit_{groups}")._engine, RUN)
    found = []
    for number in range(groups):
        (row,) = trajectory_rows("production", "g", "t", [f"live-{number:032x}"], {}, "production")
        member = Member(row["id"], {**row, "state": "finished", "payload_key": "p"}, Grade(1.0))
        found.append(Experience(row["id"], "t", "production", [member], 0))
    began = time.perf_counter()
    verdicts = ledger.admit(found, pace=Pace(-(-groups // 4), 1, 3, 4))
    assert {each.decision for each in verdicts} == {"admitted"}
    return time.perf_counter() - began


def collect_conversations(conversations: int) -> float:
    """Milliseconds of a cycle's look at the conversations of which one has ended since the last look."""
    store = empty(f"collect_{conversations}")

    def end(ids: range) -> None:
        rows = trajectory_rows("production", "g", "t", [f"live-{id}" for id in ids], {"run": RUN}, "production")
        facts = {"state": "finished", "payload_key": "p", "line": "rl"}
        with store._engine.begin() as connection:
            connection.execute(
                tables.trajectories.insert(),
                [{**row, **facts, "finished_at": id * 100.0} for id, row in zip(ids, rows, strict=True)],
            )

    end(range(1, conversations))
    analyse(store._engine)
    ended = Conversations(store._engine, RUN, settle_s=0.0)
    ended.look(conversations * 100.0 - 1)
    costs = []
    for id in range(conversations, conversations + 20):
        end(range(id, id + 1))
        began = time.perf_counter()
        assert ended.look(id * 100.0)
        costs.append((time.perf_counter() - began) * 1e3)
    return min(costs)


def seconds(call: Callable[[], object], times: int = 3) -> float:
    found = []
    for _ in range(times):
        began = time.process_time()
        call()
        found.append(time.process_time() - began)
    return min(found)


class Requests:
    """A store's backend that counts the requests it gets."""

    def __init__(self, objects: Objects) -> None:
        self._behind, self.count = objects._backend, Counter[str]()

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._behind, name)

        def counted(*arguments: Any, **settings: Any) -> Any:
            self.count[name] += 1
            return call(*arguments, **settings)

        return counted


def version_of(number: int, count: int, base: Manifest | None) -> tuple[Manifest, dict[str, bytes]]:
    """A version of `count` tensors of one chunk, each in a pack of its own, and the packs by their digest."""
    layout = tuple((f"t{place:07d}", "bf16", (8,)) for place in range(count))
    data = [np.array([number, place & 0xFFFF, place >> 16, 0] * 2, np.uint16).view(np.uint8) for place in range(count)]
    entries = entries_of(layout, [chunk_digest(each.data) for each in data])
    coded = [encode_full(each, 2) for each in data]
    encoding = Encoding(
        base=Base(number=base.number, digest=base.digest) if base else None,
        packs=tuple(Pack(digest=digest_bytes(each), bytes=len(each)) for each in coded),
        payloads=tuple(
            Payload(first=place, chunks=1, pack=place, offset=0, bytes=len(each), coding="raw")
            for place, each in enumerate(coded)
        ),
        changed_elements=8 * count,
    )
    kind: Any = {"delta" if base else "snapshot": encoding}
    manifest = Manifest(
        line="rl",
        number=number,
        form="bf16",
        first=0,
        writer="w",
        created_at=0.0,
        digest=root_digest(entries),
        tensors=entries,
        **kind,
    )
    return manifest, {digest_bytes(each): each for each in coded}


def shards_of(rows: int, ranks: int) -> list[Rows]:
    share = -(-rows // ranks)
    return [Rows((rows, 1 << 20), min(r * share, rows), min((r + 1) * share, rows)) for r in range(ranks)]


def split_batch(ranks: int) -> float:
    """A micro-batch of 256 tokens per rank."""
    lengths, rows_M = [64] * (4 * ranks), np.arange(0, 256 * ranks, 4)
    return seconds(lambda: split(lengths, rows_M, ranks, 1))


def plan(ranks: int) -> float:
    """Of 64 chunks per rank."""
    layout, rows = (("a.weight", "bf16", (64 * ranks, 1 << 20)),), {"a.weight": shards_of(64 * ranks, ranks)}
    return seconds(lambda: plan_parcels(layout, rows), 1)


def name_engines(count: int) -> float:
    share = {"kind": "embedded", "count": count // 4}
    tables = [EnginesSection.model_validate({**share, "region": region}) for region in ("a", "b", "c", "d")]
    return seconds(lambda: engine_specs(tables))


def take_packs(count: int) -> float:
    """A delta of `count` packs and chunks, pack by pack, as a region gets it."""
    base, packs = version_of(0, count, None)
    after, more = version_of(1, count, base)
    read, manifests = {**packs, **more}, {base.version: base, after.version: after}
    source = Source(manifests.__getitem__, lambda _: None, lambda _, pack: read[pack.digest], lambda *_: b"")
    host, leg, patches = HostWeights(base.tensors), Leg(after, "delta"), Patches()
    host.take(Leg(base, "snapshot"), source)

    def begin() -> None:
        for pack in leg.encoding.packs:
            host.begin(leg, pack, memoryview(read[pack.digest]), source, patches)

    return seconds(begin, 1)


def read_manifest(count: int) -> float:
    manifest, _ = version_of(0, count, None)
    data = seal(manifest)
    return seconds(lambda: parse_manifest(data, manifest.version, "bf16"), 1)


def collect_requests(count: int) -> float:
    """Requests of a collection when there are `count` packs that a dead attempt left."""
    requests = Requests(Objects.open("memory://"))
    objects = Objects(requests, "memory://")
    publisher = Publisher(WeightStore(objects), "rl")
    tensors = {"w": HostTensor("bf16", (64,), np.zeros(128, np.uint8))}
    for number in range(3):
        tensors["w"].data[number] ^= 1
        publisher.publish(number, tensors)
    for number in range(count):
        objects.put(f"weights/rl/bf16/packs/{number % 3:010d}-{number:064x}", b"x")
    requests.count.clear()
    collect(WeightStore(objects), "rl", keep=1, dry_run=True)
    return float(sum(requests.count.values()))


@functools.cache
def task_file(count: int) -> JsonlTasks:
    """Lines of about 300 bytes, in no order of ids, of a hundred families."""
    path = Path(tempfile.mkdtemp(prefix="growth-")) / "tasks.jsonl"
    atexit.register(shutil.rmtree, path.parent, ignore_errors=True)
    with path.open("w") as file:
        for number in random.Random(3).sample(range(count), count):
            line = {"id": f"t{number}", "instruction": "x" * 250, "family": f"f{number % 100}"}
            file.write(f"{json.dumps(line)}\n")
    return JsonlTasks(TaskFileConfig(path=str(path)))


def choose(kind: str, count: int) -> float:
    """Of one choice out of 256, with a committed step after every eighth. The first choice of all is not counted."""
    tasks, results = task_file(count), Results()
    sampler: Sampler = Uniform() if kind == "uniform" else Frontier(FrontierConfig())
    sampler.choose(tasks, Draw(0, 7, 0.0, results))
    start = time.process_time()
    for index in range(1, 257):
        task = sampler.choose(tasks, Draw(index, 7, index // 8 / 100, results))
        results.of(task.id).add(reward=index % 2, solved=False, turns=1, tokens=1)
    return (time.process_time() - start) / 256 * 1e3


INDEX = [
    *(
        Law(name, "trajectories", "ms", SIZES, functools.partial(milliseconds, ask), 0.25)
        for name, ask in ASKED.items()
    ),
    Law("look_at_open_groups", "open groups", "ms", (100, 1_000, 10_000), look, 0.25),
    Law("admit", "groups", "s", (100, 1_000, 10_000, 100_000), admit, 1.1),
    Law("look_at_conversations", "conversations", "ms", (1_000, 10_000, 100_000), collect_conversations, 0.25),
]
TASKS = [
    Law(f"choose_{kind}", "tasks", "ms", SIZES[1:], functools.partial(choose, kind), 0.25)
    for kind in ("uniform", "frontier")
]
WEIGHTS = [  # linear laws may have a logarithm, and caches fill
    Law("split", "ranks", "s", (100, 1_000, 10_000), split_batch, 1.3),
    Law("plan_parcels", "ranks", "s", (10, 100, 1_000), plan, 1.3),
    Law("engine_specs", "engines", "s", (1_000, 10_000, 100_000, 1_000_000), name_engines, 1.3),
    Law("take_packs", "packs", "s", (100, 1_000, 10_000), take_packs, 1.3),
    Law("read_manifest", "chunks", "s", (1_000, 10_000, 100_000), read_manifest, 1.3),
    Law("collect", "objects", "requests", (1_000, 10_000, 100_000), collect_requests, 0.05),
]
LAWS = [*INDEX, *TASKS, *WEIGHTS]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="without the largest size of each law: under a minute")
    parser.add_argument("--only", choices=[law.name for law in LAWS], help="measure this law only")
    parser.add_argument("--database", metavar="URL", help="measure the index on this PostgreSQL, and nothing else")
    arguments = parser.parse_args()
    global database
    database = arguments.database
    figures, bars = dict[str, float](), {}
    for law in INDEX if arguments.database else LAWS:
        if arguments.only not in (None, law.name):
            continue
        sizes = law.sizes[:-1] if arguments.quick else law.sizes
        costs = [law.cost(size) for size in sizes]
        slope = slope_of(sizes, costs)
        shown = "  ".join(f"{size:,}: {cost:.3g} {law.unit}" for size, cost in zip(sizes, costs, strict=True))
        print(f"{law.name:22} slope {slope:5.2f} (at most {law.slope})   {law.of}: {shown}", flush=True)
        figures |= {f"{law.name}_{size}": cost for size, cost in zip(sizes, costs, strict=True)}
        bars[f"{law.name}_slope"] = at_most(round(slope, 3), law.slope)
    finish("growth", figures, bars)


if __name__ == "__main__":
    main()
