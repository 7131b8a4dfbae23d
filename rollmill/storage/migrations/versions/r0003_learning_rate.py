"""A step keeps its learning rate: a run that is extended has another schedule, and recorded steps may run again."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.add_column("steps", sa.Column("lr", sa.Double))
