"""Grade stored trajectories again, from what is stored of them: hand-in, transcript, tokens, seconds and end.

A group is graded whole or not at all. A reward that cannot be given (the task is gone, a judge is down, the payload is
damaged) leaves the whole group as it was, with the reason. What was trained on stays: a step pins its rewards.

A trajectory keeps the digest of the task that was played. If today's task is another one, its group is left as it was,
unless `changed_tasks` allows it. Then the evidence names both digests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import sqlalchemy as sa

from rollmill.environments.environment import Environments
from rollmill.environments.task import TaskSet
from rollmill.errors import TrajectoryError
from rollmill.rollouts.config import RolloutConfig
from rollmill.rollouts.grading import Stalls, grade_patiently
from rollmill.rollouts.hand_in import graded_episode, load_hand_in
from rollmill.rollouts.rollout import reason_of
from rollmill.storage.objects import Objects
from rollmill.trajectories.gradings import record_group
from rollmill.trajectories.table_rows import TrajectoryRow
from rollmill.trajectories.trajectory_store import TrajectoryStore
from rollmill.types import Grade, TrajectoryState


@dataclass(frozen=True)
class Regraded:
    """A group, graded again."""

    group: str
    old: list[TrajectoryRow]  # its graded trajectories, with the newest reward they had
    new: list[Grade]  # of the same trajectories
    problem: str | None = None  # why it was left as it was; `new` is empty then


@dataclass(frozen=True)
class Regrading:
    """What grading again needs."""

    engine: sa.Engine
    trajectories: TrajectoryStore
    objects: Objects
    tasks: TaskSet
    environments: Environments
    limits: RolloutConfig
    grading: int | None = None  # the number to record rewards with; None: record nothing
    concurrency: int = 4  # groups at once
    changed_tasks: bool = False  # grade by today's task where it is not the one that was played
    stalls: Stalls = field(default_factory=Stalls)

    async def grade(self, groups: Iterable[tuple[str, str]], tell: Callable[[], None] = lambda: None) -> list[Regraded]:
        """Grade groups again, each by the key of its run and its id. `tell` is called after each."""
        slots = asyncio.Semaphore(self.concurrency)

        async def one(run: str, group: str) -> Regraded:
            async with slots:
                graded = await self._grade_group(run, group)
            tell()
            return graded

        return list(await asyncio.gather(*(one(run, group) for run, group in groups)))

    async def _grade_group(self, run: str, group: str) -> Regraded:
        rows = await asyncio.to_thread(self.trajectories.list, run=run, group_id=group)
        members = [row for row in sorted(rows, key=lambda row: row.id) if row.state == TrajectoryState.graded]
        try:
            if any(row.state in (TrajectoryState.running, TrajectoryState.finished) for row in rows):
                raise TrajectoryError(f"group {group} is still running")
            given = {row.id: await self._grade_one(row) for row in members}
            if self.grading is not None:
                await asyncio.to_thread(record_group, self.engine, run, group, given, self.grading)
        except Exception as error:  # rewards may be code of the user
            return Regraded(group, members, [], reason_of(error, f"grading {group} again"))
        return Regraded(group, members, list(given.values()))

    async def _grade_one(self, row: TrajectoryRow) -> Grade:
        if row.submission_key is None:
            raise TrajectoryError(f"{row.id} has no stored hand-in")
        task = self.tasks.get(row.task_id)
        played = row.provenance.get("task_digest", task.digest)  # not said: taken to be today's
        if played != task.digest and not self.changed_tasks:
            raise TrajectoryError(
                f"task {row.task_id} has changed since it was played", hint="--changed-tasks grades by today's task"
            )
        handed_in = await asyncio.to_thread(load_hand_in, self.objects, row.submission_key)
        trajectory = await asyncio.to_thread(self.trajectories.load, row.id)
        chosen = self.environments.of(task)
        episode = graded_episode(handed_in, task, chosen.grading_machines, trajectory)
        seconds = chosen.settings.grading_timeout_s or self.limits.grading_timeout_s
        reward = await grade_patiently(
            chosen.grader, episode, row.id, self.stalls, timeout_s=seconds, attempts=self.limits.attempts
        )
        if played == task.digest:
            return reward
        return replace(reward, evidence={**reward.evidence, "task_changed": {"played": played, "graded": task.digest}})
