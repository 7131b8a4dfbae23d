"""Trajectories: the index in SQL, the payloads in objects. `changes` has the changes, `rows` what is read."""

from __future__ import annotations

import builtins
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import sqlalchemy as sa
from sqlalchemy import bindparam
from sqlalchemy.exc import IntegrityError

from rollmill.errors import TrajectoryError
from rollmill.storage.database import among, erase_deleted, reading, writing
from rollmill.storage.objects import Objects
from rollmill.storage.tables import feedback, groups, ledger, rewards, trajectories
from rollmill.trajectories.changes import (
    add_reward,
    fail_unless_sealed,
    finish_trajectory,
    move_trajectory,
    reward_row,
    stored,
    trajectory_rows,
)
from rollmill.trajectories.payload import decode_trajectory
from rollmill.trajectories.query import TrajectoryQuery
from rollmill.trajectories.storable import LONGEST_OBJECT_KEY, from_json, is_key, to_key, to_number, to_object, to_text
from rollmill.trajectories.table_rows import COLUMNS, FeedbackRow, LedgerEntry, TrajectoryRow, missing, rows_of, to_row
from rollmill.types import Grade, LedgerState, TrafficClass, Trajectory, TrajectoryState

Grades = list[tuple[int, Grade]]  # reward id, reward; oldest first

_INTERRUPTED = (
    trajectories.update()
    .where(trajectories.c.state.in_([TrajectoryState.running.value, TrajectoryState.finished.value]))
    .values(state=TrajectoryState.failed.value, reason="interrupted")
)
_ADD_FEEDBACK = feedback.insert().returning(feedback.c.id)
_REWARDS = sa.select(rewards).where(among(rewards.c.trajectory, "ids")).order_by(rewards.c.trajectory, rewards.c.id)
_LEASE = sa.select(ledger.c.run, ledger.c.step).where(
    ledger.c.trajectory == bindparam("key"), ledger.c.state == LedgerState.leased.value
)
_AT_ONCE = 1_000  # trajectories deleted in one transaction
_HELD = (
    sa.select(trajectories.c.id).where(among(trajectories.c.id, "ids")).order_by(trajectories.c.id).with_for_update()
)
_LEASED = sa.select(ledger.c.trajectory).where(
    among(ledger.c.trajectory, "ids"), ledger.c.state == LedgerState.leased.value
)
_DELETED = trajectories.update().where(among(trajectories.c.id, "ids")).values(state=TrajectoryState.deleted.value)
_ERASED = trajectories.update().where(among(trajectories.c.id, "ids")).values(payload_key=None, submission_key=None)
_EMPTIED = feedback.update().where(among(feedback.c.trajectory, "ids")).values(data="{}")
_RELEASE = (
    trajectories.update()
    .where(trajectories.c.id == bindparam("key"), trajectories.c.reward_id.is_not(None))
    .where(trajectories.c.state == TrajectoryState.quarantined.value)
    .values(state=TrajectoryState.graded.value, reason=None)
)
_ENTRIES = (
    sa.select(ledger.c.run, ledger.c.state, ledger.c.step, ledger.c.reason, groups.c.origin)
    .join_from(ledger, groups, (ledger.c.run == groups.c.run) & (ledger.c.group_id == groups.c.id))
    .where(ledger.c.trajectory == bindparam("key"))
    .order_by(ledger.c.run)
)


class TrajectoryStore:
    """Facts about trajectories, shared by all runs. Safe to use from several threads and processes."""

    def __init__(self, engine: sa.Engine, objects: Objects) -> None:
        self._engine = engine
        self._objects = objects

    def create(
        self,
        run: str,
        group_id: str,
        task_id: str,
        ids: Sequence[str],
        provenance: Mapping[str, Any],
        traffic: TrafficClass = "rollout",
    ) -> None:
        if not self.add(trajectory_rows(run, group_id, task_id, ids, provenance, traffic)):
            there = {row.id: (row.run, row.group_id, row.task_id) for row in self._rows(ids)}
            if any(there.get(id) != (run, group_id, task_id) for id in ids):
                raise TrajectoryError(
                    f"one of the ids {', '.join(ids)} belongs to another trajectory",
                    hint="ids are unique in a database; make them from random bytes",
                )

    def add(self, rows: Sequence[Mapping[str, Any]]) -> bool:
        """Create all `rows` of `trajectory_rows` at once. Returns False, and creates none, if an id exists already."""
        try:
            writing(self._engine, lambda connection: connection.execute(trajectories.insert(), list(rows)))
        except IntegrityError:
            return False
        return True

    def finish(self, id: str, payload_key: str, submission_key: str | None, **facts: str | int | None) -> None:
        """Seal: the payload object has been written. `facts`: columns of the index, as `payload.seal_facts` gives."""
        keys = {"payload_key": payload_key, "submission_key": submission_key}
        values = {
            **{name: None if key is None else to_key(name, key, LONGEST_OBJECT_KEY) for name, key in keys.items()},
            **{name: to_text(fact) if isinstance(fact, str) else fact for name, fact in facts.items()},
            "finished_at": time.time(),
        }
        writing(self._engine, lambda connection: finish_trajectory(connection, id, values))

    def grade(self, id: str, reward: Grade) -> int:
        """Append a reward and return its id. A finished or quarantined trajectory becomes graded."""
        row = reward_row(id, reward)
        try:
            return writing(self._engine, lambda connection: add_reward(connection, row))
        except IntegrityError:  # the foreign key is the only constraint that such a row can break
            raise missing(id) from None

    def fail(self, id: str, reason: str) -> None:
        """Mark it as failed because of infrastructure. A failure is never a reward."""
        self._move(id, TrajectoryState.failed, reason)

    def fail_unless_sealed(self, id: str, reason: str) -> bool:
        """Mark it as failed if it is still running. Returns whether it is sealed instead: then it is not lost."""
        return writing(self._engine, lambda connection: fail_unless_sealed(connection, id, reason))

    def fail_interrupted(self, run: str, older_than_s: float = 0.0) -> int:
        """Fail the trajectories of `run` that are neither graded nor failed and began more than `older_than_s` ago.
        Returns their number. For evaluations, which start again with new trajectories after an interruption."""
        began = trajectories.c.created_at <= time.time() - older_than_s
        query = _INTERRUPTED.where(trajectories.c.run == to_key("the run", run), began)
        return writing(self._engine, lambda connection: connection.execute(query).rowcount)

    def quarantine(self, id: str, reason: str) -> None:
        """Keep it, but do not train on it until it is released or graded again. TrajectoryError while a step that has
        it is not committed: a restart would train on it."""

        def work(connection: sa.Connection) -> None:
            move_trajectory(connection, id, TrajectoryState.quarantined, reason)
            _check_not_leased(connection, id, "quarantine it after that step is committed: the step has it already")

        writing(self._engine, work)

    def release(self, id: str) -> None:
        """End a quarantine: it is graded again, with the reward it had. TrajectoryError if it has none."""
        if writing(self._engine, lambda connection: connection.execute(_RELEASE, {"key": stored(id)})).rowcount == 0:
            row = self.get(id)
            raise TrajectoryError(f"{id} is {row.state}, with reward {row.reward}, and cannot be released")

    def delete(self, id: str) -> None:
        """Delete its payload and submission. The row stays, so that every report still adds up."""

        def work(connection: sa.Connection) -> None:
            move_trajectory(connection, id, TrajectoryState.deleted, None)
            # numbers stay; what people wrote does not
            connection.execute(feedback.update().where(feedback.c.trajectory == id).values(data="{}"))
            _check_not_leased(
                connection, id, "delete it after that step is committed: until then a restart needs its payload"
            )

        writing(self._engine, work)
        self._erase([id])

    def _erase(self, ids: Sequence[str]) -> None:
        """Removes the objects of deleted trajectories. After their rows: a process that is killed in between leaves
        objects that nobody reads, and rows that still name them, so that deleting again removes them."""
        rows = self._rows(ids)
        keys = (key for row in rows for key in (row.payload_key, row.submission_key))
        self._objects.delete_all(key for key in keys if key is not None)
        writing(self._engine, lambda connection: connection.execute(_ERASED, {"ids": ids}))

    def delete_user(self, pseudonym: str) -> tuple[builtins.list[str], dict[str, str]]:
        """Delete the trajectories of a user. Returns the deleted ones, and why others cannot be deleted yet."""
        return self._delete_where(trajectories.c.provenance.contains(f'"{pseudonym}"', autoescape=True))

    def delete_expired(self, older_than_s: float) -> tuple[builtins.list[str], dict[str, str]]:
        """As `delete_user`, for sealed production trajectories of an age."""
        return self._delete_where(trajectories.c.finished_at < time.time() - older_than_s)

    def _delete_where(self, condition: sa.ColumnElement[bool]) -> tuple[builtins.list[str], dict[str, str]]:
        left = (trajectories.c.state != TrajectoryState.deleted.value) | trajectories.c.payload_key.is_not(None)
        query = sa.select(trajectories.c.id).where(trajectories.c.traffic == "production", left, condition)
        with reading(self._engine) as connection:
            ids = connection.execute(query).scalars().all()
        kept: dict[str, str] = {}
        for start in range(0, len(ids), _AT_ONCE):
            some = ids[start : start + _AT_ONCE]
            leased = writing(self._engine, partial(_delete_free, ids=some))
            for id in leased:
                try:
                    self.delete(id)
                except TrajectoryError as error:
                    kept[id] = error.message
            self._erase([id for id in some if id not in leased])
        if len(kept) < len(ids):
            erase_deleted(self._engine)
        return [id for id in ids if id not in kept], kept

    def add_feedback(
        self, id: str, kind: str, value: float | None, data: Mapping[str, Any], given_id: str | None = None
    ) -> int:
        """Append feedback and return its number. With the `given_id` of an earlier one, returns that one's number."""
        row = {
            "trajectory": stored(id),
            "kind": to_text(kind),
            "value": None if value is None else to_number(f"the feedback to {id}", value),
            "data": to_object("feedback", data),
            "created_at": time.time(),
            "given_id": None if given_id is None else to_key("the id of the feedback", given_id),
        }
        same = (feedback.c.trajectory == row["trajectory"]) & (feedback.c.given_id == row["given_id"])
        try:
            return writing(self._engine, lambda connection: connection.execute(_ADD_FEEDBACK, row).scalar_one())
        except IntegrityError:  # it is there already, or the trajectory is not
            with reading(self._engine) as connection:
                found = connection.execute(sa.select(feedback.c.id).where(same)).scalar()
            if found is None:
                raise missing(id) from None
            return int(found)

    def get(self, id: str) -> TrajectoryRow:
        return self._rows([id])[0]

    def list(
        self,
        run: str | None = None,
        state: TrajectoryState | str | None = None,
        group_id: str | None = None,
        split: str | None = None,
        limit: int | None = None,
        *,
        id_prefix: str | None = None,
    ) -> builtins.list[TrajectoryRow]:
        """Newest first."""
        return self.find(TrajectoryQuery(run, state, group_id, split, limit=limit, id_prefix=id_prefix))

    def find(self, query: TrajectoryQuery) -> builtins.list[TrajectoryRow]:
        with reading(self._engine) as connection:
            return [to_row(row) for row in connection.execute(query.narrow(sa.select(*COLUMNS)))]

    def splits(self) -> builtins.list[str]:
        """All splits that occur in trajectories."""
        column = trajectories.c.split
        with reading(self._engine) as connection:
            return sorted(connection.execute(sa.select(column).distinct().where(column.is_not(None))).scalars())

    def feedback(self, id: str) -> builtins.list[FeedbackRow]:
        query = sa.select(feedback).where(feedback.c.trajectory == to_text(id)).order_by(feedback.c.id)
        with reading(self._engine) as connection:
            rows = connection.execute(query).all()
        return [FeedbackRow(row.id, row.kind, row.value, from_json(row.data), row.created_at) for row in rows]

    def with_feedback(self, kind: str) -> builtins.list[TrajectoryRow]:
        """The trajectories about which users gave feedback of this kind, oldest first."""
        about = sa.select(feedback.c.trajectory).where(feedback.c.kind == to_text(kind))
        query = sa.select(*COLUMNS).where(trajectories.c.id.in_(about))
        with reading(self._engine) as connection:
            rows = connection.execute(query.order_by(trajectories.c.created_at, trajectories.c.id))
            return [to_row(row) for row in rows]

    def entries(self, id: str) -> builtins.list[LedgerEntry]:
        """What each run did with it."""
        with reading(self._engine) as connection:
            rows = connection.execute(_ENTRIES, {"key": to_text(id)}).all()
        return [LedgerEntry(row.run, LedgerState(row.state), row.step, row.reason, row.origin) for row in rows]

    def rewards(self, ids: Sequence[str]) -> dict[str, Grades]:
        """Every grade of each trajectory, oldest first, with the id a step pins."""
        found: dict[str, Grades] = {id: [] for id in ids}
        with reading(self._engine) as connection:
            for row in connection.execute(_REWARDS, {"ids": list(filter(is_key, ids))}):
                reward = Grade(row.value, from_json(row.parts), from_json(row.evidence), row.grader)
                found[row.trajectory].append((row.id, reward))
        return found

    def load(self, id: str) -> Trajectory:
        return self.load_many([id])[0]

    def load_many(self, ids: Sequence[str]) -> builtins.list[Trajectory]:
        """Payloads with their state and rewards, in the given order."""
        found = self.rewards(ids)
        loaded = []
        for row in self._rows(ids):
            if row.payload_key is None or row.state == TrajectoryState.deleted:
                raise TrajectoryError(f"{row.id} is {row.state} and has no payload", hint=row.reason)
            trajectory = decode_trajectory(self._objects.get(row.payload_key))
            if trajectory.id != row.id:
                raise TrajectoryError(f"the payload {row.payload_key} belongs to {trajectory.id}, not to {row.id}")
            trajectory.state, trajectory.reason, trajectory.rewards = row.state, row.reason, found[row.id]
            loaded.append(trajectory)
        return loaded

    def _rows(self, ids: Sequence[str]) -> builtins.list[TrajectoryRow]:
        with reading(self._engine) as connection:
            return rows_of(connection, ids)

    def _move(self, id: str, target: TrajectoryState, reason: str) -> None:
        writing(self._engine, lambda connection: move_trajectory(connection, id, target, reason))


def _delete_free(connection: sa.Connection, ids: Sequence[str]) -> set[str]:
    """Deletes the trajectories that no step has leased. Returns the leased ones. As in `TrajectoryStore.delete`, the
    rows are locked before the leases are read."""
    connection.execute(_HELD, {"ids": ids})
    leased = set(connection.execute(_LEASED, {"ids": ids}).scalars())
    free = {"ids": [id for id in ids if id not in leased]}
    connection.execute(_DELETED, free)
    connection.execute(_EMPTIED, free)  # numbers stay; what people wrote does not
    return leased


def _check_not_leased(connection: sa.Connection, id: str, hint: str) -> None:
    """TrajectoryError if a step that is not committed has it."""
    lease = connection.execute(_LEASE, {"key": id}).first()
    if lease is not None:
        raise TrajectoryError(f"{id} is leased to step {lease.step} of run {lease.run!r}", hint=hint)
