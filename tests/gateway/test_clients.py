"""What agents send: fields and tools without effect, names of conversations, stored items, fillers, heartbeats."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from rollmill.chat.tokenizer import Tokenizer
from tests.chat.conftest import HERMES_TOKENS
from tests.chat.test_streaming import KINDS
from tests.gateway.conftest import LIVE, QUICK, Answers, Door, Mill, until
from tests.gateway.stand_in import StandIn
from tests.gateway.test_agents import Stage
from tests.gateway.test_reasoning import ThinkingFormat
from tests.later import Later

anthropic = Later("anthropic")
openai = Later("openai")

BASH = {"type": "function", "name": "bash", "parameters": {"type": "object", "properties": {}}}
Body = dict[str, Any]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


async def post(door: Door, path: str, body: Any, key: str = LIVE, **headers: str) -> tuple[int, Any]:
    asked = {"Authorization": f"Bearer {key}", **{name.replace("_", "-"): value for name, value in headers.items()}}
    async with door.http.post(door.url + path, json=body, headers=asked) as response:
        return response.status, await response.json()


def trajectory(answer: tuple[int, Any]) -> str:
    assert answer[0] == 200, answer
    return str(answer[1]["rollmill"]["trajectory"])


async def test_fields_without_effect_are_counted_and_named_once(
    mill: Mill, answers: Answers, caplog: pytest.LogCaptureFixture
) -> None:
    door = await mill.gateway(await mill.engine(StandIn([answers.text("one")])))
    body = {"input": "x", "client_metadata": {"a": "b"}, "safety_identifier": "u", "truncation": "auto"}
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            assert (await post(door, "/v1/responses", body))[0] == 200
    assert sum("client_metadata" in record.getMessage() for record in caplog.records) == 1
    assert 'ignored_fields_total{dialect="openai_responses",field="client_metadata"} 3' in await door.metrics()
    status, told = await post(door, "/v1/responses", {**body, "unheard_of": 1})
    assert status == 400 and "unheard_of" in told["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "served"),
    [
        ("/v1/responses", {"input": "x"}, {"type": "web_search", "external_web_access": True}),
        ("/v1/messages", {"messages": [user("x")], "max_tokens": 9}, {"type": "web_search_20250305", "name": "ws"}),
    ],
)
async def test_a_tool_that_only_a_server_could_run_is_left_out_with_a_note_or_refused(
    mill: Mill, answers: Answers, path: str, body: Body, served: Body
) -> None:
    door = await mill.gateway(await mill.engine(StandIn([answers.text("one")])))
    own = BASH if path == "/v1/responses" else {"name": "bash", "input_schema": {"type": "object"}}
    status, told = await post(door, path, {**body, "tools": [own, served]})
    assert (status, told["rollmill"]["dropped_tools"]) == (200, ["web_search"])
    status, told = await post(door, path, {**body, "tools": [served]})
    assert status == 400 and "web_search" in told["error"]["message"]


async def test_namespaces_and_free_texts_are_told_as_the_client_knows_them(mill: Mill) -> None:
    stage = Stage(mill, [("mail__send", {"to": "ann"})], [("patch", {"input": "a b"})], "Done.")
    door, key = await stage.open()
    space = {"type": "namespace", "name": "mail", "tools": [{**BASH, "name": "send"}]}
    free = {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "lark", "definition": "x"}}
    items: list[Any] = [user("Write.")]
    for said in ({"name": "send", "namespace": "mail"}, {"type": "custom_tool_call", "name": "patch", "input": "a b"}):
        status, told = await post(door, "/v1/responses", {"input": items, "tools": [space, free]}, key)
        (item,) = told["output"]
        assert status == 200 and said.items() <= item.items()
        result = {"type": f"{item['type']}_output", "call_id": item["call_id"], "output": "ok"}
        items += [item, result]
    assert (await post(door, "/v1/responses", {"input": items, "tools": [space, free]}, key))[0] == 200
    stage.check(await door.seal("a"), "start")


async def test_a_stored_item_is_found_by_its_own_client_only(mill: Mill, answers: Answers) -> None:
    door = await mill.gateway(await mill.engine(StandIn([answers.text("The secret is 42."), answers.text("Done.")])))
    _, other = mill.keys.create(["production"])
    first = await post(door, "/v1/responses", {"input": "Tell.", "user": "ann"})
    (item,) = first[1]["output"]
    asked = {"input": [user("Tell."), {"type": "item_reference", "id": item["id"]}, user("Again.")]}
    for key, who in ((other, "ann"), (LIVE, "bob"), (LIVE, "")):
        status, told = await post(door, "/v1/responses", {**asked, "user": who}, key)
        assert status == 404 and item["id"] in told["error"]["message"]
    second = await post(door, "/v1/responses", {**asked, "user": "ann"})
    assert trajectory(second) == trajectory(first)
    assert second[1]["rollmill"]["segment"] == first[1]["rollmill"]["segment"], "its next turn, not a branch"


async def test_twins_stay_apart_by_what_their_agents_send(mill: Mill, answers: Answers) -> None:
    """Two conversations with the same texts: each goes on in its own trajectory if anything tells them apart."""
    door = await mill.gateway(await mill.engine(StandIn([answers.text("Yes.")])))
    ways: list[Callable[[str], tuple[Body, dict[str, str]]]] = [
        lambda name: ({"prompt_cache_key": name}, {}),
        lambda name: ({}, {"x_claude_code_session_id": name}),
        lambda name: ({}, {"x_codex_turn_metadata": "{}", "session_id": name}),
        lambda name: ({"user": name}, {}),
    ]
    for number, way in enumerate(ways):
        begin = [user(f"Question {number}")]
        found = {}
        for name in ("one", "two"):
            body, headers = way(name)
            found[name] = trajectory(await post(door, "/v1/chat/completions", {"messages": begin, **body}, **headers))
        longer = [*begin, {"role": "assistant", "content": "Yes."}, user("More?")]
        for name in ("two", "one"):
            body, headers = way(name)
            again = await post(door, "/v1/chat/completions", {"messages": longer, **body}, **headers)
            assert trajectory(again) == found[name]
    assert "ambiguous_histories_total 0" in await door.metrics()


async def test_what_stays_ambiguous_is_counted(mill: Mill, answers: Answers) -> None:
    door = await mill.gateway(await mill.engine(StandIn([answers.text("Yes.")])))
    begin = [user("Question")]
    firsts = {trajectory(await post(door, "/v1/chat/completions", {"messages": begin})) for _ in range(2)}
    longer = [*begin, {"role": "assistant", "content": "Yes."}, user("More?")]
    assert trajectory(await post(door, "/v1/chat/completions", {"messages": longer})) not in firsts
    assert "ambiguous_histories_total 1" in await door.metrics()


async def test_a_name_means_nothing_under_another_key_or_user(mill: Mill, answers: Answers) -> None:
    door = await mill.gateway(await mill.engine(StandIn([answers.text("Yes.")])))
    _, other = mill.keys.create(["production"])
    ask = {"messages": [user("x")]}
    mine = trajectory(await post(door, "/v1/chat/completions", ask, x_claude_code_session_id="s"))
    theirs = trajectory(await post(door, "/v1/chat/completions", ask, other, x_claude_code_session_id="s"))
    named = trajectory(await post(door, "/v1/chat/completions", ask, other, x_claude_code_session_id=mine))
    of_user = trajectory(await post(door, "/v1/chat/completions", {**ask, "user": "u"}, x_claude_code_session_id="s"))
    assert len({mine, theirs, named, of_user}) == 4


async def test_the_user_of_claude_code_is_its_account_and_not_its_session(mill: Mill, answers: Answers) -> None:
    door = await mill.gateway(await mill.engine(StandIn([answers.text("Yes.")])))
    told = []
    for session in ("s", "t", "s"):
        who = json.dumps({"device_id": "d", "account_uuid": "ann", "session_id": session})
        body = {"messages": [user("x")], "max_tokens": 9, "metadata": {"user_id": who}}
        told.append(trajectory(await post(door, "/v1/messages", body)))
    assert told[0] == told[2] != told[1]
    status, forgotten = await door.admin("POST", "/forget", {"user": "ann"})
    assert (status, forgotten["open"]) == (200, 2)


@pytest.mark.parametrize("prompt", [[[5, 6, 7]], ["abc"], [5, 6, 7]])
async def test_a_batch_of_one_prompt_is_answered_and_echo_is_refused(mill: Mill, answers: Answers, prompt: Any) -> None:
    """As `lm-eval --model local-completions` sends them."""
    door = await mill.gateway(await mill.engine(StandIn([answers.text("Yes.")])))
    body = {"prompt": prompt, "max_tokens": 9, "temperature": 0, "stop": ["\n"], "seed": 1234}
    assert (await post(door, "/v1/completions", body))[0] == 200
    status, told = await post(door, "/v1/completions", {**body, "echo": True, "logprobs": 1})
    assert status == 400 and "generate_until" in told["error"]["message"]
    status, told = await post(door, "/v1/completions", {**body, "prompt": [[5], [6]]})
    assert status == 400 and "batch_size=1" in told["error"]["message"]


async def test_an_alias_takes_other_names_of_models(mill: Mill, answers: Answers) -> None:
    engine = await mill.engine(StandIn([answers.text("Yes.")]))
    door = await mill.gateway(engine, config=QUICK.model_copy(update={"aliases": {"claude-*": "rollmill"}}))
    body = {"messages": [user("x")], "max_tokens": 9}
    status, told = await post(door, "/v1/messages", {**body, "model": "claude-opus-5"})
    assert (status, told["model"]) == (200, "claude-opus-5")
    status, told = await post(door, "/v1/messages", {**body, "model": "gpt-7"})
    assert status == 404 and "gateway.aliases" in told["error"]["message"]


async def test_thinking_is_signed_because_clients_send_it_back_as_text_otherwise(mill: Mill) -> None:
    mill.tokenizer = Tokenizer(KINDS["byte-level"](HERMES_TOKENS))
    mill.format = ThinkingFormat(mill.tokenizer)  # type: ignore[assignment]
    script = [*mill.tokenizer.encode("<think>\nFirst.\n</think>\n\nThen."), mill.tokenizer.token_id("<|im_end|>")]
    door = await mill.gateway(await mill.engine(StandIn([script])))
    body = {"messages": [user("x")], "max_tokens": 99}
    _, told = await post(door, "/v1/messages", body)
    assert told["content"][0]["signature"]
    async with door.http.post(
        f"{door.url}/v1/messages", json={**body, "stream": True}, headers={"x-api-key": LIVE}
    ) as response:
        assert b'"signature_delta"' in await response.read()


async def test_the_filler_of_litellm_is_no_text(mill: Mill, answers: Answers) -> None:
    door = await mill.gateway(await mill.engine(StandIn([answers.call("bash", command="ls"), answers.text("Done.")])))
    tools = [{"name": "bash", "input_schema": {"type": "object"}}]
    asked: dict[str, Any] = {"messages": [user("x")], "max_tokens": 99, "tools": tools}
    first = await post(door, "/v1/messages", asked)
    (call,) = first[1]["content"]
    filler = {"type": "text", "text": "[System: Empty message content sanitised to satisfy protocol]"}
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": "a.py"}
    asked["messages"] += [{"role": "assistant", "content": [filler, call]}, user([result])]  # type: ignore[arg-type]
    second = await post(door, "/v1/messages", asked)
    assert second[1]["rollmill"]["segment"] == first[1]["rollmill"]["segment"]


@pytest.mark.parametrize(
    ("path", "body", "beat"),
    [
        ("/v1/chat/completions", {"messages": [user("x")]}, b": heartbeat\n\n"),
        ("/v1/completions", {"prompt": "x"}, b": heartbeat\n\n"),
        ("/v1/messages", {"messages": [user("x")], "max_tokens": 99}, b"event: ping\n"),
        ("/v1/responses", {"input": "x"}, b"event: response.in_progress\n"),
    ],
)
# while a call is sampled, of which nothing is streamed; and while the request waits for an engine
async def test_a_silent_answer_has_heartbeats(mill: Mill, answers: Answers, path: str, body: Body, beat: bytes) -> None:
    stand_in = StandIn([answers.call("bash", command="ls -la")], hold_after=3, gate=asyncio.Event())
    config = QUICK.model_copy(
        update={"heartbeat_s": 0.02, "stream_above": 0, "engine_requests": 1, "engine_wait_s": 60}
    )
    door = await mill.gateway(await mill.engine(stand_in), config=config)
    heard = [b"", b""]

    async def ask(number: int) -> None:
        headers = {"Authorization": f"Bearer {LIVE}", "x-rollmill-session": f"s{number}"}
        async with door.http.post(door.url + path, json={**body, "stream": True}, headers=headers) as response:
            async for piece in response.content.iter_any():
                heard[number] += piece

    async def beats() -> bool:
        return all(each.count(beat) > 5 for each in heard)

    asking = [asyncio.create_task(ask(number)) for number in range(2)]  # the second waits for the place of the first
    await until(beats)
    assert stand_in.gate is not None
    stand_in.gate.set()
    before = [each.count(beat) for each in heard]

    async def more() -> bool:
        return any(each.count(beat) > count + 5 for each, count in zip(heard, before, strict=True))

    await until(more)
    stand_in.release.set()
    await asyncio.gather(*asking)
    whole = b'"response.completed"' if path == "/v1/responses" else b"message_stop" if "messages" in path else b"[DONE]"
    assert all(whole in each for each in heard)


async def test_an_error_after_a_heartbeat_is_told_in_the_stream(mill: Mill, answers: Answers) -> None:
    stand_in = StandIn([answers.text("x")])
    config = QUICK.model_copy(update={"heartbeat_s": 0.02, "engine_wait_s": 0.5})
    door = await mill.gateway(await mill.engine(stand_in), config=config)
    stand_in.alive = False

    async def down() -> bool:
        return not await door.all_engines_up()

    await until(down)
    headers = {"Authorization": f"Bearer {LIVE}"}
    body = {"messages": [user("x")], "stream": True}
    async with door.http.post(f"{door.url}/v1/chat/completions", json=body, headers=headers) as response:
        told = await response.read()
    assert response.status == 200 and b": heartbeat" in told and b'"error"' in told


@pytest.mark.parametrize("dialect", ["chat", "responses", "anthropic"])
async def test_arguments_are_told_while_they_are_sampled(mill: Mill, dialect: str) -> None:
    """By dialects whose arguments are a text. What the client has in the end is the record, byte by byte; also of a
    call whose JSON breaks off."""
    stage = Stage(mill, "x")
    written = [
        '{"name": "bash", "arguments": {"command":"ls \\u00e9", "all" : [1,2]}}',
        '{"name": "bash", "arguments": {"c',
    ]
    marks = [mill.tokenizer.token_id(mark) for mark in ("<tool_call>", "</tool_call>", "<|im_end|>")]
    first, second = ([marks[0], *mill.tokenizer.encode(text), marks[1]] for text in written)
    stage.engine.answers[:] = stage.tokens[:] = [[*mill.tokenizer.encode("See."), *first, *second, marks[2]]]
    stage.engine.hold_after = len(stage.tokens[0]) - 8
    door, key = await stage.open()
    calls: dict[int, list[str]] = {}
    async with asyncio.timeout(120):  # against hangs only
        async for number, text in _streamed(dialect, door, key):
            calls.setdefault(number, []).append(text)
            stage.engine.release.set()  # the engine goes on once something was told
    told = ["".join(each) for number, each in calls.items() if number >= 0]
    trajectory = await door.seal("a")
    stage.check(trajectory, "start")
    recorded = [call["function"]["arguments"] for call in trajectory.messages[-1]["tool_calls"]]
    assert recorded == ['{"command":"ls \\u00e9", "all" : [1,2]}', '{"c']
    if dialect == "anthropic":
        assert [json.loads(each) for each in told] == [json.loads(recorded[0]), {"malformed_arguments": recorded[1]}]
    else:
        assert told == recorded
        assert len(next(iter(calls.values()))) > 5


async def _streamed(dialect: str, door: Door, key: str) -> AsyncIterator[tuple[int, str]]:
    """The arguments of calls, by the number of the call, as the client of the dialect reads them. Anthropic's client is
    told calls at the end: their input is an object, so a call that turns out not to be JSON has to be wrapped whole.
    """
    ask: dict[str, Any] = {"model": "rollmill", "stream": True}
    if dialect == "anthropic":
        async with anthropic.AsyncAnthropic(base_url=door.url, api_key=key) as sdk:
            tools: Any = [{"name": "bash", "input_schema": {"type": "object"}}]
            async for event in await sdk.messages.create(**ask, max_tokens=999, messages=[user("x")], tools=tools):
                if event.type == "ping" or (event.type == "content_block_delta" and event.delta.type == "text_delta"):
                    yield -1, ""
                elif event.type == "content_block_delta" and event.delta.type == "input_json_delta":
                    yield event.index, event.delta.partial_json
        return
    async with openai.AsyncOpenAI(base_url=f"{door.url}/v1", api_key=key) as sdk:
        if dialect == "responses":
            async for item in await sdk.responses.create(**ask, input="x", tools=[BASH]):
                if item.type == "response.function_call_arguments.delta":
                    yield item.output_index, item.delta
        else:
            tools = [{"type": "function", "function": {"name": "bash"}}]
            async for piece in await sdk.chat.completions.create(**ask, messages=[user("x")], tools=tools):
                for call in piece.choices[0].delta.tool_calls or []:
                    yield call.index, call.function.arguments
