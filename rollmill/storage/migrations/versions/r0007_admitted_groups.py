"""A group may be admitted from elsewhere: it names the run that it is from."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    op.add_column("groups", sa.Column("origin", sa.Text))
