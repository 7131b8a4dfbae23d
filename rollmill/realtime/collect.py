"""Reads production conversations with what users said about them."""

from __future__ import annotations

from collections import defaultdict

import sqlalchemy as sa

from rollmill.realtime.distil import Conversation
from rollmill.realtime.rule import Signal
from rollmill.storage.database import reading
from rollmill.trajectories.storable import from_json
from rollmill.trajectories.tables import feedback, trajectories

PRODUCTION = "production"  # what the gateway lists live traffic under
_COLUMNS = ("id", "state", "line", "oldest_version", "newest_version", "provenance")


def read_conversations(engine: sa.Engine, since: float, ended_before: float) -> list[Conversation]:
    """Conversations that began at `since` or later. One that has not ended by `ended_before` counts as running."""
    of = (trajectories.c.run == PRODUCTION) & (trajectories.c.created_at >= since)
    rows = sa.select(*(trajectories.c[name] for name in (*_COLUMNS, "finished_at"))).where(of)
    said = sa.select(feedback.c.trajectory, feedback.c.kind, feedback.c.value, feedback.c.data)
    said = said.join_from(feedback, trajectories, feedback.c.trajectory == trajectories.c.id).where(of)
    signals: dict[str, list[Signal]] = defaultdict(list)
    with reading(engine) as connection:
        found = connection.execute(rows.order_by(trajectories.c.created_at, trajectories.c.id)).all()
        for row in connection.execute(said.order_by(feedback.c.id)):
            data = from_json(row.data)
            label = data.get("label") if isinstance(data, dict) else None
            signals[row.trajectory].append(Signal(row.kind, row.value, label))
    return [
        Conversation(
            id=row.id,
            state=row.state if (row.finished_at or 0.0) <= ended_before or row.state == "deleted" else "running",
            line=row.line,
            oldest=row.oldest_version,
            newest=row.newest_version,
            consent=str(from_json(row.provenance).get("consent", "train")),
            signals=signals[row.id],
        )
        for row in found
    ]
