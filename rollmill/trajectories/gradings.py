"""Gradings: the rewards of many trajectories, given by the same graders.

A run grades each trajectory once, when it ends; that grading has no number. Grading again adds rewards beside the old
ones, with a number that names the rewards' settings. All graded trajectories of a group get their new rewards in one
transaction, so whoever reads a group sees one grading of it, complete, and never a mixture.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa
from sqlalchemy import bindparam

from rollmill.errors import TrajectoryChanged
from rollmill.storage.database import writing
from rollmill.storage.tables import gradings, trajectories
from rollmill.trajectories.changes import add_reward, reward_row
from rollmill.trajectories.storable import to_json, to_key
from rollmill.types import Grade, TrajectoryState

_MEMBERS = (
    sa.select(trajectories.c.id, trajectories.c.state)
    .where(trajectories.c.run == bindparam("of_run"), trajectories.c.group_id == bindparam("group"))
    .with_for_update()
)
_UNSETTLED = (TrajectoryState.running, TrajectoryState.finished)


def begin_grading(engine: sa.Engine, run: str, rewards: Any) -> int:
    """Record the settings of a new grading, and return its number."""
    row = {"run": to_key("the run", run), "rewards": to_json("rewards", rewards), "created_at": time.time()}
    insert = gradings.insert().returning(gradings.c.id)
    return writing(engine, lambda connection: connection.execute(insert, row).scalar_one())


def record_group(engine: sa.Engine, run: str, group_id: str, given: Mapping[str, Grade], grading: int) -> None:
    """Append a reward to every graded trajectory of a group, all at once.

    TrajectoryChanged if `given` does not have exactly those, or if a trajectory of the group is not graded yet: the
    run's own grading comes first.
    """
    rows = {id: reward_row(id, reward, grading) for id, reward in given.items()}

    def work(connection: sa.Connection) -> None:
        members = {row.id: row.state for row in connection.execute(_MEMBERS, {"of_run": run, "group": group_id})}
        graded = {id for id, state in members.items() if state == TrajectoryState.graded}
        if any(state in _UNSETTLED for state in members.values()) or graded != rows.keys():
            raise TrajectoryChanged(f"group {group_id} has changed since it was read", hint="grade it again")
        for row in rows.values():
            add_reward(connection, row)

    writing(engine, work)
