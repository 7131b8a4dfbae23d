"""What came of the trajectories that committed steps decided on: trained on, or closed because they taught nothing.

Baselines and samplers learn from it. Once a step is committed, its results do not change any more, so whoever reads
them up to the same step sees the same, in any process and after any restart.
"""

from __future__ import annotations

from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy import bindparam

from rollmill.storage.tables import groups, ledger, trajectories
from rollmill.types import GroupState, TrajectoryState


@dataclass(frozen=True)
class Result:
    """A graded trajectory whose group is final."""

    step: int  # that took the group, or closed it while it looked for its own
    task_id: str
    family: str
    reward: float
    solved: bool
    turns: int  # answers of the model
    tokens: int  # sampled


# kept apart, because SQLite would begin with the whole ledger of the run
_DECIDED = (
    sa.select(groups.c.run, groups.c.id, groups.c.step, groups.c.created_at)
    .where(
        groups.c.run == bindparam("of_run"),
        groups.c.state == GroupState.final.value,
        groups.c.step > bindparam("after"),
        groups.c.step <= bindparam("through"),
    )
    .cte("decided")
    .prefix_with("MATERIALIZED")
)
_RESULTS = (
    sa.select(
        _DECIDED.c.step,
        trajectories.c.task_id,
        trajectories.c.family,
        trajectories.c.turns,
        trajectories.c.sampled_tokens,
        trajectories.c.reward,
        trajectories.c.solved,
    )
    .join_from(_DECIDED, ledger, (ledger.c.run == _DECIDED.c.run) & (ledger.c.group_id == _DECIDED.c.id))
    .join(trajectories, ledger.c.trajectory == trajectories.c.id)
    .where(trajectories.c.state == TrajectoryState.graded.value)
    .order_by(_DECIDED.c.step, _DECIDED.c.created_at, _DECIDED.c.id, trajectories.c.id)
)


def read_results(connection: sa.Connection, run: str, after: int, through: int) -> list[Result]:
    """The results of the steps from `after` + 1 to `through`, oldest first."""
    rows = connection.execute(_RESULTS, {"of_run": run, "after": after, "through": through})
    return [
        Result(
            step=row.step,
            task_id=row.task_id,
            family=row.family or "",
            reward=row.reward,
            solved=bool(row.solved),
            turns=row.turns or 0,
            tokens=row.sampled_tokens or 0,
        )
        for row in rows
    ]
