"""Several requests of one session at the same time, and a seal while they are in flight."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from rollmill.gateway.sessions.waits import Waits
from rollmill.inference.engine import GenerateChunk
from tests.chat.conftest import TOOLS
from tests.gateway.conftest import LIVE, QUICK, USER, Answers, Door, Mill, until
from tests.gateway.stand_in import StandIn


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


async def test_parallel_requests_become_branches(mill: Mill, answers: Answers) -> None:
    engine = StandIn([answers.text(text) for text in ("one", "two", "three", "four", "five")])
    endpoint = await mill.engine(engine)
    mill.plan("a")
    async with mill.running(endpoint) as door:
        key = await door.open("a")
        engine.hold_after = 0
        first = [asyncio.create_task(door.ask(key, [USER])) for _ in range(2)]
        await engine.asked(2)  # both are being sampled
        engine.release.set()
        said = [(await asked)[1]["choices"][0]["message"] for asked in first]
        engine.release.clear()
        histories = [[USER, said[0], user("and?")], [USER, said[0], user("and then?")], [USER, said[1], USER]]
        second = [asyncio.create_task(door.ask(key, history)) for history in histories]
        await engine.asked(5)
        engine.release.set()
        await asyncio.gather(*second)
        assert len({request["session"] for request in engine.requests[2:]}) == 3  # none takes the cache of another
        before = read_record(mill)
    async with mill.running(endpoint) as door:  # the log gives the same tree
        segments = (await door.seal("a")).segments
    assert sorted(segment.cause for segment in segments) == ["fork", "fork", "start"]
    start = len(mill.format.render_start([USER], TOOLS))
    assert segments[1].parent == (segments[0].id, start)
    sampled = sorted(segment.tokens[span.start : span.end].tolist() for segment in segments for span in segment.spans)
    assert sampled == sorted(answers.text(text) for text in ("one", "two", "three", "four", "five"))
    assert {segment.id: len(segment.spans) for segment in segments} == before


async def test_a_large_request_that_is_repeated_while_it_is_planned_is_answered_once(
    mill: Mill, answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = StandIn([answers.text("one"), answers.text("two")])
    mill.plan("a")
    begun, go_on, render = threading.Event(), threading.Event(), mill.format.render_start

    def slow(*arguments: Any) -> list[int]:
        begun.set()
        go_on.wait()
        return render(*arguments)

    monkeypatch.setattr(mill.format, "render_start", slow)
    door = await mill.gateway(await mill.engine(engine))
    key, large = await door.open("a"), [user("word " * 20_000)]
    gone = asyncio.create_task(door.ask(key, large))
    try:
        await asyncio.to_thread(begun.wait)
        gone.cancel()
        again = asyncio.create_task(door.ask(key, large))
        await asyncio.sleep(0.3)  # it has arrived
    finally:
        go_on.set()
    status, body = await again
    assert status == 200 and body["choices"][0]["message"]["content"] == "one"
    assert len(engine.requests) == 1
    (segment,) = (await door.seal("a")).segments
    assert len(segment.spans) == 1


def read_record(mill: Mill) -> dict[str, int]:
    """The number of turns of each segment in the log."""
    segments = [entry.header["segment"] for _, _, entry in mill.log_entries() if entry.op == "turn"]
    return {segment: segments.count(segment) for segment in segments}


async def test_a_repeated_request_gets_the_answer_that_is_in_flight(mill: Mill, answers: Answers) -> None:
    engine = StandIn([answers.text("one"), answers.text("two")], hold_after=0)
    door = await mill.gateway(await mill.engine(engine))
    key = await door.open("a")
    async with aiohttp.ClientSession() as impatient:
        gone = asyncio.create_task(Door(door.url, door.trajectories, impatient).ask(key, [USER]))
        await engine.asked(1)
        gone.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await gone
    again = asyncio.create_task(door.ask(key, [USER]))
    other = asyncio.create_task(door.ask(key, [user("something else")]))
    await engine.asked(2)
    engine.release.set()
    assert (await again)[1]["choices"][0]["message"]["content"] == "one"
    await other
    assert len(engine.requests) == 2


@contextlib.asynccontextmanager
async def streaming(door: Door, key: str, until_text: bytes) -> AsyncIterator[aiohttp.ClientResponse]:
    body = {"messages": [USER], "tools": TOOLS, "stream": True}
    headers = {"Authorization": f"Bearer {key}"}
    async with door.http.post(f"{door.url}/v1/chat/completions", json=body, headers=headers) as response:
        await response.content.readuntil(until_text)
        yield response


async def test_a_seal_cuts_the_answer_in_flight(mill: Mill, answers: Answers) -> None:
    """Another request has no token yet: nothing of it is recorded."""
    engine = StandIn([answers.text("a b c d e f g h")], hold_after=3)
    door = await mill.gateway(await mill.engine(engine))
    mill.plan("a")
    key = await door.open("a")
    async with streaming(door, key, b' b"') as response:
        engine.hold_after = 0
        silent = asyncio.create_task(door.ask(key, [user("x")]))
        await engine.asked(2)
        (segment,) = (await door.seal("a")).segments
        assert b"this session has ended" in await response.read()
    assert segment.tokens[segment.sampled].tolist() == engine.answers[0][:3]
    assert [span.finish for span in segment.spans] == ["abort"]
    assert (await silent)[0] == 401


async def test_a_seal_does_not_cut_a_production_answer(
    mill: Mill, answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollmill.gateway.recording.sealing._LANDING_S", 0.01)
    engine = StandIn([answers.text("one"), answers.text("two")])
    door = await mill.gateway(await mill.engine(engine))
    live: list[Any] = [USER]
    trajectory = (await door.say(LIVE, live))["rollmill"]["trajectory"]
    engine.hold_after = 0
    asked = asyncio.create_task(door.ask(LIVE, [*live, USER]))
    await engine.asked(2)
    status, body = await door.admin("POST", f"/sessions/{trajectory}/seal", {})
    assert status == 503 and "in flight" in body["error"]["message"]
    engine.release.set()
    assert (await asked)[0] == 200
    assert len((await door.seal(trajectory)).segments[0].spans) == 2


async def test_a_session_knows_its_waits_before_its_first_answer_and_after_a_restart(
    mill: Mill, answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine answers health checks and nothing else."""
    monkeypatch.setattr("rollmill.gateway.recording.sealing._SWEEP_S", 0.02)
    monkeypatch.setattr("rollmill.gateway.recording.sealing._WAIT_STEP_S", 0.02)
    endpoint = await mill.engine(StandIn([answers.text("x")], refuse=(500, "broken")))
    config = QUICK.model_copy(update={"engine_wait_s": 60.0})
    async with mill.running(endpoint, config=config) as door:
        key = await door.open("a")
        asked = asyncio.create_task(door.ask(key, [USER]))
        await until(lambda: _waits_are_kept(mill))
        kept = _waits(mill)[-1]
        assert (await door.admin("GET", "/sessions/a"))[1]["waited_seconds"] >= kept
    with contextlib.suppress(aiohttp.ClientError):
        await asked
    async with mill.running(endpoint, config=config) as door:
        # the time in which the gateway was down is not in it: the client counts that itself
        assert (await door.admin("GET", "/sessions/a"))[1]["waited_seconds"] == _waits(mill)[-1] >= kept


def _waits(mill: Mill) -> list[float]:
    return [entry.header["seconds"] for _, _, entry in mill.log_entries() if entry.op == "waited"]


async def _waits_are_kept(mill: Mill) -> bool:
    return bool(_waits(mill))


def test_a_request_waits_until_an_engine_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("rollmill.gateway.sessions.waits.time.monotonic", lambda: clock[0])
    waits = Waits()
    token = GenerateChunk([1], [-1.0], [0], [])
    request, other = waits.begin(), waits.begin()
    clock[0] = 10.0
    request.hear(GenerateChunk([], [], [], [], finish="abort"))  # the engine gave it up
    clock[0] = 20.0
    request.hear(token)
    clock[0] = 25.0
    request.lost()  # after some tokens
    clock[0] = 30.0
    other.hear(GenerateChunk([1], [-1.0], [0], [], finish="stop", timing={"total_seconds": 12.0}))  # 18 s of waiting
    clock[0] = 35.0
    assert waits.seconds() == 30.0
    request.hear(token)
    clock[0] = 50.0
    request.end()
    other.end()
    assert waits.seconds() == 30.0


async def test_an_answer_that_was_cut_is_not_repeated_after_a_restart(mill: Mill, answers: Answers) -> None:
    engine = StandIn([answers.text("a b c d e f g h"), answers.text("whole")], hold_after=3)
    endpoint = await mill.engine(engine)
    mill.plan("a")
    async with mill.running(endpoint) as door:
        key = await door.open("a")
        async with streaming(door, key, b' b"') as response:
            response.close()
        engine.release.set()
        await until(lambda: _is_recorded(mill))
    async with mill.running(endpoint) as door:
        assert (await door.ask(key, [USER]))[1]["choices"][0]["message"]["content"] == "whole"


async def _is_recorded(mill: Mill) -> bool:
    return bool(read_record(mill))
