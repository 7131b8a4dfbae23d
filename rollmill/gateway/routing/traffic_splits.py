"""How production is divided between versions, in the database, so that it can change while gateways run.

`split` in [gateway] is where a gateway begins. What is in the database is laid over it, per model: the gateway looks
once per second. If the database fails, the gateway keeps what it knows.

A canary must not outlive the process that watches it. Whoever divides production writes the split again and again; a
gateway that has seen no new writing for `STALE_S` gives all sessions to the name with the largest weight.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping

import sqlalchemy as sa

from rollmill.errors import StorageError
from rollmill.storage.database import reading, writing
from rollmill.storage.tables import splits
from rollmill.trajectories.storable import from_json, to_key, to_object

log = logging.getLogger(__name__)
_LOOK_S = 1.0
STALE_S = 60.0
Split = Mapping[str, Mapping[str, float]]  # model → name → weight


class SplitStore:
    def __init__(self, engine: sa.Engine, run: str) -> None:
        self._engine = engine
        self._run = to_key("the run", run)

    def get(self) -> dict[str, dict[str, float]]:
        return {model: weights for model, (weights, _) in self.written().items()}

    def written(self) -> dict[str, tuple[dict[str, float], float]]:
        """By model: the weights, and when they were written last, by the clock of the writer."""
        query = sa.select(splits.c.model, splits.c.weights, splits.c.updated_at).where(splits.c.run == self._run)
        with reading(self._engine) as connection:
            rows = connection.execute(query).all()
        read = {row.model: (from_json(row.weights), row.updated_at) for row in rows}
        return {model: ({name: float(each) for name, each in tree.items()}, at) for model, (tree, at) in read.items()}

    def put(self, model: str, weights: Mapping[str, float]) -> None:
        """Divide the production sessions that ask for `model` between names. Repeating it renews the split."""
        row = {"run": self._run, "model": to_key("the model", model)}
        same = (splits.c.run == self._run) & (splits.c.model == model)
        values = {"weights": to_object("weights", weights), "updated_at": time.time()}

        def work(connection: sa.Connection) -> None:
            if connection.execute(splits.update().where(same).values(**values)).rowcount == 0:
                connection.execute(splits.insert(), {**row, **values})

        writing(self._engine, work)


class Renewals:
    """Which splits are still renewed. Compares no clocks of two machines: only whether the time of writing changes."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[float, float]] = {}  # model → when it was written, when this was first seen here

    def current(self, written: Mapping[str, tuple[Mapping[str, float], float]], now: float) -> Split:
        """The splits as they count at `now`."""
        for model, (_, at) in written.items():
            if model not in self._seen or self._seen[model][0] != at:
                self._seen[model] = at, now
        return {
            model: weights if now - self._seen[model][1] < STALE_S else {max(weights, key=weights.__getitem__): 1.0}
            for model, (weights, _) in written.items()
        }


async def follow(store: SplitStore, tell: Callable[[Split], None]) -> None:
    """Runs for ever: tells what the database says."""
    renewals = Renewals()
    while True:
        try:
            tell(renewals.current(await asyncio.to_thread(store.written), time.monotonic()))
        except StorageError as error:
            log.warning("the split of production cannot be read: %s", error)
        await asyncio.sleep(_LOOK_S)
