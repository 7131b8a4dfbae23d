"""Laws of growth of the index and the ledger: the statements of hot paths are counted at N and at 8 N, and no hot query
reads a whole table. tests/test_scale.py has the other laws; `python -m benchmarks.growth` measures seconds."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import sqlalchemy as sa

from benchmarks.growth import Requests
from rollmill.environments.samplers.uniform import Uniform
from rollmill.environments.tasks.listed import ListedTasks
from rollmill.errors import StorageError
from rollmill.rollouts.choices import Choices
from rollmill.storage.database import open_database
from rollmill.storage.objects import Objects
from rollmill.trajectories.admission import Experience, Member
from rollmill.trajectories.changes import trajectory_rows
from rollmill.trajectories.ledger import Ledger, NewGroup, UntakenGroups
from rollmill.trajectories.staleness import Pace
from rollmill.trajectories.trajectory_store import TrajectoryStore
from rollmill.types import Grade, LedgerState, StepRecord, Version
from tests.rollouts.world import make_task

PACE = Pace(100, 2, 0)
LARGE = ("groups", "ledger", "trajectories", "rewards", "step_trajectories")


@pytest.fixture
def engine(database_url: str) -> Iterator[sa.Engine]:
    engine = open_database(database_url)
    yield engine
    engine.dispose()


@contextlib.contextmanager
def statements(engine: sa.Engine) -> Iterator[list[tuple[str, Any]]]:
    """Every statement that is sent meanwhile, with its parameters."""
    sent: list[tuple[str, Any]] = []

    def note(connection: Any, cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        if not statement.startswith("BEGIN"):
            sent.append((statement, parameters))

    sa.event.listen(engine, "before_cursor_execute", note)
    try:
        yield sent
    finally:
        sa.event.remove(engine, "before_cursor_execute", note)


class ReadOnly(Requests):
    def delete(self, keys: Any) -> None:
        raise StorageError("the store is read-only")


def numbered(index: int) -> NewGroup:
    return NewGroup(f"g-{index:06d}", f"task-{index % 4}", [f"g-{index:06d}-{member}" for member in range(2)])


def play(engine: sa.Engine, store: TrajectoryStore, steps: int) -> Ledger:
    """A run of `steps` committed steps of two groups."""
    ledger = Ledger(engine, "run")
    for number in range(ledger.committed() + 1, steps + 1):
        pairs: dict[str, tuple[int, float, float]] = {}
        started = [ledger.start_group(numbered, pace=PACE) for _ in range(2)]
        named = [group for group, _ in filter(None, started)]
        for group in named:
            for id in group.ids:
                store.finish(id, f"p/{id}", None, tokens=2, sampled_tokens=1, segments=1)
                pairs[id] = (store.grade(id, Grade(1.0)), 1.0, 0.5)
            ledger.group_ready(group.id)
        ledger.write_step(StepRecord("run", number, "rl", tuple(group.id for group in named), pairs, {}, 0.0, 1e-6))
        ledger.commit_step(number, Version("rl", number), "digest")
    return ledger


def hot(ledger: Ledger, store: TrajectoryStore, engine: sa.Engine) -> dict[str, Callable[[], object]]:
    """What runs once per group, per step, or several times per second."""
    last = ledger.committed()
    return {
        "results of a step": lambda: ledger.results(last - 1, last),
        "groups started": ledger.groups_started,
        "open groups": ledger.open_groups,
        "untaken groups": ledger.untaken_groups,
        "changed groups": lambda: ledger.changed_groups(1),
        "a step": lambda: ledger.step(last),
        "what runs did with a trajectory": lambda: store.entries("g-000000-0"),
        "members": lambda: ledger.members(["g-000000"]),
        "start": lambda: ledger.start_group(numbered, pace=PACE),
        "rewards": lambda: store.rewards(["g-000000-0"]),
        "delete": lambda: store.delete("g-000000-0"),
    }


def test_no_hot_query_reads_a_whole_table(engine: sa.Engine, tmp_path: Any) -> None:
    store = TrajectoryStore(engine, Objects.open(tmp_path / "store"))
    ledger = play(engine, store, 4)
    for name, ask in hot(ledger, store, engine).items():
        with statements(engine) as sent:
            ask()
        assert sent
        for statement, parameters in sent:
            for line in plan(engine, statement, parameters):
                assert not scans(line), f"{name}: {line}\n{statement}"


def plan(engine: sa.Engine, statement: str, parameters: Any) -> list[str]:
    """How the database would answer a statement, if its tables were large."""
    postgresql = engine.dialect.name == "postgresql"
    one = parameters[0] if isinstance(parameters, list) else parameters
    with engine.connect() as connection:
        if postgresql:  # small tables are read whole whatever indexes there are
            connection.exec_driver_sql("SET LOCAL enable_seqscan = off")
        rows = connection.exec_driver_sql(("EXPLAIN " if postgresql else "EXPLAIN QUERY PLAN ") + statement, one)
        return [str(row[-1]) for row in rows]


def scans(line: str) -> bool:
    """Whether this line of a plan reads a large table from its beginning to its end, or all that a run has in it."""
    if line.startswith("SEARCH") and line.endswith("(run=?)"):
        return line.split()[1] in LARGE
    words = line.replace("Seq Scan on", "SCAN").replace("->", " ").split()
    return "SCAN" in words and words[words.index("SCAN") + 1] in LARGE and "USING" not in words


def test_a_hot_query_asks_as_often_after_many_steps_as_after_few(engine: sa.Engine, tmp_path: Any) -> None:
    store = TrajectoryStore(engine, Objects.open(tmp_path / "store"))
    counted = []
    for steps in (2, 16):
        ledger = play(engine, store, steps)
        counts = {}
        for name, ask in hot(ledger, store, engine).items():
            if name != "delete":
                with statements(engine) as sent:
                    ask()
                counts[name] = len(sent)
        counted.append(counts)
    assert counted[0] == counted[1]


def test_a_look_at_open_groups_reads_those_that_changed(engine: sa.Engine) -> None:
    ledger = Ledger(engine, "run")
    for count in (2, 16):
        while ledger.open_groups() < count:
            ledger.start_group(numbered, pace=PACE)
        untaken = UntakenGroups(ledger)
        first = untaken.look()
        assert len(first) == count and first == ledger.untaken_groups()
        with statements(engine) as sent:
            assert untaken.look() is first
        assert len(sent) == 1, "nothing has changed"
        seen, _ = ledger.changed_groups(None)
        dropped = {f"g-000001-{member}": (LedgerState.dropped, "a test") for member in range(2)}
        if count == 2:
            ledger.start_group(numbered, pace=PACE)
        else:
            ledger.close_group("g-000001", dropped, 1)
        assert len(ledger.changed_groups(seen)[1]) == 1
        assert untaken.look() == ledger.untaken_groups() != first


def test_admission_asks_as_often_for_many_groups_as_for_few(engine: sa.Engine) -> None:
    def found(name: str, count: int, oldest: int) -> list[Experience]:
        return [
            Experience(group, "task", "other", members(group), oldest)
            for group in (f"{name}-{number}" for number in range(count))
        ]

    def members(group: str) -> list[Member]:
        ids = [f"{group}-{member}" for member in range(2)]
        rows = trajectory_rows("other", group, "task", ids, {}, "production")
        return [Member(row["id"], {**row, "state": "finished", "payload_key": "p"}, Grade(1.0)) for row in rows]

    ledger, counted = Ledger(engine, "run"), []
    for count in (2, 16):
        groups = [*found(f"fresh-{count}", count, 0), *found(f"stale-{count}", count, -5)]
        with statements(engine) as sent:
            verdicts = ledger.admit(groups, pace=PACE)
        assert [each.decision for each in verdicts] == ["admitted"] * count + ["stale"] * count
        counted.append(len(sent))
        assert [each.decision for each in ledger.admit(groups, pace=PACE)] == ["refused"] * 2 * count
    assert counted[0] == counted[1]
    assert ledger.counts()["admitted"] == ledger.counts()["stale"] == 2 * (2 + 16)


def test_expired_conversations_are_deleted_together(engine: sa.Engine, tmp_path: Any) -> None:
    requests = Requests(Objects.open(tmp_path / "store"))
    objects = Objects(requests, "counted")
    store, counted = TrajectoryStore(engine, objects), []
    for count in (2, 16):
        ids = [f"{count}-{number:02d}" for number in range(count)]
        store.create("run", f"group-{count}", "task", ids, {}, "production")
        for id in ids:
            objects.put(f"p/{id}", b"what somebody wrote")
            store.finish(id, f"p/{id}", None, tokens=2, sampled_tokens=1, segments=1)
        requests.count.clear()
        with statements(engine) as sent:
            deleted, kept = store.delete_expired(-60.0)
        assert (sorted(deleted), kept, objects.list("p")) == (ids, {}, [])
        counted.append((len(sent), requests.count["stat"], requests.count["delete"]))
    assert counted[0] == counted[1] == (counted[0][0], 0, 1)


def test_a_deletion_that_was_interrupted_is_finished(engine: sa.Engine, tmp_path: Any) -> None:
    """The rows are deleted first. What is killed then has left the objects."""
    objects = Objects.open(tmp_path / "store")
    store = TrajectoryStore(engine, objects)
    store.create("run", "group", "task", ["a"], {}, "production")
    objects.put("p/a", b"what somebody wrote")
    store.finish("a", "p/a", None, tokens=2, sampled_tokens=1, segments=1)
    with pytest.raises(StorageError, match="read-only"):
        TrajectoryStore(engine, Objects(ReadOnly(objects), "read-only")).delete_expired(-60.0)
    assert store.get("a").state == "deleted" and objects.list("p") == ["p/a"]
    assert store.delete_expired(-60.0) == (["a"], {})
    assert objects.list("p") == [] and store.delete_expired(-60.0) == ([], {})


def test_a_choice_reads_nothing_while_no_step_was_committed(engine: sa.Engine, tmp_path: Any) -> None:
    ledger = play(engine, TrajectoryStore(engine, Objects.open(tmp_path / "store")), 3)
    choices = Choices(Uniform(), ListedTasks([make_task(number) for number in range(4)]), ledger, Pace(2, 2, 0), seed=0)
    with statements(engine) as sent:
        choices.read(3)
    assert sent
    with statements(engine) as sent:
        for index in range(8):
            choices.read(3)
            choices.choose(index, 3)
    assert not sent


@pytest.mark.parametrize("dispatchers", [1, 8])
def test_a_group_costs_as_many_statements_beside_other_dispatchers(engine: sa.Engine, dispatchers: int) -> None:
    """None of them loses a race for an index and asks again."""
    pace, count = Pace(16, 2, 0), 16

    def work(number: int) -> int:
        ledger, won = Ledger(engine, "run"), 0
        while ledger.start_group(numbered, pace=pace, holder=f"dispatcher-{number}") is not None:
            won += 1
        return won

    Ledger(engine, "run")
    with statements(engine) as sent, ThreadPoolExecutor(dispatchers) as pool:
        won = list(pool.map(work, range(dispatchers)))
    assert sum(won) == count
    asked = [statement for statement, _ in sent if "FROM runs" in statement and "started" in statement]
    assert len(asked) == count + dispatchers, "one look each, and the last one of each finds no room"


def test_any_number_of_ids_is_one_parameter(engine: sa.Engine, tmp_path: Any) -> None:
    store = TrajectoryStore(engine, Objects.open(tmp_path / "store"))
    ledger = play(engine, store, 1)
    many = ["g-000001-1", *(f"nobody-{number}" for number in range(70_000))]
    with statements(engine) as sent:
        found = store.rewards(many)
        assert ledger.members(many)["g-000001-1"] == []
    assert len(found) == len(many) and len(found["g-000001-1"]) == 1
    assert len(sent) == 2
