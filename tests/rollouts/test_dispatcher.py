"""The dispatcher's part of promises 4 and 5: the staleness bound always holds, and a restart loses nothing."""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollmill.environments.episode import Episode
from rollmill.environments.reward import Reward
from rollmill.environments.rewards.calls import Calls
from rollmill.environments.sampler import Draw, Sampler
from rollmill.environments.samplers.frontier import Frontier, FrontierConfig
from rollmill.environments.task import Task, TaskSet
from rollmill.environments.tasks.listed import ListedTasks
from rollmill.errors import HarnessError, RewardUnavailable, TaskError
from rollmill.rollouts.choices import Choices
from rollmill.rollouts.config import RolloutConfig
from rollmill.rollouts.dispatcher import POLL_S, Dispatcher
from rollmill.rollouts.gateway_client import GatewayClient
from rollmill.rollouts.rollout_context import RolloutContext
from rollmill.storage.database import open_database
from rollmill.trajectories.claims import Claims
from rollmill.trajectories.ledger import Ledger, UntakenGroups
from rollmill.trajectories.staleness import Pace
from rollmill.types import Grade, GroupState, LedgerState, StepRecord, TrajectoryState, Version
from tests.rollouts.world import (
    ADMIN,
    RUN,
    Additions,
    FailingHost,
    StandInLostGateway,
    World,
    make_task,
    open_world,
)
from tests.trajectories.build import start_group

pytestmark = pytest.mark.asyncio(loop_scope="module")
SIZE = 3


def make_dispatcher(
    world: World,
    *,
    context: RolloutContext | None = None,
    tasks: TaskSet | None = None,
    pace: Pace | None = None,
    sampler: Sampler | None = None,
    total: int = 3,
    claims: Claims | None = None,
    **config: Any,
) -> Dispatcher:
    """Without `pace`: three groups at once, one per step."""
    return Dispatcher(
        context or world.context,
        world.ledger,
        tasks or Additions(),
        RolloutConfig(max_answer_tokens=400, **{"concurrency": 16, **config}),
        run=RUN,
        seed=0,
        pace=pace or Pace(1, SIZE, max_staleness=2, steps=total),
        sampler=sampler,
        claims=claims,
    )


async def dispatch(world: World, *, groups: int, **named: Any) -> None:
    """Run a dispatcher until `groups` groups are waiting for a trainer, then stop it."""
    dispatching = asyncio.create_task(make_dispatcher(world, total=groups, **named).run())
    await until(lambda: dispatching.done() or len(world.ledger.groups(GroupState.waiting)) == groups)
    await stop(dispatching)
    if not dispatching.cancelled():
        await dispatching  # raises what it raised


def train_one_step(ledger: Ledger, groups_per_step: int) -> bool:
    """A stand-in for the trainer: it writes and commits the next step in the ledger and computes nothing."""
    groups = ledger.groups(GroupState.waiting)[:groups_per_step]
    if len(groups) < groups_per_step:
        return False
    number = ledger.committed() + 1
    members = [row for rows in ledger.members([group.id for group in groups]).values() for row in rows]
    excluded = {row.id: (LedgerState.no_signal, "stand-in") for row in members}
    names = tuple(group.id for group in groups)
    ledger.write_step(StepRecord(RUN, number, "main", names, {}, excluded, time.time()))
    ledger.commit_step(number, Version("main", number), f"digest-{number}")
    return True


async def until(condition: Any) -> None:
    while not await asyncio.to_thread(condition):  # noqa: ASYNC110 - what is waited for happens in the store
        await asyncio.sleep(0.005)


async def test_the_bound_holds_while_a_slow_trainer_commits(world: World) -> None:
    seen: list[int] = []
    dispatching = asyncio.create_task(make_dispatcher(world, pace=Pace(2, SIZE, 1, steps=4)).run())

    async def watch() -> None:
        while True:
            seen.append(await asyncio.to_thread(world.ledger.open_groups))

    watching = asyncio.create_task(watch())
    for step in range(4):
        await until(lambda: len(world.ledger.groups(GroupState.waiting)) >= (4 if step < 3 else 2))  # noqa: B023
        assert train_one_step(world.ledger, 2)
    await dispatching
    watching.cancel()
    assert max(seen) == 4  # the bound is reached and never exceeded
    groups = world.ledger.groups()
    assert [group.id for group in groups] == [f"{RUN}-{index:06d}" for index in range(8)]
    assert all(group.state == GroupState.final for group in groups)
    assert [group.min_version for group in groups] == sorted(group.min_version for group in groups)
    assert groups[-1].min_version >= 2  # later groups ask for newer weights


async def test_no_group_starts_while_the_bound_is_reached(world: World) -> None:
    dispatching = asyncio.create_task(make_dispatcher(world, pace=Pace(1, SIZE, 1, steps=4)).run())
    await until(lambda: len(world.ledger.groups(GroupState.waiting)) == 2)
    await asyncio.sleep(10 * POLL_S)
    assert world.ledger.groups_started() == 2 and not dispatching.done()
    assert train_one_step(world.ledger, 1)
    await until(lambda: world.ledger.groups_started() == 3)
    for _ in range(3):
        await until(lambda: train_one_step(world.ledger, 1))
    await dispatching
    assert world.ledger.groups_started() == 4


async def test_closed_groups_are_replaced_until_replacements_run_out(world: World) -> None:
    """The trainer closes all groups but one. Each step has twice the groups it needs; without any, training is over."""
    pace = Pace(2, SIZE, max_staleness=0, steps=3)
    dispatching = asyncio.create_task(make_dispatcher(world, pace=pace).run())
    for step, closed in ((1, pace.most_started(0) - 1), (2, pace.most_started(0))):
        for _ in range(closed):
            await until(lambda: world.ledger.groups(GroupState.waiting))
            (group, *_) = world.ledger.groups(GroupState.waiting)
            members = world.ledger.members([group.id])[group.id]
            world.ledger.close_group(group.id, {row.id: (LedgerState.no_signal, "stand-in") for row in members}, step)
        if step == 1:
            await asyncio.sleep(10 * POLL_S)
            assert world.ledger.groups_started() == pace.most_started(0) and world.ledger.open_groups() == 1
            assert train_one_step(world.ledger, 1)
    await dispatching
    assert world.ledger.groups_started() == pace.most_started(1) and world.ledger.committed() == 1


async def test_a_failed_rollout_leaves_its_group_usable(world: World) -> None:
    machines = FailingHost(lambda asked: asked == 2, world.context.machines)
    context = replace(world.context, machines=machines)
    await dispatch(world, context=context, groups=1, attempts=1)
    (group,) = world.ledger.groups(GroupState.waiting)
    states = Counter(row.state for row in world.ledger.members([group.id])[group.id])
    assert states == {TrajectoryState.graded: SIZE - 1, TrajectoryState.failed: 1}


async def test_a_rollout_that_the_infrastructure_lost_is_tried_again(world: World) -> None:
    machines = FailingHost(lambda asked: asked in (2, 4), world.context.machines)
    await dispatch(world, context=replace(world.context, machines=machines), groups=1, concurrency=1)
    ids = [row.id for row in world.ledger.members([f"{RUN}-000000"])[f"{RUN}-000000"]]
    assert sorted(ids) == [f"{RUN}-000000-0", f"{RUN}-000000-1_2", f"{RUN}-000000-2"]
    assert all(world.row(id).state == TrajectoryState.graded for id in ids)
    assert world.ledger.counts()["dropped"] == 2 and len(world.context.trajectories.list(run=RUN)) == SIZE + 2
    assert {reason for state, reason in world.ledger.reasons()} == {
        f"replaced by {RUN}-000000-1_{attempt}: machine: no machine could be created: out of machines\nhint: buy more"
        for attempt in (1, 2)
    }


async def test_fresh_attempts_end_and_a_task_that_is_wrong_gets_none(world: World) -> None:
    """The machine of member 1 is never created; the image of the second task does not exist."""
    broken = FailingHost(lambda asked: asked in (2, 4, 5), world.context.machines)
    await dispatch(world, context=replace(world.context, machines=broken), groups=1, concurrency=1)

    class Wrong(Additions):
        def train(self, seed: int) -> Iterator[Task]:
            return itertools.cycle([make_task(0), make_task(1, image="absent")])

    await dispatch(world, tasks=Wrong(), groups=2)
    states = Counter((row.group_id[-1], row.state.value) for row in world.context.trajectories.list(run=RUN))
    assert states == {("0", "graded"): SIZE - 1, ("0", "failed"): 3, ("1", "failed"): SIZE}


def leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for each in error.exceptions:
            yield from leaves(each)
    else:
        yield error


async def test_a_host_that_only_fails_stops_the_run(world: World) -> None:
    context = replace(world.context, machines=FailingHost(lambda asked: True))
    with pytest.raises(BaseExceptionGroup) as raised:
        await dispatch(world, context=context, groups=3, give_up_after=4, concurrency=1)
    errors = list(leaves(raised.value))
    assert all(isinstance(error, HarnessError) for error in errors)
    error = str(min(errors, key=str))  # rollouts that fail before they are cancelled tell of 5 and more
    assert "last 4 rollouts all failed" in error and "out of machines" in error and "doctor" in error
    failed = world.context.trajectories.list(run=RUN, state=TrajectoryState.failed)
    assert 4 <= len(failed) < 3 * SIZE  # most of the waiting rollouts did not start


async def test_failures_with_successes_in_between_do_not_stop_the_run(world: World) -> None:
    machines = FailingHost(lambda asked: asked % 2 == 0, world.context.machines)
    context = replace(world.context, machines=machines)
    await dispatch(world, context=context, groups=2, give_up_after=2, concurrency=1)
    assert len(world.ledger.groups(GroupState.waiting)) == 2


# samplers


async def trained_tasks(world: World, *, killed: bool) -> list[str]:
    """The tasks of six groups, one per step, chosen by `frontier`; the dispatcher is replaced before each if killed."""
    tasks, pace = ListedTasks([make_task(number) for number in range(6)]), Pace(1, SIZE, max_staleness=0, steps=6)
    dispatching: asyncio.Task[None] | None = None
    for step in range(1, 7):
        if killed and dispatching is not None:
            await stop(dispatching)
        if killed or dispatching is None:
            sampler = Frontier(FrontierConfig())
            dispatching = asyncio.create_task(make_dispatcher(world, tasks=tasks, pace=pace, sampler=sampler).run())
        await until(lambda: world.ledger.groups(GroupState.waiting))
        assert train_one_step(world.ledger, 1) and world.ledger.committed() == step
    assert dispatching is not None
    await dispatching
    return [group.task_id for group in world.ledger.groups()]


async def test_the_choices_of_a_sampler_are_the_same_after_restarts(world: World, tmp_path: Path) -> None:
    chosen = await trained_tasks(world, killed=False)
    async with open_world(tmp_path / "again", world.tokenizer, world.context.machines) as again:
        assert await trained_tasks(again, killed=True) == chosen
    # each follows from what the ledger has: the seed, the index, and the version the group was admitted with
    tasks = ListedTasks([make_task(number) for number in range(6)])
    for index, group in enumerate(world.ledger.groups()):
        choices = Choices(Frontier(FrontierConfig()), tasks, world.ledger, Pace(1, SIZE, 0, steps=6), seed=0)
        choices.read(group.min_version)
        assert choices.choose(index, group.min_version).id == group.task_id
    results = world.ledger.results(0, 6)
    assert [result.solved for result in results] == [int(result.task_id[-1]) % 2 == 0 for result in results]
    assert all(result.turns == 3 and result.tokens > 0 for result in results)


async def test_a_group_starts_only_with_the_results_its_task_was_chosen_by(world: World) -> None:
    pace = Pace(9, 1, 0)
    assert start_group(world.ledger, "a", "task", 1, pace=pace, ids=["a-0"], committed=1) is None
    assert start_group(world.ledger, "a", "task", 1, pace=pace, ids=["a-0"], committed=0) == 0


@pytest.mark.parametrize(("chosen", "said"), [(None, "returned NoneType"), (KeyError("x"), "KeyError: 'x'")])
async def test_a_sampler_that_returns_nonsense_ends_the_run_with_its_name(world: World, chosen: Any, said: str) -> None:
    class Broken(Sampler):
        name = "broken"

        def choose(self, tasks: TaskSet, draw: Draw) -> Task:
            if isinstance(chosen, Exception):
                raise chosen
            return chosen

    with pytest.raises(BaseExceptionGroup) as raised:
        await make_dispatcher(world, sampler=Broken()).run()
    assert "'broken'" in str(raised.value.exceptions[0]) and said in str(raised.value.exceptions[0])


# restarts


class StandInGrader(Reward):
    """Grades the first `grades` submissions, then hangs."""

    name = "stand-in"

    def __init__(self, grades: int) -> None:
        self._grades = grades
        self.asked = 0

    async def grade(self, *arguments: Any) -> Grade:
        self.asked += 1
        if self.asked > self._grades:
            await asyncio.Future()
        return await Calls().grade(*arguments)


async def test_episodes_that_are_graded_keep_no_other_from_running(world: World) -> None:
    """Nor are more graded at once than may be: the rest waits, handed in."""
    grader = StandInGrader(grades=0)
    pace = Pace(1, SIZE, max_staleness=0, steps=1)
    context = replace(world.context, grader=grader)
    dispatcher = make_dispatcher(world, context=context, pace=pace, concurrency=1, grading_concurrency=2)
    dispatching = asyncio.create_task(dispatcher.run())
    rows = world.context.trajectories.list
    await until(lambda: [row.state for row in rows(run=RUN)] == [TrajectoryState.finished] * SIZE)
    await until(lambda: grader.asked >= 2)
    assert dispatcher._grading.full and grader.asked == 2
    await stop(dispatching)


class StandInJudge(Reward):
    """Grades as the hidden tests do, unless it is down."""

    name = "judge"
    down = True
    asked = 0

    async def grade(self, episode: Episode) -> Grade:
        self.asked += 1
        if self.down:
            raise RewardUnavailable("the judge is down")
        return await Calls().grade(episode)


async def test_a_run_waits_for_its_judge_and_loses_no_episode(world: World) -> None:
    """However long it is down: no episode is dropped, so none counts as a failure of this host."""
    judge, pace = StandInJudge(), Pace(1, SIZE, max_staleness=0, steps=1)
    context = replace(world.context, grader=judge, grading_timeout_s=0.5)
    dispatching = asyncio.create_task(make_dispatcher(world, context=context, pace=pace).run())
    rows = world.context.trajectories.list
    # the pauses between so many are longer than the limit
    ended = {TrajectoryState.failed, TrajectoryState.graded}
    await until(lambda: judge.asked >= SIZE * 6 or ended & {row.state for row in rows(run=RUN)} or dispatching.done())
    states, judge.down = [row.state for row in rows(run=RUN)], False
    await until(lambda: all(row.state in ended for row in rows(run=RUN)) or dispatching.done())
    await stop(dispatching)
    assert states == [TrajectoryState.finished] * SIZE
    assert [row.state for row in rows(run=RUN)] == [TrajectoryState.graded] * SIZE


class StandInGateway(GatewayClient):
    """Hangs in `seal`: after the session was sealed if `asks`, else before the request."""

    def __init__(self, url: str, *, asks: bool) -> None:
        super().__init__(url, ADMIN)
        self._asks = asks
        self.waiting = 0

    async def seal(self, trajectory: str, submission_key: str | None) -> dict[str, Any]:
        if self._asks:
            await super().seal(trajectory, submission_key)
        self.waiting += 1
        return await asyncio.Future()


async def stop(dispatching: asyncio.Task[None]) -> None:
    """Cancel the dispatcher, as if its process had died."""
    dispatching.cancel()
    await asyncio.wait([dispatching])


def check_books(world: World, groups: int) -> dict[str, list[str]]:
    """Every group is complete and ready, every member graded. Returns their ids by group."""
    waiting = world.ledger.groups(GroupState.waiting)
    members = world.ledger.members([group.id for group in waiting])
    assert len(waiting) == groups and all(len(rows) == SIZE for rows in members.values())
    assert all(row.state == TrajectoryState.graded for rows in members.values() for row in rows)
    rows = world.context.trajectories.list(run=RUN)
    assert sum(world.ledger.counts().values()) == len(rows)
    # no trajectory has two rewards: the restart graded only what had no reward
    assert all(len(grades) <= 1 for grades in world.context.trajectories.rewards([row.id for row in rows]).values())
    return {group: [row.id for row in rows] for group, rows in members.items()}


async def test_a_restart_grades_finished_trajectories_and_replaces_lost_ones(world: World) -> None:
    blocked: set[str] = set()

    async def block(session: str, turn: int) -> None:
        if any(f"{RUN}-{lost}" in session for lost in ("000000-1", "000001-0")):
            blocked.add(session)
            await asyncio.Future()

    world.engine.on_turn = block
    context, pace = replace(world.context, grader=StandInGrader(grades=5)), Pace(3, SIZE, max_staleness=0, steps=2)
    dispatching = asyncio.create_task(make_dispatcher(world, context=context, pace=pace).run())

    def stuck() -> bool:
        states = Counter(row.state for row in world.context.trajectories.list(run=RUN))
        return (states[TrajectoryState.graded], states[TrajectoryState.finished], len(blocked)) == (5, 2, 2)

    await until(stuck)
    finished = {row.id for row in world.context.trajectories.list(run=RUN, state=TrajectoryState.finished)}
    await stop(dispatching)
    # stop once more, in the middle of the recovery
    blocked.clear()
    again = asyncio.create_task(make_dispatcher(world, context=context, pace=pace).run())
    await until(lambda: len(blocked) == 2)
    await stop(again)

    world.engine.on_turn = None
    last = asyncio.create_task(make_dispatcher(world, pace=pace).run())
    await until(lambda: len(world.ledger.groups(GroupState.waiting)) == 3)
    members = check_books(world, 3)
    assert members[f"{RUN}-000000"] == [f"{RUN}-000000-0", f"{RUN}-000000-2", f"{RUN}-000000-1_2"]
    assert members[f"{RUN}-000001"] == [f"{RUN}-000001-1", f"{RUN}-000001-2", f"{RUN}-000001-0_2"]
    assert finished <= {id for ids in members.values() for id in ids}
    assert world.ledger.counts()["dropped"] == 4
    assert "dispatcher was restarted" in str(world.row(f"{RUN}-000000-1").reason)
    assert train_one_step(world.ledger, 3)  # and the run continues
    await until(lambda: len(world.ledger.groups(GroupState.waiting)) == 3)
    assert [group.id for group in UntakenGroups(world.ledger).look()] == [f"{RUN}-{index:06d}" for index in (3, 4, 5)]
    assert train_one_step(world.ledger, 3)
    await last
    assert await world.open_sessions() == 0


@pytest.mark.parametrize("asks", [True, False], ids=["heard too late", "never asked"])
async def test_a_stored_submission_is_graded_after_a_restart_around_the_seal(world: World, asks: bool) -> None:
    async with StandInGateway(world.context.gateway.base_url, asks=asks) as gateway:
        context = replace(world.context, gateway=gateway)
        dispatching = asyncio.create_task(make_dispatcher(world, context=context, total=1).run())
        await until(lambda: gateway.waiting == SIZE)
        await stop(dispatching)
    await dispatch(world, groups=1)
    assert check_books(world, 1) == {f"{RUN}-000000": [f"{RUN}-000000-{member}" for member in range(SIZE)]}
    assert world.ledger.counts()["dropped"] == 0


async def test_a_gateway_that_is_lost_after_it_sealed_again_loses_nothing(world: World) -> None:
    async with StandInGateway(world.context.gateway.base_url, asks=False) as first:
        dispatching = asyncio.create_task(
            make_dispatcher(world, context=replace(world.context, gateway=first), total=1).run()
        )
        await until(lambda: first.waiting == SIZE)
        await stop(dispatching)
    async with StandInLostGateway(world.context.gateway.base_url) as second:
        await dispatch(world, context=replace(world.context, gateway=second), groups=1)
    ids = [f"{RUN}-000000-{member}" for member in range(SIZE)]
    assert check_books(world, 1) == {f"{RUN}-000000": ids} and sorted(second.sealed) == ids
    assert world.ledger.counts()["dropped"] == 0


async def test_grading_that_fails_after_a_restart_fails_its_own_trajectory(world: World) -> None:
    context = replace(world.context, grader=StandInGrader(grades=0))
    dispatching = asyncio.create_task(make_dispatcher(world, context=context, total=1).run())
    await until(lambda: len(world.context.trajectories.list(run=RUN, state=TrajectoryState.finished)) == SIZE)
    await stop(dispatching)
    broken = FailingHost(lambda asked: asked == 1, world.context.grading_machines)
    context = replace(world.context, grading_machines=broken, attempts=1)
    await dispatch(world, context=context, groups=1)
    (group,) = world.ledger.groups(GroupState.waiting)
    states = Counter(row.state for row in world.ledger.members([group.id])[group.id])
    assert states == {TrajectoryState.graded: SIZE - 1, TrajectoryState.failed: 1}


async def test_a_reward_that_cannot_be_stored_does_not_end_the_run_for_ever(world: World) -> None:
    """The first dispatcher stops before it grades. The second has a grader whose evidence is infinite."""
    context = replace(world.context, grader=StandInGrader(grades=0))
    dispatching = asyncio.create_task(make_dispatcher(world, context=context, total=1).run())
    await until(lambda: len(world.context.trajectories.list(run=RUN, state=TrajectoryState.finished)) == SIZE)
    await stop(dispatching)

    class Infinite(Reward):
        name = "infinite"

        async def grade(self, *arguments: Any) -> Grade:
            return Grade(0.0, evidence={"first_wrong": math.inf})

    await dispatch(world, context=replace(world.context, grader=Infinite()), groups=1)
    (group,) = world.ledger.groups(GroupState.waiting)
    assert {row.state for row in world.ledger.members([group.id])[group.id]} == {TrajectoryState.failed}


async def test_a_task_that_no_longer_exists_fails_its_own_group_after_a_restart(world: World) -> None:
    async def block(session: str, turn: int) -> None:
        if "-000000-1" in session:
            await asyncio.Future()

    class FewerTasks(Additions):
        def get(self, task_id: str) -> Task:
            raise TaskError(f"{task_id} names no task")

    world.engine.on_turn = block
    context = replace(world.context, grader=StandInGrader(grades=1))
    dispatching = asyncio.create_task(make_dispatcher(world, context=context, total=1).run())

    def stuck() -> bool:
        states = Counter(row.state for row in world.context.trajectories.list(run=RUN))
        return (states[TrajectoryState.graded], states[TrajectoryState.finished]) == (1, 1)

    await until(stuck)
    await stop(dispatching)
    world.engine.on_turn = None
    await dispatch(world, tasks=FewerTasks(), groups=2)
    first, second = world.ledger.groups(GroupState.waiting)
    members = world.ledger.members([first.id, second.id])
    assert Counter(row.state for row in members[first.id]) == {TrajectoryState.graded: 1, TrajectoryState.failed: 2}
    assert all(row.state == TrajectoryState.graded for row in members[second.id])
    failed = [row for row in members[first.id] if row.state == TrajectoryState.failed]
    assert all("names no task" in str(row.reason) for row in failed)
    assert await world.open_sessions() == 0


# several dispatchers


async def test_dispatchers_share_the_groups_and_play_those_of_one_that_died(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second dies with a rollout in the middle; the first plays its groups, and both together what is left."""
    monkeypatch.setattr("rollmill.rollouts.dispatcher.RENEW_S", 0.05)
    database = open_database(f"sqlite:///{world.directory}/mill.db")
    pace = Pace(2, SIZE, max_staleness=1, steps=4)
    blocked = asyncio.Event()

    async def block(session: str, turn: int) -> None:
        if not blocked.is_set() and f"{RUN}-000000-1" in session:
            blocked.set()
            await asyncio.Future()

    def begin(name: str) -> asyncio.Task[None]:
        claims = Claims(database, RUN, name)
        return asyncio.create_task(make_dispatcher(world, pace=pace, claims=claims, concurrency=SIZE + 1).run())

    world.engine.on_turn = block
    dying = begin("dispatcher-2")
    await blocked.wait()
    first = begin("dispatcher")
    await until(lambda: len(world.ledger.groups(GroupState.waiting)) == 3)  # all that the bound allows but the blocked
    await stop(dying)
    Claims(database, RUN, "dispatcher-2", lease_s=-1.0).hold()  # as if its lease had expired
    await until(lambda: len(world.ledger.groups(GroupState.waiting)) == 4)
    check_books(world, 4)
    second = begin("dispatcher-2")
    for _ in range(4):
        await until(lambda: train_one_step(world.ledger, 2))
    await asyncio.gather(first, second)
    groups = world.ledger.groups()
    assert sorted(group.id for group in groups) == [f"{RUN}-{index:06d}" for index in range(8)]
    assert all(group.state == GroupState.final for group in groups)
    rows = world.context.trajectories.list(run=RUN, limit=1000)
    assert Counter(row.state for row in rows) == {TrajectoryState.graded: 8 * SIZE, TrajectoryState.failed: 1}
    assert world.ledger.counts()["dropped"] == 1 and sum(world.ledger.counts().values()) == len(rows)


async def test_a_dispatcher_whose_name_another_process_has_stops(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollmill.rollouts.dispatcher.RENEW_S", 0.01)
    database = open_database(f"sqlite:///{world.directory}/mill.db")
    old = asyncio.create_task(make_dispatcher(world, claims=Claims(database, RUN, "dispatcher")).run())
    await until(lambda: world.ledger.groups_started() == 3)
    Claims(database, RUN, "dispatcher").hold()
    with pytest.raises(BaseExceptionGroup) as raised:
        await old
    assert "has lost its lease" in str(raised.value.exceptions[0])
