"""A client that sends back what was streamed to it continues its conversation, whatever the tokenizer."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rollmill.chat.format import assistant_message
from rollmill.chat.formats.choice import format_of
from rollmill.chat.formats.compact import SPECIAL_TOKENS
from rollmill.chat.tokenizer import Tokenizer
from tests.chat.conftest import HERMES_TOKENS, TOOLS
from tests.chat.test_streaming import KINDS
from tests.gateway.conftest import USER, Door, Mill
from tests.gateway.stand_in import StandIn


@pytest.mark.parametrize("special", [SPECIAL_TOKENS, HERMES_TOKENS], ids=["compact", "hermes"])
@pytest.mark.parametrize("kind", KINDS)
async def test_the_second_turn_does_not_branch(mill: Mill, kind: str, special: tuple[str, ...]) -> None:
    mill.tokenizer = Tokenizer(KINDS[kind](special))
    mill.format = format_of(mill.tokenizer)  # type: ignore[assignment]
    said = ["All tests pass now, 你好 as they should.", " \n", "Done."]
    script = [mill.format.render_answer(assistant_message(text, []), TOOLS) for text in said]
    door = await mill.gateway(await mill.engine(StandIn(list(script))))
    mill.plan("a")
    key = await door.open("a", run="run", task_id="t", group_id="g")
    messages: list[Any] = [USER]
    for tokens in script:
        content = await stream_content(door, key, messages)
        assert content == mill.format.parse(tokens, TOOLS)["content"]
        messages += [{"role": "assistant", "content": content}, {"role": "user", "content": "go on"}]
    (segment,) = (await door.seal("a")).segments
    assert len(segment.spans) == len(said)


async def stream_content(door: Door, key: str, messages: list[Any]) -> str:
    body = {"model": "rollmill", "messages": messages, "tools": TOOLS, "stream": True}
    headers = {"Authorization": f"Bearer {key}"}
    async with door.http.post(f"{door.url}/v1/chat/completions", json=body, headers=headers) as response:
        assert response.status == 200, await response.text()
        lines = [line[6:] for line in (await response.text()).splitlines() if line.startswith("data: {")]
    choices = [json.loads(line)["choices"] for line in lines]
    return "".join(choice[0]["delta"].get("content") or "" for choice in choices if choice)
