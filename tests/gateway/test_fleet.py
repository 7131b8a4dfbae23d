"""Engines join, leave and expire while the gateway serves."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from rollmill.errors import EngineError
from rollmill.gateway.config import GatewayConfig
from rollmill.gateway.routing import fleet as module
from rollmill.gateway.routing.fleet import Fleet, Registration
from rollmill.inference.engine_wire import WIRE
from rollmill.inference.joining import Joining, keep_registered
from rollmill.storage.database import open_database, writing
from tests.gateway.conftest import ENGINE, QUICK, USER, Answers, Door, Mill, until
from tests.gateway.serve import LIVE
from tests.gateway.stand_in import StandIn


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_S", 0.02)


def registration(url: str, name: str = "engine-home", **change: Any) -> Registration:
    facts = {"region": "home", "kind": "embedded", "form": "bf16", "wire": WIRE, "capacity": 4}
    return Registration(name=name, url=url, **{**facts, **change})


async def urls(door: Door, *, alive: bool = True) -> list[str]:
    return [engine["url"] for engine in (await door.health())["engines"] if engine["alive"] or not alive]


@contextlib.asynccontextmanager
async def joined(door: Door, name: str, url: str) -> AsyncIterator[asyncio.Task[None]]:
    """As an engine process does it."""
    joining = Joining(door.url, ENGINE, "embedded", 4)
    task = asyncio.create_task(keep_registered(joining, name, url, region="home", form="bf16"))
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_engines_join_and_leave_while_it_serves(mill: Mill, answers: Answers) -> None:
    first, second = StandIn([answers.text("one")], name="first"), StandIn([answers.text("two")], name="second")
    url, other = [(await mill.engine(each)).url.rstrip("/") for each in (first, second)]
    door = await mill.gateway()
    assert (await door.health())["status"] == "no engine"
    async with joined(door, "engine-home", url):
        await until(lambda: _are(door, [url]))
        assert (await door.say(LIVE, [USER]))["choices"][0]["message"]["content"] == "one"
        async with joined(door, "engine-home-2", other):
            await until(lambda: _are(door, [url, other]))
    await until(lambda: _are(door, []))  # both said that they leave
    asked = len(first.requests)
    status, _ = await door.ask(LIVE, [USER])
    assert status == 503 and len(first.requests) == asked and not second.requests
    async with joined(door, "engine-home", other):  # the name comes back elsewhere
        await until(lambda: _are(door, [other]))
        assert (await door.say(LIVE, [USER]))["choices"][0]["message"]["content"] == "two"


async def _are(door: Door, expected: list[str]) -> bool:
    return sorted(await urls(door)) == sorted(expected) and sorted(await urls(door, alive=False)) == sorted(expected)


async def test_an_engine_whose_lease_expired_gets_no_new_request(mill: Mill, answers: Answers) -> None:
    """Whatever its health says: its answer that runs is kept."""
    engine = StandIn([answers.text("one two three")], hold_after=2)
    url = (await mill.engine(engine)).url.rstrip("/")
    mill.fleet.hold(registration(url), renews=False)
    door = await mill.gateway(config=GatewayConfig(engine_wait_s=0.2, health_interval_s=0.02))
    await until(lambda: _are(door, [url]))
    running = asyncio.create_task(door.ask(LIVE, [USER], max_tokens=100))
    await engine.asked()
    mill.fleet.hold(registration(url), renews=True, seconds=-1.0)
    await until(lambda: _are(door, []))
    status, _ = await door.ask(LIVE, [{"role": "user", "content": "Another."}])
    assert status == 503 and len(engine.requests) == 1
    engine.release.set()
    status, body = await running
    assert status == 200 and body["choices"][0]["message"]["content"] == "one two three"


async def test_every_gateway_of_a_run_follows_the_same_engines(mill: Mill, answers: Answers, tmp_path: Path) -> None:
    url = (await mill.engine(StandIn([answers.text("one")]))).url.rstrip("/")
    one = await mill.gateway()
    beside = Mill(tmp_path / "beside", mill.format, mill.tokenizer, mill.stack)
    beside.directory.mkdir()
    (beside.directory / "mill.db").symlink_to(mill.directory / "mill.db")
    other = await beside.gateway()
    async with joined(one, "engine-home", url):
        await until(lambda: _are(other, [url]))
        assert (await other.say(LIVE, [USER]))["choices"][0]["message"]["content"] == "one"
    await until(lambda: _are(other, []))


async def test_a_process_that_was_replaced_is_told_to_stop(
    mill: Mill, answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RENEW_S", 0.02)
    old, new = [(await mill.engine(StandIn([answers.text(name)], name=name))).url.rstrip("/") for name in ("a", "b")]
    door = await mill.gateway()
    async with joined(door, "engine-home", old) as first:
        await until(lambda: _are(door, [old]))
        async with joined(door, "engine-home", new):
            await until(lambda: _are(door, [new]))
            with pytest.raises(EngineError, match="another process serves as engine-home now"):
                await first
            assert await _are(door, [new])  # what the old one did at its end changed nothing


@pytest.mark.parametrize(
    ("change", "status", "words"),
    [
        ({"wire": WIRE + 1}, 409, "install the same release of rollmill on both"),
        ({"url": "ftp://host"}, 400, "url: "),
        ({"url": "http://user:password@host"}, 400, "url: "),
        ({"capacity": 0}, 400, "capacity: "),
        ({"region": None}, 400, "region: "),
    ],
)
async def test_registrations_that_are_refused(mill: Mill, change: dict[str, Any], status: int, words: str) -> None:
    door = await mill.gateway()
    facts = {**registration("http://127.0.0.1:1").model_dump(), **change}
    told = await door.admin("PUT", "/engines/engine-home", facts, token=ENGINE)
    assert told[0] == status and words in str(told[1])
    assert mill.fleet.registered() == []


async def test_a_key_for_something_else_registers_nothing(mill: Mill) -> None:
    door = await mill.gateway()
    facts = registration("http://127.0.0.1:1").model_dump()
    assert (await door.admin("PUT", "/engines/engine-home", facts, token=LIVE))[0] == 403
    assert (await door.admin("PUT", "/engines/engine-home", facts, token="wrong"))[0] == 401
    _, secret = mill.keys.create(["engine"])
    assert (await door.admin("PUT", "/engines/engine-home", facts, token=secret))[0] == 200
    assert (await door.admin("DELETE", "/engines/engine-home?url=http://other", token=secret))[0] == 200
    assert [each.name for each in mill.fleet.registered()] == ["engine-home"]  # another process has the name


async def test_the_engines_stay_while_the_database_fails(mill: Mill, answers: Answers) -> None:
    engine = StandIn([answers.text("one")])
    url = (await mill.engine(engine)).url.rstrip("/")
    mill.fleet.hold(registration(url), renews=False)
    door = await mill.gateway()
    await until(lambda: _are(door, [url]))
    writing(mill.fleet.database, lambda connection: connection.execute(sa.text("ALTER TABLE engines RENAME TO away")))
    told = await door.admin("PUT", "/engines/engine-2", registration("http://127.0.0.1:1").model_dump(), token=ENGINE)
    assert told[0] == 503
    assert await _are(door, [url])
    assert (await door.say(LIVE, [USER]))["choices"][0]["message"]["content"] == "one"


async def test_a_row_that_it_cannot_read_is_left_out_and_told_once(
    mill: Mill, answers: Answers, caplog: pytest.LogCaptureFixture
) -> None:
    """As another release may write it."""
    url = (await mill.engine(StandIn([answers.text("one")]))).url.rstrip("/")
    door = await mill.gateway()
    strange = registration("http://a:1", "engine-strange").model_copy(update={"url": "unix:/engine"})
    mill.fleet.hold(strange, renews=False)
    async with joined(door, "engine-home", url):
        await until(lambda: _are(door, [url]))
    await until(lambda: _are(door, []))  # it goes on following
    assert [record.message for record in caplog.records if "engine-strange" in record.message] == [
        "engine engine-strange is left out: url: String should match pattern '^https?://[^/?#@\\s]+$'"
    ]


def test_leases_in_the_database(database_url: str) -> None:
    fleet = Fleet(open_database(database_url), "run", ENGINE)
    other = Fleet(fleet.database, "run/serve-1", ENGINE)
    home, away = registration("http://a:1"), registration("http://b:1", "engine-away", region="away", capacity=64)
    assert fleet.hold(home, renews=False) and fleet.hold(away, renews=True)  # its row was lost: a renewal makes one
    assert fleet.registered() == [away, home] and other.registered() == []
    moved = home.model_copy(update={"url": "http://c:1"})
    assert fleet.hold(moved, renews=False) and not fleet.hold(home, renews=True)
    fleet.release(home.name, home.url)
    assert fleet.registered() == [away, moved]
    assert fleet.hold(away, renews=True, seconds=-1.0) and fleet.registered() == [moved]
    assert fleet.hold(away, renews=True) and fleet.registered() == [away, moved]  # it was late, not gone
    fleet.release(away.name, away.url)
    assert fleet.registered() == [moved]


async def test_an_engine_that_decodes_more_together_gets_more(mill: Mill, answers: Answers) -> None:
    gate = asyncio.Event()
    small, large = [StandIn([answers.text("x")], name=name, gate=gate) for name in ("small", "large")]
    for engine, capacity in ((small, 1), (large, 3)):
        url = (await mill.engine(engine)).url.rstrip("/")
        mill.fleet.hold(registration(url, engine.name, capacity=capacity), renews=False)
    door = await mill.gateway(config=QUICK)
    asking = [
        asyncio.create_task(door.ask(LIVE, [{"role": "user", "content": f"Question {number}."}])) for number in range(8)
    ]
    async with asyncio.timeout(60):  # it would wait for ever
        await asyncio.gather(small.asked(2), large.asked(6))
    gate.set()
    assert [status for status, _ in await asyncio.gather(*asking)] == [200] * 8
