"""One rollout: a task, a machine, a harness talking to the model at a URL, a hand-in, a grade.

    create machine → open session → harness runs → take the submission out → store it → seal → close → grade
                                                                              │
                             everything before the seal may be lost with its process; from the seal on the
                             trajectory is `finished` and can always be graded again from what was stored

Errors are caught here and nowhere below: an episode that went wrong through no fault of the policy becomes a `failed`
trajectory with a reason, never a reward. Only a store that cannot be written to goes further up.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import logging
import time
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any

from rollmill import telemetry
from rollmill.environments.harness import Harness, HarnessResult
from rollmill.environments.machine import WORK, Machine, MachineHost
from rollmill.environments.reward import Grader, Submission
from rollmill.environments.task import Task
from rollmill.errors import GatewayError, ObjectExists, RollmillError
from rollmill.rollouts.client import GatewayClient
from rollmill.storage.objects import Objects
from rollmill.trajectories.store import TrajectoryStore
from rollmill.types import Reward, Sampling

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RolloutContext:
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
    context: RolloutContext, task: Task, trajectory: str, *, sampling: Sampling, min_version: int, facts: dict[str, Any]
) -> Outcome:
    """Run and grade one episode. Its trajectory row must exist; it is final when this returns."""

    async def episode() -> Outcome:
        result, submission, tokens = await _play(context, task, trajectory, sampling, min_version, facts)
        reward = await context.grader.grade(task, submission, context.grading_machines)
        return Outcome(trajectory, reward, result, tokens)

    return await _settle(context, task, trajectory, facts, episode())


async def regrade(
    context: RolloutContext, task: Task, trajectory: str, submission_key: str, *, facts: dict[str, Any]
) -> Outcome:
    """Grade a finished trajectory from what was handed in: after a crash, or with a better grader."""

    async def grading() -> Outcome:
        submission = await asyncio.to_thread(load_submission, context.objects, submission_key)
        reward = await context.grader.grade(task, submission, context.grading_machines)
        return Outcome(trajectory, reward, None)

    return await _settle(context, task, trajectory, facts, grading())


async def _settle(
    context: RolloutContext, task: Task, trajectory: str, facts: dict[str, Any], work: Awaitable[Outcome]
) -> Outcome:
    """The boundary: whatever becomes of `work`, the trajectory gets a reward or a reason."""
    started = time.time()
    try:
        async with asyncio.timeout(context.timeout_s) as limit:
            outcome = await work
    except Exception as error:
        if not isinstance(error, RollmillError | OSError):
            log.exception("rollout %s", trajectory)  # nobody foresaw it: the log keeps where it came from
        reason = f"no end after {context.timeout_s:g} s" if limit.expired() else _describe(error)
        outcome = Outcome(trajectory, None, None, reason=reason)
        await give_up(context, trajectory, reason)
    # outside the boundary: a reward that cannot be written must not turn into a failure of the rollout
    if outcome.reward is not None:
        await asyncio.to_thread(context.trajectories.grade, trajectory, outcome.reward)
    _report(task, outcome, facts, time.time() - started)
    return outcome


def _describe(error: Exception) -> str:
    return str(error) if isinstance(error, RollmillError) else f"{type(error).__name__}: {error}"


async def _play(
    context: RolloutContext, task: Task, trajectory: str, sampling: Sampling, min_version: int, facts: dict[str, Any]
) -> tuple[HarnessResult, Submission, int]:
    machine = await context.machines.create(task.image, {path: text.encode() for path, text in task.files.items()})
    try:
        key = await context.gateway.open_session(
            trajectory, traffic="rollout", min_version=min_version, task_id=task.id, **facts
        )
        result = await context.harness.run(
            task, machine, base_url=f"{context.gateway.base_url}/v1", api_key=key, sampling=sampling
        )
        submission = await _hand_in(machine, task)
    finally:
        await machine.close()
    submission_key = await asyncio.to_thread(store_submission, context.objects, trajectory, submission)
    sealed = await context.gateway.seal(trajectory, submission_key)
    return result, submission, sealed["tokens"]


async def _hand_in(machine: Machine, task: Task) -> Submission:
    """Only the declared paths leave the machine; one the agent deleted or made unreadable is simply not handed in."""
    submission = {}
    for path in task.submission:
        with contextlib.suppress(OSError):
            submission[path] = await machine.read(f"{WORK}/{path}")
    return submission


def submission_key(trajectory: str) -> str:
    return f"submissions/{trajectory}.json"


def store_submission(objects: Objects, trajectory: str, submission: Submission) -> str:
    key = submission_key(trajectory)
    body = {path: base64.b64encode(data).decode() for path, data in submission.items()}
    with contextlib.suppress(ObjectExists):  # handed in before a crash: the first one counts
        objects.create(key, json.dumps(body).encode())
    return key


def load_submission(objects: Objects, key: str) -> Submission:
    return {path: base64.b64decode(text) for path, text in json.loads(objects.get(key)).items()}


async def seal_again(context: RolloutContext, trajectory: str) -> str | None:
    """The submission of a rollout whose process died between handing in and hearing of the seal; None if it is lost.

    The gateway may be sealing it this very moment: asking is the only way not to throw away a finished trajectory.
    """
    key = submission_key(trajectory)
    if await asyncio.to_thread(context.objects.head, key) is None:
        return None
    try:
        await context.gateway.seal(trajectory, key)
    except GatewayError:
        return None
    return key


async def give_up(context: RolloutContext, trajectory: str, reason: str) -> None:
    """Record a failed trajectory once."""
    await asyncio.to_thread(context.trajectories.fail, trajectory, reason)
    await abandon(context, trajectory)


async def abandon(context: RolloutContext, trajectory: str) -> None:
    """Have the gateway forget a session. It may be the very thing that failed, so this is best effort."""
    with contextlib.suppress(RollmillError, TimeoutError, OSError):
        async with asyncio.timeout(2.0):
            await context.gateway.abandon(trajectory)


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
