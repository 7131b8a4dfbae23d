"""Everything random in a rollout follows from the run's seed: the same seed gives the same tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import replace

import pytest

from rollmill.demo.coding import CodingConfig, CodingHarness
from rollmill.evals.evaluation import Examination, run_eval
from rollmill.evals.suite import EvalConfig
from rollmill.rollouts.config import RolloutConfig
from rollmill.rollouts.dispatcher import Dispatcher
from rollmill.rollouts.rollout import rollout_seed
from rollmill.rollouts.rollout_context import RolloutContext
from rollmill.storage.database import open_database
from rollmill.trajectories.ledger import Ledger
from rollmill.trajectories.staleness import Pace
from rollmill.trajectories.table_rows import TrajectoryRow
from rollmill.trajectories.trajectory_store import TrajectoryStore
from rollmill.types import GroupState, TrajectoryState
from tests.rollouts.world import Additions, World, real_engine

Answers = dict[str, list[list[int]]]  # which rollout → the tokens of each of its segments
on_one_loop = pytest.mark.asyncio(loop_scope="module")


async def train(world: World, context: RolloutContext, run: str, seed: int, longest: int = 12) -> list[TrajectoryRow]:
    """Two groups of two rollouts, one rollout at a time. Returns their rows."""
    ledger = Ledger(open_database(f"sqlite:///{world.directory}/mill.db"), run)
    config = RolloutConfig(concurrency=1, max_answer_tokens=longest)
    tasks = Additions()
    pace = Pace(2, group_size=2, max_staleness=0, steps=1)
    dispatcher = Dispatcher(context, ledger, tasks, config, run=run, seed=seed, pace=pace)
    dispatching = asyncio.create_task(dispatcher.run())
    while len(await asyncio.to_thread(ledger.groups, GroupState.waiting)) < 2:
        assert not dispatching.done()
        await asyncio.sleep(0.005)
    dispatching.cancel()
    return context.trajectories.list(run=run)


async def evaluate(context: RolloutContext, run: str, seed: int) -> list[TrajectoryRow]:
    suite = EvalConfig(tasks=2, attempts=2, family_tasks=0, greedy=False, concurrency=1)
    await run_eval(context, Additions(), suite, Examination(run, "before", 1, max_answer_tokens=12, seed=seed))
    return context.trajectories.list(run=f"{run}/eval-before")


def answers(store: TrajectoryStore, rows: Iterable[TrajectoryRow]) -> Answers:
    """By task and member: ids of runs and of evaluations differ."""
    found: Answers = {}
    for row in sorted(rows, key=lambda row: row.id):
        assert row.state == TrajectoryState.graded, row.reason
        place = f"{row.task_id} {row.id.rpartition('-')[2]} {row.provenance.get('mode')}"
        found.setdefault(place, []).extend(segment.tokens.tolist() for segment in store.load(row.id).segments)
    return found


@pytest.mark.slow
@on_one_loop
async def test_the_same_seed_gives_the_same_tokens(world: World) -> None:
    """Two runs against the real engine with random weights, and an evaluation each; then another seed."""
    harness = CodingHarness(CodingConfig(max_turns=2))
    world.stack.push_async_callback(harness.close)
    async with real_engine(world) as context:
        context = replace(context, harness=harness)
        rollouts, evaluations = [], []
        for run, seed in (("first", 3), ("second", 3), ("third", 4)):
            rollouts.append(answers(context.trajectories, await train(world, context, run, seed)))
            evaluations.append(answers(context.trajectories, await evaluate(context, run, seed)))
    for same, again, other in (rollouts, evaluations):
        assert len(same) == 4 and same == again
        assert all(same[place] != other.get(place) for place in same)


@on_one_loop
async def test_each_rollout_and_turn_has_its_own_seed_and_the_span_records_it(world: World) -> None:
    rows = await train(world, world.context, "r", seed=3, longest=400)
    seeds = {
        row.id: [
            span.sampling.seed for segment in world.context.trajectories.load(row.id).segments for span in segment.spans
        ]
        for row in rows
    }
    assert len(seeds) == 4 and all(len(turns) == 3 for turns in seeds.values())
    flat = [seed for turns in seeds.values() for seed in turns]
    assert None not in flat and len(set(flat)) == len(flat)
    assert sorted(flat) == sorted(request["sampling"]["seed"] for request in world.engine.requests)
    first = rollout_seed(3, 0, 1)
    assert [seed - first for seed in seeds["r-000000-1"] if seed is not None] == [1, 2, 3]


def test_seeds_fit_into_a_request() -> None:
    drawn = {
        rollout_seed(seed, of, member) for seed in (-1, 0, 2**70) for of in (0, 1, "0", "\ud800") for member in (0, 1)
    }
    assert len(drawn) == 3 * 4 * 2 and all(0 <= seed < 1 << 62 for seed in drawn)
