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
import re
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from typing import Any

from rollmill import telemetry
from rollmill.environments.harness import HarnessResult
from rollmill.environments.rewards import transcript
from rollmill.environments.task import Task
from rollmill.environments.task_machine import folder_for
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
    with_kept_state,
)
from rollmill.rollouts.rollout_context import RolloutContext
from rollmill.trajectories.payload import seal_facts
from rollmill.types import Grade, Sampling

log = logging.getLogger(__name__)
GRACE_S = 60.0  # limit of each step around the agent's own time: get a machine, open a session, hand in, seal
_CHECK_S = 1.0  # between two looks at the clock of an episode whose time seems to be over
_HEALTH_S = 5.0  # how long to ask the gateway whether an engine serves
_MOVED = "gateway_moved"  # code of a GatewayError
_LONGEST_ID = 96  # characters; the numbers of group, member and attempt follow
_DIGEST = 12  # hexadecimal digits
_STRANGE = re.compile(r"[^A-Za-z0-9._-]")


@dataclass(frozen=True)
class Outcome:
    trajectory: str
    reward: Grade | None
    result: HarnessResult | None
    tokens: int = 0
    reason: str | None = None  # why there is no reward
    seconds: float = 0.0  # the agent's own time
    asked: bool = False  # it ended with a question instead of work
    lost: bool = False  # the infrastructure failed before anything was handed in: a fresh attempt may succeed
    moved: bool = False  # lost because its gateway was: not a fault of this host
    versions: tuple[int, int] | None = None  # the oldest and the newest that sampled it; None: nothing was sampled

    @property
    def solved(self) -> bool:
        return self.reward is not None and self.reward.solved


def as_id(text: str) -> str:
    """`text`, if it can begin the id of a group; otherwise its valid characters, cut, and a digest of all of it.

    Ids are parts of URLs and object keys, so the gateway takes only some characters and at most 128 of them.
    """
    valid = _STRANGE.sub("-", text)
    if valid == text and len(text) <= _LONGEST_ID:
        return text
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:_DIGEST]
    return f"{valid[: _LONGEST_ID - _DIGEST - 1]}-{digest}"


def rollout_seed(run_seed: int, of: int | str, member: int) -> int:
    """The sampling seed of rollout number `member` of a group or task. `of`: the group's index, or the task's id.

    It depends on nothing else, so a run with the same seed draws the same numbers, also after a restart. The harness
    derives each turn's seed from it.
    """
    digest = hashlib.blake2b(f"{run_seed} {of!r} {member}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 2  # 62 bits: adding the number of a turn stays within the 63 bits of a request


def provenance_of(task: Task) -> dict[str, str]:
    facts = {"family": task.family, "split": task.split, "image": task.image, "task_digest": task.digest}
    return {**facts, "environment": task.environment} if task.environment else facts


class Rollout:
    """One attempt at a task. The row of its trajectory must exist; its state is final after `run` or `regrade`."""

    def __init__(
        self,
        context: RolloutContext,
        task: Task,
        trajectory: str,
        *,
        sampling: Sampling,
        min_version: int,
        facts: dict[str, Any],
    ) -> None:
        """`min_version`: no older engine answers. `facts`: run, group_id and provenance, for the gateway."""
        self._context, self._task, self._trajectory = context.of(task), task, trajectory
        self._min_version, self._facts = min_version, facts
        self._sampling = replace(sampling, max_tokens=self._context.max_answer_tokens or sampling.max_tokens)

    async def run(self) -> Outcome:
        """Play the episode and grade it."""
        return await self._settle(self._play(), self._context.running)

    async def regrade(self, submission_key: str) -> Outcome:
        """Grade a finished trajectory from what it handed in: after a crash, or with a better grader."""
        loading = asyncio.to_thread(load_hand_in, self._context.objects, submission_key)
        return await self._settle(loading, contextlib.nullcontext())

    async def _settle(
        self, handing_in: Coroutine[Any, Any, HandIn], running: AbstractAsyncContextManager[None]
    ) -> Outcome:
        """The error boundary: however the episode ends, its trajectory gets a reward, or a reason why it has none.
        `handing_in` is awaited inside `running`."""
        context, trajectory = self._context, self._trajectory
        started = time.time()
        handed_in = None
        try:
            with contextlib.closing(handing_in):  # if it never begins
                async with running:
                    started = time.time()
                    handed_in = await handing_in
            # a machine that is kept must not wait for others that wait for machines
            async with contextlib.nullcontext() if handed_in.keeps_machine else context.grading:
                outcome = await self._grade(handed_in)
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
        self._report(outcome, time.time() - started)
        return outcome

    async def _grade(self, handed_in: HandIn) -> Outcome:
        context = self._context
        record = await asyncio.to_thread(context.trajectories.load, self._trajectory)
        episode = graded_episode(handed_in, self._task, context.grading_machines, record)
        reward = await grade_patiently(
            context.grader,
            episode,
            self._trajectory,
            context.stalls,
            timeout_s=context.grading_timeout_s,
            attempts=context.attempts,
        )
        facts = seal_facts(record)
        oldest, newest = facts["oldest_version"], facts["newest_version"]
        return Outcome(
            self._trajectory,
            reward,
            episode.result,
            facts["tokens"],
            seconds=episode.seconds,
            asked=transcript.asks(episode),
            versions=None if oldest is None else (oldest, newest),
        )

    async def _play(self) -> HandIn:
        """Play the episode to its end, from its last checkpoint if it has one. If its machine is lost, resume
        likewise."""
        attempts = 0
        while True:
            found = await checkpoint.find(self._context, self._trajectory)
            attempts += 1
            try:
                return await self._attempt(found)
            except MachineError as error:
                if attempts >= self._context.attempts:
                    raise
                if await checkpoint.find(self._context, self._trajectory) is None:
                    raise
                telemetry.emit("resumed", trajectory=self._trajectory, task=self._task.id, reason=str(error))

    async def _attempt(self, found: Checkpoint | None) -> HandIn:
        context, task = self._context, self._task
        machine = await self._start_machine(found)
        try:
            if found is not None:
                self._min_version = found.min_version  # as the session was opened
            key = await self._open_session(machine)
            clock = await self._clock(machine, found)
            result, seconds = await self._run_harness(clock, key, self._progress(machine, clock, found))
            # an agent can make packing slow: its own limit must end it first, so that the agent earns nothing
            packing_s = work_diff.PACK_S * machine.capabilities.slowdown
            async with _within_grace("to read what was handed in", packing_s):
                wanted, clean = context.grader.wants_final_state, context.grading_machines
                handed_in = await take_hand_in(machine, task, clean, result, seconds, keep_state=wanted)
                handed_in = await with_kept_state(handed_in, context.machines)
        finally:
            await machine.close()
        try:
            await self._seal(handed_in)
        except BaseException:
            await release(context.machines, handed_in.final_state)
            raise
        return handed_in

    async def _start_machine(self, found: Checkpoint | None) -> Machine:
        context, task = self._context, self._task
        folder = None if context.grader.wants_final_state else folder_for(context.harness, task)
        if folder is not None:
            return folder
        await context.machines.slowdown(task.image)  # makes its template, if the host has templates
        async with _within_grace("to get a machine"):
            return await checkpoint.start_machine(context, task, found)

    async def _open_session(self, machine: Machine) -> str:
        """The key for the harness."""
        provenance = {**self._facts.get("provenance", {}), "image": machine.image}
        facts = {**self._facts, "provenance": provenance, "line": self._context.line, "task_id": self._task.id}
        async with _within_grace("to open a session"):
            return await self._context.gateway.open_session(
                self._trajectory, traffic="rollout", min_version=self._min_version, **facts
            )

    async def _clock(self, machine: Machine, found: Checkpoint | None) -> Clock:
        gateway = self._context.gateway
        if found is None:
            return Clock(gateway, self._trajectory, machine)
        waited = await gateway.waited(self._trajectory)
        return Clock(gateway, self._trajectory, machine, spent_s=found.seconds, waited_before=waited)

    def _progress(self, machine: Machine, clock: Clock, found: Checkpoint | None) -> dict[str, Any]:
        """The keyword arguments of a harness that can resume an episode."""
        if not checkpoint.are_kept(self._context):
            return {}
        progress = EpisodeProgress(self._context, self._trajectory, machine, clock, self._min_version)
        progress.state = found.harness if found is not None else None
        return {"progress": progress}

    async def _run_harness(self, clock: Clock, key: str, options: dict[str, Any]) -> tuple[HarnessResult, float]:
        """Let the agent work until it ends or its own time is over. Returns how it ended, and its own seconds.

        Running out of time is the agent's doing, and graded. Raises HarnessError or GatewayError if it waited for a
        model that no engine serves, and GatewayError if its gateway has moved: the agent knows no other address.
        """
        context, task, gateway = self._context, self._task, self._context.gateway
        limit, seconds = context.timeout_s if task.timeout_s is None else task.timeout_s, 0.0
        pause, elsewhere = limit, False
        url = gateway.url_of(self._trajectory)
        work: asyncio.Future[HarnessResult] = asyncio.ensure_future(
            context.harness.run(
                task, clock.machine, base_url=f"{url}/v1", api_key=key, sampling=self._sampling, **options
            )
        )
        moved = asyncio.ensure_future(gateway.moved(self._trajectory, url))
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
        await gateway.wait_until_serving(self._min_version, context.line, patience_s=_HEALTH_S, of=self._trajectory)
        return HarnessResult("time", turns=0, tool_calls=0), seconds  # grading counts them in the transcript

    async def _seal(self, handed_in: HandIn) -> None:
        """Store what was handed in, and have the gateway seal the session. A gateway that is lost after the seal does
        not answer: then the index says whether the trajectory is finished, and it counts."""
        context, trajectory = self._context, self._trajectory
        try:
            async with _within_grace("to seal the session"):
                submission_key = await asyncio.to_thread(store_hand_in, context.objects, trajectory, handed_in)
                await context.gateway.seal(trajectory, submission_key)
        except (GatewayError, HarnessError) as error:
            if not await asyncio.to_thread(context.trajectories.fail_unless_sealed, trajectory, str(error)):
                raise

    def _report(self, outcome: Outcome, seconds: float) -> None:
        result, task = outcome.result, self._task
        telemetry.emit(
            "rollout",
            trajectory=outcome.trajectory,
            group=self._facts.get("group_id"),
            task=task.id,
            family=task.family,
            split=task.split,
            environment=task.environment or None,
            state="graded" if outcome.reward else "failed",
            reward=outcome.reward.value if outcome.reward else None,
            solved=outcome.solved if outcome.reward else None,
            turns=result.turns if result else 0,
            tool_calls=result.tool_calls if result else 0,
            bad_tool_calls=result.bad_tool_calls if result else 0,
            tokens=outcome.tokens,
            seconds=seconds,
            reason=outcome.reason,
        )


def reason_of(error: Exception, what: str) -> str:
    """The text to record for `error`. Raises the error again if a store is down: that is no failure of a rollout."""
    if isinstance(error, StorageError) and not isinstance(error, ObjectMissing | ObjectTruncated):
        raise error
    if not isinstance(error, RollmillError | OSError):
        log.error("%s failed with an unexpected error", what, exc_info=error)
    return str(error) if isinstance(error, RollmillError) else f"{type(error).__name__}: {error}"


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
