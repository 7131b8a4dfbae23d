"""Several rewards that add up: the value is the sum of weight · value. Each part is kept with its evidence."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from rollmill.environments.episode import Episode
from rollmill.environments.reward import Reward, grade_episode
from rollmill.environments.task import Task
from rollmill.errors import TaskError
from rollmill.types import TURN, Grade


class WeightedRewards(Reward):
    """The first reward decides whether an episode is solved: `parts["solved"]` is its value. A reward for one kind of
    grading stands aside for tasks of another kind."""

    name = "weighted"

    def __init__(self, graders: Sequence[tuple[float, Reward]]) -> None:
        self._graders = graders
        self.wants_final_state = any(grader.wants_final_state for _, grader in graders)

    async def grade(self, episode: Episode) -> Grade:
        graders = for_task(self._graders, episode.task)
        try:
            async with asyncio.TaskGroup() as running:
                tasks = [running.create_task(grade_episode(grader, episode)) for _, grader in graders]
        except ExceptionGroup as group:
            raise group.exceptions[0] from None  # the first one says why; the others were cancelled
        rewards = [task.result() for task in tasks]
        value, parts, evidence = 0.0, {"solved": float(rewards[0].value)}, dict[str, Any]()
        turns: defaultdict[str, float] = defaultdict(float)
        for number, ((weight, grader), reward) in enumerate(zip(graders, rewards, strict=True)):
            name = grader.name if grader.name not in evidence else f"{grader.name}_{number}"
            value += weight * float(reward.value)
            parts[name] = float(reward.value)
            parts |= {f"{name}.{part}": float(share) for part, share in reward.parts.items()}
            for part, share in reward.parts.items():
                if part.startswith(TURN):  # what single turns earned adds up as the values do
                    turns[part] += weight * float(share)
            evidence[name] = dict(reward.evidence)
        return Grade(value, {**parts, **turns}, evidence, "+".join(grader.name for _, grader in graders))

    async def weaknesses(self, episode: Episode) -> str:
        """What the rewards cannot protect in a task."""
        graders = [grader for _, grader in for_task(self._graders, episode.task)]
        texts = [await grader.weaknesses(episode) for grader in graders]
        return "; ".join(filter(None, texts))


def for_task(graders: Sequence[tuple[float, Reward]], task: Task) -> list[tuple[float, Reward]]:
    """The rewards for a task: those for the kind of its grading, and those for any kind. TaskError if rewards are for
    certain kinds and none is for this one."""
    kind, kinds = task.grading.get("kind"), sorted({grader.kind for _, grader in graders if grader.kind is not None})
    if kind is None and len(kinds) <= 1:
        return list(graders)
    if kinds and kind not in kinds:
        raise TaskError(
            f"task {task.id}: no reward grades the kind {kind!r}; there are rewards for {', '.join(kinds)}",
            hint="[[rewards]] with that kind, or another `kind` in its grading",
        )
    return [(weight, grader) for weight, grader in graders if grader.kind in (kind, None)]


def add_up(graders: Sequence[tuple[float, Reward]]) -> Reward:
    """One grader for several. A single one with weight 1 stays as it is."""
    return graders[0][1] if len(graders) == 1 and graders[0][0] == 1.0 else WeightedRewards(graders)
