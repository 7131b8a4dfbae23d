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


def read_conversations(
    engine: sa.Engine,
    run: str,
    ended_before: float,
    *,
    settle_s: float,
    ended_after: float = 0.0,
    begun_at: float = 0.0,
) -> list[Conversation]:
    """Conversations of a run that ended after `ended_after` and began at `begun_at` or later. One that has not ended by
    `ended_before` counts as running: who asks next with that time as `ended_after` gets it.

    Signals count up to `settle_s` seconds after the end, whenever they are read: so a conversation gets the same reward
    however late a cycle looks, and slow users of an old conversation are not heard more than those of a new one.

    Runs may share a database, and versions of two runs may have the same name. Conversations that name no run, as
    older gateways recorded them, are left out: they may be of any run."""
    ended_at = sa.func.coalesce(trajectories.c.finished_at, trajectories.c.created_at)
    of = (trajectories.c.run == PRODUCTION) & (ended_at > ended_after) & (trajectories.c.created_at >= begun_at)
    rows = sa.select(*(trajectories.c[name] for name in (*_COLUMNS, "finished_at"))).where(of)
    said = sa.select(feedback.c.trajectory, feedback.c.kind, feedback.c.value, feedback.c.data)
    said = said.join_from(feedback, trajectories, feedback.c.trajectory == trajectories.c.id).where(of)
    said = said.where(feedback.c.created_at <= trajectories.c.finished_at + settle_s)
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
            consent=str(provenance.get("consent", "train")),
            signals=signals[row.id],
            user=str(provenance.get("user", "")),
        )
        for row in found
        if (provenance := from_json(row.provenance)).get("run") == run
    ]
