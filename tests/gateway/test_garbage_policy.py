"""Collections of garbage: requests leave no cycles, old objects are left alone, and nothing is kept for ever."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref
from collections import Counter
from typing import Any

import pytest
from aiohttp import web

from rollmill.gateway import garbage_policy as garbage
from rollmill.gateway.access.account import Account
from rollmill.gateway.sessions.sessions import Session
from tests.gateway.conftest import USER, Answers, Mill, collect_as_usual, until
from tests.gateway.serve import LIVE
from tests.gateway.stand_in import StandIn


class Node:
    other: Node
    holding: bytes


async def test_a_request_leaves_no_cycle(mill: Mill, answers: Answers) -> None:
    door = await mill.gateway(await mill.engine(StandIn([answers.text("one two three")])))
    _, key = mill.keys.create(["production"], requests_per_minute=1000)
    asked: list[tuple[str, Any, bool, int]] = [(LIVE, "no list", False, 400), ("unknown", [USER], False, 401)]
    asked += [(secret, [USER], stream, 200) for stream in (False, True) for secret in (LIVE, key)]
    gc.collect()  # what other tests have left
    gc.disable()  # what is found on the way is not seen below
    try:
        for secret, messages, stream, status in asked:
            headers = {"Authorization": f"Bearer {secret}"}
            body = {"messages": messages, "stream": stream}
            async with door.http.post(f"{door.url}/v1/chat/completions", json=body, headers=headers) as response:
                assert response.status == status and await response.read()
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        kinds = Counter(type(found) for found in gc.garbage)
        assert not kinds[Account] and not kinds[Session] and not kinds[web.Request], kinds
    finally:
        gc.enable()
        gc.set_debug(0)
        gc.garbage.clear()


async def test_objects_in_use_are_left_alone_until_nobody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(garbage, "_LOOK_S", 0.0)
    monkeypatch.setattr(garbage, "_SOONEST_S", 0.0)
    idle = asyncio.Event()
    garbage.collect_little()
    try:
        kept = [[number] for number in range(20 * garbage._NEW_OBJECTS)]
        assert len(gc.get_objects()) < 3 * garbage._NEW_OBJECTS  # all others are not looked at any more
        old = cycle_that_was_in_use()
        collecting = asyncio.create_task(garbage.collect_all(idle.is_set, lambda: 0))
        for _ in range(20):
            await asyncio.sleep(0)
        assert old() is not None
        idle.set()
        while old() is not None:  # noqa: ASYNC110
            await asyncio.sleep(0)
        collecting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await collecting
        assert len(gc.get_objects()) < 3 * garbage._NEW_OBJECTS < len(kept)
    finally:
        collect_as_usual()


async def test_a_look_that_takes_long_is_rare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while nobody asks: who comes then would wait."""
    monkeypatch.setattr(garbage, "_LOOK_S", 0.0)
    monkeypatch.setattr(garbage, "_SOONEST_S", 0.0)
    recorded = 1 << 30
    garbage.collect_little()
    collecting = asyncio.create_task(garbage.collect_all(lambda: True, lambda: recorded))
    try:
        old = cycle_that_was_in_use()
        for _ in range(20):
            await asyncio.sleep(0)
        assert old() is not None
        recorded = 0

        async def is_collected() -> bool:
            return old() is None

        await until(is_collected)
    finally:
        collecting.cancel()
        collect_as_usual()


async def test_memory_that_grows_is_a_reason_to_look(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(garbage, "_LOOK_S", 0.0)
    monkeypatch.setattr(garbage, "_GROWTH", 1.0)
    monkeypatch.setattr(garbage, "_GROWTH_BYTES", 32 << 20)
    monkeypatch.setattr(garbage, "_LONG_S", 0.0)
    recorded = 0
    garbage.collect_little()  # first: what it frees would hide the growth
    collecting = asyncio.create_task(garbage.collect_all(lambda: False, lambda: recorded))
    await asyncio.sleep(0)  # it knows the memory of now
    try:
        recorded = 128 << 20  # the growth may be that of open sessions
        old = cycle_that_was_in_use(holding=b"x" * (128 << 20))
        for _ in range(20):
            await asyncio.sleep(0)
        assert old() is not None
        recorded = 0

        async def is_collected() -> bool:
            return old() is None

        await until(is_collected)
        assert gc.isenabled() and "all requests waited for" in caplog.text
        collect_as_usual()
        told, old = len(caplog.records), cycle_that_was_in_use(holding=b"x" * (128 << 20))
        for _ in range(20):
            await asyncio.sleep(0)
        assert old() is not None and len(caplog.records) == told  # now it is Python's to look
    finally:
        if garbage._leave in gc.callbacks:
            collect_as_usual()
        collecting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await collecting
        gc.collect()


def cycle_that_was_in_use(holding: bytes = b"") -> weakref.ref[Node]:
    """Nobody uses it, but somebody did when the collector looked at it."""
    first, second = Node(), Node()
    first.other, second.other, first.holding = second, first, holding
    gc.collect()
    return weakref.ref(first)
