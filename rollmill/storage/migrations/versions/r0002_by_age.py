"""Trajectories of all runs are listed by age. A rollmill that knows no revisions refuses the database from here on."""

from __future__ import annotations

from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.create_index("trajectories_by_age", "trajectories", ["created_at", "id"])
    # 0.1.0 reads this number and refuses a database whose number it does not know
    op.execute("UPDATE schema_version SET version = 2")
