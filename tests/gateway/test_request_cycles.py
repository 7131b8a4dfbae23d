"""An answered request leaves no cycle of objects: its memory is free at once."""

from __future__ import annotations

import gc
from collections import Counter
from typing import Any

from aiohttp import web

from rollmill.gateway.access.account import Account
from rollmill.gateway.sessions.sessions import Session
from tests.gateway.conftest import USER, Answers, Mill
from tests.gateway.serve import LIVE
from tests.gateway.stand_in import StandIn


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
