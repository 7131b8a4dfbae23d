"""One rollout: a task, a machine, a harness that talks to the model at a URL, a submission, a reward.

    create machine → open session → run harness → read the submission → close machine → store it → seal → grade
                                                                                                    │
        before the seal, a rollout is lost when its process dies, or goes on from its last checkpoint
        (episode_checkpoint.py). After the seal, the trajectory is `finished` and can be graded at any time from the
        stored submission.

This module is the error boundary of a rollout. An episode that fails through no fault of the policy becomes a
`failed` trajectory with a reason, never a reward. The same holds for a reward that cannot be stored. Only a store that
is down raises: the trajectory keeps its state, and a restart resumes it.

An episode's time limit counts its own time, see clock.py. An answer that comes whole (at most `gateway.stream_above`
tokens) counts as waiting until it arrives, so an episode may exceed its limit by one such answer. Machine, seal and
grading have their own limits.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

from rollmill import telemetry
from rollmill.environments.harness import HarnessResult
from rollmill.environments.machine_folder import folder_for
from rollmill.environments.reward import wants_final_state
from rollmill.environments.rewards import transcript
from rollmill.environments.task import Task
from rollmill.errors import (
    GatewayError,
    HarnessError,
    MachineError,
    ObjectMissing,
    ObjectTruncated,
    RollmillError,
    StorageError,
    TrajectoryError,
)
from rollmill.machines.machine import Machine, release
from rollmill.rollouts import episode_checkpoint as checkpoint
from rollmill.rollouts import work_diff
from rollmill.rollouts.clock import Clock
from rollmill.rollouts.episode_checkpoint import Checkpoint, EpisodeProgress
from rollmill.rollouts.grading import grade_patiently
from rollmill.rollouts.hand_in import (
    HandIn,
    graded_episode,
    hand_in_key,
    load_hand_in,
    store_hand_in,
    take_hand_in,
)
from rollmill.rollouts.rollout_context import RolloutContext
from rollmill.trajectories.schema import seal_facts
from rollmill.types import Reward, Sampling

log = logging.getLogger(__name__)
GRACE_S = 60.0  # limit of each step around the agent's own time: get a machine, open a session, hand in, seal
_CHECK_S = 1.0  # between two looks at the clock of an episode whose time seems to be over
_HEALTH_S = 5.0  # how long to ask the gateway whether an engine serves
_MOVED = "gateway_moved"  # code of a GatewayError


@dataclass(frozen=True)
class Outcome:
    trajectory: str
    reward: Reward | None
    result: HarnessResult | None
    tokens: int = 0
    reason: str | None = None  # why there is no reward
    seconds: float = 0.0  # the agent's own time
    asked: bool = False  # it ended with a question instead of work
    lost: bool = False  # the infrastructure failed before anything was handed in: a fresh attempt may succeed
    moved: bool = False  # lost because its gateway was: not a fault of this host

    @property
    def solved(self) -> bool:
        return self.reward is not None and self.reward.solved


def rollout_seed(run_seed: int, of: int | str, member: int) -> int:
    """The sampling seed of rollout number `member` of a group or task. `of`: the group's index, or the task's id.

    It depends on nothing else, so a run with the same seed draws the same numbers, also after a restart. The harness
    derives each turn's seed from it.
    """
    digest = hashlib.blake2b(f"{run_seed} {of!r} {member}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 2  # 62 bits: adding the number of a turn stays within the 63 bits of a request


async def run_rollout(
    context: RolloutContext, task: Task, trajectory: str, *, sampling: Sampling, min_version: int, facts: dict[str, Any]
) -> Outcome:
    """Run and grade one episode. The row of `trajectory` must exist; its state is final when this returns."""
    playing = _play(context, task, trajectory, sampling, min_version, facts)
    return await _settle(context, task, trajectory, facts, playing, context.running)


async def regrade(
    context: RolloutContext, task: Task, trajectory: str, submission_key: str, *, facts: dict[str, Any]
) -> Outcome:
    """Grade a finished trajectory from what it handed in: after a crash, or with a better grader."""
    loading = asyncio.to_thread(load_hand_in, context.objects, submission_key)
    return await _settle(context, task, trajectory, facts, loading, contextlib.nullcontext())


async def _grade(context: RolloutContext, task: Task, trajectory: str, handed_in: HandIn) -> Outcome:
    record = await asyncio.to_thread(context.trajectories.load, trajectory)
    episode = graded_episode(handed_in, task, context.grading_machines, record)
    reward = await grade_patiently(
        context.grader,
        episode,
        trajectory,
        context.stalls,
        timeout_s=context.grading_timeout_s,
        attempts=context.attempts,
    )
    tokens, asked = seal_facts(record)["tokens"], transcript.asks(episode)
    return Outcome(trajectory, reward, episode.result, tokens, seconds=episode.seconds, asked=asked)


async def _settle(
    context: RolloutContext,
    task: Task,
    trajectory: str,
    facts: dict[str, Any],
    handing_in: Coroutine[Any, Any, HandIn],
    running: AbstractAsyncContextManager[None],
) -> Outcome:
    """The error boundary: however the episode ends, its trajectory gets a reward, or a reason why it has none.
    `handing_in` is awaited inside `running`."""
    started = time.time()
    handed_in = None
    try:
        with contextlib.closing(handing_in):  # if it never begins
            async with running:
                started = time.time()
                handed_in = await handing_in
        async with context.grading:
            outcome = await _grade(context, task, trajectory, handed_in)
        assert outcome.reward is not None
        await asyncio.to_thread(context.trajectories.grade, trajectory, outcome.reward)
    except Exception as error:
        reason = reason_of(error, trajectory)
        lost = handed_in is None and isinstance(error, MachineError | HarnessError | GatewayError)
        moved = isinstance(error, GatewayError) and error.code == _MOVED
        outcome = Outcome(trajectory, None, None, reason=reason, lost=lost, moved=moved)
        await give_up(context, trajectory, reason)
    finally:
        if handed_in is not None:
            await release(context.machines, handed_in.final_state)
    await checkpoint.forget(context, trajectory)
    _report(task, outcome, facts, time.time() - started)
    return outcome


def reason_of(error: Exception, what: str) -> str:
    """The text to record for `error`. Raises the error again if a store is down: that is no failure of a rollout."""
    if isinstance(error, StorageError) and not isinstance(error, ObjectMissing | ObjectTruncated):
        raise error
    if not isinstance(error, RollmillError | OSError):
        log.error("%s failed with an unexpected error", what, exc_info=error)
    return str(error) if isinstance(error, RollmillError) else f"{type(error).__name__}: {error}"


async def _play(
    context: RolloutContext, task: Task, trajectory: str, sampling: Sampling, min_version: int, facts: dict[str, Any]
) -> HandIn:
    """Play the episode to its end, from its last checkpoint if it has one. If its machine is lost, resume likewise."""
    attempts = 0
    while True:
        found = await checkpoint.find(context, trajectory)
        attempts += 1
        try:
            return await _attempt(context, task, trajectory, sampling, min_version, facts, found)
        except MachineError as error:
            if attempts >= context.attempts or await checkpoint.find(context, trajectory) is None:
                raise
            telemetry.emit("resumed", trajectory=trajectory, task=task.id, reason=str(error))


async def _attempt(
    context: RolloutContext,
    task: Task,
    trajectory: str,
    sampling: Sampling,
    min_version: int,
    facts: dict[str, Any],
    found: Checkpoint | None,
) -> HandIn:
    machine = await _machine_for(context, task, found)
    try:
        min_version = min_version if found is None else found.min_version  # as the session was opened
        facts = {**facts, "provenance": {**facts.get("provenance", {}), "image": machine.image}}
        async with _within_grace("to open a session"):
            key = await context.gateway.open_session(
                trajectory, traffic="rollout", min_version=min_version, line=context.line, task_id=task.id, **facts
            )
        clock, options = await _begin(context, trajectory, machine, min_version, found)
        url = context.gateway.url_of(trajectory)
        run = context.harness.run(task, clock.machine, base_url=f"{url}/v1", api_key=key, sampling=sampling, **options)
        result, seconds = await _run_harness(context, task, clock, asyncio.ensure_future(run), min_version, url)
        # an agent can make packing slow: its own limit must end it first, so that the agent earns nothing
        packing_s = work_diff.PACK_S * machine.capabilities.slowdown
        async with _within_grace("to read what was handed in", packing_s):
            wanted = wants_final_state(context.grader)
            handed_in = await take_hand_in(machine, task, context.grading_machines, result, seconds, keep_state=wanted)
    finally:
        await machine.close()
    try:
        await _seal(context, trajectory, handed_in)
    except BaseException:
        await release(context.machines, handed_in.final_state)
        raise
    return handed_in


async def _seal(context: RolloutContext, trajectory: str, handed_in: HandIn) -> None:
    """Store what was handed in, and have the gateway seal the session. A gateway that is lost after the seal does not
    answer: then the index says whether the trajectory is finished, and it counts."""
    try:
        async with _within_grace("to seal the session"):
            submission_key = await asyncio.to_thread(store_hand_in, context.objects, trajectory, handed_in)
            await context.gateway.seal(trajectory, submission_key)
    except (GatewayError, HarnessError) as error:
        if not await asyncio.to_thread(context.trajectories.fail_unless_sealed, trajectory, str(error)):
            raise


async def _machine_for(context: RolloutContext, task: Task, found: Checkpoint | None) -> Machine:
    folder = None if wants_final_state(context.grader) else folder_for(context.harness, task)
    if folder is not None:
        return folder
    await context.machines.slowdown(task.image)  # makes its template, if the host has templates
    async with _within_grace("to get a machine"):
        return await checkpoint.start_machine(context, task, found)


async def _begin(
    context: RolloutContext, trajectory: str, machine: Machine, min_version: int, found: Checkpoint | None
) -> tuple[Clock, dict[str, Any]]:
    """The clock of an episode, and the keyword arguments of a harness that can resume an episode."""
    if context.checkpoint_s is None or not getattr(context.harness, "resumable", False):
        return Clock(context.gateway, trajectory, machine), {}
    waited = await context.gateway.waited(trajectory) if found is not None else 0.0
    spent_s = found.seconds if found is not None else 0.0
    clock = Clock(context.gateway, trajectory, machine, spent_s=spent_s, waited_before=waited)
    progress = EpisodeProgress(context, trajectory, machine, clock, min_version)
    progress.state = found.harness if found is not None else None
    return clock, {"progress": progress}


@contextlib.asynccontextmanager
async def _within_grace(what: str, more_s: float = 0.0) -> AsyncIterator[None]:
    seconds = GRACE_S + more_s
    try:
        async with asyncio.timeout(seconds) as limit:
            yield
    except TimeoutError:
        if limit.expired():
            raise HarnessError(f"{seconds:g} s were not enough {what}") from None
        raise


def time_limit(context: RolloutContext, task: Task) -> float:
    """How many seconds of its own time (clock.py) an episode may take."""
    return context.timeout_s if task.timeout_s is None else task.timeout_s


async def _run_harness(
    context: RolloutContext, task: Task, clock: Clock, work: asyncio.Future[HarnessResult], min_version: int, url: str
) -> tuple[HarnessResult, float]:
    """Let the agent work until it ends or its own time is over. Returns how it ended, and its own seconds.

    Running out of time is the agent's doing, and graded. Raises HarnessError or GatewayError if it waited for a model
    that no engine serves, and GatewayError if its gateway is no longer at `url`: the agent knows no other address.
    """
    limit, seconds = time_limit(context, task), 0.0
    pause, elsewhere = limit, False
    moved = asyncio.ensure_future(context.gateway.moved(clock.trajectory, url))
    either: list[asyncio.Future[Any]] = [work, moved]
    try:
        while True:
            await asyncio.wait(either, timeout=pause, return_when=asyncio.FIRST_COMPLETED)
            elsewhere = moved.done() and not work.done()
            if elsewhere or (work.done() and work.exception() is not None):
                break
            seconds = await clock.seconds()
            if work.done() or seconds >= limit:
                break
            pause = min(limit - seconds, _CHECK_S)
    finally:
        moved.cancel()
        work.cancel()  # without effect if it has ended
        await asyncio.wait([work])
    if elsewhere:
        raise GatewayError(
            f"the gateway of this session is no longer at {url}, and the agent knows no other address",
            status=503,
            code=_MOVED,
            hint="the rollout is tried again; the log of the gateway says why it was started elsewhere",
        ) from (None if work.cancelled() else work.exception())
    if not work.cancelled():
        return work.result(), seconds
    await context.gateway.wait_until_serving(min_version, context.line, patience_s=_HEALTH_S, of=clock.trajectory)
    return HarnessResult("time", turns=0, tool_calls=0), seconds  # grading counts them in the transcript


async def seal_again(context: RolloutContext, trajectory: str) -> str | None:
    """The key of the submission of a rollout whose process died around the seal; None if the gateway did not seal it.

    The gateway may be sealing the session at this moment, so it is asked: a finished trajectory must not be lost.
    """
    key = hand_in_key(trajectory)
    if await asyncio.to_thread(context.objects.head, key) is None:
        return None
    try:
        await context.gateway.seal(trajectory, key)
    except GatewayError:
        return None
    return key


async def give_up(context: RolloutContext, trajectory: str, reason: str) -> None:
    """Record that a trajectory failed. One that was deleted or graded in the meantime stays as it is."""
    try:
        await asyncio.to_thread(context.trajectories.fail, trajectory, reason)
    except TrajectoryError as refused:
        log.warning("%s failed (%s), which is not recorded: %s", trajectory, reason, refused)
    await abandon(context, trajectory)


async def abandon(context: RolloutContext, trajectory: str) -> None:
    """Ask the gateway to forget a session. Best effort: the gateway may be what failed."""
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
