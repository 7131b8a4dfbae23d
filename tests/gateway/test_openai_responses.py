"""OpenAI responses with the unmodified `openai` SDK: items, stored state, streams and the record."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rollmill.chat.format import assistant_message
from rollmill.errors import GatewayError
from rollmill.gateway.access.privacy import Privacy
from rollmill.gateway.config import GatewayConfig
from rollmill.gateway.sessions.registry import Registry
from rollmill.gateway.sessions.sessions import SessionFacts
from rollmill.gateway.wire.answer import Answer
from rollmill.gateway.wire.dialect import Identity, Limits, Reply, Stored
from rollmill.gateway.wire.dialects.openai_responses import OpenAIResponses
from tests.chat.conftest import TOOLS
from tests.gateway.conftest import LIVE, Answers, Mill
from tests.gateway.stand_in import StandIn
from tests.gateway.test_openai_sdk import client
from tests.gateway.test_privacy import written
from tests.later import Later

openai = Later("openai")

FUNCTIONS: list[Any] = [tool["function"] for tool in TOOLS]
ASK: dict[str, Any] = {"model": "rollmill", "tools": [{"type": "function", **each} for each in FUNCTIONS]}


async def ask(sdk: openai.AsyncOpenAI, stream: bool, **fields: Any) -> Any:
    if not stream:
        return await sdk.responses.create(**ASK, **fields)
    async for event in await sdk.responses.create(**ASK, **fields, stream=True):
        if event.type in ("response.completed", "response.incomplete"):
            return event.response
    raise AssertionError("the stream has no end")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stored", [False, True])
async def test_items_and_stored_state_give_the_same_segment(
    mill: Mill, answers: Answers, stream: bool, stored: bool
) -> None:
    calls = [("read", '{"path": "a.py"}'), ("read", '{"path": "b.py"}')]
    both = mill.format.render_answer(assistant_message("I read both.", calls), TOOLS)
    door = await mill.gateway(await mill.engine(StandIn([both, answers.text("Done.")])))
    mill.plan("a")
    async with client(door, await door.open("a")) as sdk:
        opening: list[Any] = [{"role": "user", "content": "Fix add."}]
        first = await ask(sdk, stream, instructions="Be brief.", input=opening, store=stored)
        assert [item.type for item in first.output] == ["message", "function_call", "function_call"]
        assert first.usage.output_tokens == len(both)
        results = [
            {"type": "function_call_output", "call_id": item.call_id, "output": "text"}
            for item in first.output
            if item.type == "function_call"
        ]
        if stored:
            history: dict[str, Any] = {"input": results, "previous_response_id": first.id}
        else:
            items = [item.model_dump(exclude_none=True) for item in first.output]
            history = {"input": [*opening, *items, *results]}
        second = await ask(sdk, stream, instructions="Be brief.", store=stored, **history)
        assert (second.output_text, second.status) == ("Done.", "completed")
        if stored:
            assert (await sdk.responses.retrieve(second.id)).output_text == "Done."
        else:
            with pytest.raises(openai.NotFoundError):
                await sdk.responses.retrieve(second.id)
    (segment,) = (await door.seal("a")).segments
    assert segment.tokens[segment.sampled].tolist() == both + answers.text("Done.")


async def test_a_stream_tells_every_piece_in_order(mill: Mill, answers: Answers) -> None:
    door = await mill.gateway(await mill.engine(StandIn([answers.text("one two three")])))
    async with client(door, await door.open("a")) as sdk:
        async with sdk.responses.stream(model="rollmill", input="go", max_output_tokens=50) as events:
            seen = [event async for event in events]
            final = await events.get_final_response()
    kinds = [event.type for event in seen]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    numbers = [event.sequence_number for event in seen]
    assert numbers == list(range(len(seen)))
    assert final.output_text == "one two three"


async def test_a_stored_response_belongs_to_its_session(mill: Mill, answers: Answers) -> None:
    door = await mill.gateway(await mill.engine(StandIn([answers.text("one")])))
    mill.plan("a", "b")
    mine, other = await door.open("a"), await door.open("b")
    async with client(door, mine) as sdk, client(door, other) as stranger, client(door, LIVE) as live:
        made = await sdk.responses.create(model="rollmill", input="x")
        for thief in (stranger, live):
            with pytest.raises(openai.NotFoundError):
                await thief.responses.retrieve(made.id)
            with pytest.raises(openai.NotFoundError) as caught:
                await thief.responses.create(model="rollmill", input="y", previous_response_id=made.id)
            assert caught.value.code == "previous_response_not_found"
        # a production conversation goes on by the id alone
        one = await live.responses.create(model="rollmill", input="x")
        two = await live.responses.create(model="rollmill", input="y", previous_response_id=one.id)
        assert one.rollmill["trajectory"] == two.rollmill["trajectory"]  # type: ignore[attr-defined]
        assert one.rollmill["segment"] == two.rollmill["segment"]  # type: ignore[attr-defined]


async def test_stored_responses_survive_a_restart_and_end_with_their_session(mill: Mill, answers: Answers) -> None:
    endpoint = await mill.engine(StandIn([answers.text(text) for text in ("one", "two", "three", "four", "five")]))
    mill.plan("a")
    private: dict[str, Any] = {"extra_headers": {"x-rollmill-consent": "none"}}
    async with mill.running(endpoint) as door:
        key = await door.open("a")
        async with client(door, key) as sdk, client(door, LIVE) as live:
            first = await ask(sdk, False, instructions="Be brief.", input="x")
            second = await ask(sdk, True, input="y", previous_response_id=first.id)
            other = await ask(live, True, input="z")
            secret: Any = await live.responses.create(model="rollmill", input="private", **private)
    async with mill.running(endpoint) as door, client(door, key) as sdk, client(door, LIVE) as live:
        for made, owner in ((first, sdk), (second, sdk), (other, live)):
            assert (await owner.responses.retrieve(made.id)).to_dict() == made.to_dict()
        with pytest.raises(openai.NotFoundError):
            await live.responses.retrieve(secret.id)
        # the first one again: a branch, whose history ends with the first answer
        third = await ask(sdk, False, instructions="Be brief.", input="w", previous_response_id=first.id)
        assert third.rollmill["segment"] == first.rollmill["segment"] != second.rollmill["segment"]
        fourth = await ask(live, False, input="v", previous_response_id=other.id)
        assert fourth.rollmill["segment"] == other.rollmill["segment"]
        told = (await door.seal("a")).messages
        assert [message["content"] for message in told] == ["Be brief.", "x", "one", "w", "five"]
    async with mill.running(endpoint) as door, client(door, LIVE) as live:
        assert (await live.responses.retrieve(fourth.id)).previous_response_id == other.id
        assert (await door.health())["sessions"] == 1


@pytest.mark.parametrize("changed", [{"extra_headers": {"x-rollmill-consent": "train"}}, {"user": "bob"}])
async def test_a_stored_response_is_continued_only_by_its_user_with_its_consent(
    mill: Mill, answers: Answers, changed: dict[str, Any]
) -> None:
    door = await mill.gateway(await mill.engine(StandIn([answers.text("one")])))
    async with client(door, LIVE) as live:
        same: dict[str, Any] = {"extra_headers": {"x-rollmill-consent": "none"}, "user": "ann"}
        one: Any = await live.responses.create(model="rollmill", input="my private words", **same)
        more: dict[str, Any] = {"model": "rollmill", "input": "y", "previous_response_id": one.id}
        with pytest.raises(openai.NotFoundError):
            await live.responses.create(**more, **{**same, **changed})
        two: Any = await live.responses.create(**more, **same)
        assert one.rollmill["trajectory"] == two.rollmill["trajectory"]
    assert b"private words" not in written(mill)


def test_stored_responses_are_bounded_by_bytes_and_freed_with_their_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollmill.gateway.sessions.stored._MOST_BYTES", 3000)
    registry = Registry("secret")
    sessions = [registry.add(SessionFacts(id)) for id in "ab"]
    message: Any = {"role": "user", "content": "x" * 900}
    for id, trajectory in {"1": "a", "2": "b", "3": "a", "4": "b", "5": "gone"}.items():
        registry.responses.add(Stored(trajectory, [message], {"id": id}))
    assert registry.responses.get("2") == Stored("b", [message], {"id": "2"})
    registry.remove(sessions[0])
    for id in ("1", "3", "5"):
        with pytest.raises(GatewayError):
            registry.responses.get(id)
    assert registry.responses.bytes == 2 * len(json.dumps([message]) + json.dumps({"id": "2"}))
    registry.remove(sessions[1])
    assert registry.responses.bytes == 0


def test_a_stored_response_holds_what_is_left_after_redaction() -> None:
    dialect = OpenAIResponses()
    body = {"input": "I am ann@example.org", "instructions": "Be brief."}
    limits = Limits((), 16, 16)
    asked = dialect.continued(dialect.parse(json.dumps(body).encode(), limits), limits, None, lambda id: {})
    config = GatewayConfig.model_validate({"redaction": {"remove": ["email"]}})
    asked = Privacy(config.consent, config.redaction).redact_inputs(asked)
    answer = Answer([1], [0.0], [0], [], [], [], "stop", True, assistant_message("Hi.", []))
    stored = dialect.kept(Reply(asked, Identity(), [answer], 1, {"trajectory": "a"}))
    assert stored is not None
    assert [message["content"] for message in stored.messages] == ["I am [email]", "Hi."]


async def test_what_is_not_supported_is_named(mill: Mill, answers: Answers) -> None:
    door = await mill.gateway(await mill.engine(StandIn([answers.text("one")])))
    image = {"role": "user", "content": [{"type": "input_image", "image_url": "https://example.com/a.png"}]}
    bad: list[tuple[dict[str, Any], str]] = [
        ({"input": [image]}, r"input\[0\].content\[0\] is .*input_image"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "the tool web_search is not supported"),
        ({"input": [{"type": "compaction_trigger"}]}, "let the client compact"),
        ({"input": "x", "background": True}, "background"),
        ({"input": []}, "input must be"),
    ]
    async with client(door, await door.open("a")) as sdk:
        for fields, says in bad:
            with pytest.raises(openai.BadRequestError, match=says):
                await sdk.responses.create(model="rollmill", **fields)
