"""Several dispatchers: when one of them ends by itself, and when it does not. Several gateways, one of them away."""

from __future__ import annotations

import asyncio
import time

import pytest
from aiohttp.test_utils import unused_port

from rollmill.errors import GatewayError, StorageError, TrajectoryError
from rollmill.gateway.replicas import gateway_of
from rollmill.rollouts.dispatcher import _keep
from rollmill.rollouts.gateway_client import GatewayClient
from rollmill.storage.database import open_database
from rollmill.trajectories.claims import Claims
from rollmill.trajectories.staleness import Pace
from rollmill.types import Grade
from tests.rollouts.test_dispatcher import make_dispatcher, train_one_step
from tests.rollouts.world import ADMIN, RUN, World
from tests.trajectories.build import start_group

pytestmark = pytest.mark.asyncio(loop_scope="module")


class StandInClaims(Claims):
    """Of a database that fails, or that does not answer for `hangs_s`."""

    hangs_s = 0.0

    def renew(self) -> bool:
        time.sleep(self.hangs_s)
        raise StorageError("the database is away")


@pytest.mark.parametrize("hangs_s", [0.0, 3.0])
async def test_a_dispatcher_without_a_database_ends_when_its_lease_is_over(
    world: World, monkeypatch: pytest.MonkeyPatch, hangs_s: float
) -> None:
    monkeypatch.setattr("rollmill.rollouts.dispatcher.RENEW_S", 0.02)
    database = open_database(f"sqlite:///{world.directory}/mill.db")
    claims = StandInClaims(database, RUN, "dispatcher", lease_s=0.3)
    claims.hangs_s = hangs_s
    claims.hold()
    began = time.monotonic()
    with pytest.raises(TrajectoryError, match="could not renew its lease in time"):
        await _keep(claims)
    assert 0.2 < time.monotonic() - began < 2.5


async def test_a_late_renewal_keeps_the_lease_that_nobody_took(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollmill.rollouts.dispatcher.RENEW_S", 1.0)
    claims = Claims(open_database(f"sqlite:///{world.directory}/mill.db"), RUN, "dispatcher", lease_s=0.5)
    claims.hold()
    keeping = asyncio.create_task(_keep(claims))
    await asyncio.sleep(0.8)
    assert claims.left_s() < 0
    while not keeping.done() and claims.left_s() < 0:  # noqa: ASYNC110 - the renewal is in another thread
        await asyncio.sleep(0.01)
    assert not keeping.done()
    keeping.cancel()


async def test_a_group_that_another_dispatcher_has_brought_to_its_end_ends_nobody(world: World) -> None:
    database, ledger = open_database(f"sqlite:///{world.directory}/mill.db"), world.ledger
    claims = Claims(database, RUN, "dispatcher")
    claims.hold()
    pace = Pace(1, 1, 0, steps=5)
    assert start_group(ledger, "g-000000", "train/0", 1, pace=pace, ids=["g-000000-0"], holder="dispatcher") == 0
    playing = make_dispatcher(world, pace=pace, claims=claims)
    with pytest.raises(TrajectoryError, match="g-000000-0 is running"):
        await playing._group_ready("g-000000")
    world.context.trajectories.finish("g-000000-0", "p", None, tokens=1, sampled_tokens=1, segments=1)
    world.context.trajectories.grade("g-000000-0", Grade(1.0))
    ledger.group_ready("g-000000")
    assert train_one_step(ledger, 1)
    await playing._group_ready("g-000000")
    assert await playing._replace("g-000000", make_dispatcher(world)._tasks.get("train/0"), "g-000000-0", "lost")


async def test_a_gateway_that_is_away_does_not_hide_that_another_one_serves(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollmill.rollouts.gateway_client._TURN_S", 0.2)
    places = [lambda: f"http://127.0.0.1:{unused_port()}", lambda: world.context.gateway.base_url]
    names = [next(name for name in map(str, range(99)) if gateway_of(name, 2) == number) for number in range(2)]
    async with GatewayClient(places, ADMIN) as client:
        await client.wait_until_serving(0, patience_s=30.0)
        await client.wait_until_serving(0, patience_s=30.0, of=names[1])
        with pytest.raises(GatewayError, match="cannot be reached"):
            await client.wait_until_serving(0, patience_s=0.3, of=names[0])
