"""Changes of a run's groups are numbered, so that the trainer reads only those since its last look."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"


def upgrade() -> None:
    op.add_column("runs", sa.Column("changes", sa.BigInteger, nullable=False, server_default="0"))
    op.add_column("groups", sa.Column("changed", sa.BigInteger, nullable=False, server_default="0"))
    op.create_index("groups_by_change", "groups", ["run", "changed"])
