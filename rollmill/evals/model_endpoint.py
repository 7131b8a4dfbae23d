"""Evaluate any OpenAI-compatible endpoint on the tasks of a run, with the same statistics."""

from __future__ import annotations

from rollmill.environments.environment import Environment
from rollmill.environments.rewards import transcript
from rollmill.environments.task import Task, TaskSet
from rollmill.evals.evaluation import EvalResult, Examination, OnProgress, run_cells, sampling_of
from rollmill.evals.suite import Cell, EvalConfig
from rollmill.rollouts.agent_endpoint import EndpointProxy, play
from rollmill.rollouts.config import RolloutConfig
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
        episode = played.episode
        return Outcome(
            f"{task.id} #{number}",
            played.reward,
            episode.result,
            episode.tokens,
            played.reason,
            seconds=episode.seconds,
            asked=transcript.asks(episode),
        )

    return await run_cells(tasks, config, examination, attempt, on_progress)
