"""Plays one stage of the run: the evaluation before it, its groups of rollouts, the evaluation after it.

Of several dispatchers the first evaluates, and all play groups: see trajectories/claims.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import asdict

from rollmill import telemetry
from rollmill.environments.environment import build_sampler, build_tasks, open_environments
from rollmill.environments.task import TaskSet
from rollmill.evals.evaluation import EvalResult, Examination, run_eval
from rollmill.evals.kept import Kept
from rollmill.evals.suite import EvalConfig
from rollmill.rollouts.dispatcher import Dispatcher
from rollmill.rollouts.gateway_client import GatewayClient
from rollmill.rollouts.rollout_context import RolloutContext
from rollmill.runs.run import RunDirectory, phase
from rollmill.runs.shared.addresses import gateway_finders
from rollmill.runs.stages import (
    Evaluation,
    attempts_folder,
    evaluations,
    is_recorded,
    last_version,
    results_key,
)
from rollmill.tls import trust
from rollmill.training.stage import RolloutSettings, StageSection
from rollmill.trajectories.claims import Claims
from rollmill.trajectories.ledger import Ledger
from rollmill.trajectories.staleness import Pace
from rollmill.trajectories.trajectory_store import TrajectoryStore
from rollmill.types import Version
from rollmill.weights.reading.weight_store import WeightStore

# Publishing and loading a large model takes long. The supervisor notices when trainer or engines die meanwhile.
START_PATIENCE_S = 3600.0
LOOK_S = 0.5  # between two looks for the results of the first evaluation


def main(run: RunDirectory, *arguments: str) -> None:
    """`arguments`: the stage; before it the number of this dispatcher, if it is not the first."""
    name = arguments[-1]
    telemetry.label_events(stage=name)
    others = arguments[:-1]
    asyncio.run(_help(run, run.config.stage(name), others[0]) if others else _dispatch(run, run.config.stage(name)))


async def _dispatch(run: RunDirectory, stage: StageSection) -> None:
    due = [each for each in evaluations(run.config) if each.stage is stage]
    tasks = build_tasks(run.config)
    async with open_context(run, stage.name) as context:
        for each in due:
            if each.first:
                await _evaluate_once(run, context, tasks, each)
        if isinstance(stage, RolloutSettings) and stage.steps:
            with phase(stage.name):
                await _dispatcher(run, stage, stage.pace(stage.steps), context, tasks, "dispatcher").run()
        for each in due:
            if not each.first:
                await _evaluate_once(run, context, tasks, each)


async def _help(run: RunDirectory, stage: StageSection, number: str) -> None:
    """Play groups beside the first dispatcher, once it has made the evaluation before them: that one is of version 0,
    which no step may replace meanwhile."""
    if not isinstance(stage, RolloutSettings) or not stage.steps:
        return
    before = [each for each in evaluations(run.config) if each.stage is stage and each.first]
    async with open_context(run, stage.name) as context:
        for each in before:
            while not await asyncio.to_thread(is_recorded, run, context.objects, each, 0):  # noqa: ASYNC110
                await asyncio.sleep(LOOK_S)
        tasks, name = build_tasks(run.config), f"dispatcher-{number}"
        await _dispatcher(run, stage, stage.pace(stage.steps), context, tasks, name).run()


def _dispatcher(
    run: RunDirectory, stage: StageSection, pace: Pace, context: RolloutContext, tasks: TaskSet, name: str
) -> Dispatcher:
    key, database = run.stage_key(stage), run.database()
    return Dispatcher(
        context,
        Ledger(database, key),
        tasks,
        run.config.rollouts,
        run=key,
        seed=run.config.seed_of(stage),
        pace=pace,
        sampler=build_sampler(run.config.sampler, run.config),
        claims=Claims(database, key, name) if run.config.dispatcher.replicas > 1 else None,
    )


async def _evaluate_once(run: RunDirectory, context: RolloutContext, tasks: TaskSet, evaluation: Evaluation) -> None:
    """Evaluate and record the results, unless they are recorded already."""
    last = last_version(WeightStore(context.objects), evaluation.stage, run.config.form)
    assert last is not None, "an engine serves the line"
    number = 0 if evaluation.first else last.number
    if is_recorded(run, context.objects, evaluation, number):
        return
    suite, label = run.config.evals, evaluation.label
    kept = Kept(context.objects, attempts_folder(run, label, number))
    with phase(f"evaluate {label}"):
        results = await evaluate_in(run, context, tasks, suite, label, number, kept=kept)  # one dispatcher evaluates
        context.objects.put(results_key(run, label), json.dumps(list(map(asdict, results))).encode())
    await asyncio.to_thread(kept.clear)


async def evaluate(
    service: RunDirectory, suite: EvalConfig, version: Version, rounds: range = range(1), *, name: str = ""
) -> list[EvalResult]:
    """Evaluate the version that the engines of a service are pinned to. `name`: of the suite, if it is not that of the
    run."""
    own_line = version.line == service.config.line
    label = f"version-{version.number}" if own_line else f"{version.line}-{version.number}"
    label = f"{name}-{label}" if name else label
    async with open_context(service, version.line) as context:
        with phase(f"evaluate {version}"):
            return await evaluate_in(
                service, context, build_tasks(service.config), suite, label, version.number, rounds
            )


async def evaluate_in(
    run: RunDirectory,
    context: RolloutContext,
    tasks: TaskSet,
    suite: EvalConfig,
    label: str,
    version: int,
    rounds: range = range(1),
    *,
    kept: Kept | None = None,
) -> list[EvalResult]:
    """`kept`: attempts of an evaluation that one process makes, and another one goes on with."""
    examination = Examination(run.id, label, version, run.config.rollouts.max_answer_tokens, run.config.seed, rounds)
    return await run_eval(context, tasks, suite, examination, alone=kept is not None, kept=kept)


@contextlib.asynccontextmanager
async def open_context(run: RunDirectory, line: str) -> AsyncIterator[RolloutContext]:
    config = run.config
    if config.tls is not None:  # `rollmill eval` calls this in its own process
        trust(config.tls.ca)
    objects = run.objects()
    async with (
        open_environments(config) as environments,
        GatewayClient(gateway_finders(run), run.secrets["rollout_key"]) as gateway,
    ):
        await gateway.wait_until_serving(0, line, START_PATIENCE_S)
        first = environments.first
        yield RolloutContext(
            gateway=gateway,
            machines=first.machines,
            grading_machines=first.grading_machines,
            harness=first.harness,
            grader=first.grader,
            environments=environments,
            trajectories=TrajectoryStore(run.database(), objects),
            objects=objects,
            line=line,
            timeout_s=config.rollouts.timeout_s,
            grading_timeout_s=config.rollouts.grading_timeout_s,
            attempts=config.rollouts.attempts,
            checkpoint_s=config.rollouts.checkpoint_s,
        )
