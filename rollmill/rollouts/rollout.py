"""One rollout: a task, a machine, a harness talking to the model at a URL, a hand-in, a grade.

    create machine → open session → harness runs → take the submission out → store it → seal → close → grade
                                                                              │
                             everything before the seal may be lost with its process; from the seal on the
                             trajectory is `finished` and can always be graded again from what was stored

Errors are caught here and nowhere below: an episode that went wrong through no fault of the policy becomes a `failed`
trajectory with a reason, never a reward.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import time
from dataclasses import dataclass
from typing import Any

from rollmill import telemetry
from rollmill.environments.harness import Harness, HarnessResult
from rollmill.environments.machine import WORK, Machine, MachineHost
from rollmill.environments.reward import Grader, Submission
from rollmill.environments.task import Task
from rollmill.errors import ObjectExists, RollmillError
from rollmill.rollouts.client import GatewayClient
from rollmill.storage.objects import Objects
from rollmill.trajectories.store import TrajectoryStore
from rollmill.types import Reward, Sampling


@dataclass(frozen=True)
class Stage:
    """Everything a rollout needs besides its task; shared by all rollouts of a process."""

    gateway: GatewayClient
    machines: MachineHost  # where agents work
    grading_machines: MachineHost  # where their work is graded; usually the same host
    harness: Harness
    grader: Grader
    trajectories: TrajectoryStore
    objects: Objects
    timeout_s: float = 120.0


@dataclass(frozen=True)
class Outcome:
    trajectory: str
    reward: Reward | None
    result: HarnessResult | None
    tokens: int = 0
    reason: str | None = None  # why there is no reward

    @property
    def solved(self) -> bool:
        return self.reward is not None and self.reward.value >= 1.0


async def run_rollout(
    stage: Stage, task: Task, trajectory: str, *, sampling: Sampling, min_version: int, facts: dict[str, Any]
) -> Outcome:
    """Run and grade one episode. Its trajectory row must exist; it is final when this returns."""
    started = time.time()
    outcome = Outcome(trajectory, None, None)
    try:
        async with asyncio.timeout(stage.timeout_s):
            result, submission, tokens = await _play(stage, task, trajectory, sampling, min_version, facts)
            reward = await stage.grader.grade(task, submission, stage.grading_machines)
        await asyncio.to_thread(stage.trajectories.grade, trajectory, reward)
        outcome = Outcome(trajectory, reward, result, tokens)
    except (RollmillError, TimeoutError, OSError) as error:
        reason = str(error) or f"no end after {stage.timeout_s:.0f} s"
        outcome = Outcome(trajectory, None, None, reason=reason)
        await give_up(stage, trajectory, reason)
    _report(task, outcome, facts, time.time() - started)
    return outcome


async def _play(
    stage: Stage, task: Task, trajectory: str, sampling: Sampling, min_version: int, facts: dict[str, Any]
) -> tuple[HarnessResult, Submission, int]:
    machine = await stage.machines.create(task.image, {path: text.encode() for path, text in task.files.items()})
    try:
        key = await stage.gateway.open_session(
            trajectory, traffic="rollout", min_version=min_version, task_id=task.id, **facts
        )
        result = await stage.harness.run(
            task, machine, base_url=f"{stage.gateway.base_url}/v1", api_key=key, sampling=sampling
        )
        submission = await _hand_in(machine, task)
    finally:
        await machine.close()
    submission_key = await asyncio.to_thread(store_submission, stage.objects, trajectory, submission)
    sealed = await stage.gateway.seal(trajectory, submission_key)
    return result, submission, sealed["tokens"]


async def _hand_in(machine: Machine, task: Task) -> Submission:
    """Only the declared paths leave the machine; one the agent deleted or made unreadable is simply not handed in."""
    submission = {}
    for path in task.submission:
        with contextlib.suppress(OSError):
            submission[path] = await machine.read(f"{WORK}/{path}")
    return submission


def store_submission(objects: Objects, trajectory: str, submission: Submission) -> str:
    key = f"submissions/{trajectory}.json"
    body = {path: base64.b64encode(data).decode() for path, data in submission.items()}
    with contextlib.suppress(ObjectExists):  # handed in before a crash: the first one counts
        objects.create(key, json.dumps(body).encode())
    return key


def load_submission(objects: Objects, key: str) -> Submission:
    return {path: base64.b64decode(text) for path, text in json.loads(objects.get(key)).items()}


async def regrade(stage: Stage, task: Task, trajectory: str, submission_key: str) -> Reward:
    """Grade a finished trajectory from its stored submission: after a crash, or with a better grader."""
    submission = await asyncio.to_thread(load_submission, stage.objects, submission_key)
    reward = await stage.grader.grade(task, submission, stage.grading_machines)
    await asyncio.to_thread(stage.trajectories.grade, trajectory, reward)
    return reward


async def give_up(stage: Stage, trajectory: str, reason: str) -> None:
    """Record a failed trajectory once. The gateway may be the very thing that failed, so telling it is best effort."""
    await asyncio.to_thread(stage.trajectories.fail, trajectory, reason)
    with contextlib.suppress(RollmillError, TimeoutError, OSError):
        async with asyncio.timeout(2.0):
            await stage.gateway.abandon(trajectory)


def _report(task: Task, outcome: Outcome, facts: dict[str, Any], seconds: float) -> None:
    result = outcome.result
    telemetry.emit(
        "rollout",
        trajectory=outcome.trajectory,
        group=facts.get("group_id"),
        task=task.id,
        family=task.family,
        split=task.split,
        state="graded" if outcome.reward else "failed",
        reward=outcome.reward.value if outcome.reward else None,
        turns=result.turns if result else 0,
        tool_calls=result.tool_calls if result else 0,
        bad_tool_calls=result.bad_tool_calls if result else 0,
        tokens=outcome.tokens,
        seconds=seconds,
        reason=outcome.reason,
    )
