"""Run an evaluation: the same rollouts as training, on held-out tasks, against the version the engines serve."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from rollmill import telemetry
from rollmill.environments.task import Task, TaskSet
from rollmill.errors import RollmillError
from rollmill.evals.statistics import clustered_interval
from rollmill.evals.suite import Cell, EvalConfig
from rollmill.rollouts.rollout import Outcome, RolloutContext, run_rollout
from rollmill.types import Sampling

MAX_FAILED_SHARE = 0.05


@dataclass(frozen=True)
class EvalResult:
    label: str
    split: str
    mode: str
    version: int
    solved: int
    attempts: int
    failed: int  # attempts that infrastructure lost: not counted as attempts
    rate: float
    low: float  # 95 % interval, attempts of one task taken together
    high: float
    seconds: float
    by_task: dict[str, list[bool]]  # task id → what became of its attempts
    example_solved: str | None = None  # a trajectory worth reading
    example_unsolved: str | None = None


@dataclass(frozen=True)
class Examination:
    """What is evaluated: weights at least as new as `version`, recorded under the run's name and `label`."""

    run: str
    label: str
    version: int
    max_answer_tokens: int


async def run_eval(
    context: RolloutContext, tasks: TaskSet, config: EvalConfig, examination: Examination
) -> list[EvalResult]:
    """Evaluate every cell of the suite."""
    await context.gateway.wait_until_serving(examination.version)
    slots = asyncio.Semaphore(config.concurrency)
    results = []
    for cell in config.cells():
        started = time.time()
        suite = tasks.heldout(cell.split, cell.tasks)
        # an evaluation that is run again, after a crash say, is a new set of trajectories
        prefix = f"{examination.run}-{examination.label}-{secrets.token_hex(3)}-{cell.split}-{cell.mode}"
        attempts = (
            _attempt_task(context, task, cell, examination, f"{prefix}-{index:04d}", slots)
            for index, task in enumerate(suite)
        )
        outcomes = dict(zip((task.id for task in suite), await asyncio.gather(*attempts), strict=True))
        result = _summarise(outcomes, cell, examination, time.time() - started)
        telemetry.emit("eval", **asdict(result))
        results.append(result)
    return results


async def _attempt_task(
    context: RolloutContext, task: Task, cell: Cell, examination: Examination, group: str, slots: asyncio.Semaphore
) -> list[Outcome]:
    run = f"{examination.run}/eval-{examination.label}"
    ids = [f"{group}-{attempt}" for attempt in range(cell.attempts)]
    provenance = {"family": task.family, "split": task.split, "image": task.image, "mode": cell.mode}
    facts = {"run": run, "group_id": group, "provenance": provenance}
    sampling = Sampling(temperature=1.0 if cell.mode == "sampled" else 0.0, max_tokens=examination.max_answer_tokens)
    await asyncio.to_thread(context.trajectories.create, run, group, task.id, ids, provenance=provenance)

    async def attempt(id: str) -> Outcome:
        async with slots:
            return await run_rollout(context, task, id, sampling=sampling, min_version=examination.version, facts=facts)

    return await asyncio.gather(*map(attempt, ids))


def _summarise(
    by_task: Mapping[str, list[Outcome]], cell: Cell, examination: Examination, seconds: float
) -> EvalResult:
    """Attempts lost to infrastructure are left out of the rate; too many of them and there is no rate to speak of."""
    graded = {task: [outcome for outcome in outcomes if outcome.reward] for task, outcomes in by_task.items()}
    attempts = sum(map(len, graded.values()))
    failed = sum(map(len, by_task.values())) - attempts
    if failed > MAX_FAILED_SHARE * (attempts + failed):
        reason = next(outcome.reason for outcomes in by_task.values() for outcome in outcomes if outcome.reason)
        raise RollmillError(
            f"evaluation {examination.label!r}: {failed} of {attempts + failed} attempts failed, the first: {reason}",
            hint="an evaluation with that many lost attempts would mislead; mend the cause and run it again",
        )
    solved = {task: [outcome.solved for outcome in outcomes] for task, outcomes in graded.items() if outcomes}
    interval = clustered_interval(list(solved.values()))
    flat = [outcome for outcomes in graded.values() for outcome in outcomes]
    return EvalResult(
        label=examination.label,
        split=cell.split,
        mode=cell.mode,
        version=examination.version,
        solved=sum(outcome.solved for outcome in flat),
        attempts=attempts,
        failed=failed,
        rate=interval.value,
        low=interval.low,
        high=interval.high,
        seconds=seconds,
        by_task=solved,
        example_solved=next((outcome.trajectory for outcome in flat if outcome.solved), None),
        example_unsolved=next((outcome.trajectory for outcome in flat if not outcome.solved), None),
    )
