"""Changes to trajectories, each in the transaction of its caller.

A change of state is one conditional UPDATE built from TRAJECTORY_TRANSITIONS, so an illegal change updates no row and
raises an error with the current state. Repeating a change is not an error: a caller that was killed between the write
and the reply repeats it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy import bindparam

from rollmill.errors import TrajectoryError
from rollmill.storage.tables import rewards, trajectories
from rollmill.trajectories.storable import from_json, is_key, to_key, to_number, to_numbers, to_object, to_text
from rollmill.trajectories.table_rows import TrajectoryRow, missing, rows_of
from rollmill.types import TRAJECTORY_TRANSITIONS, Grade, TrafficClass, TrajectoryState

_SEALED = (TrajectoryState.finished, TrajectoryState.graded, TrajectoryState.quarantined)


def _into(target: TrajectoryState, *also_from: TrajectoryState) -> sa.ColumnElement[bool]:
    """The row `key`, if its state allows the change to `target`."""
    sources = {state for state, targets in TRAJECTORY_TRANSITIONS.items() if target in targets}
    # not `in_`: with it no statement could be sent for many rows at once
    allowed = sa.or_(*(trajectories.c.state == state.value for state in sorted({*sources, *also_from})))
    return (trajectories.c.id == bindparam("key")) & allowed


_MOVE = {
    target: trajectories.update()
    .where(_into(target))
    .values(state=target.value, reason=sa.func.coalesce(bindparam("why", type_=sa.Text), trajectories.c.reason))
    for target in (TrajectoryState.failed, TrajectoryState.quarantined, TrajectoryState.deleted)
}
_FAIL_RUNNING = _MOVE[TrajectoryState.failed].where(trajectories.c.state == TrajectoryState.running.value)
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


def reward_row(id: str, reward: Grade, grading: int | None = None) -> dict[str, Any]:
    """A new row for `rewards`. TrajectoryError if it cannot be stored."""
    return {
        "trajectory": stored(id),
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
    if connection.execute(_GRADE, _given(row, reward_id)).rowcount == 0:
        raise _illegal(_found(connection, row["trajectory"]), TrajectoryState.graded)
    return reward_id


def _given(row: Mapping[str, Any], reward_id: int) -> dict[str, Any]:
    """The parameters of `_GRADE`."""
    solved = Grade(row["value"], from_json(row["parts"])).solved
    given = {"key": row["trajectory"], "given_id": reward_id, "given": row["value"]}
    return {**given, "is_solved": solved, "of_grading": row["grading"]}


def add_rewards(connection: sa.Connection, rows: Sequence[dict[str, Any]]) -> None:
    """As `add_reward`, for trajectories that were inserted as finished in the same transaction."""
    added = connection.execute(rewards.insert().returning(rewards.c.trajectory, rewards.c.id), rows)
    ids = {row.trajectory: row.id for row in added}  # databases return them in any order
    connection.execute(_GRADE, [_given(row, ids[row["trajectory"]]) for row in rows])


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
    if connection.execute(_MOVE[target], {"key": stored(id), "why": why}).rowcount == 0:
        found = _found(connection, id)
        if found.state != target:
            raise _illegal(found, target)


def fail_unless_sealed(connection: sa.Connection, id: str, reason: str) -> bool:
    """`TrajectoryStore.fail_unless_sealed` in the caller's transaction. A seal happens before it or after it, never in
    between."""
    connection.execute(_FAIL_RUNNING, {"key": stored(id), "why": to_text(reason)})
    return _found(connection, id).state in _SEALED


def finish_trajectory(connection: sa.Connection, id: str, values: Mapping[str, Any]) -> None:
    """Seals it: `values` are the columns, `payload_key` among them."""
    if connection.execute(_FINISH, {"key": stored(id), **values}).rowcount == 0:
        found = _found(connection, id)
        if found.state not in _SEALED or found.payload_key != values["payload_key"]:
            raise _illegal(found, TrajectoryState.finished)


def stored(id: str) -> str:
    """The id as a query parameter. An id that no database can hold matches nothing."""
    if not is_key(id):
        raise missing(id)
    return id


def _found(connection: sa.Connection, id: str) -> TrajectoryRow:
    return rows_of(connection, [id])[0]


def _illegal(row: TrajectoryRow, target: TrajectoryState) -> TrajectoryError:
    allowed = ", ".join(sorted(TRAJECTORY_TRANSITIONS[row.state])) or "nothing"
    because = f" ({row.reason})" if row.reason else ""
    return TrajectoryError(
        f"{row.id} is {row.state}{because} and cannot become {target}", hint=f"only {allowed} can follow"
    )
