"""The `anthropic` SDK, unmodified, against the gateway: what it parses, what it raises, and what is recorded."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rollmill.chat.format import assistant_message
from tests.chat.conftest import TOOLS
from tests.gateway.conftest import LIVE, USER, Answers, Door, Mill
from tests.gateway.stand_in import StandIn
from tests.later import Later

anthropic = Later("anthropic")

FUNCTIONS: list[Any] = [tool["function"] for tool in TOOLS]
TOOL_LIST: list[Any] = [{"name": each["name"], "input_schema": each["parameters"]} for each in FUNCTIONS]
ASK: dict[str, Any] = {"model": "rollmill", "max_tokens": 64}


def client(door: Door, key: str, **more: Any) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=door.url, api_key=key, **{"max_retries": 0, **more})


def user(content: Any) -> Any:
    return {"role": "user", "content": content}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_conversation_with_parallel_tool_calls_is_one_segment(
    mill: Mill, answers: Answers, stream: bool
) -> None:
    calls = [("read", '{"path": "a.py"}'), ("read", '{"path": "b.py"}')]
    both = mill.format.render_answer(assistant_message("I read both.", calls), TOOLS)
    engine = StandIn([both, answers.text("Done.")])
    door = await mill.gateway(await mill.engine(engine))
    mill.plan("a")
    key = await door.open("a")
    messages: list[Any] = [user("Fix add.")]
    async with client(door, key) as sdk:
        first = await _ask(sdk, stream, messages, system=[{"type": "text", "text": "Be brief."}])
        assert [block.type for block in first.content] == ["text", "tool_use", "tool_use"]
        assert first.stop_reason == "tool_use" and first.usage.output_tokens == len(both)
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": f"of {block.input['path']}"}
            for block in first.content
            if block.type == "tool_use"
        ]
        assert len({result["tool_use_id"] for result in results}) == 2
        messages += [{"role": "assistant", "content": first.content}, user([*results, {"type": "text", "text": "So?"}])]
        second = await _ask(sdk, stream, messages, system="Be brief.")
        assert (second.content[0].text, second.stop_reason) == ("Done.", "end_turn")
    trajectory = await door.seal("a")
    (segment,) = trajectory.segments
    assert segment.tokens[segment.sampled].tolist() == both + answers.text("Done.")
    roles = [message["role"] for message in trajectory.messages]
    assert roles == ["system", "user", "assistant", "tool", "tool", "user", "assistant"]


async def _ask(sdk: anthropic.AsyncAnthropic, stream: bool, messages: list[Any], **more: Any) -> Any:
    if not stream:
        return await sdk.messages.create(**ASK, messages=messages, tools=TOOL_LIST, **more)
    async with sdk.messages.stream(**ASK, messages=messages, tools=TOOL_LIST, **more) as events:
        return await events.get_final_message()


async def test_stop_sequences_and_limits_are_told(mill: Mill, answers: Answers) -> None:
    door = await mill.gateway(await mill.engine(StandIn([answers.text("one two three four")])))
    async with client(door, await door.open("a")) as sdk:
        stopped = await sdk.messages.create(**ASK, messages=[user("x")], stop_sequences=["three"])
        assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "three")
        assert stopped.content[0].text == "one two "
        short = await sdk.messages.create(model="rollmill", max_tokens=2, messages=[user("y")])
        assert short.stop_reason == "max_tokens"
        counted = await sdk.messages.count_tokens(model="rollmill", messages=[user("x")])
        assert counted.input_tokens == len(mill.format.render_start([user("x")], []))
        assert [model.id async for model in sdk.models.list()] == ["rollmill", "main", "main@0"]


async def test_errors_are_the_exceptions_of_the_sdk(mill: Mill, answers: Answers) -> None:
    engine = StandIn([answers.text("x")], context_limit=200)
    door = await mill.gateway(await mill.engine(engine))
    key = await door.open("a")
    async with client(door, key) as sdk, client(door, "wrong") as stranger:
        with pytest.raises(anthropic.AuthenticationError):
            await stranger.messages.create(**ASK, messages=[user("x")])
        with pytest.raises(anthropic.NotFoundError):
            await sdk.messages.create(**{**ASK, "model": "claude"}, messages=[user("x")])
        with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
            await sdk.messages.create(**ASK, messages=[user("x" * 1000)])
        image: Any = {"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}}
        with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\].content\[1\] is .*image"):
            await sdk.messages.create(**ASK, messages=[user([{"type": "text", "text": "see"}, image])])
        with pytest.raises(anthropic.BadRequestError, match="last message"):
            await sdk.messages.create(**ASK, messages=[user("x"), {"role": "assistant", "content": "Well,"}])
        engine.alive = False
        engine.refuse = (503, "busy")
        with pytest.raises(anthropic.APIStatusError) as caught:
            await sdk.messages.create(**ASK, messages=[user("x")])
        assert caught.value.status_code == 529 and caught.value.body["error"]["type"] == "overloaded_error"  # type: ignore[index]


async def test_arguments_that_are_not_an_object_come_back_as_they_were(mill: Mill, answers: Answers) -> None:
    """A malformed call is the agent's to answer, and its own copy of the call continues the segment."""
    broken = mill.format.render_answer(assistant_message(None, [("read", "[1, 2")]), TOOLS)
    engine = StandIn([broken, answers.text("Sorry.")])
    door = await mill.gateway(await mill.engine(engine))
    mill.plan("a")
    async with client(door, await door.open("a")) as sdk:
        messages: list[Any] = [user("x")]
        first = await _ask(sdk, False, messages)
        assert isinstance(first.content[0].input, dict)
        result = {"type": "tool_result", "tool_use_id": first.content[0].id, "content": "bad call", "is_error": True}
        await _ask(sdk, False, [*messages, {"role": "assistant", "content": first.content}, user([result])])
    (segment,) = (await door.seal("a")).segments
    assert len(segment.spans) == 2


async def test_every_block_of_a_stream_ends(mill: Mill, answers: Answers) -> None:
    door = await mill.gateway(await mill.engine(StandIn([answers.text("one two three")])))
    body = {"messages": [USER], "max_tokens": 64, "stream": True}
    async with door.http.post(f"{door.url}/v1/messages", json=body, headers={"x-api-key": LIVE}) as response:
        lines = (await response.text()).splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    blocks = [(event["type"], event["index"]) for event in events if event["type"].startswith("content_block_st")]
    assert blocks == [("content_block_start", 0), ("content_block_stop", 0)]
