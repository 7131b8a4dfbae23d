"""The states of a cycle, in the database. A process that is killed anywhere goes on from the last state.

    collecting ─► distilling ─► training ─► gating ─► canary ─► promoting ─► promoted
                      │             │          │         ├────► rolling_back ─► rolled_back
                      └─────────────┴──────────┴─────────┴────► held

A move is one transaction: the new state, what was found out on the way (`facts`), and the reason for people. Moves are
never changed, so they are the history. A state's work may be done twice, never half: it is repeated after a crash.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from rollmill.errors import RollmillError
from rollmill.storage.database import reading, writing
from rollmill.storage.tables import cycle_moves, cycles
from rollmill.trajectories.storable import from_json, to_key, to_object, to_text

FINAL = ("promoted", "held", "rolled_back")
TRANSITIONS: Mapping[str, tuple[str, ...]] = {
    "collecting": ("distilling",),
    "distilling": ("training", "held"),
    "training": ("gating", "held"),
    "gating": ("canary", "held"),
    "canary": ("promoting", "rolling_back", "held"),
    "promoting": ("promoted", "held"),
    "rolling_back": ("rolled_back",),
    **dict.fromkeys(FINAL, ()),
}


@dataclass(frozen=True)
class Cycle:
    number: int
    state: str
    facts: dict[str, Any]
    started_at: float
    updated_at: float

    @property
    def is_over(self) -> bool:
        return self.state in FINAL


@dataclass(frozen=True)
class Move:
    number: int  # of the cycle
    state: str
    reason: str
    at: float


class Journal:
    """The cycles of one run."""

    def __init__(self, engine: sa.Engine, run: str) -> None:
        self._engine = engine
        self._run = to_key("the run", run)

    def current(self) -> Cycle | None:
        """The newest cycle, over or not."""
        return self._first(sa.select(cycles).order_by(cycles.c.number.desc()).limit(1))

    def get(self, number: int) -> Cycle | None:
        return self._first(sa.select(cycles).where(cycles.c.number == number))

    def _first(self, query: sa.Select[Any]) -> Cycle | None:
        query = query.where(cycles.c.run == self._run)
        with reading(self._engine) as connection:
            row = connection.execute(query).first()
        if row is None:
            return None
        return Cycle(row.number, row.state, from_json(row.facts), row.started_at, row.updated_at)

    def begin(self, facts: Mapping[str, Any], reason: str) -> Cycle:
        """The cycle that is not over, or a new one."""
        now = time.time()

        def work(connection: sa.Connection) -> None:
            query = sa.select(cycles.c.number, cycles.c.state).where(cycles.c.run == self._run)
            last = connection.execute(query.order_by(cycles.c.number.desc()).limit(1)).first()
            if last is not None and last.state not in FINAL:
                return
            number = last.number + 1 if last is not None else 1
            row = {"run": self._run, "number": number, "state": "collecting", "facts": to_object("facts", facts)}
            connection.execute(cycles.insert(), {**row, "started_at": now, "updated_at": now})
            self._add_move(connection, number, "collecting", reason, now)

        writing(self._engine, work)
        found = self.current()
        assert found is not None
        return found

    def move(self, cycle: Cycle, state: str, reason: str, **facts: Any) -> Cycle:
        """Move to the next state and keep what was found out. RollmillError if another process moved the cycle."""
        assert state in TRANSITIONS[cycle.state], f"{cycle.state} cannot become {state}"
        now, known = time.time(), {**cycle.facts, **facts}
        update = (
            cycles.update()
            .where(cycles.c.run == self._run, cycles.c.number == cycle.number, cycles.c.state == cycle.state)
            .values(state=state, facts=to_object("facts", known), updated_at=now)
        )

        def work(connection: sa.Connection) -> None:
            if connection.execute(update).rowcount == 0:
                raise RollmillError(
                    f"cycle {cycle.number} is no longer {cycle.state}", hint="does another `rollmill cycle run` run?"
                )
            self._add_move(connection, cycle.number, state, reason, now)

        writing(self._engine, work)
        return Cycle(cycle.number, state, known, cycle.started_at, now)

    def history(self, number: int | None = None) -> list[Move]:
        """All moves, oldest first; of one cycle if `number` is given."""
        query = sa.select(cycle_moves).where(cycle_moves.c.run == self._run)
        if number is not None:
            query = query.where(cycle_moves.c.number == number)
        with reading(self._engine) as connection:
            rows = connection.execute(query.order_by(cycle_moves.c.number, cycle_moves.c.position)).all()
        return [Move(row.number, row.state, row.reason, row.at) for row in rows]

    def _add_move(self, connection: sa.Connection, number: int, state: str, reason: str, now: float) -> None:
        mine = (cycle_moves.c.run == self._run) & (cycle_moves.c.number == number)
        position = connection.execute(sa.select(sa.func.count()).where(mine)).scalar_one()
        row = {"run": self._run, "number": number, "position": position, "state": state}
        connection.execute(cycle_moves.insert(), {**row, "reason": to_text(reason), "at": now})
