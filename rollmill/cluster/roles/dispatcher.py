"""Evaluates version 0, runs every group of the run, evaluates the last version."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import asdict

from rollmill.cluster.run import RunDirectory, phase
from rollmill.environments.environment import build_tasks, open_environment
from rollmill.evals.run import EvalResult, Examination, run_eval
from rollmill.evals.suite import EvalConfig
from rollmill.kinds import build
from rollmill.rollouts.client import GatewayClient
from rollmill.rollouts.dispatcher import Dispatcher
from rollmill.rollouts.rollout import RolloutContext
from rollmill.rollouts.simulation import SlowMachines
from rollmill.storage.database import open_database
from rollmill.storage.objects import Objects
from rollmill.trajectories.ledger import Ledger
from rollmill.trajectories.store import TrajectoryStore
from rollmill.types import Version

# Publishing and loading a large model takes long. The supervisor notices when trainer or engines die meanwhile.
START_PATIENCE_S = 3600.0


def main(run: RunDirectory) -> None:
    asyncio.run(_dispatch(run))


async def _dispatch(run: RunDirectory) -> None:
    config = run.config
    ledger = Ledger(open_database(run.database_url), run.id)
    async with open_context(run) as context:
        await _evaluate_once(run, context, "before", 0)
        if config.steps == 0:
            return
        with phase("reinforce"):
            await Dispatcher(
                context,
                ledger,
                build_tasks(run.config),
                config.rollouts,
                run=run.id,
                seed=config.seed,
                pace=config.pace,
                sampler=build(config.sampler),
            ).run()
        await _evaluate_once(run, context, "after", config.steps)


async def _evaluate_once(run: RunDirectory, context: RolloutContext, label: str, version: int) -> None:
    """Evaluate and record the results, unless they are recorded already. An extended run is evaluated again."""
    key = f"evals/{run.id}/{label}.json"
    if context.objects.head(key) is not None and json.loads(context.objects.get(key))[0]["version"] == version:
        return
    suite = run.config.evals
    with phase(f"evaluate {label}"):
        results = await _evaluate(run, context, suite, label, version, alone=True)  # a run has one dispatcher
        context.objects.put(key, json.dumps([asdict(result) for result in results]).encode())


async def evaluate(service: RunDirectory, suite: EvalConfig, version: Version) -> list[EvalResult]:
    """Evaluate the version that the engines of a service are pinned to."""
    own_line = version.line == service.config.line
    label = f"version-{version.number}" if own_line else f"{version.line}-{version.number}"
    async with open_context(service) as context:
        with phase(f"evaluate {version}"):
            return await _evaluate(service, context, suite, label, version.number)


async def _evaluate(
    run: RunDirectory, context: RolloutContext, suite: EvalConfig, label: str, version: int, *, alone: bool = False
) -> list[EvalResult]:
    examination = Examination(run.id, label, version, run.config.rollouts.max_answer_tokens, run.config.seed)
    return await run_eval(context, build_tasks(run.config), suite, examination, alone=alone)


@contextlib.asynccontextmanager
async def open_context(run: RunDirectory) -> AsyncIterator[RolloutContext]:
    config = run.config
    objects = Objects.open(run.home_store)
    async with open_environment(config) as environment, GatewayClient(run.url("gateway"), run.admin_token) as gateway:
        machines = environment.machines
        if config.rollouts.simulated_tool_seconds:
            machines = SlowMachines(machines, config.rollouts.simulated_tool_seconds, config.seed)
        await gateway.wait_until_serving(0, START_PATIENCE_S)
        yield RolloutContext(
            gateway=gateway,
            machines=machines,
            grading_machines=environment.machines,
            harness=environment.harness,
            grader=environment.grader,
            trajectories=TrajectoryStore(open_database(run.database_url), objects),
            objects=objects,
            timeout_s=config.rollouts.timeout_s,
            grading_timeout_s=config.rollouts.grading_timeout_s,
            attempts=config.rollouts.attempts,
        )
