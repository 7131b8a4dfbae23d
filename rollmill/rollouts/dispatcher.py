"""The dispatcher starts groups of rollouts as fast as the staleness bound allows.

What each loop waits for, and who unblocks it:

    admit    waits for room under the bounds of trajectories/staleness.py       the trainer: it commits a step or
                                                                                closes a group it cannot learn from
    rollout  waits for the gateway (tokens), its machine (tools), its grader    their processes, or a time limit
    group    waits for all of its rollouts                                      the rollouts
    run      ends when the last step is committed, or none can follow: until then the trainer may need other groups
    lease    renews the lease of this dispatcher, and ends it when others may play its groups
    share    takes over the groups of a dispatcher that has no lease any more

All counts come from the store, so a dispatcher that is killed and started again continues: it grades sealed
trajectories from their stored submissions, goes on with those that have a checkpoint, and starts new attempts for those
that were lost. Several dispatchers may play the groups of one run: each group has one holder, see
trajectories/claims.py.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from rollmill import telemetry
from rollmill.environments.sampler import Sampler
from rollmill.environments.samplers.uniform import Uniform
from rollmill.environments.task import Task, TaskSet
from rollmill.errors import HarnessError, StorageError, TrajectoryError
from rollmill.rollouts import episode_checkpoint as checkpoint
from rollmill.rollouts.choices import Choices
from rollmill.rollouts.config import RolloutConfig
from rollmill.rollouts.grading import Stalls
from rollmill.rollouts.hand_in import hand_in_key
from rollmill.rollouts.rollout import (
    Outcome,
    Rollout,
    abandon,
    as_id,
    give_up,
    provenance_of,
    reason_of,
    rollout_seed,
    seal_again,
)
from rollmill.rollouts.rollout_context import RolloutContext
from rollmill.trajectories.claims import RENEW_S, Claims
from rollmill.trajectories.ledger import GroupRow, Ledger, NewGroup
from rollmill.trajectories.staleness import Pace
from rollmill.trajectories.table_rows import TrajectoryRow
from rollmill.types import GroupState, Sampling, TrajectoryState

POLL_S = 0.05


class Queue:
    """At most `most` are inside at once; the others wait, first come, first served. Use it by `async with`.

    Episodes that run and episodes that are graded each have a queue. An episode gives its slot back when it has handed
    in, so a slow grader keeps no engine idle, and episodes that start never stand before one that only has to be
    graded. Machines are started in a third queue, that of the pool.
    """

    def __init__(self, most: int) -> None:
        self._slots = asyncio.Semaphore(most)
        self.inside = 0

    @property
    def full(self) -> bool:
        return self._slots.locked()

    async def __aenter__(self) -> None:
        await self._slots.acquire()
        self.inside += 1

    async def __aexit__(self, *_: object) -> None:
        self.inside -= 1
        self._slots.release()


class Dispatcher:
    def __init__(
        self,
        context: RolloutContext,
        ledger: Ledger,
        tasks: TaskSet,
        config: RolloutConfig,
        *,
        run: str,
        seed: int,
        pace: Pace,
        sampler: Sampler | None = None,
        claims: Claims | None = None,
    ) -> None:
        """`claims`: of one of several dispatchers. None: this one plays all groups."""
        self._playing = Queue(config.concurrency)
        self._grading = Queue(config.grading_concurrency or config.concurrency)
        self._context = replace(context, running=self._playing, grading=self._grading, stalls=Stalls(patient=True))
        self._claims = claims
        self._ledger = ledger
        self._tasks = tasks
        self._config = config
        self._run = run
        self._seed = seed
        self._pace = pace
        self._choices = Choices(sampler or Uniform(), tasks, ledger, pace, seed)
        self._failures_in_a_row = 0

    async def run(self) -> None:
        """Start, run and grade groups until training is over."""
        clock = asyncio.create_task(self._mark_busy())
        try:
            async with asyncio.TaskGroup() as groups:
                await self._recover(groups)
                claims, sharing = self._claims, []
                if claims is not None:
                    sharing = [groups.create_task(work) for work in (_keep(claims), self._share(claims, groups))]
                while await self._start_group(groups):
                    pass
                for each in sharing:
                    each.cancel()
        finally:
            clock.cancel()

    async def _share(self, claims: Claims, groups: asyncio.TaskGroup) -> None:
        """Resume the groups of dispatchers that have no lease any more."""
        while True:
            await asyncio.sleep(RENEW_S)
            try:
                taken = set(await asyncio.to_thread(claims.take_over))
            except StorageError:  # the database does not answer now
                continue
            if taken:
                telemetry.emit("takeover", dispatcher=claims.name, groups=len(taken))
                await asyncio.sleep(RENEW_S)  # by then their holder knows, if it is alive after all
                await self._resume(taken, groups)

    async def _start_group(self, groups: asyncio.TaskGroup) -> bool:
        """Wait until there is room, then start the next group. False once training is over."""
        while True:
            if self._claims is None or not self._playing.full:  # it would wait here: let another one play it
                committed, room, over = await asyncio.to_thread(self._look)
                if over:
                    return False
                if room and await self._start_next(committed, groups):
                    return True
            await asyncio.sleep(POLL_S)

    def _look(self) -> tuple[int, bool, bool]:
        """The committed version, whether there is room for another group, and whether training is over. It is called
        often, so it only reads: `start_group` counts again when it writes."""
        committed = self._ledger.committed()
        startable = self._ledger.groups_started() < self._pace.most_started(committed)
        over = self._pace.is_last(committed) or (not startable and self._ledger.is_spent(self._pace))
        return committed, startable and self._ledger.open_groups() < self._pace.most_open(committed), over

    async def _start_next(self, committed: int, groups: asyncio.TaskGroup) -> bool:
        """Start the next group, if there is room and `committed` is still the newest committed step."""
        chosen: dict[str, Task] = {}

        def name(index: int) -> NewGroup:
            task = self._choices.choose(index, committed)
            id = f"{as_id(self._run.replace('/', '-'))}-{index:06d}"
            chosen[id] = task
            ids = [f"{id}-{member}" for member in range(self._pace.group_size)]
            return NewGroup(id, task.id, ids, provenance_of(task))

        holder = self._claims.name if self._claims else None
        await asyncio.to_thread(self._choices.read, committed)
        started = await asyncio.to_thread(
            self._ledger.start_group, name, pace=self._pace, committed=committed, holder=holder
        )
        if started is None:
            return False
        group, version = started
        task = chosen[group.id]
        self._context.of(task).machines.expect(task.image, len(group.ids))  # the next group will need as many
        groups.create_task(self._run_group(group.id, task, group.ids, version))
        return True

    async def _run_group(self, group_id: str, task: Task, ids: Sequence[str], min_version: int) -> None:
        async with asyncio.TaskGroup() as rollouts:
            for trajectory in ids:
                rollouts.create_task(self._run_one(group_id, task, trajectory, min_version))
        await self._group_ready(group_id)

    async def _group_ready(self, group_id: str) -> None:
        try:
            await asyncio.to_thread(self._ledger.group_ready, group_id)
        except TrajectoryError:
            if not await self._has_moved(group_id):
                raise

    async def _has_moved(self, group_id: str) -> bool:
        """Whether another dispatcher plays this group now, or has brought it to its end."""
        return self._claims is not None and not await asyncio.to_thread(self._claims.plays, group_id)

    async def _run_one(self, group_id: str, task: Task, trajectory: str, min_version: int) -> None:
        outcome = await self._rollout(group_id, task, trajectory, min_version).run()
        self._count_failure(outcome)
        if outcome.lost and _parts(group_id, trajectory)[2] + 1 < self._config.attempts:
            await self._replace(group_id, task, trajectory, str(outcome.reason))

    def _rollout(self, group_id: str, task: Task, trajectory: str, min_version: int) -> Rollout:
        index, member, _ = _parts(group_id, trajectory)
        sampling = Sampling(
            temperature=self._config.temperature,
            max_tokens=self._config.max_answer_tokens,
            seed=rollout_seed(self._seed, index, member),
        )
        facts = {"run": self._run, "group_id": group_id, "provenance": provenance_of(task)}
        return Rollout(self._context, task, trajectory, sampling=sampling, min_version=min_version, facts=facts)

    async def _replace(self, group_id: str, task: Task, trajectory: str, reason: str) -> bool:
        """Run a fresh attempt in place of a lost one. Returns False if the trajectory is sealed: it is not lost."""
        _, member, attempt = _parts(group_id, trajectory)
        fresh = f"{group_id}-{member}_{attempt + 1}"
        try:
            version = await asyncio.to_thread(self._ledger.replace_lost, group_id, trajectory, fresh, reason)
        except TrajectoryError:
            if await self._has_moved(group_id):
                return True  # the other dispatcher replaces it
            raise
        if version is None:
            return False
        await abandon(self._context, trajectory)
        await checkpoint.forget(self._context, trajectory)
        await self._run_one(group_id, task, fresh, version)
        return True

    def _count_failure(self, outcome: Outcome) -> None:
        """One failed rollout is data. `give_up_after` failures in a row mean that the host is broken: stop the run.
        A lost gateway is no such failure, however many rollouts it had."""
        if outcome.moved:
            return
        self._failures_in_a_row = self._failures_in_a_row + 1 if outcome.reward is None else 0
        if self._failures_in_a_row >= self._config.give_up_after:
            raise HarnessError(
                f"the last {self._failures_in_a_row} rollouts all failed; the latest: {outcome.reason}",
                hint="`rollmill doctor` checks what machines need; `rollmill trajectories list` shows the reasons",
            )

    async def _recover(self, groups: asyncio.TaskGroup) -> None:
        """Resume the groups that an earlier dispatcher left running."""
        claims, mine = self._claims, None
        if claims is not None:
            await asyncio.to_thread(claims.hold)
            mine = set(await asyncio.to_thread(claims.take_over, own=True))
        await self._resume(mine, groups)

    async def _resume(self, named: set[str] | None, groups: asyncio.TaskGroup) -> None:
        """Resume running groups: those named, or all."""
        for group in await asyncio.to_thread(self._ledger.groups, GroupState.running):
            if named is None or group.id in named:
                groups.create_task(self._resume_group(group))

    async def _resume_group(self, group: GroupRow) -> None:
        rows = await asyncio.to_thread(self._context.trajectories.list, run=self._run, group_id=group.id)
        try:
            task = self._tasks.get(group.task_id)
        except Exception as error:  # the task set has changed: the rest of the group cannot be graded
            reason = reason_of(error, group.id)
            for row in rows:
                if row.state in (TrajectoryState.running, TrajectoryState.finished):
                    await give_up(self._context, row.id, reason)
                await checkpoint.forget(self._context, row.id)
        else:
            async with asyncio.TaskGroup() as rollouts:
                for row in rows:
                    rollouts.create_task(self._resume_one(group, task, row))
        await self._group_ready(group.id)

    async def _resume_one(self, group: GroupRow, task: Task, row: TrajectoryRow) -> None:
        """Grade the trajectory if its submission is stored. If it was interrupted, go on from its checkpoint or replace
        it. Otherwise its state is final: only a checkpoint may be left of it."""
        handed_in = row.submission_key if row.state == TrajectoryState.finished else None
        if row.state not in (TrajectoryState.running, TrajectoryState.finished):
            await checkpoint.forget(self._context, row.id)
        if row.state == TrajectoryState.running:
            handed_in = await seal_again(self._context, row.id)
            if handed_in is None and await self._can_go_on(task, row.id):
                telemetry.emit("resumed", trajectory=row.id, task=task.id, reason="the dispatcher was restarted")
                return await self._run_one(group.id, task, row.id, group.min_version)
            why = "the dispatcher was restarted in the middle of this rollout"
            if handed_in is None and not await self._replace(group.id, task, row.id, why):
                handed_in = hand_in_key(row.id)  # sealed meanwhile, by a gateway that could not say so
        if handed_in is not None:
            self._count_failure(await self._rollout(group.id, task, row.id, group.min_version).regrade(handed_in))

    async def _can_go_on(self, task: Task, trajectory: str) -> bool:
        """Whether an interrupted trajectory has a checkpoint and has handed in nothing. What it handed in may be sealed
        at any moment by a gateway that does not answer, so it is neither deleted nor replaced."""
        if await asyncio.to_thread(self._context.objects.head, hand_in_key(trajectory)) is not None:
            return False
        return await checkpoint.find(self._context.of(task), trajectory) is not None

    def _in_progress(self) -> int:
        return self._playing.inside + self._grading.inside

    async def _mark_busy(self) -> None:
        """Emit one `busy` event per second of work: enough for the timeline, and few lines in the log."""
        start = time.time()
        while True:
            was_running = self._in_progress()
            await asyncio.sleep(1.0)
            if was_running and (running := self._in_progress()):
                telemetry.emit("busy", what="rollouts", start=start, end=time.time(), running=running)
            start = time.time()


async def _keep(claims: Claims) -> None:
    """Keep the lease. Raises TrajectoryError once others play the groups of this dispatcher, or may do so."""
    loop = asyncio.get_running_loop()
    thread = ThreadPoolExecutor(1, "lease")  # its own: grading and stores may occupy all threads of the loop
    try:
        while True:
            await asyncio.sleep(RENEW_S)
            try:
                # if the whole process was paused, try once more: perhaps no other dispatcher took its groups
                async with asyncio.timeout(max(claims.left_s(), RENEW_S)):
                    kept = await loop.run_in_executor(thread, claims.renew)
            except (StorageError, TimeoutError) as error:
                if claims.left_s() > 0:
                    continue
                why = error.message if isinstance(error, StorageError) else "the database does not answer"
                raise TrajectoryError(
                    f"{claims.name} could not renew its lease in time: {why}",
                    hint="others may play its groups now; is the database reachable from this host?",
                ) from error
            if not kept:
                raise TrajectoryError(f"{claims.name} has lost its lease", hint="others play its groups now")
    finally:
        thread.shutdown(wait=False)


def _parts(group_id: str, trajectory: str) -> tuple[int, int, int]:
    """(group index, member, attempt) of the ids `RUN-INDEX` and `RUN-INDEX-MEMBER[_ATTEMPT]`."""
    member, _, attempt = trajectory.removeprefix(f"{group_id}-").partition("_")
    return int(group_id.rpartition("-")[2]), int(member), int(attempt or 0)
