"""Groups that exist already enter a run's ledger: only while they fit, once, and never past their deadline."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import sqlalchemy as sa

from rollmill.errors import TrajectoryChanged
from rollmill.storage import tables
from rollmill.storage.database import open_database, reading
from rollmill.storage.objects import Objects
from rollmill.training.rl.deadlines import Candidate, choose_groups
from rollmill.trajectories.admission import Experience, Member, Room, copied_row, oldest_position, renamed
from rollmill.trajectories.ledger import Ledger
from rollmill.trajectories.payload import encode_trajectory, seal_facts
from rollmill.trajectories.staleness import Pace
from rollmill.trajectories.trajectory_store import TrajectoryStore
from rollmill.types import Grade, GroupState, LedgerState, PolicyRef, Version
from tests.trajectories import build
from tests.trajectories.build import start_group
from tests.trajectories.test_ledger import record, settle

PACE = Pace(groups_per_step=2, group_size=2, max_staleness=1, steps=20)


def stored(store: TrajectoryStore, objects: Objects, group: str, oldest: int = 0, size: int = 2) -> Experience:
    """A group of another run, graded."""
    members = []
    for number in range(size):
        id = f"{group}-{number}"
        made = build.trajectory(id, group_id=group)
        objects.put(f"trajectories/{id}.zst", encode_trajectory(made))
        store.create("other/rl", group, "bug/7", [id], made.provenance)
        store.finish(id, f"trajectories/{id}.zst", None, **seal_facts(made))
        store.grade(id, Grade(float(number), {"tests": float(number)}, {}, "tests"))
        members.append(Member(id, copied_row(store.get(id), made), Grade(float(number))))
    return Experience(group, "bug/7", "other/rl", members, oldest)


def start(ledger: Ledger, group: str) -> bool:
    ids = [f"{group}-{n}" for n in range(2)]
    return start_group(ledger, group, "task", 2, pace=PACE, ids=ids) is not None


def decisions(ledger: Ledger, *groups: Experience, dry_run: bool = False) -> list[str]:
    return [verdict.decision for verdict in ledger.admit(groups, pace=PACE, dry_run=dry_run)]


def commit(ledger: Ledger, number: int, *groups: str) -> None:
    ledger.write_step(record(ledger, number, *groups))
    ledger.commit_step(number, Version("rl", number), f"digest {number}")


def test_an_admitted_group_is_ready_counts_as_open_and_is_trained_on(
    store: TrajectoryStore, objects: Objects, ledger: Ledger
) -> None:
    group = stored(store, objects, "x")
    assert decisions(ledger, group, dry_run=True) == ["admitted"] and ledger.groups() == []
    assert decisions(ledger, group) == ["admitted"]
    (row,) = ledger.untaken_groups()
    assert (row.state, row.size, row.min_version, row.origin) == (GroupState.waiting, 2, 0, "other/rl")
    assert ledger.open_groups() == 1 and ledger.groups_started() == 0, "the dispatcher did not start it"
    assert [start(ledger, name) for name in "abcd"] == [True, True, True, False], "it counts against the bound"
    assert [each.id for each in ledger.entered("x")] == ["x-0", "x-1"]
    commit(ledger, 1, "x")
    assert ledger.counts()["trained"] == 2 and store.get("x-0").run == "other/rl"
    assert [each.task_id for each in ledger.results(0, 1)] == ["bug/7", "bug/7"]


def test_nothing_is_admitted_twice(store: TrajectoryStore, objects: Objects, ledger: Ledger, engine: sa.Engine) -> None:
    group = stored(store, objects, "x")
    assert decisions(ledger, group, group) == ["admitted", "refused"]
    (verdict,) = ledger.admit([group], pace=PACE)
    assert (verdict.decision, verdict.reason) == ("refused", "in the ledger already: admitted")
    commit(ledger, 1, "x")
    (verdict,) = ledger.admit([group], pace=PACE)
    assert verdict.reason == "in the ledger already: trained"
    more = dataclasses.replace(stored(store, objects, "y"), group_id="x")
    assert decisions(ledger, more) == ["refused"], "a group is decided on whole"
    assert decisions(Ledger(engine, "second"), group) == ["admitted"], "another run decides for itself"


def test_a_group_past_its_deadline_is_recorded_as_stale(
    store: TrajectoryStore, objects: Objects, ledger: Ledger
) -> None:
    for number in (1, 2):
        start(ledger, f"own{number}")
        settle(store, ledger, f"own{number}")
        commit(ledger, number, f"own{number}")
    old, due = stored(store, objects, "old", oldest=0), stored(store, objects, "due", oldest=1)
    assert decisions(ledger, old, due, dry_run=True) == ["stale", "admitted"]
    assert decisions(ledger, old, due) == ["stale", "admitted"]
    assert ledger.counts()["stale"] == 2 and ledger.counts()["admitted"] == 2
    ((state, reason),) = ledger.reasons()
    assert state == LedgerState.stale and "step 2 was the last" in reason and "the next one is 3" in reason
    final = {group.id: (group.state, group.step) for group in ledger.groups()}
    assert final["old"] == (GroupState.final, None) and ledger.open_groups() == 1
    assert decisions(ledger, old) == ["refused"] and ledger.counts()["stale"] == 2
    assert len(ledger.results(0, 9)) == 4, "stale ones teach no sampler and no baseline"


def test_a_step_chooses_again_when_a_group_is_admitted_meanwhile(
    store: TrajectoryStore, objects: Objects, ledger: Ledger
) -> None:
    for name in ("a", "b"):
        start(ledger, name)
        settle(store, ledger, name)
    chosen = record(ledger, 1, "a")
    start(ledger, "younger")  # of the dispatcher: it has the latest deadline of all
    assert decisions(ledger, stored(store, objects, "x", oldest=-1)) == ["admitted"]
    with pytest.raises(TrajectoryChanged, match="group x was admitted meanwhile"):
        ledger.write_step(chosen, {"a", "b"})
    assert ledger.steps() == []
    ledger.write_step(record(ledger, 1, "x", "a"), {"a", "b", "x"})


def test_a_step_that_has_its_groups_takes_no_other(store: TrajectoryStore, objects: Objects, ledger: Ledger) -> None:
    """Step 1 is written and not committed: what is due by step 1 comes too late."""
    start(ledger, "own")
    settle(store, ledger, "own")
    ledger.write_step(record(ledger, 1, "own"))
    assert decisions(ledger, stored(store, objects, "x", oldest=-1)) == ["stale"]


def test_no_room(store: TrajectoryStore, objects: Objects, ledger: Ledger) -> None:
    for name in "abcd":
        assert start(ledger, name)
    (verdict,) = ledger.admit([stored(store, objects, "x")], pace=PACE)
    assert verdict.decision == "no_room" and "4 groups are open" in verdict.reason
    assert "x-0" not in {id for group in ledger.groups() for id in [row.id for row in ledger.entered(group.id)]}
    ledger.close_group("a", {f"a-{n}": (LedgerState.dropped, "failed") for n in range(2)}, 1)
    assert decisions(ledger, stored(store, objects, "y"), stored(store, objects, "z")) == ["admitted", "no_room"]


def test_a_group_does_not_push_others_over_their_deadlines() -> None:
    """groups_per_step = 2, and step 5 is next."""
    pace = Pace(groups_per_step=2, group_size=2, max_staleness=2)
    group = Experience("x", "task", "other", (), oldest=2)  # due by step 5

    def judged(*untaken: int) -> str:
        return Room(pace, committed=4, written=4, open=len(untaken), untaken=Counter(untaken)).judge(group)[0]

    assert judged() == judged(5) == judged(5, 7, 7) == "admitted"
    assert judged(5, 5) == "no_room", "step 5 is full"
    assert judged(6, 6, 6) == "admitted" and judged(6, 6, 6, 6) == "no_room", "one of them would be too old after 6"
    assert judged(7, 7, 7, 7, 7, 7) == "no_room"
    last = dataclasses.replace(pace, steps=4)
    assert Room(last, committed=4, written=4, open=0, untaken={}).judge(group)[0] == "refused"


def test_what_is_known_of_the_room_does_not_grow_with_the_groups() -> None:
    """A cycle admits all its conversations at once: each is judged by counts of deadlines, not by all groups."""
    room, groups = Room(Pace(500, 1, 3, 4), committed=0, written=0, open=0, untaken={}), 2001
    for number in range(groups):
        group = Experience(str(number), "", "production", (), oldest=-(number % 2))
        decision, _ = room.judge(group)
        assert decision == ("admitted" if number < 2000 else "no_room")
        room = room.with_group(group)
    assert room.untaken == {3: 1000, 4: 1001} and room.open == groups


def test_a_trajectory_that_was_deleted_meanwhile(store: TrajectoryStore, objects: Objects, ledger: Ledger) -> None:
    group = stored(store, objects, "x")
    store.delete("x-1")
    (verdict,) = ledger.admit([group], pace=PACE)
    assert (verdict.decision, verdict.reason) == ("refused", "x-1 is deleted") and ledger.groups() == []


def test_rows_are_copied_into_another_database(
    store: TrajectoryStore, objects: Objects, ledger: Ledger, tmp_path: Path
) -> None:
    elsewhere = open_database(f"sqlite:///{tmp_path}/elsewhere.db")
    source = TrajectoryStore(elsewhere, objects)
    fresh, old = stored(source, objects, "x"), stored(source, objects, "y", oldest=-9)
    assert decisions(ledger, fresh, old) == ["admitted", "stale"]
    row, original = store.get("x-1"), source.get("x-1")
    assert dataclasses.replace(original, reward_id=row.reward_id) == row and (row.reward, row.solved) == (1.0, True)
    assert store.load("x-1").segments[0].policies == build.POLICIES
    assert store.get("y-0").payload_key is None, "nobody will read it"
    second = Ledger(store._engine, "second")
    assert decisions(second, fresh) == ["admitted"], "the rows are there already"
    assert decisions(second, dataclasses.replace(old, oldest=0)) == ["admitted"], "another stage has other deadlines"
    assert store.get("y-0").payload_key == "trajectories/y-0.zst"


def test_admission_beside_a_dispatcher_and_a_trainer(
    store: TrajectoryStore, objects: Objects, ledger: Ledger, engine: sa.Engine
) -> None:
    """Two threads admit the same groups, one starts groups, one trains what is ready: the bound holds, every group is
    trained on by its deadline, and the books add up."""
    groups = [stored(store, objects, f"x{number}") for number in range(6)]
    most: list[int] = []

    def admit() -> int:
        return sum(decisions(ledger, group).count("admitted") for _ in range(3) for group in groups)

    def dispatch() -> int:
        return sum(start(ledger, f"own{number}") for number in range(12))

    def train() -> None:
        for _ in range(30):
            most.append(ledger.open_groups())
            for group in ledger.groups(GroupState.running):
                settle(store, ledger, group.id)
            number, untaken = ledger.committed() + 1, ledger.untaken_groups()
            ready = [Candidate(each.id, PACE.deadline(each.min_version), each.state == "waiting") for each in untaken]
            taken = choose_groups(ready, number, PACE.groups_per_step).take
            if taken is not None:
                with contextlib.suppress(TrajectoryChanged):
                    ledger.write_step(record(ledger, number, *taken), {each.id for each in untaken})
                    ledger.commit_step(number, Version("rl", number), f"digest {number}")

    with ThreadPoolExecutor(4) as pool:
        training, dispatching = pool.submit(train), pool.submit(dispatch)
        admitting, again = pool.submit(admit), pool.submit(admit)
        training.result()
        admitted, started = admitting.result() + again.result(), dispatching.result()
    found = ledger.groups()
    late = [group for group in found if group.step is not None and group.step > PACE.deadline(group.min_version)]
    assert late == [] and ledger.committed() > 1
    assert max(most, default=0) <= PACE.most_open(0) == 4 and ledger.groups_started() == started
    assert admitted == sum(group.origin is not None for group in found) - ledger.counts()["stale"] // 2
    with reading(engine) as connection:
        entries = connection.execute(sa.select(tables.ledger.c.trajectory)).scalars().all()
    assert len(entries) == len(set(entries)) == sum(ledger.counts().values()) == 2 * len(found)


def test_the_oldest_token_decides() -> None:
    made = build.trajectory()
    numbers = {"rl": 0}

    def position(policy: PolicyRef) -> int | None:
        return policy.number + numbers[policy.line] if policy.line in numbers else None

    assert oldest_position(made, position) == 3
    unused = dataclasses.replace(made.segments[0], policies=[*build.POLICIES, PolicyRef("x", 0, "bf16", "c" * 64)])
    assert oldest_position(dataclasses.replace(made, segments=[unused]), position) == 3, "nothing was sampled by it"
    numbers.clear()
    assert "no ancestor of this stage" in str(oldest_position(made, position))
    assert oldest_position(dataclasses.replace(made, segments=[]), position) == "no token of it was sampled"


def test_names_change_and_tokens_do_not() -> None:
    made = build.trajectory()
    copy = renamed(made, lambda policy: Version(f"first-{policy.line}", policy.number))
    assert [(each.line, each.digest) for each in copy.segments[0].policies] == [
        ("first-rl", policy.digest) for policy in build.POLICIES
    ]
    for before, after in zip(made.segments, copy.segments, strict=True):
        assert after.tokens is before.tokens and after.logprobs is before.logprobs and after.policy is before.policy


@pytest.mark.parametrize("oldest", [-3, 0])
def test_versions_of_the_parent_line_count_below_zero(
    oldest: int, store: TrajectoryStore, objects: Objects, ledger: Ledger
) -> None:
    group = stored(store, objects, "x", oldest=oldest)
    assert decisions(ledger, group) == ["admitted" if oldest + PACE.max_staleness >= 0 else "stale"]
