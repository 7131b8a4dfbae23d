"""Several dispatchers share the groups of a run: each holds a lease, and a group names the one that plays it."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"


def upgrade() -> None:
    op.create_table(
        "dispatchers",
        sa.Column("run", sa.Text, primary_key=True),
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("process", sa.Text, nullable=False),
        sa.Column("expires_at", sa.Double, nullable=False),
    )
    op.add_column("groups", sa.Column("holder", sa.Text))
