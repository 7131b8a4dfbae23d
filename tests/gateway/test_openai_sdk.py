"""The `openai` SDK, unmodified, against the gateway: what it parses, what it raises, and what is recorded."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from rollmill.chat.format import assistant_message
from tests.chat.conftest import TOOLS
from tests.gateway import conftest
from tests.gateway.conftest import Answers, Door, Mill
from tests.gateway.stand_in import StandIn
from tests.later import Later

openai = Later("openai")

USER: Any = conftest.USER
ASK: dict[str, Any] = {"model": "rollmill", "tools": TOOLS}


def client(door: Door, key: str, **more: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{door.url}/v1", api_key=key, **{"max_retries": 0, **more})


@pytest.mark.parametrize("stream", [False, True])
async def test_a_conversation_with_parallel_tool_calls_is_one_segment(
    mill: Mill, answers: Answers, stream: bool
) -> None:
    calls = [("read", '{"path": "a.py"}'), ("read", '{"path": "b.py"}')]
    both = mill.format.render_answer(assistant_message(None, calls), TOOLS)
    door = await mill.gateway(await mill.engine(StandIn([both, answers.text("Done.")])))
    mill.plan("a")
    messages: list[Any] = [USER]
    async with client(door, await door.open("a")) as sdk:
        first = await _ask(sdk, stream, messages)
        assert first.choices[0].finish_reason == "tool_calls"
        assert first.usage.completion_tokens == len(both)
        answer = first.choices[0].message
        messages.append({"role": "assistant", "content": answer.content, "tool_calls": _dumped(answer.tool_calls)})
        messages += [{"role": "tool", "tool_call_id": call.id, "content": "text"} for call in answer.tool_calls]
        second = await _ask(sdk, stream, messages)
        assert second.choices[0].message.content == "Done."
    (segment,) = (await door.seal("a")).segments
    assert segment.tokens[segment.sampled].tolist() == both + answers.text("Done.")


async def _ask(sdk: openai.AsyncOpenAI, stream: bool, messages: list[Any], **more: Any) -> Any:
    if not stream:
        return await sdk.chat.completions.create(**ASK, messages=messages, **more)
    state = Later("openai.lib.streaming.chat").ChatCompletionStreamState()
    usage: Any = {"include_usage": True}
    async for piece in await sdk.chat.completions.create(
        **ASK, messages=messages, stream=True, stream_options=usage, **more
    ):
        state.handle_chunk(piece)
    return state.get_final_completion()


def _dumped(calls: Any) -> list[Any]:
    return [{"id": call.id, "type": "function", "function": _function(call)} for call in calls]


def _function(call: Any) -> dict[str, str]:
    return {"name": call.function.name, "arguments": call.function.arguments}


@pytest.mark.parametrize("stream", [False, True])
async def test_several_answers_are_branches_and_each_is_recorded_once(
    mill: Mill, answers: Answers, stream: bool
) -> None:
    script = [answers.text(text) for text in ("one", "two", "three")]
    engine = StandIn([*script, script[0]])
    door = await mill.gateway(await mill.engine(engine))
    mill.plan("a")
    async with client(door, await door.open("a")) as sdk:
        reply = await _ask(sdk, stream, [USER], n=3, seed=7)
    assert [choice.index for choice in reply.choices] == [0, 1, 2]
    assert {choice.message.content for choice in reply.choices} == {"one", "two", "three"}
    assert reply.usage.completion_tokens == sum(map(len, script))
    assert sorted(request["sampling"]["seed"] for request in engine.requests) == [7, 8, 9]
    segments = (await door.seal("a")).segments
    prompt = len(mill.format.render_start([USER], TOOLS))
    assert Counter((segment.cause, segment.parent) for segment in segments) == {
        ("start", None): 1,
        ("fork", ("a.0", prompt)): 2,
    }
    sampled = [segment.tokens[segment.sampled].tolist() for segment in segments]
    assert sorted(sampled) == sorted(script)


async def test_completions_take_and_give_token_ids(mill: Mill, answers: Answers) -> None:
    first, second = mill.tokenizer.encode("return a"), mill.tokenizer.encode("+ b")
    engine = StandIn([first, second])
    door = await mill.gateway(await mill.engine(engine))
    mill.plan("a")
    prompt = mill.tokenizer.encode("def add(a, b):")
    async with client(door, await door.open("a")) as sdk:
        reply = await sdk.completions.create(model="rollmill", prompt=prompt, max_tokens=50, logprobs=0)
        (choice,) = reply.choices
        ids = choice.token_ids  # type: ignore[attr-defined]
        assert (choice.text, ids, choice.finish_reason) == ("return a", first, "length")
        assert choice.logprobs is not None and len(choice.logprobs.token_logprobs or ()) == len(first)
        context = [*prompt, *ids, *mill.tokenizer.encode(" ")]
        stream = await sdk.completions.create(model="rollmill", prompt=context, max_tokens=50, stream=True)
        pieces = [piece.choices[0] async for piece in stream]
        assert "".join(piece.text for piece in pieces) == "+ b"
        assert [token for piece in pieces for token in piece.token_ids] == second  # type: ignore[attr-defined]
        # the same text as a text, which starts like the recorded tokens
        await sdk.completions.create(model="rollmill", prompt="def add(a, b):", max_tokens=50)
    one, two = (await door.seal("a")).segments
    assert one.tokens.tolist() == context + second
    assert int(one.sampled.sum()) == len(first) + len(second)
    assert (two.cause, two.parent) == ("retry", ("a.0", len(prompt)))


async def test_errors_are_the_exceptions_of_the_sdk(mill: Mill, answers: Answers) -> None:
    engine = StandIn([answers.text("x")], context_limit=200)
    door = await mill.gateway(await mill.engine(engine))
    key = await door.open("a")
    async with client(door, key) as sdk, client(door, "wrong") as stranger:
        with pytest.raises(openai.AuthenticationError):
            await stranger.chat.completions.create(**ASK, messages=[USER])
        with pytest.raises(openai.NotFoundError) as missing:
            await sdk.chat.completions.create(model="gpt-9", messages=[USER])
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as long:
            await _ask(sdk, True, [{"role": "user", "content": "x" * 1000}])
        assert long.value.code == "context_length_exceeded"
        with pytest.raises(openai.BadRequestError, match="prompt"):
            await sdk.completions.create(model="rollmill", prompt=["a", "b"])
        engine.alive, engine.refuse = False, (503, "busy")
        with pytest.raises(openai.InternalServerError):
            await _ask(sdk, False, [USER])


async def test_the_client_without_asyncio_works_too(mill: Mill, answers: Answers) -> None:
    door = await mill.gateway(await mill.engine(StandIn([answers.text("one")])))
    key = await door.open("a")

    def ask() -> tuple[Any, str]:
        with openai.OpenAI(base_url=f"{door.url}/v1", api_key=key) as sdk:
            whole = sdk.chat.completions.create(**ASK, messages=[USER]).choices[0].message.content
            stream: Any = sdk.chat.completions.create(**ASK, messages=[USER], stream=True)
            return whole, "".join(piece.choices[0].delta.content or "" for piece in stream)

    assert await asyncio.to_thread(ask) == ("one", "one")
