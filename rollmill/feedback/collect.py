"""Reads production conversations with what users said about them."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import sqlalchemy as sa
from sqlalchemy import bindparam

from rollmill.feedback.distil import Conversation
from rollmill.feedback.rule import Signal
from rollmill.storage.database import reading
from rollmill.storage.tables import feedback, trajectories
from rollmill.trajectories.storable import from_json
from rollmill.trajectories.table_rows import consent_of

PRODUCTION = "production"  # what the gateway lists live traffic under
LATE_S = 60.0  # a row may become visible, or the clock of its gateway be wrong, by this much
_COLUMNS = ("id", "state", "line", "oldest_version", "newest_version", "provenance")
_ended = trajectories.c.finished_at
_OF = (
    (trajectories.c.run == PRODUCTION)
    & (_ended > bindparam("after"))
    & (_ended <= bindparam("before"))
    & (trajectories.c.created_at >= bindparam("begun"))
)
_ROWS = sa.select(*(trajectories.c[name] for name in _COLUMNS)).where(_OF).order_by(_ended, trajectories.c.id)
_SAID = (
    sa.select(feedback.c.trajectory, feedback.c.kind, feedback.c.value, feedback.c.data)
    .join_from(trajectories, feedback, feedback.c.trajectory == trajectories.c.id)
    .where(_OF, feedback.c.created_at <= _ended + bindparam("settle"))
    .order_by(feedback.c.id)
)


class Conversations:
    """Conversations of a run that ended after `ended_after` and began at `begun_at` or later.

    Signals count up to `settle_s` seconds after the end, whenever they are read: so a conversation gets the same reward
    however late a cycle looks, and slow users of an old conversation are not heard more than those of a new one. It
    also means that a conversation is final when it is read, and is read once.

    Runs may share a database, and versions of two runs may have the same name. Conversations that name no run, as
    older gateways recorded them, are left out: they may be of any run."""

    def __init__(
        self, engine: sa.Engine, run: str, *, settle_s: float, ended_after: float = 0.0, begun_at: float = 0.0
    ) -> None:
        self._engine, self._run = engine, run
        self._bounds = {"settle": settle_s, "begun": begun_at}
        self._first = self._read_to = ended_after
        self._recent: set[str] = set()  # what the next look meets again
        self.found: list[Conversation] = []

    def look(self, ended_before: float) -> bool:
        """Add those that ended by `ended_before`, which is no later than `settle_s` ago. Returns whether there were
        any. One that has not ended yet is for a later look."""
        after = max(self._first, self._read_to - LATE_S)
        bounds = {**self._bounds, "after": after, "before": ended_before}
        signals: dict[str, list[Signal]] = defaultdict(list)
        with reading(self._engine) as connection:
            rows = connection.execute(_ROWS, bounds).all()
            fresh = [row for row in rows if row.id not in self._recent]
            for row in connection.execute(_SAID, bounds) if fresh else ():
                signals[row.trajectory].append(_signal(row))
        self._recent = {row.id for row in rows}
        self._read_to = ended_before
        new = [each for row in fresh if (each := self._conversation(row, signals[row.id])) is not None]
        self.found += new
        return bool(new)

    def _conversation(self, row: Any, signals: list[Signal]) -> Conversation | None:
        provenance = from_json(row.provenance)
        if provenance.get("run") != self._run:
            return None
        return Conversation(
            id=row.id,
            state=row.state,
            line=row.line,
            oldest=row.oldest_version,
            newest=row.newest_version,
            consent=consent_of(provenance),
            signals=signals,
            user=str(provenance.get("user", "")),
        )


def _signal(row: Any) -> Signal:
    data = from_json(row.data)
    said = data if isinstance(data, dict) else {}
    return Signal(row.kind, row.value, said.get("label"), str(said.get("answer") or said.get("segment") or ""))
