"""An evaluation counts rollouts: its rates add up, its attempts are recorded, and too many failures are an error."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from rollmill import telemetry
from rollmill.chat.format import assistant_message
from rollmill.chat.formats.compact import CompactFormat
from rollmill.chat.tokenizer import Tokenizer
from rollmill.cli.evaluate import _family_rows, _task_rows
from rollmill.demo.coding_tools import tool_schemas
from rollmill.demo.micro_repos import MicroRepos
from rollmill.environments.task import Task
from rollmill.environments.tasks.listed import ListedTasks
from rollmill.errors import GatewayError, RollmillError, StorageError, TaskError
from rollmill.evals.evaluation import Examination, Progress, _summarise, run_eval
from rollmill.evals.statistics import clustered_interval
from rollmill.evals.suite import Cell, EvalConfig, SuiteConfig
from rollmill.machines.namespace.client import NamespaceHost
from rollmill.rollouts.gateway_client import GatewayClient
from rollmill.rollouts.rollout import Outcome
from rollmill.types import Grade, TrajectoryState
from tests.chat.conftest import tokenizer  # noqa: F401
from tests.machines.conftest import host  # noqa: F401
from tests.rollouts.world import ADMIN, RUN, SOLUTION, Additions, FailingHost, World, open_world

pytestmark = pytest.mark.asyncio(loop_scope="module")
EXAMINATION = Examination(RUN, "before", 0, max_answer_tokens=400, seed=5)
SUITE = EvalConfig(tasks=4, attempts=3, family_tasks=1, concurrency=4)


@pytest_asyncio.fixture(loop_scope="module")
async def world(
    tmp_path: Path,
    tokenizer: Tokenizer,  # noqa: F811
    host: NamespaceHost,  # noqa: F811
) -> AsyncIterator[World]:
    async with open_world(tmp_path, tokenizer, host) as world:
        yield world


async def test_every_cell_is_counted_and_every_attempt_recorded(world: World) -> None:
    sampled, greedy, family = await run_eval(world.context, Additions(), SUITE, EXAMINATION)
    # the script solves the tasks with an even number
    assert sampled.by_task == {f"heldout/{number}": [number % 2 == 0] * 3 for number in range(4)}
    assert (sampled.split, sampled.mode, sampled.solved, sampled.attempts) == ("heldout", "sampled", 6, 12)
    assert (sampled.rate, sampled.low, sampled.high) == clustered_interval(list(sampled.by_task.values()))
    assert sampled.low < 0.5 < sampled.high and sampled.failed == 0 and sampled.label == "before"
    assert (greedy.mode, greedy.solved, greedy.attempts) == ("greedy", 2, 4)
    assert (family.split, family.solved, family.attempts, family.rate) == ("heldout_family", 3, 3, 1.0)
    assert family.example_unsolved is None
    temperatures = [request["sampling"]["temperature"] for request in world.engine.requests]
    assert set(temperatures) == {0.0, 1.0} and temperatures.count(0.0) == 4 * 3  # greedy attempts, three turns each
    # the examples have a payload, and one is solved and the other is not
    assert sampled.example_solved is not None and sampled.example_unsolved is not None
    assert world.row(sampled.example_solved).reward == 1.0 and world.row(sampled.example_unsolved).reward == 0.0
    assert world.context.trajectories.load(sampled.example_solved).messages
    rows = world.context.trajectories.list(run=f"{RUN}/eval-before")
    assert len(rows) == 12 + 4 + 3 and all(row.state == TrajectoryState.graded for row in rows)
    # none of them is in the ledger of the training run
    assert world.ledger.counts() == dict.fromkeys(world.ledger.counts(), 0)


async def test_attempts_keep_how_they_behaved(world: World) -> None:
    """A call that is not JSON, one that is, and then a question instead of work: what the gate looks at."""
    encode, token = world.tokenizer.encode, world.tokenizer.token_id
    question = CompactFormat(world.tokenizer).render_answer(assistant_message("which?", []), tool_schemas())
    malformed = [*encode("run"), token("<arg>"), *encode("{x"), token("<end>")]
    suite = EvalConfig(tasks=1, attempts=1, family_tasks=0, greedy=False)
    seen = []
    for script in ((malformed, ("run", {}), question), SOLUTION):
        world.says(*script)
        (result,) = await run_eval(world.context, Additions(), suite, EXAMINATION)
        ((conduct,),) = result.conduct.values()
        assert conduct.tokens > 0 and conduct.seconds > 0 and not conduct.lost
        seen.append((conduct.solved, conduct.calls, conduct.malformed, conduct.asked))
    assert seen == [(False, 2, 1, True), (True, 3, 0, False)]


async def test_an_evaluation_can_be_repeated(world: World) -> None:
    suite = EvalConfig(tasks=2, attempts=1, family_tasks=0, greedy=False)
    (first,) = await run_eval(world.context, Additions(), suite, EXAMINATION)
    (second,) = await run_eval(world.context, Additions(), suite, EXAMINATION)
    assert first.by_task == second.by_task and first.example_solved != second.example_solved


class Suite(ListedTasks):
    """A task that the script of `Additions` solves, and one that it does not."""

    def __init__(self) -> None:
        super().__init__(Additions().heldout("heldout", 2))


async def test_results_of_a_suite_stand_under_its_name(world: World) -> None:
    tasks = {"kind": f"{__name__}:Suite"}
    own = SuiteConfig.model_validate_json(
        json.dumps({"name": "own", "tasks": tasks, "attempts": 2, "temperature": 0.5})
    )
    config = EvalConfig(tasks=1, attempts=1, family_tasks=0, greedy=False, suites=(own,))
    first, second = await run_eval(world.context, Additions(), config, EXAMINATION)
    assert (first.split, first.attempts, second.split, second.attempts, second.k) == ("heldout", 1, "own", 4, 2)
    assert second.by_task == {"heldout/0": [True] * 2, "heldout/1": [False] * 2} and second.version == 0
    assert {request["sampling"]["temperature"] for request in world.engine.requests} == {0.5, 1.0}
    rows = world.context.trajectories.list(run=f"{RUN}/eval-before")
    assert sorted(row.provenance.get("suite", "") for row in rows) == ["", "own", "own", "own", "own"]
    assert [row[0] for row in _task_rows([first, second])] == ["own: heldout/1", "heldout/0", "own: heldout/0"]
    assert [row[0] for row in _family_rows([second])] == ["own: add"]


async def test_attempts_that_an_interrupted_evaluation_left_open_fail_when_it_is_run_again(world: World) -> None:
    suite = EvalConfig(tasks=1, attempts=1, family_tasks=0, greedy=False)
    world.context.trajectories.create(f"{RUN}/eval-before", "g", "heldout/0", ["left-open"], {})
    await run_eval(world.context, Additions(), suite, EXAMINATION)
    assert world.row("left-open").state == "running"  # it may be another process's
    await run_eval(world.context, Additions(), suite, EXAMINATION, alone=True)
    assert (world.row("left-open").state, world.row("left-open").reason) == ("failed", "interrupted")


async def test_progress_counts_every_attempt_of_every_cell(world: World, tmp_path: Path) -> None:
    telemetry.open_events(tmp_path / "events", "test")
    told: list[Progress] = []
    await run_eval(world.context, Additions(), SUITE, EXAMINATION, told.append)
    assert (told[0].done, told[0].seconds_left) == (0, None)
    assert (told[-1].done, told[-1].seconds_left) == (19, 0.0)
    assert {progress.total for progress in told} == {12 + 4 + 3}
    assert [progress.done for progress in told] == sorted(progress.done for progress in told)
    events = [event for event in telemetry.read_events(tmp_path / "events") if event["kind"] == "eval_progress"]
    assert [(event["done"], event["total"], event["label"]) for event in events] == [
        (progress.done, 19, "before") for progress in told
    ]


async def test_an_interrupted_evaluation_leaves_rows_only_for_what_it_ran(world: World) -> None:
    asked = asyncio.Event()

    async def hang(session: str, turn: int) -> None:
        asked.set()
        await asyncio.Future()

    world.engine.on_turn = hang
    suite = EvalConfig(tasks=40, attempts=3, family_tasks=0, greedy=False, concurrency=2)
    evaluation = asyncio.create_task(run_eval(world.context, Additions(), suite, EXAMINATION))
    await asked.wait()
    evaluation.cancel()
    await asyncio.wait([evaluation])
    assert 1 <= len(world.context.trajectories.list(run=f"{RUN}/eval-before")) <= 2


async def test_a_store_that_is_down_ends_the_evaluation_with_its_own_error(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(*_: Any, **__: Any) -> None:
        raise StorageError("the disk is full")

    monkeypatch.setattr(world.context.trajectories, "create", full_disk)
    with pytest.raises(StorageError, match="disk is full"):
        await run_eval(world.context, Additions(), SUITE, EXAMINATION)


async def test_a_split_without_tasks_is_an_error_that_names_it(world: World) -> None:
    class NoFamily(Additions):
        def heldout(self, split: str, count: int) -> list[Task]:
            return [] if split == "heldout_family" else super().heldout(split, count)

    with pytest.raises(TaskError, match="no tasks in the split 'heldout_family'"):
        await run_eval(world.context, NoFamily(), SUITE, EXAMINATION)


async def test_long_and_strange_names_of_run_label_and_split_become_ids(world: World) -> None:
    """A run, a stage and a split may each have 63 characters; a task set of a user may call a split anything."""
    suite = EvalConfig(tasks=1, attempts=2, family_tasks=0, greedy=False)
    for run, label in (("r" * 72, "after-" + "s" * 63), ("r" * 72, "after-" + "s" * 62 + "t"), (RUN, "häuser / 2")):
        (result,) = await run_eval(world.context, Additions(), suite, replace(EXAMINATION, run=run, label=label))
        assert (result.attempts, result.failed) == (2, 0)


async def test_too_many_lost_attempts_are_an_error_that_names_the_first(world: World) -> None:
    context = replace(world.context, machines=FailingHost(lambda asked: asked == 1, world.context.machines))
    with pytest.raises(RollmillError, match=r"1 of 12 attempts failed, the first: machine: .*out of machines"):
        await run_eval(context, Additions(), SUITE, EXAMINATION)


async def test_it_waits_until_the_version_is_served(world: World) -> None:
    """The router may ask an older engine, so an evaluation starts only when one serves the version."""
    examination = replace(EXAMINATION, version=3)
    async with GatewayClient(world.context.gateway.base_url, ADMIN, patience_s=0.2) as gateway:
        with pytest.raises(GatewayError, match=r"no engine serves version 3 .* at \[0\]"):
            await run_eval(replace(world.context, gateway=gateway), Additions(), SUITE, examination)
    assert world.engine.requests == []
    world.engine.number = 3
    suite = EvalConfig(tasks=1, attempts=1, family_tasks=0, greedy=False)
    (result,) = await run_eval(world.context, Additions(), suite, examination)
    assert result.version == 3
    assert world.row(str(result.example_solved)).oldest_version == 3


async def test_a_few_lost_attempts_are_left_out_of_the_rate() -> None:
    by_task = {
        f"task-{task}": [Outcome(f"{task}-{attempt}", Grade(float(attempt > 0)), None) for attempt in range(4)]
        for task in range(10)
    }
    by_task["task-3"][2:] = [Outcome("lost", None, None, reason="gone")] * 2
    result = _summarise(by_task, Cell("heldout", "sampled", 10, 4), EXAMINATION, 1.0, [])
    assert (result.solved, result.attempts, result.failed) == (28, 38, 2)
    assert result.rate == 28 / 38 and result.by_task["task-3"] == [False, True]
    by_task["task-4"] = [Outcome("lost", None, None, reason="gone")]
    with pytest.raises(RollmillError, match="3 of 37"):
        _summarise(by_task, Cell("heldout", "sampled", 10, 4), EXAMINATION, 1.0, [])


async def test_an_evaluation_keeps_the_reward_of_each_attempt() -> None:
    """A judge's scores: nothing counts as solved, and the mean reward is known."""
    easy = Task("task-0", "do it", family="easy", environment="sums")
    by_task = {f"task-{task}": [Outcome(f"{task}", Grade(0.9 - 0.1 * task), None)] * 2 for task in range(4)}
    result = _summarise(by_task, Cell("heldout", "sampled", 4, 2), EXAMINATION, 1.0, [easy])
    assert result.reward == pytest.approx(0.75) and result.reward_low < 0.75 < result.reward_high
    assert (result.rate, result.solved_once, result.k) == (0.0, 0.0, 2) and result.families == {"task-0": "easy"}
    assert result.environments == {"task-0": "sums"}
    assert [each.earned for each in result.conduct["task-1"]] == [0.8, 0.8]


async def test_the_temperature_of_sampled_attempts_is_a_setting() -> None:
    listed = ListedTasks([Task("a", "do it", split="heldout")])
    temperatures = {cell.mode: cell.temperature for cell in EvalConfig(temperature=0.2).cells(listed)}
    assert temperatures == {"sampled": 0.2, "greedy": 0.0}


async def test_families_are_measured_where_the_task_set_has_them() -> None:
    listed = ListedTasks([Task("a", "do it", split="heldout")])
    assert [cell.split for cell in EvalConfig(greedy=False).cells(listed)] == ["heldout"]
    assert [(cell.split, cell.tasks) for cell in EvalConfig(greedy=False, tasks=9).cells(MicroRepos())] == [
        ("heldout", 9),
        ("heldout_family", 9),
    ]
    assert EvalConfig(tasks=99).cells(MicroRepos())[-1].tasks == 64
    assert [cell.split for cell in EvalConfig(greedy=False, family_tasks=0).cells(MicroRepos())] == ["heldout"]
