"""Cycles look for the conversations that have ended since they last looked."""

from __future__ import annotations

from alembic import op

revision = "0013"
down_revision = "0012"


def upgrade() -> None:
    op.create_index("trajectories_by_end", "trajectories", ["run", "finished_at", "id"])
