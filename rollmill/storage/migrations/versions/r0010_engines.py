"""Engines register with a lease. `expires_at` is by the database's clock."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    op.create_table(
        "engines",
        sa.Column("fleet", sa.Text, primary_key=True),
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("url", sa.Text, nullable=False),
        sa.Column("region", sa.Text, nullable=False),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("form", sa.Text, nullable=False),
        sa.Column("wire", sa.Integer, nullable=False),
        sa.Column("capacity", sa.Integer, nullable=False),
        sa.Column("expires_at", sa.Double, nullable=False),
    )
