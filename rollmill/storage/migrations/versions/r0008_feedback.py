"""Feedback may have an id that its sender chose: sent again, it is not appended again."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    op.add_column("feedback", sa.Column("given_id", sa.Text))
    op.create_index("feedback_by_given_id", "feedback", ["trajectory", "given_id"], unique=True)
