"""A trajectory keeps how many answers of the model it has: samplers choose tasks by it."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    op.add_column("trajectories", sa.Column("turns", sa.Integer))
