"""Plays one stage of the run: the evaluation before it, its groups of rollouts, the evaluation after it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
from collections.abc import AsyncIterator
from dataclasses import asdict

from rollmill import telemetry
from rollmill.cluster.addresses import find_gateway
from rollmill.cluster.run import RunDirectory, phase
from rollmill.cluster.stages import Evaluation, evaluations, is_recorded, last_version, results_key
from rollmill.environments.environment import build_tasks, open_environment
from rollmill.environments.task import TaskSet
from rollmill.evals.run import EvalResult, Examination, run_eval
from rollmill.evals.suite import EvalConfig
from rollmill.kinds import build
from rollmill.rollouts.client import GatewayClient
from rollmill.rollouts.dispatcher import Dispatcher
from rollmill.rollouts.rollout import RolloutContext
from rollmill.rollouts.simulation import SlowMachines
from rollmill.storage.database import open_database
from rollmill.storage.objects import Objects
from rollmill.training.stage import RolloutSettings, StageSection
from rollmill.trajectories.ledger import Ledger
from rollmill.trajectories.store import TrajectoryStore
from rollmill.types import Version
from rollmill.weights.reading.store import WeightStore

# Publishing and loading a large model takes long. The supervisor notices when trainer or engines die meanwhile.
START_PATIENCE_S = 3600.0


def main(run: RunDirectory, name: str) -> None:
    telemetry.label_events(stage=name)
    asyncio.run(_dispatch(run, run.config.stage(name)))


async def _dispatch(run: RunDirectory, stage: StageSection) -> None:
    due = [each for each in evaluations(run.config) if each.stage is stage]
    tasks = build_tasks(run.config)
    async with open_context(run, stage.name) as context:
        for each in due:
            if each.first:
                await _evaluate_once(run, context, tasks, each)
        if isinstance(stage, RolloutSettings) and stage.steps:
            key = run.stage_key(stage)
            with phase(stage.name):
                await Dispatcher(
                    context,
                    Ledger(open_database(run.database_url), key),
                    tasks,
                    run.config.rollouts,
                    run=key,
                    seed=run.config.seed_of(stage),
                    pace=stage.pace(stage.steps),
                    sampler=build(run.config.sampler),
                ).run()
        for each in due:
            if not each.first:
                await _evaluate_once(run, context, tasks, each)


async def _evaluate_once(run: RunDirectory, context: RolloutContext, tasks: TaskSet, evaluation: Evaluation) -> None:
    """Evaluate and record the results, unless they are recorded already."""
    last = last_version(WeightStore(context.objects), evaluation.stage, run.config.form)
    assert last is not None, "an engine serves the line"
    number = 0 if evaluation.first else last.number
    if is_recorded(run, context.objects, evaluation, number):
        return
    suite, label = run.config.evals, evaluation.label
    with phase(f"evaluate {label}"):
        results = await _evaluate(run, context, tasks, suite, label, number, alone=True)  # a run has one dispatcher
        body = json.dumps([asdict(result) for result in results]).encode()
        context.objects.put(results_key(run, label), body)


async def evaluate(service: RunDirectory, suite: EvalConfig, version: Version) -> list[EvalResult]:
    """Evaluate the version that the engines of a service are pinned to."""
    own_line = version.line == service.config.line
    label = f"version-{version.number}" if own_line else f"{version.line}-{version.number}"
    async with open_context(service, version.line) as context:
        with phase(f"evaluate {version}"):
            return await _evaluate(service, context, build_tasks(service.config), suite, label, version.number)


async def _evaluate(
    run: RunDirectory,
    context: RolloutContext,
    tasks: TaskSet,
    suite: EvalConfig,
    label: str,
    version: int,
    *,
    alone: bool = False,
) -> list[EvalResult]:
    examination = Examination(run.id, label, version, run.config.rollouts.max_answer_tokens, run.config.seed)
    return await run_eval(context, tasks, suite, examination, alone=alone)


@contextlib.asynccontextmanager
async def open_context(run: RunDirectory, line: str) -> AsyncIterator[RolloutContext]:
    config = run.config
    objects = Objects.open(run.home_store)
    async with (
        open_environment(config) as environment,
        GatewayClient(functools.partial(find_gateway, run), run.secrets["rollout_key"]) as gateway,
    ):
        machines = environment.machines
        if config.rollouts.simulated_tool_seconds:
            machines = SlowMachines(machines, config.rollouts.simulated_tool_seconds, config.seed)
        await gateway.wait_until_serving(0, line, START_PATIENCE_S)
        yield RolloutContext(
            gateway=gateway,
            machines=machines,
            grading_machines=environment.machines,
            harness=environment.harness,
            grader=environment.grader,
            trajectories=TrajectoryStore(open_database(run.database_url), objects),
            objects=objects,
            line=line,
            timeout_s=config.rollouts.timeout_s,
            grading_timeout_s=config.rollouts.grading_timeout_s,
            attempts=config.rollouts.attempts,
            checkpoint_s=config.rollouts.checkpoint_s,
        )
