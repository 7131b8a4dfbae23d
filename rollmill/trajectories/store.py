"""Trajectories: the index in SQL, the payloads in objects.

Every change of state is one conditional UPDATE built from TRAJECTORY_TRANSITIONS, so an illegal change updates no row
and raises an error with the current state. Repeating a write is not an error: a caller that was killed between the
write and the reply repeats it.
"""

from __future__ import annotations

import builtins
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy import bindparam
from sqlalchemy.exc import IntegrityError

from rollmill.errors import TrajectoryError
from rollmill.storage.database import reading, writing
from rollmill.storage.objects import Objects
from rollmill.trajectories.query import TrajectoryQuery
from rollmill.trajectories.schema import decode_trajectory
from rollmill.trajectories.storable import (
    LONGEST_OBJECT_KEY,
    from_json,
    is_key,
    to_key,
    to_number,
    to_numbers,
    to_object,
    to_text,
)
from rollmill.trajectories.tables import feedback, groups, ledger, rewards, trajectories
from rollmill.types import (
    TRAJECTORY_TRANSITIONS,
    LedgerState,
    Reward,
    TrafficClass,
    Trajectory,
    TrajectoryState,
)


@dataclass(frozen=True)
class TrajectoryRow:
    """The index row of a trajectory."""

    id: str
    run: str
    group_id: str
    task_id: str
    state: TrajectoryState
    reason: str | None
    traffic: TrafficClass
    payload_key: str | None
    submission_key: str | None
    tokens: int | None
    sampled_tokens: int | None
    segments: int | None
    created_at: float
    finished_at: float | None
    provenance: dict[str, Any]
    reward: float | None  # the newest
    reward_id: int | None
    solved: bool | None  # as the newest reward says
    grading: int | None  # of the newest reward; None: the run's own
    split: str | None
    family: str | None
    # facts of its tokens, once sealed
    line: str | None
    form: str | None
    oldest_version: int | None
    newest_version: int | None
    causes: str | None
    regions: str | None
    turns: int | None


@dataclass(frozen=True)
class FeedbackRow:
    id: int
    kind: str
    value: float | None
    data: Any
    created_at: float


@dataclass(frozen=True)
class LedgerEntry:
    """What a run did with a trajectory."""

    run: str
    state: LedgerState
    step: int | None
    reason: str | None
    origin: str | None  # the run that it was admitted from, if it was


Grades = list[tuple[int, Reward]]  # reward id, reward; oldest first
_SEALED = (TrajectoryState.finished, TrajectoryState.graded, TrajectoryState.quarantined)
COLUMNS = tuple(trajectories.c[name] for name in TrajectoryRow.__annotations__)


def _into(target: TrajectoryState, *also_from: TrajectoryState) -> sa.ColumnElement[bool]:
    """The row `key`, if its state allows the change to `target`."""
    sources = {state for state, targets in TRAJECTORY_TRANSITIONS.items() if target in targets}
    return (trajectories.c.id == bindparam("key")) & trajectories.c.state.in_(sorted(sources | set(also_from)))


_MOVE = {
    target: trajectories.update()
    .where(_into(target))
    .values(state=target.value, reason=sa.func.coalesce(bindparam("why", type_=sa.Text), trajectories.c.reason))
    for target in (TrajectoryState.failed, TrajectoryState.quarantined, TrajectoryState.deleted)
}
_FAIL_RUNNING = _MOVE[TrajectoryState.failed].where(trajectories.c.state == TrajectoryState.running.value)
_INTERRUPTED = (
    trajectories.update()
    .where(trajectories.c.state.in_([TrajectoryState.running.value, TrajectoryState.finished.value]))
    .values(state=TrajectoryState.failed.value, reason="interrupted")
)
_FINISH = trajectories.update().where(_into(TrajectoryState.finished)).values(state=TrajectoryState.finished.value)
# two graders may finish in another order than they began: the row shows the reward with the higher number
_SUPERSEDED = trajectories.c.reward_id > bindparam("given_id")
_GRADE = (
    trajectories.update()
    .where(_into(TrajectoryState.graded, TrajectoryState.graded))
    .values(
        state=TrajectoryState.graded.value,
        reward_id=sa.case((_SUPERSEDED, trajectories.c.reward_id), else_=bindparam("given_id")),
        reward=sa.case((_SUPERSEDED, trajectories.c.reward), else_=bindparam("given")),
        solved=sa.case((_SUPERSEDED, trajectories.c.solved), else_=bindparam("is_solved")),
        grading=sa.case((_SUPERSEDED, trajectories.c.grading), else_=bindparam("of_grading", type_=sa.BigInteger)),
    )
)
_ADD_REWARD = rewards.insert().returning(rewards.c.id)
_ADD_FEEDBACK = feedback.insert().returning(feedback.c.id)
_GET = sa.select(*COLUMNS).where(trajectories.c.id.in_(bindparam("ids", expanding=True)))
_REWARDS = (
    sa.select(rewards)
    .where(rewards.c.trajectory.in_(bindparam("ids", expanding=True)))
    .order_by(rewards.c.trajectory, rewards.c.id)
)
_LEASE = sa.select(ledger.c.run, ledger.c.step).where(
    ledger.c.trajectory == bindparam("key"), ledger.c.state == LedgerState.leased.value
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

    def finish(
        self,
        id: str,
        payload_key: str,
        submission_key: str | None,
        *,
        tokens: int,
        sampled_tokens: int,
        segments: int,
        line: str | None = None,
        form: str | None = None,
        oldest_version: int | None = None,
        newest_version: int | None = None,
        causes: str | None = None,
        regions: str | None = None,
        turns: int | None = None,
    ) -> None:
        """Seal: the payload object has been written. `schema.seal_facts` gives the keyword arguments."""
        keys = {"payload_key": payload_key, "submission_key": submission_key}
        names = {"line": line, "form": form, "causes": causes, "regions": regions}
        values = {
            **{name: None if key is None else to_key(name, key, LONGEST_OBJECT_KEY) for name, key in keys.items()},
            **{name: None if text is None else to_text(text) for name, text in names.items()},
            "tokens": tokens,
            "sampled_tokens": sampled_tokens,
            "segments": segments,
            "turns": turns,
            "oldest_version": oldest_version,
            "newest_version": newest_version,
            "finished_at": time.time(),
        }

        def work(connection: sa.Connection) -> None:
            if connection.execute(_FINISH, {"key": _stored(id), **values}).rowcount == 0:
                found = _found(connection, id)
                if found.state not in _SEALED or found.payload_key != payload_key:
                    raise _illegal(found, TrajectoryState.finished)

        writing(self._engine, work)

    def grade(self, id: str, reward: Reward) -> int:
        """Append a reward and return its id. A finished or quarantined trajectory becomes graded."""
        row = reward_row(id, reward)
        return self._append(id, lambda connection: add_reward(connection, row))

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
        """Keep it, but do not train on it until it is graded again."""
        self._move(id, TrajectoryState.quarantined, reason)

    def delete(self, id: str) -> None:
        """Delete its payload and submission. The row stays, so that every report still adds up."""

        def work(connection: sa.Connection) -> None:
            move_trajectory(connection, id, TrajectoryState.deleted, None)
            # numbers stay; what people wrote does not
            connection.execute(feedback.update().where(feedback.c.trajectory == id).values(data="{}"))
            lease = connection.execute(_LEASE, {"key": id}).first()
            if lease is not None:
                raise TrajectoryError(
                    f"{id} is leased to step {lease.step} of run {lease.run!r}",
                    hint="delete it after that step is committed: until then a restart needs its payload",
                )

        writing(self._engine, work)
        # after the row: a process killed in between leaves an object nobody reads, and deleting again removes it
        row = self.get(id)
        for key in (row.payload_key, row.submission_key):
            if key is not None and self._objects.head(key) is not None:
                self._objects.delete(key)

    def delete_user(self, pseudonyms: Sequence[str]) -> tuple[builtins.list[str], dict[str, str]]:
        """Delete the trajectories of a user. Returns the deleted ones, and why others cannot be deleted yet."""
        provenance = trajectories.c.provenance
        return self._delete_where(sa.or_(*(provenance.contains(f'"{name}"', autoescape=True) for name in pseudonyms)))

    def delete_expired(self, older_than_s: float) -> tuple[builtins.list[str], dict[str, str]]:
        """As `delete_user`, for sealed production trajectories of an age."""
        return self._delete_where(trajectories.c.finished_at < time.time() - older_than_s)

    def _delete_where(self, condition: sa.ColumnElement[bool]) -> tuple[builtins.list[str], dict[str, str]]:
        production = (trajectories.c.traffic == "production") & (trajectories.c.state != TrajectoryState.deleted.value)
        with reading(self._engine) as connection:
            ids = connection.execute(sa.select(trajectories.c.id).where(production, condition)).scalars().all()
        kept: dict[str, str] = {}
        for id in ids:
            try:
                self.delete(id)
            except TrajectoryError as error:
                kept[id] = error.message
        return [id for id in ids if id not in kept], kept

    def add_feedback(
        self, id: str, kind: str, value: float | None, data: Mapping[str, Any], given_id: str | None = None
    ) -> int:
        """Append feedback and return its number. With the `given_id` of an earlier one, returns that one's number."""
        row = {
            "trajectory": _stored(id),
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
                raise _missing(id) from None
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
                reward = Reward(row.value, from_json(row.parts), from_json(row.evidence), row.grader)
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
            rows = connection.execute(_GET, {"ids": list(filter(is_key, ids))})
            found = {row.id: to_row(row) for row in rows}
        for id in ids:
            if id not in found:
                raise _missing(id)
        return [found[id] for id in ids]

    def _move(self, id: str, target: TrajectoryState, reason: str) -> None:
        writing(self._engine, lambda connection: move_trajectory(connection, id, target, reason))

    def _append(self, id: str, work: Callable[[sa.Connection], int]) -> int:
        try:
            return writing(self._engine, work)
        except IntegrityError:  # the foreign key is the only constraint such a row can break
            raise _missing(id) from None


def reward_row(id: str, reward: Reward, grading: int | None = None) -> dict[str, Any]:
    """A new row for `rewards`. TrajectoryError if it cannot be stored."""
    return {
        "trajectory": _stored(id),
        "value": to_number(f"the reward of {id}", reward.value),
        "parts": to_numbers("reward.parts", reward.parts),
        "evidence": to_object("reward.evidence", reward.evidence),
        "grader": to_text(reward.grader),
        "created_at": time.time(),
        "grading": grading,
    }


def add_reward(connection: sa.Connection, row: dict[str, Any]) -> int:
    """Append a reward in the caller's transaction. Returns its id."""
    reward_id = connection.execute(_ADD_REWARD, row).scalar_one()
    solved = Reward(row["value"], from_json(row["parts"])).solved
    given = {"key": row["trajectory"], "given_id": reward_id, "given": row["value"], "is_solved": solved}
    if connection.execute(_GRADE, {**given, "of_grading": row["grading"]}).rowcount == 0:
        raise _illegal(_found(connection, row["trajectory"]), TrajectoryState.graded)
    return reward_id


def trajectory_rows(
    run: str,
    group_id: str,
    task_id: str,
    ids: Sequence[str],
    provenance: Mapping[str, Any],
    traffic: TrafficClass,
) -> list[dict[str, Any]]:
    """New rows for `trajectories`."""
    if not ids:
        raise TrajectoryError(f"no ids for the trajectories of task {task_id!r}")
    text = to_object("provenance", provenance)
    split, family = (provenance.get(name) for name in ("split", "family"))
    shared = {
        "run": to_key("the run", run),
        "group_id": to_key("the group", group_id),
        "task_id": to_key("the task", task_id),
        "traffic": traffic,
        "split": None if split is None else to_text(str(split)),
        "family": None if family is None else to_text(str(family)),
        "state": TrajectoryState.running.value,
        "provenance": text,
        "created_at": time.time(),
    }
    return [{"id": to_key("the trajectory", id), **shared} for id in ids]


def move_trajectory(connection: sa.Connection, id: str, target: TrajectoryState, reason: str | None) -> None:
    """Change the state in the caller's transaction. A trajectory already in `target` keeps its reason."""
    why = None if reason is None else to_text(reason)
    if connection.execute(_MOVE[target], {"key": _stored(id), "why": why}).rowcount == 0:
        found = _found(connection, id)
        if found.state != target:
            raise _illegal(found, target)


def fail_unless_sealed(connection: sa.Connection, id: str, reason: str) -> bool:
    """As the method of the store, in the caller's transaction. A seal comes before it or after it, never in between."""
    connection.execute(_FAIL_RUNNING, {"key": _stored(id), "why": to_text(reason)})
    return _found(connection, id).state in _SEALED


def to_row(row: sa.Row[Any]) -> TrajectoryRow:
    fields = dict(row._mapping)
    fields["state"] = TrajectoryState(fields["state"])
    fields["provenance"] = from_json(fields["provenance"])
    return TrajectoryRow(**fields)


def _found(connection: sa.Connection, id: str) -> TrajectoryRow:
    row = connection.execute(_GET, {"ids": [id]}).first()
    if row is None:
        raise _missing(id)
    return to_row(row)


def _stored(id: str) -> str:
    """The id as a query parameter. An id that no database can hold matches nothing."""
    if not is_key(id):
        raise _missing(id)
    return id


def _missing(id: str) -> TrajectoryError:
    return TrajectoryError(
        f"there is no trajectory {id!r:.300}", hint="`rollmill trajectories list` shows the existing ones"
    )


def _illegal(row: TrajectoryRow, target: TrajectoryState) -> TrajectoryError:
    allowed = ", ".join(sorted(TRAJECTORY_TRANSITIONS[row.state])) or "nothing"
    because = f" ({row.reason})" if row.reason else ""
    return TrajectoryError(
        f"{row.id} is {row.state}{because} and cannot become {target}", hint=f"only {allowed} can follow"
    )
