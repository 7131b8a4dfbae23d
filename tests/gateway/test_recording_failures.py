"""A full disk or a failing store: production is served and the loss is reported, rollouts are told at once."""

from __future__ import annotations

from typing import Any

from tests.gateway.conftest import LIVE, USER, Answers, Mill
from tests.gateway.stand_in import StandIn
from tests.gateway.test_recorder import full_disk


async def test_a_full_disk_fails_rollouts_and_serves_production(mill: Mill, answers: Answers) -> None:
    engine = StandIn([answers.text(text) for text in ("one", "two", "three", "four", "five")])
    door = await mill.gateway(await mill.engine(engine))
    mill.plan("a")
    key = await door.open("a")
    live: list[Any] = [USER]
    recorded = await door.say(LIVE, live)
    with full_disk((mill.directory / "gateway" / "sessions.log").stat().st_size + 8):
        status, body = await door.ask(key, [USER])
        assert status == 503
        assert "could not be recorded" in body["error"]["message"] and "disk space" in body["error"]["message"]
        assert (await door.admin("POST", "/sessions", {"trajectory": "b"}))[0] == 503
        continued = await door.say(LIVE, [*live, USER])
        assert continued["rollmill"]["trajectory"] == recorded["rollmill"]["trajectory"]
        fresh = await door.say(LIVE, [{"role": "user", "content": "hello"}])
        health = await door.health()
        assert health["status"] == "degraded" and "sessions.log" in health["problems"][0]
    metrics = await door.metrics()
    assert 'recording_failures_total{traffic="rollout"} 1' in metrics
    assert 'recording_failures_total{traffic="production"} 2' in metrics
    # space is back: the rollout goes on as if the lost answer had never been
    await door.say(key, [USER])
    (segment,) = (await door.seal("a")).segments
    assert segment.tokens[segment.sampled].tolist() == answers.text("five")
    assert (await door.health())["status"] == "ok"
    # a conversation with a hole in it is not sealed
    assert (await door.admin("POST", f"/sessions/{fresh['rollmill']['trajectory']}/seal", {}))[0] == 410
    assert (await door.admin("POST", f"/sessions/{recorded['rollmill']['trajectory']}/seal", {}))[0] == 410


async def test_a_store_that_fails_keeps_the_session_until_it_works_again(mill: Mill, answers: Answers) -> None:
    door = await mill.gateway(await mill.engine(StandIn([answers.text("x")])))
    mill.plan("a")
    key = await door.open("a")
    await door.say(key, [USER])
    store, aside = mill.directory / "store", mill.directory / "aside"
    store.rename(aside)
    store.write_text("not a directory any more")
    status, body = await door.admin("POST", "/sessions/a/seal", {"submission_key": None})
    assert status == 503, body
    assert (await door.health())["status"] == "degraded"
    assert body["error"]["type"] == "server_error"
    store.unlink()
    aside.rename(store)
    assert len((await door.seal("a")).segments) == 1
    assert (await door.health())["status"] == "ok"
