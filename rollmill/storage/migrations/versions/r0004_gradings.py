"""Trajectories can be graded again: a reward names its grading. Whether a trajectory is solved has a column of its own,
because with several rewards it does not follow from their sum."""

from __future__ import annotations

import json

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"

_SERIAL = sa.BigInteger().with_variant(sa.Integer, "sqlite")
_REWARDS = sa.table("rewards", sa.column("id"), sa.column("parts"))
_TRAJECTORIES = sa.table("trajectories", sa.column("reward_id"), sa.column("reward"), sa.column("solved", sa.Boolean))


def upgrade() -> None:
    op.create_table(
        "gradings",
        sa.Column("id", _SERIAL, primary_key=True, autoincrement=True),
        sa.Column("run", sa.Text, nullable=False),
        sa.Column("rewards", sa.Text, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sqlite_autoincrement=True,
    )
    op.add_column("rewards", sa.Column("grading", _SERIAL))
    op.add_column("trajectories", sa.Column("solved", sa.Boolean))
    op.add_column("trajectories", sa.Column("grading", _SERIAL))
    connection = op.get_bind()
    columns = _TRAJECTORIES.c
    connection.execute(_TRAJECTORIES.update().where(columns.reward.is_not(None)).values(solved=columns.reward >= 1.0))
    # where several rewards were added up, the part `solved` decides
    several = sa.select(_REWARDS).where(_REWARDS.c.parts.contains('"solved"'))
    for row in connection.execute(several).all():
        solved = float(json.loads(row.parts).get("solved", 0.0)) >= 1.0
        connection.execute(_TRAJECTORIES.update().where(columns.reward_id == row.id).values(solved=solved))
