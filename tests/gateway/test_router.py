"""Engines that die, hang, refuse or are behind."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np

from rollmill.gateway.config import EngineEndpoint, GatewayConfig
from tests.chat.conftest import TOOLS
from tests.gateway.conftest import QUICK, USER, Answers, Door, Mill, until
from tests.gateway.stand_in import StandIn, route_row


async def test_an_engine_that_dies_before_its_first_token_costs_nothing(mill: Mill, answers: Answers) -> None:
    dying = StandIn([answers.text("never")], name="dying", die_after=1)
    healthy = StandIn([answers.text("one")], name="healthy")
    endpoints = [await mill.engine(dying), await mill.engine(healthy)]
    door = await mill.gateway(*endpoints)
    mill.plan("a")
    key = await door.open("a")
    reply = await door.say(key, [USER], max_tokens=32)
    assert reply["choices"][0]["message"]["content"] == "one"
    (segment,) = (await door.seal("a")).segments
    assert [(span.engine, span.finish) for span in segment.spans] == [("healthy", "stop")]
    assert len(dying.requests) == 1


async def test_tokens_of_an_engine_that_dies_during_an_answer_are_kept(mill: Mill, answers: Answers) -> None:
    tokens = answers.text("one two three four five")
    dying = StandIn([tokens], name="first", die_after=4, number=1)
    endpoint = await mill.engine(dying)
    second = StandIn([tokens[3:]], name="second", number=2, tag=1)
    second.health_body = {}  # at first only the first engine is fit
    door = await mill.gateway(endpoint, await mill.engine(second), wait=False)
    mill.plan("a")
    key = await door.open("a")

    async def recover() -> None:
        await dying.asked()
        second.health_body, dying.alive = None, False

    second_up = asyncio.create_task(recover())
    await until(lambda: _alive(door, True, False))
    reply = await door.say(key, [USER], max_tokens=100, seed=7)
    await second_up
    assert reply["choices"][0]["message"]["content"] == "one two three four five"
    (segment,) = (await door.seal("a")).segments
    assert segment.tokens[segment.sampled].tolist() == tokens
    prompt = int(np.argmax(segment.sampled))
    assert second.requests[0]["tokens"][prompt:] == tokens[:3]
    assert second.requests[0]["sampling"]["max_tokens"] == 97
    assert second.requests[0]["sampling"]["seed"] == 7
    assert [(span.engine, span.finish, span.end - span.start) for span in segment.spans] == [
        ("first", "abort", 3),
        ("second", "stop", len(tokens) - 3),
    ]
    used = [segment.policies[index].number for index in segment.policy[segment.sampled]]
    assert used == [1] * 3 + [2] * (len(tokens) - 3)
    assert segment.routes is not None
    assert (
        segment.routes[prompt] == route_row(prompt)
    ).all()  # the routes the token was sampled with, not the recomputed ones
    assert (segment.routes[prompt + 3] == route_row(prompt + 3, engine=1)).all()


async def _alive(door: Door, *expected: bool) -> bool:
    return tuple(engine["alive"] for engine in (await door.health())["engines"]) == expected


async def test_an_answer_that_was_complete_when_its_engine_died_is_complete(mill: Mill, answers: Answers) -> None:
    tokens = answers.text("one two three")
    engine = StandIn([tokens], die_after=4)
    door = await mill.gateway(await mill.engine(engine))
    key = await door.open("a")
    engine.answers.append([])
    reply = await door.say(key, [USER], max_tokens=3, stop=["never"])
    assert reply["choices"][0]["finish_reason"] == "length"
    assert len(engine.requests) == 1


async def test_without_an_engine_a_request_waits_and_then_gets_a_503(mill: Mill, answers: Answers) -> None:
    engine = StandIn([answers.text("one")], alive=False)
    door = await mill.gateway(await mill.engine(engine), wait=False)
    key = await door.open("a")
    assert (await door.health())["status"] == "no engine"
    headers = {"Authorization": f"Bearer {key}"}
    body = {"messages": [USER]}
    async with door.http.post(f"{door.url}/v1/chat/completions", json=body, headers=headers) as response:
        assert response.status == 503
        assert response.headers["Retry-After"] == "1"
        assert "no engine" in (await response.json())["error"]["message"]
    waiting = asyncio.create_task(door.ask(key, [USER]))
    await asyncio.sleep(0.1)
    engine.alive = True
    assert (await waiting)[0] == 200


async def test_an_engine_that_does_not_listen_is_dead(mill: Mill, answers: Answers) -> None:
    healthy = await mill.engine(StandIn([answers.text("one")]))
    door = await mill.gateway(EngineEndpoint("http://127.0.0.1:9", "away"), healthy, wait=False)
    key = await door.open("a")
    assert (await door.ask(key, [USER]))[0] == 200
    states = (await door.health())["engines"]
    assert [engine["alive"] for engine in states] == [False, True]
    assert states[0]["problem"]


async def test_a_request_that_every_engine_fails_gets_an_error(mill: Mill, answers: Answers) -> None:
    engine = StandIn([answers.text("one")], refuse=(500, "out of memory"))
    door = await mill.gateway(await mill.engine(engine), config=QUICK.model_copy(update={"engine_wait_s": 0.3}))
    key = await door.open("a")
    assert (await door.ask(key, [USER]))[0] == 503
    assert 1 < len(engine.requests) < 10  # retried, but not in a tight loop


async def test_a_request_that_the_engine_refuses_is_not_retried(mill: Mill, answers: Answers) -> None:
    engine = StandIn([answers.text("one")], refuse=(400, "the context is too long"))
    door = await mill.gateway(await mill.engine(engine))
    key = await door.open("a")
    status, body = await door.ask(key, [USER])
    assert status == 400 and "the context is too long" in body["error"]["message"]
    assert len(engine.requests) == 1


async def test_a_wrong_engine_token_is_not_reported_as_a_bad_request(mill: Mill, answers: Answers) -> None:
    locked = StandIn([answers.text("one")], token="other")
    engine = replace(await mill.engine(locked), token="mine")
    door = await mill.gateway(engine, config=QUICK.model_copy(update={"engine_wait_s": 0.3}))
    key = await door.open("a")
    assert (await door.ask(key, [USER]))[0] == 503
    assert "mine" not in str(await door.health())
    locked.token = "mine"
    assert (await door.ask(key, [USER]))[0] == 200


async def test_a_hanging_engine_counts_as_dead(mill: Mill, answers: Answers) -> None:
    engine = StandIn([answers.text("one")], token_delay_s=0.6)
    config = GatewayConfig(engine_wait_s=5, engine_silence_s=0.2, health_interval_s=0.02)
    door = await mill.gateway(await mill.engine(engine), config=config)
    key = await door.open("a")
    asked = asyncio.create_task(door.ask(key, [USER]))
    await engine.asked()
    engine.token_delay_s = 0
    assert (await asked)[0] == 200
    assert len(engine.requests) == 2


async def test_sessions_stay_where_their_cache_is_and_new_versions_are_preferred(mill: Mill, answers: Answers) -> None:
    engines = [StandIn([answers.text("x")], name=str(number), number=number) for number in (3, 5)]
    door = await mill.gateway(*[await mill.engine(engine) for engine in engines])
    key = await door.open("a", min_version=5)
    messages: list[Any] = [USER]
    for _ in range(3):
        await door.say(key, messages)
        messages.append(USER)
    assert [len(engine.requests) for engine in engines] == [0, 3]
    engines[0].number = 6
    await asyncio.sleep(0.1)
    await door.say(key, messages)
    assert [len(engine.requests) for engine in engines] == [0, 4]


async def test_tokens_that_were_streamed_are_recorded_when_no_engine_goes_on(mill: Mill, answers: Answers) -> None:
    tokens = answers.text("one two three four five")
    dying = StandIn([tokens], die_after=4)
    door = await mill.gateway(await mill.engine(dying), config=QUICK.model_copy(update={"engine_wait_s": 0.2}))
    mill.plan("a")
    key = await door.open("a")
    dying.hold_after = 2

    async def die() -> None:
        await dying.asked()
        dying.refuse = (500, "out of memory")
        dying.release.set()

    dead = asyncio.create_task(die())
    body = {"messages": [USER], "tools": TOOLS, "stream": True}
    headers = {"Authorization": f"Bearer {key}"}
    async with door.http.post(f"{door.url}/v1/chat/completions", json=body, headers=headers) as response:
        assert '"error"' in await response.text()
    await dead
    (segment,) = (await door.seal("a")).segments
    assert segment.tokens[segment.sampled].tolist() == tokens[:3]
    assert [span.finish for span in segment.spans] == ["abort"]


async def test_an_engine_that_loses_one_connection_stays_alive(mill: Mill, answers: Answers) -> None:
    """One failed connection of thousands must not take an engine away from all the others."""
    engine = StandIn([answers.text("never"), answers.text("one")], die_after=1)
    config = QUICK.model_copy(update={"health_interval_s": 60.0})
    door = await mill.gateway(await mill.engine(engine), config=config)
    key = await door.open("a")
    reply = await door.say(key, [USER], max_tokens=32)
    assert reply["choices"][0]["message"]["content"] == "one"
