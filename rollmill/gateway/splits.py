"""How production is divided between versions, in the database, so that it can change while gateways run.

`split` in [gateway] is where a gateway begins. What is in the database is laid over it, per model: the gateway looks
once per second. If the database fails, the gateway keeps what it knows.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping

import sqlalchemy as sa

from rollmill.errors import StorageError
from rollmill.storage.database import reading, writing
from rollmill.trajectories.storable import from_json, to_key, to_object
from rollmill.trajectories.tables import splits

log = logging.getLogger(__name__)
_LOOK_S = 1.0
Split = Mapping[str, Mapping[str, float]]  # model → name → weight


class SplitStore:
    def __init__(self, engine: sa.Engine, run: str) -> None:
        self._engine = engine
        self._run = to_key("the run", run)

    def get(self) -> dict[str, dict[str, float]]:
        query = sa.select(splits.c.model, splits.c.weights).where(splits.c.run == self._run)
        with reading(self._engine) as connection:
            rows = connection.execute(query).all()
        return {row.model: {name: float(weight) for name, weight in from_json(row.weights).items()} for row in rows}

    def put(self, model: str, weights: Mapping[str, float]) -> None:
        """Divide the production sessions that ask for `model` between names. Repeating it changes nothing."""
        row = {"run": self._run, "model": to_key("the model", model)}
        same = (splits.c.run == self._run) & (splits.c.model == model)
        values = {"weights": to_object("weights", weights), "updated_at": time.time()}

        def work(connection: sa.Connection) -> None:
            if connection.execute(splits.update().where(same).values(**values)).rowcount == 0:
                connection.execute(splits.insert(), {**row, **values})

        writing(self._engine, work)


async def follow(store: SplitStore, tell: Callable[[Split], None]) -> None:
    """Runs for ever: tells what the database says."""
    while True:
        try:
            tell(await asyncio.to_thread(store.get))
        except StorageError as error:
            log.warning("the split of production cannot be read: %s", error)
        await asyncio.sleep(_LOOK_S)
