"""Reasoning, as each dialect tells it: the field `reasoning_content`, a thinking block, a reasoning item."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from rollmill.chat.format import ContentStream, Message, Thinking, Tool
from rollmill.chat.formats.hermes import HermesFormat
from rollmill.chat.tokenizer import Tokenizer
from tests.chat.conftest import HERMES_TOKENS
from tests.chat.test_streaming import KINDS
from tests.gateway import test_anthropic_sdk, test_openai_responses, test_openai_sdk
from tests.gateway.conftest import Mill
from tests.gateway.stand_in import StandIn

MARKS = Thinking("<think>", "</think>")


class ThinkingFormat(HermesFormat):
    """Hermes with reasoning before the text, as the templates of reasoning models have it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer)
        self._own = tokenizer

    def parse(self, tokens: Sequence[int], tools: Sequence[Tool]) -> Message:
        message = super().parse(tokens, tools)
        reasoning, content = MARKS.split(message["content"])
        return message | {"content": content} | ({"reasoning_content": reasoning} if reasoning else {})

    def content_stream(self, stops: Sequence[str] = ()) -> ContentStream:
        return ContentStream(self._own, ends=("<tool_call>", "<|im_end|>", *stops), drop_blank=True, thinking=MARKS)


@pytest.mark.parametrize("stream", [False, True])
async def test_each_dialect_tells_the_reasoning_and_takes_it_back(mill: Mill, stream: bool) -> None:
    mill.tokenizer = Tokenizer(KINDS["byte-level"](HERMES_TOKENS))
    mill.format = ThinkingFormat(mill.tokenizer)  # type: ignore[assignment]
    script = mill.tokenizer.encode("<think>\nFirst this.\n</think>\n\nThen that.")
    script.append(mill.tokenizer.token_id("<|im_end|>"))
    door = await mill.gateway(await mill.engine(StandIn([script])))
    mill.plan("a", "b", "c")

    async with test_openai_sdk.client(door, await door.open("a")) as chat:
        told = (await test_openai_sdk._ask(chat, stream, [test_openai_sdk.USER])).choices[0].message
        assert (told.reasoning_content, told.content) == ("First this.", "Then that.")
    async with test_anthropic_sdk.client(door, await door.open("b")) as claude:
        messages: list[Any] = [test_anthropic_sdk.user("x")]
        answer = await test_anthropic_sdk._ask(claude, stream, messages)
        assert [block.type for block in answer.content] == ["thinking", "text"]
        assert (answer.content[0].thinking, answer.content[1].text) == ("First this.", "Then that.")
        messages += [{"role": "assistant", "content": answer.content}, test_anthropic_sdk.user("y")]
        await test_anthropic_sdk._ask(claude, stream, messages)
        (segment,) = (await door.seal("b")).segments
        assert len(segment.spans) == 2
    async with test_openai_sdk.client(door, await door.open("c")) as responses:
        made = await test_openai_responses.ask(responses, stream, input="x")
        assert [item.type for item in made.output] == ["reasoning", "message"]
        assert (made.output[0].content[0].text, made.output_text) == ("First this.", "Then that.")
