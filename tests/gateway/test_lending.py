"""Engines of production are lent to training and return. Real gateways, engines, weights and tables."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from rollmill.config import validate_config
from rollmill.dashboard.loans import LOANS
from rollmill.errors import ConfigError
from rollmill.events import EVENTS
from rollmill.gateway.config import EngineEndpoint, GatewayConfig, LendingConfig
from rollmill.gateway.routing import fleet as fleet_module
from rollmill.gateway.routing import lender as module
from rollmill.gateway.routing.fleet import Fleet, Registration
from rollmill.gateway.routing.lender import Lender, LendingRule, Seen, is_hour
from rollmill.inference.embedded.engine import EmbeddedEngine
from rollmill.inference.engine_wire import WIRE
from rollmill.inference.server import make_app, serving
from rollmill.types import Version
from rollmill.weights.reading.channels import Channels
from rollmill.weights.reading.line_follower import LineFollower
from tests.gateway.conftest import ENGINE, USER, Mill, until
from tests.gateway.serve import LIVE
from tests.inference.test_follower import Line, following
from tests.inference.world import TINY, engine_at

QUICK = GatewayConfig(engine_wait_s=20.0, health_interval_s=0.02, stream_above=0)
CONFIG = LendingConfig(quiet_s=10.0)
LEND = ("lend", None)


def seen(name: str, busy: int = 0, loan: str | None = None, places: int = 10) -> Seen:
    registration = Registration(
        name=name, url="http://a", region="home", kind="embedded", form="bf16", wire=WIRE, capacity=places
    )
    return Seen(registration, places, busy, "rl" if loan else None, loan, "rl" if loan == "lent" else "main")


def decide(rule: LendingRule, engines: list[Seen], now: float, minute: int = 0) -> tuple[list[str], list[str]]:
    decided = rule.decide(engines, now, minute)
    assert bool(decided.reason) >= bool(decided.lend or decided.recall), "what is decided has a reason"
    return [each.name for each in decided.lend], [each.name for each in decided.recall]


def test_what_is_lent_and_recalled_by_load() -> None:
    rule = LendingRule(CONFIG)
    quiet = [seen("a", 2), seen("b", 1), seen("c", 2)]
    assert decide(rule, quiet, 0.0) == decide(rule, quiet, 9.9) == ([], [])
    assert decide(rule, quiet, 10.0) == (["b"], [])  # the one with the least to finish
    assert decide(rule, quiet, 11.0) == ([], []), "the time counts from the start again"
    assert decide(rule, [seen("a", 7), seen("b", 1)], 20.0) == ([], [])
    assert decide(rule, quiet, 25.0) == ([], []), "a busy moment begins the quiet time again"
    # one engine always stays, and three of ten places of those that stay are free to be taken
    for engines in ([seen("a")], [seen("a", 3), seen("b", 1)], [seen("a"), seen("b", loan="lent")]):
        assert decide(LendingRule(LendingConfig(quiet_s=0.0)), engines, 0.0) == ([], [])
    # rising load: first those that have not left yet, then as many as bring it to 0.45
    lent = [seen("b", 99, "lent"), seen("c", 99, "lent"), seen("d", 1, "leaving")]
    assert decide(rule, [seen("a", 6), *lent], 30.0) == ([], [])
    assert decide(rule, [seen("a", 7), *lent], 31.0) == ([], ["d"])
    assert decide(rule, [seen("a", 17), *lent], 32.0) == ([], ["d", "b", "c"])
    returning = [seen("d", 0, "returning"), seen("b", 0, "lent")]
    assert decide(rule, [seen("a", 7), *returning], 33.0) == ([], []), "one that returns already counts"
    assert decide(rule, [seen("b", 0, "lent"), seen("c", 0, "lent")], 34.0) == ([], ["b"]), "the last one died"


def test_why_engines_are_lent_and_recalled() -> None:
    rule, lent = LendingRule(LendingConfig(quiet_s=0.0, keep=2, hours=("22:00-06:00",))), seen("c", 0, "lent")
    for engines, minute, reason in (
        ([seen("a", 2), seen("b", 1), seen("d")], 0, "a load of 0.15, at most 0.3 for 0 s"),
        ([seen("a", 9), seen("b", 4), lent], 0, "a load of 0.65, above 0.6"),
        ([seen("a", 0), lent], 0, "production has 1 engines, fewer than keep = 2"),
        ([seen("a", 0), lent], 720, "not one of the hours 22:00-06:00"),
        ([seen("a", 0), seen("b")], 0, ""),
    ):
        assert rule.decide(engines, 0.0, minute).reason.endswith(reason), reason


def test_what_is_lent_and_recalled_by_schedule() -> None:
    rule = LendingRule(LendingConfig(quiet_s=0.0, hours=("22:00-06:00",)))
    engines = [seen("a"), seen("b"), seen("c", loan="lent")]
    assert decide(rule, engines, 0.0, 23 * 60) == (["a"], [])
    assert decide(rule, engines, 1.0, 5 * 60 + 59) == (["a"], [])
    assert decide(rule, engines, 2.0, 6 * 60) == ([], ["c"])
    assert is_hour(("08:30-09:00", "12:00-13:00"), 12 * 60) and not is_hour(("08:30-09:00",), 9 * 60)
    for wrong in ({"hours": ["24:00-06:00"]}, {"below": 0.6, "above": 0.6}, {"keep": 0}):
        with pytest.raises(ConfigError):
            validate_config(LendingConfig, wrong, "test")


def test_a_return_that_took_too_long_is_told(mill: Mill, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[dict[str, Any]] = []
    monkeypatch.setattr(module.telemetry, "emit", lambda kind, **fields: told.append({"kind": kind, **fields}))
    lender = Lender(
        LendingConfig(return_s=2.0), mill.fleet, mill.fleet, channel="live", line="rl", gateway=GatewayConfig()
    )
    for name, since in (("late", 3.0), ("soon", 1.0)):
        lender._recalled[name] = (time.monotonic() - since, "load")
        lender._returned(seen(name))
    assert [(each["engine"], each["late"], each["limit_s"]) for each in told] == [
        ("late", True, 2.0),
        ("soon", False, 2.0),
    ]


class Fleets:
    """Two engines on `live`, one on the line `rl`; a gateway for production and one for training."""

    def __init__(self, mill: Mill, path: Path) -> None:
        self.mill, self.model = mill, TINY.model_copy(update={"vocab_size": mill.tokenizer.vocab_size})
        self.main = Line(path / "weights", self.model)
        self.rl = Line(path / "weights", self.model, name="rl", shift=100)
        self.own = Fleet(mill.fleet.database, "run/serve-1", ENGINE)
        self.engines: list[EmbeddedEngine] = []
        self.urls: list[str] = []

    async def engine(self, fleet: Fleet, name: str, source: LineFollower, serves: dict[str, str]) -> None:
        enter = self.mill.stack.enter_async_context
        engine = await enter(engine_at(None, model=self.model))
        follower = await enter(following(engine, source))
        runner = await enter(serving(make_app(engine, follower, ENGINE, serves), "127.0.0.1", 0))
        url = "http://{}:{}".format(*runner.addresses[0][:2])
        facts = {"region": "home", "kind": "embedded", "form": "bf16", "wire": WIRE, "capacity": 2}
        fleet.hold(Registration(name=name, url=url, **facts), renews=False, seconds=600.0)
        self.engines.append(engine)
        self.urls.append(url)

    async def start(self) -> None:
        self.main.publish()
        self.rl.publish()
        Channels(self.main.objects).move("live", Version("main", 0))
        for name in ("engine-home", "engine-home-2"):
            source = LineFollower(self.main.store, "main", holder=name)
            source.follow_channel("live")
            await self.engine(self.own, name, source, {"kind": "channel", "name": "live"})
        training = LineFollower(self.main.store, "rl")
        await self.engine(self.mill.fleet, "engine-home", training, {"kind": "line", "name": "rl"})

    @contextlib.asynccontextmanager
    async def lending(self, **settings: Any) -> AsyncIterator[None]:
        config = LendingConfig(**{"quiet_s": 0.0, "below": 0.4, "above": 0.9, "return_s": 60.0, **settings})
        lender = Lender(config, self.own, self.mill.fleet, channel="live", line="rl", gateway=QUICK)
        task = asyncio.create_task(lender.run())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def healths(self) -> list[Any]:
        async with aiohttp.ClientSession() as client:
            return [await (await client.get(f"{url}/health")).json() for url in self.urls]

    async def loans(self) -> list[str | None]:
        return [each["loan"] for each in await self.healths()]


async def test_an_engine_works_for_training_and_returns(
    mill: Mill, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_module, "LOOK_S", 0.02)
    monkeypatch.setattr(module, "TICK_S", 0.02)
    told: list[tuple[str, Any]] = []  # of the lender; engines tell of their switches
    reasons: list[str] = []

    def emit(kind: str, **fields: Any) -> None:
        told.append((kind, fields.get("late")))
        if kind in LOANS:
            assert set(fields) == set(EVENTS[kind].fields)
            reasons.append(fields["reason"])

    monkeypatch.setattr(module.telemetry, "emit", emit)
    fleets = Fleets(mill, tmp_path)
    await fleets.start()
    rollouts = await mill.gateway(config=QUICK)  # follows the fleet of training
    (tmp_path / "production").mkdir()
    beside = Mill(tmp_path / "production", mill.format, mill.tokenizer, mill.stack)
    ends = [EngineEndpoint(url, "home", ENGINE) for url in fleets.urls[:2]]
    production = await beside.gateway(*ends, config=QUICK, follows=False)
    names = [f"r{number}" for number in range(8)]
    mill.plan(*names)

    async def rollout(name: str) -> Any:
        key = await rollouts.open(name)
        return await rollouts.ask(key, [USER], max_tokens=80, temperature=1.0)

    async def ask(number: int) -> Any:
        return await production.ask(LIVE, [{"role": "user", "content": f"Question {number}."}], max_tokens=40)

    async def works_for_training() -> bool:
        engines = (await rollouts.health())["engines"]
        return [each["policy"]["line"] for each in engines if each["alive"]] == ["rl", "rl"]

    async with fleets.lending():
        await until(works_for_training)
        first, second = (await fleets.healths())[:2]
        lent, stays = (0, 1) if first["loan"] else (1, 0)
        assert (second if stays else first)["policy"]["line"] == "main"
        answers = await asyncio.gather(*(ask(number) for number in range(4)))
        assert {status for status, _ in answers} == {200}
        # production rises: the engine that stayed cannot keep up. Rollouts run on the one that is lent
        await fleets.engines[stays].pause()
        running = [asyncio.create_task(rollout(name)) for name in names]
        asked = [asyncio.create_task(ask(number)) for number in range(4, 8)]
        await until(lambda: _has(told, ("returned", False)))
        assert (await fleets.healths())[lent]["policy"]["line"] == "main"
        await fleets.engines[stays].resume()
        assert [status for status, _ in await asyncio.gather(*asked)] == [200] * 4
        assert [status for status, _ in await asyncio.gather(*running)] == [200] * 8
        await until(works_for_training)  # quiet again: it is lent again
        lent_now = [url for url, loan in zip(fleets.urls, await fleets.loans(), strict=True) if loan]
        engines = "".join([await _metrics(url) for url in fleets.urls[:2]])
        loans, returns, now = (
            sum(map(int, re.findall(rf"^rollmill_engine_{name} (\d)", engines, re.M)))
            for name in ("loans_total", "return_seconds_count", "lent")
        )
        assert loans == returns + 1 >= 2 and now == 1 == len(lent_now)
        for gateway in (production, rollouts):  # both see it
            assert f'rollmill_gateway_engine_lent{{url="{lent_now[0]}"}} 1' in await _metrics(gateway.url)
    assert reasons[0].startswith("the engines that stay would have a load of 0.00") and "above 0.9" in reasons[1]
    assert reasons[-1] == "lending ends"
    assert await fleets.loans() == [None, None, None], "the lender's end is the end of its loans"
    assert [each.name for each in mill.fleet.registered()] == ["engine-home"]
    assert [event for event in told if event[0] in ("lend", "returned")][:3] == [LEND, ("returned", False), LEND]
    for name in names:  # every token of every rollout is of training's line, also of those that were broken off
        segments = (await rollouts.seal(name)).segments
        assert {policy.line for segment in segments for policy in segment.policies} == {"rl"}


async def _metrics(url: str) -> str:
    """Without the labels of engines."""
    async with aiohttp.ClientSession() as client, client.get(f"{url}/metrics") as answer:
        return re.sub(r'\{engine="[^}]*\}', "", await answer.text())


async def _has(found: list[Any], wanted: Any) -> bool:
    return wanted in found


async def test_a_loan_that_nobody_prolongs_ends(mill: Mill, tmp_path: Path) -> None:
    """And a lent engine answers no production, whoever asks it."""
    fleets = Fleets(mill, tmp_path)
    await fleets.start()
    async with aiohttp.ClientSession(fleets.urls[0], headers={"Authorization": f"Bearer {ENGINE}"}) as client:
        for seconds in (60.0, 60.0, 0.5):  # again: that prolongs, or shortens
            body = {"line": "rl", "seconds": seconds}
            assert (await client.post("/lend", json=body)).status == 200
            if seconds == 60.0:
                await until(lambda: _lent(fleets, "lent"))
                question = {"session": "s", "tokens": [1], "sampling": {}, "traffic": "production", "stream": False}
                refused = await client.post("/generate", json=question)
                assert refused.status == 503 and "lent to training" in await refused.text()
        assert (await client.post("/lend", json={"line": "other"})).status == 400
        await until(lambda: _lent(fleets, None))
        assert (await fleets.healths())[0]["policy"]["line"] == "main"


async def _lent(fleets: Fleets, state: str | None) -> bool:
    return (await fleets.loans())[0] == state
