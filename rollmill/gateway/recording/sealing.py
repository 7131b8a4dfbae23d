"""The end of a session: its record becomes one object, the index is updated, and the log forgets it.

    log "seal" ─► create payload object ─► index: finished ─► log "close"

The process may die after each arrow. After the first one the record cannot change, so a restart repeats the rest: the
object is create-only, and finishing twice is not an error.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rollmill.errors import GatewayError, ObjectExists, StorageError, TrajectoryError
from rollmill.gateway.config import GatewayConfig
from rollmill.gateway.recording.entries import encode_entry, encode_waited
from rollmill.gateway.recording.expert_routes import gather_routes
from rollmill.gateway.recording.recorder import Recorder
from rollmill.gateway.sessions.registry import Registry
from rollmill.gateway.sessions.sessions import Session
from rollmill.gateway.watching.metrics import Metrics
from rollmill.storage.objects import Objects
from rollmill.trajectories.changes import trajectory_rows
from rollmill.trajectories.payload import seal_facts, write_trajectory
from rollmill.trajectories.trajectory_store import TrajectoryStore
from rollmill.types import Trajectory, TrajectoryState

log = logging.getLogger(__name__)
_SWEEP_S = 1.0
_EXPIRE_S = 3600.0  # between two looks for old trajectories
_SMALL_PAYLOAD = 4 << 20  # bytes that are kept in memory
_AT_ONCE = 256  # sessions that a sweep looks at before requests get their turn, and rows in one transaction
_LANDING_S = 20.0  # how long a seal waits for answers in flight to be recorded; callers wait up to 60 s for the seal
_WAIT_STEP_S = 1.0  # waits are written to the log in steps of this, and of a tenth of the sum
_SEALED = tuple(seal_facts(Trajectory("", [])))  # the facts of a record that the index keeps


@dataclass(eq=False, repr=False)
class Sealer:
    config: GatewayConfig
    recorder: Recorder
    registry: Registry
    trajectories: TrajectoryStore
    objects: Objects
    metrics: Metrics
    problem: str | None = field(init=False, default=None)  # why the last seal failed; None after one succeeds

    async def seal(self, trajectory: str, submission_key: str | None) -> dict[str, Any]:
        """Seal a session. Idempotent: a sealed session gives the same reply again."""
        session = self.registry.get(trajectory)
        if session is None:
            return await self._already_sealed(trajectory)
        session.ending = True
        try:
            await self._land(session)
            async with session.lock:
                if self.registry.get(trajectory) is not session or session.given_up is not None:
                    return await self._already_sealed(trajectory)
                return await self._seal(session, submission_key)
        finally:
            session.ending = False

    async def give_up(self, session: Session, reason: str) -> bool:
        """Forget a session; its record is not kept. Returns False if it was sealed or given up meanwhile.

        Raises StorageError if something of it could not be removed. The sweep tries again.
        """
        session.given_up = reason
        _cut(session)
        async with session.lock:  # an answer that is being recorded, or a seal, ends first
            if self.registry.get(session.facts.trajectory) is not session:
                return False
            await self._give_up(session, reason)
            return True

    async def _give_up(self, session: Session, reason: str) -> None:
        """As `give_up`, for a caller that holds the lock of the session."""
        trajectory = session.facts.trajectory
        session.given_up = reason
        if session.sealing:
            await asyncio.to_thread(delete_unfinished, self.trajectories, self.objects, trajectory)
        if session.facts.traffic == "production" and session.listed == TrajectoryState.running:
            await self._fail(session, reason)
        if session.logged:
            await self.recorder.forget(trajectory)
        self.registry.remove(session)

    async def is_sealed(self, trajectory: str) -> bool:
        return await asyncio.to_thread(self.objects.head, payload_key(trajectory)) is not None

    async def sweep(self) -> None:
        """Runs for ever: finish seals that a crash interrupted, list new conversations, end idle ones."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._sweep_sessions())
            group.create_task(self._keep_waits())
            if self.config.retention_days is not None:
                group.create_task(self._expire(self.config.retention_days * 86400))

    async def _land(self, session: Session) -> None:
        """Wait until no answer is in flight. Those of a rollout are cut; a production user gets the whole answer."""
        _cut(session)
        try:
            async with asyncio.timeout(_LANDING_S):
                for flight in list(session.flights):
                    await flight.wait()
        except TimeoutError:
            raise GatewayError(
                f"{session.facts.trajectory} has an answer in flight", status=503, hint="try again"
            ) from None

    async def _expire(self, older_than_s: float) -> None:
        """Delete the payloads of old production trajectories. One that a step needs is deleted later."""
        while True:
            try:
                deleted, _ = await asyncio.to_thread(self.trajectories.delete_expired, older_than_s)
                if deleted:
                    log.info("%d trajectories are older than %g days: deleted", len(deleted), older_than_s / 86400)
            except (StorageError, OSError) as error:
                log.warning("old trajectories are not deleted yet: %s", error)
            await asyncio.sleep(_EXPIRE_S)

    async def _keep_waits(self) -> None:
        """Write the waits of rollouts to the log. A restarted gateway goes on with the clocks of their episodes."""
        while True:
            for number, session in enumerate(self.registry):
                if number % _AT_ONCE == 0:
                    await asyncio.sleep(0)
                if session.facts.traffic != "rollout" or not session.logged:
                    continue
                waits, trajectory = session.waits, session.facts.trajectory
                seconds = waits.seconds()
                step = max(_WAIT_STEP_S, waits.kept / 10)
                if seconds - waits.kept >= step:
                    waits.kept = seconds
                    self.recorder.append_later(trajectory, encode_waited(trajectory, seconds))
            await asyncio.sleep(_SWEEP_S)

    async def _sweep_sessions(self) -> None:
        while True:
            new, others = [], []
            for number, session in enumerate(self.registry):
                if number % _AT_ONCE == 0:
                    await asyncio.sleep(0)
                if session.listed is None and self._is_listable(session):
                    new.append(session)
                if session.unrecorded is not None or self._is_over(session):
                    others.append(session)
            await self._list_new(new)
            for session in others:
                if not self._is_open(session):
                    continue  # it ended while another one was processed
                await self._list_failed(session)
                if self._is_over(session):
                    await self._end(session)
            await asyncio.sleep(_SWEEP_S)

    def _is_open(self, session: Session) -> bool:
        return self.registry.get(session.facts.trajectory) is session

    def _is_over(self, session: Session) -> bool:
        """Whether it is closed or idle, and nobody works with it."""
        if not session.closed and time.time() - session.used_at <= self._limit_s(session):
            return False
        return not session.flights and not session.lock.locked()

    async def list_now(self, session: Session) -> None:
        """Write the row of an open production conversation, if it is not there yet."""
        if session.listed is None:
            await asyncio.to_thread(self._write_row, session)
            session.listed = TrajectoryState.running if session.unrecorded is None else TrajectoryState.failed

    async def _list_new(self, new: Sequence[Session]) -> None:
        """Write new production conversations to the index, many in one transaction: each would wait for the disk, which
        the session log needs, and take the interpreter from requests. What fails is tried again by the next sweep."""
        for at in range(0, len(new), _AT_ONCE):
            # some have ended, or were listed with their feedback, while others were written
            some = [session for session in new[at : at + _AT_ONCE] if session.listed is None and self._is_open(session)]
            if not some:
                continue
            try:
                await asyncio.to_thread(self._write_rows, some)
            except (StorageError, OSError) as error:
                log.warning("%d sessions are not listed yet: %s", len(some), error)
                return
            for session in some:
                session.listed = TrajectoryState.running
                if session.given_up is not None:  # given up meanwhile
                    await self._fail(session, session.given_up)

    def _write_rows(self, sessions: Sequence[Session]) -> None:
        with contextlib.suppress(TrajectoryError):  # the index cannot hold one of them
            rows = [
                row
                for each in sessions
                for row in trajectory_rows(
                    each.facts.run,
                    each.facts.group_id,
                    each.facts.task_id,
                    [each.facts.trajectory],
                    each.provenance,
                    each.facts.traffic,
                )
            ]
            if self.trajectories.add(rows):
                return
        for session in sessions:  # one by one: some are there already, listed before a restart or by their feedback
            try:
                self._write_row(session)
            except TrajectoryError as error:  # it was deleted, or the index cannot hold it: nothing to list
                log.info("session %s is not listed: %s", session.facts.trajectory, error.message)

    def _is_listable(self, session: Session) -> bool:
        """Whether it is a production conversation that has begun, all of it recorded."""
        facts = session.facts
        return facts.traffic == "production" and session.stored and bool(session.segments) and not session.unrecorded

    async def _list_failed(self, session: Session) -> None:
        """Write a production conversation to the index that is not recorded completely. Nobody waits for this."""
        listed = session.facts.traffic != "production" or session.listed == TrajectoryState.failed
        if session.unrecorded is None or not session.stored or listed:
            return
        try:
            await asyncio.to_thread(self._write_row, session)
            session.listed = TrajectoryState.failed
            if session.given_up is not None:  # given up meanwhile
                await self._fail(session, session.given_up)
        except TrajectoryError as error:  # it was deleted: nothing to list
            log.info("session %s is not listed: %s", session.facts.trajectory, error.message)
            session.listed = TrajectoryState.failed
        except (StorageError, OSError) as error:
            log.warning("session %s is not listed yet: %s", session.facts.trajectory, error)

    async def _fail(self, session: Session, reason: str) -> None:
        with contextlib.suppress(TrajectoryError, StorageError):
            await asyncio.to_thread(self.trajectories.fail, session.facts.trajectory, reason)

    def _write_row(self, session: Session) -> None:
        facts = session.facts
        self.trajectories.create(
            facts.run, facts.group_id, facts.task_id, [facts.trajectory], session.provenance, facts.traffic
        )
        if session.unrecorded is not None:
            self.trajectories.fail(facts.trajectory, f"not recorded completely: {session.unrecorded}")

    async def _end(self, session: Session) -> None:
        trajectory = session.facts.trajectory
        try:
            if session.given_up is not None:
                await self.give_up(session, session.given_up)
            elif not session.stored:
                await self.give_up(session, "its user did not agree to storing it")
            elif session.facts.traffic == "rollout" and not session.sealing:
                log.warning("session %s expired: nobody sealed it", trajectory)
                await self.give_up(session, "nobody sealed it")
            else:
                await self.seal(trajectory, session.submission_key)
        except GatewayError as error:
            log.error("session %s cannot be sealed: %s", trajectory, error)
            if error.status == 409:  # the index has given it up, or its record is inconsistent
                session.given_up = error.message  # the next sweep removes it
        except StorageError as error:
            log.warning("session %s is not removed yet: %s", trajectory, error)
        except Exception:  # one session must not block the sealing of others
            log.exception("session %s cannot be sealed", trajectory)

    async def _seal(self, session: Session, submission_key: str | None) -> dict[str, Any]:
        trajectory = session.facts.trajectory
        if not session.stored:
            await self._give_up(session, "its user did not agree to storing it")
            raise GatewayError(f"{trajectory} is not stored: its user did not agree", status=410)
        if session.unrecorded is not None:
            await self._list_failed(session)
            await self._give_up(session, session.unrecorded)
            raise GatewayError(f"{trajectory} was not recorded completely: {session.unrecorded}", status=410)
        try:
            if not session.sealing:
                await self.recorder.append(
                    trajectory, encode_entry("seal", trajectory, {"submission_key": submission_key})
                )
                session.sealing, session.submission_key = True, submission_key
            sealed = await asyncio.to_thread(self._store, session)
            self.problem = None
        except TrajectoryError as error:
            raise GatewayError(f"{trajectory} cannot be sealed: {error.message}", status=409, hint=error.hint) from None
        except (StorageError, OSError) as error:
            self.problem, hint = (error.message, error.hint) if isinstance(error, StorageError) else (str(error), None)
            raise GatewayError(f"{trajectory} cannot be stored: {self.problem}", status=503, hint=hint) from None
        self.registry.remove(session)
        with contextlib.suppress(StorageError):  # it is stored, which a restart would find out
            await self.recorder.forget(trajectory)
        self.metrics.count("sealed_total", traffic=session.facts.traffic)
        return sealed

    def _store(self, session: Session) -> dict[str, Any]:
        """Runs in a thread, because compression, object store and database may be slow."""
        facts = session.facts
        trajectory = session.build()
        key = payload_key(facts.trajectory)
        with contextlib.suppress(ObjectExists):  # ours, from before a crash: the record was already final
            self._create_payload(key, session, trajectory)
        if facts.traffic == "production":  # no run planned it, so the gateway creates its row
            self._write_row(session)
        sealed = seal_facts(trajectory)
        self.trajectories.finish(facts.trajectory, key, session.submission_key, **sealed)
        return {"trajectory": facts.trajectory, "payload_key": key, **sealed}

    def _create_payload(self, key: str, session: Session, trajectory: Trajectory) -> None:
        """Goes through files without a name on the disk of the log: the payload may be larger than memory."""
        directory = self.recorder.directory
        with (
            self.recorder.located(trajectory.id) as (log, extents),
            tempfile.TemporaryFile(dir=directory) as scratch,
            tempfile.SpooledTemporaryFile(_SMALL_PAYLOAD, dir=str(directory)) as payload,
        ):
            routes = gather_routes(session.segments.values(), log, extents, scratch.fileno())
            write_trajectory(trajectory, payload, routes)
            payload.seek(0)
            self.objects.create_from(key, payload)

    async def _already_sealed(self, trajectory: str) -> dict[str, Any]:
        try:
            row = await asyncio.to_thread(self.trajectories.get, trajectory)
        except TrajectoryError:
            row = None
        if row is None or row.payload_key is None or row.state in (TrajectoryState.running, TrajectoryState.deleted):
            raise GatewayError(f"there is no session {trajectory}", status=404, hint="POST /sessions opens one")
        return {"trajectory": row.id, "payload_key": row.payload_key, **{name: getattr(row, name) for name in _SEALED}}

    def _limit_s(self, session: Session) -> float:
        return self.config.seal_idle_s if session.facts.traffic == "production" else self.config.expire_idle_s


def _cut(session: Session) -> None:
    if session.facts.traffic == "rollout":
        for flight in session.flights:
            flight.cut()


def delete_unfinished(trajectories: TrajectoryStore, objects: Objects, trajectory: str) -> None:
    """Delete the payload of a seal that did not reach the index: the index does not know that there is one."""
    try:
        if trajectories.get(trajectory).payload_key is not None:
            return
    except TrajectoryError:  # it has no row
        pass
    if objects.head(payload_key(trajectory)) is not None:
        objects.delete(payload_key(trajectory))


def payload_key(trajectory: str) -> str:
    return f"trajectories/{trajectory}.zst"
