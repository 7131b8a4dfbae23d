"""What is asked often no longer costs more as a run grows: started groups are counted, and lookups by step and by
trajectory have an index."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"


def upgrade() -> None:
    op.add_column("runs", sa.Column("started", sa.Integer, nullable=False, server_default="0"))
    op.execute(
        "UPDATE runs SET started = (SELECT count(*) FROM groups WHERE groups.run = runs.id AND groups.origin IS NULL)"
    )
    op.create_index("groups_by_step", "groups", ["run", "state", "step"])
    op.create_index("ledger_by_step", "ledger", ["run", "step"])
    op.create_index("ledger_by_trajectory", "ledger", ["trajectory"])
