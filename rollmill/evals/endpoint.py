"""Evaluate any OpenAI-compatible endpoint on the tasks of a run, with the same statistics."""

from __future__ import annotations

from rollmill.environments.environment import Environment
from rollmill.environments.task import Task, TaskSet
from rollmill.evals.run import EvalResult, Examination, OnProgress, run_cells, sampling_of
from rollmill.evals.suite import Cell, EvalConfig
from rollmill.rollouts.config import RolloutConfig
from rollmill.rollouts.endpoint import EndpointProxy, play
from rollmill.rollouts.rollout import Outcome


async def evaluate_endpoint(
    environment: Environment,
    tasks: TaskSet,
    config: EvalConfig,
    proxy: EndpointProxy,
    examination: Examination,
    limits: RolloutConfig,
    on_progress: OnProgress | None = None,
) -> list[EvalResult]:
    async def attempt(task: Task, cell: Cell, index: int, number: int) -> Outcome:
        played = await play(environment, proxy, task, sampling_of(task, cell, number, examination), limits)
        return Outcome(
            f"{task.id} #{number}", played.reward, played.episode.result, played.episode.tokens, played.reason
        )

    return await run_cells(tasks, config, examination, attempt, on_progress)
