"""The gateway over HTTP, with real files, a real database and a stand-in engine."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import numpy as np
import pytest
from yarl import URL

from rollmill.gateway.config import GatewayConfig
from rollmill.gateway.recording import recorder
from rollmill.types import PolicyRef
from tests.chat.conftest import TOOLS
from tests.gateway.conftest import ADMIN, LIVE, QUICK, USER, Answers, Door, Mill, until
from tests.gateway.stand_in import StandIn, route_row


async def test_two_turns_become_the_record_of_the_design(mill: Mill, answers: Answers) -> None:
    first, second = answers.call("read", path="add.py"), answers.text("Done.")
    engine = StandIn([first, second], switch_after=2, number=4)
    door = await mill.gateway(await mill.engine(engine))
    mill.plan("a")
    key = await door.open("a", run="run", task_id="t", group_id="g", min_version=3, provenance={"split": "train"})
    messages: list[Any] = [USER]
    reply = await door.say(key, messages)
    assert reply["choices"][0]["finish_reason"] == "tool_calls"
    assert reply["usage"]["prompt_tokens"] == len(engine.requests[0]["tokens"])
    assert reply["usage"]["completion_tokens"] == len(first)
    assert [policy["number"] for policy in reply["rollmill"]["policies"]] == [4, 5]
    messages.append({"role": "tool", "tool_call_id": "x", "content": "def add"})
    reply = await door.say(key, messages)
    assert reply["choices"][0]["message"]["content"] == "Done."
    trajectory = await door.seal("a")

    (segment,) = trajectory.segments
    prompt = mill.format.render_start([USER], TOOLS)
    turn = mill.format.render_turn([messages[2]], TOOLS, answer_closed=True)
    assert segment.tokens.tolist() == prompt + first + turn + second
    sampled = [0] * len(prompt) + [1] * len(first) + [0] * len(turn) + [1] * len(second)
    assert segment.sampled.tolist() == sampled
    positions = np.arange(len(segment.tokens))
    np.testing.assert_allclose(segment.logprobs[segment.sampled], -positions[segment.sampled] / 1000, rtol=1e-6)
    used = [segment.policies[index].number for index in segment.policy[segment.sampled]]
    assert used == [4, 4] + [5] * (len(first) - 2) + [5, 5] + [6] * (len(second) - 2)
    assert segment.policies[0] == PolicyRef("main", 4, "bf16", "digest-4")
    assert segment.routes is not None and segment.routes_valid is not None
    # the last one was never an input
    assert segment.routes_valid.tolist() == [True] * (len(segment.tokens) - 1) + [False]
    assert all((segment.routes[at] == route_row(at)).all() for at in positions[:-1])
    assert [(span.finish, span.engine, span.traffic) for span in segment.spans] == [("stop", "stand-in", "rollout")] * 2
    assert segment.policies[segment.spans[1].oldest_kv_policy].number == 5
    assert trajectory.provenance["split"] == "train" and trajectory.provenance["tools"] == TOOLS
    assert [message["role"] for message in trajectory.messages] == ["user", "assistant", "tool", "assistant"]
    assert [request["min_version"] for request in engine.requests] == [3, 3]


async def test_sampled_tokens_are_never_tokenised_again(mill: Mill, answers: Answers) -> None:
    """A model may use other tokens for a word than the tokenizer; the context must keep the model's tokens."""
    letters = [token for letter in "return" for token in mill.tokenizer.encode(letter)]
    unusual = [mill.tokenizer.token_id("<text>"), *letters, mill.tokenizer.token_id("<end>")]
    assert unusual != answers.text("return")
    engine = StandIn([unusual])
    door = await mill.gateway(await mill.engine(engine))
    key = await door.open("a")
    messages: list[Any] = [USER]
    await door.say(key, messages)
    assert messages[1]["content"] == "return"
    await door.say(key, [*messages, {"role": "user", "content": "go on"}])
    prompt = mill.format.render_start([USER], TOOLS)
    assert engine.requests[1]["tokens"][: len(prompt) + len(unusual)] == prompt + unusual
    assert engine.requests[1]["session"] == engine.requests[0]["session"]


async def test_a_streamed_answer_equals_one_that_is_not_streamed(mill: Mill, answers: Answers) -> None:
    text = "Résumé 😀 done"
    engine = StandIn([answers.text(text), answers.call("edit", path="a", line=3, text="x")])
    door = await mill.gateway(await mill.engine(engine))
    key = await door.open("a")
    events = await _stream(door, key, [USER], stream_options={"include_usage": True})
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    deltas = [event["choices"][0]["delta"].get("content", "") for event in events if event["choices"]]
    assert "".join(deltas) == text
    assert len([delta for delta in deltas if delta]) > 2
    assert events[-2]["choices"][0]["finish_reason"] == "stop"
    assert events[-2]["rollmill"]["trajectory"] == "a"
    assert events[-1]["usage"]["completion_tokens"] == len(answers.text(text))
    messages = [USER, {"role": "assistant", "content": text}, USER]
    calls = [event["choices"][0]["delta"].get("tool_calls") for event in await _stream(door, key, messages)]
    (call,) = next(delta for delta in calls if delta)
    assert json.loads(call["function"]["arguments"]) == {"path": "a", "line": 3, "text": "x"}
    assert "start" in await door.metrics() and "edit" not in await door.metrics()


async def _stream(door: Door, key: str, messages: list[Any], **fields: Any) -> list[Any]:
    body = {"messages": messages, "tools": TOOLS, "stream": True, **fields}
    headers = {"Authorization": f"Bearer {key}"}
    async with door.http.post(f"{door.url}/v1/chat/completions", json=body, headers=headers) as response:
        assert response.status == 200
        assert response.content_type == "text/event-stream"
        lines = [line for line in (await response.text()).split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


async def test_closing_a_stream_stops_the_engine_and_keeps_the_sampled_tokens(mill: Mill, answers: Answers) -> None:
    engine = StandIn([answers.text("a b c d e f g h " * 20)], token_delay_s=0.01)
    door = await mill.gateway(await mill.engine(engine))
    mill.plan("a")
    key = await door.open("a")
    body = {"messages": [USER], "tools": TOOLS, "stream": True}
    headers = {"Authorization": f"Bearer {key}"}
    async with door.http.post(f"{door.url}/v1/chat/completions", json=body, headers=headers) as response:
        await response.content.readuntil(b' b"')
        response.close()
    trajectory = await door.seal("a")
    (segment,) = trajectory.segments
    (span,) = segment.spans
    assert span.finish == "abort"
    assert 0 < segment.sampled.sum() < len(engine.answers[0])
    assert engine.cancelled == 1


async def test_stop_strings_end_the_answer_after_the_token_that_completes_them(mill: Mill, answers: Answers) -> None:
    engine = StandIn([answers.text("one two three four")])
    door = await mill.gateway(await mill.engine(engine))
    mill.plan("a")
    key = await door.open("a")
    _, body = await door.ask(key, [USER], stop=["three"])
    assert body["choices"][0]["message"]["content"] == "one two "
    assert body["choices"][0]["finish_reason"] == "stop"
    (segment,) = (await door.seal("a")).segments
    assert mill.tokenizer.decode(segment.tokens[segment.sampled].tolist()) == "<text>one two three"


async def test_an_answer_cut_by_max_tokens_says_length_and_is_closed_in_the_next_turn(
    mill: Mill, answers: Answers
) -> None:
    engine = StandIn([answers.text("one two three four"), answers.text("five")])
    door = await mill.gateway(await mill.engine(engine))
    key = await door.open("a")
    messages: list[Any] = [USER]
    reply = await door.say(key, messages, max_tokens=3)
    assert reply["choices"][0]["finish_reason"] == "length"
    await door.say(key, [*messages, USER])
    answer = mill.format.render_start([USER], TOOLS) + answers.text("one two three four")[:3]
    assert engine.requests[1]["tokens"] == answer + mill.format.render_turn([USER], TOOLS, answer_closed=False)


async def test_other_histories_branch_off_with_parent_and_cause(mill: Mill, answers: Answers) -> None:
    engine = StandIn([answers.text(text) for text in ("one", "two", "three", "four")])
    door = await mill.gateway(await mill.engine(engine))
    mill.plan("a")
    key = await door.open("a")
    messages: list[Any] = [USER]
    await door.say(key, messages)
    await door.ask(key, [USER])  # the same question again
    await door.say(key, [USER, messages[1], {"role": "user", "content": "and?"}])  # continues from the first answer
    await door.say(key, [USER, {"role": "assistant", "content": "edited"}, {"role": "user", "content": "and?"}])
    segments = (await door.seal("a")).segments
    start = len(mill.format.render_start([USER], TOOLS))
    assert [(segment.cause, segment.parent) for segment in segments] == [
        ("start", None),
        ("retry", ("a.0", start)),
        ("edit", ("a.0", start)),
    ]
    assert [int(segment.sampled.sum()) for segment in segments] == [
        len(answers.text("one")) + len(answers.text("three")),
        len(answers.text("two")),
        len(answers.text("four")),
    ]
    assert "edited" in mill.tokenizer.decode(segments[2].tokens.tolist())


async def test_sealing_is_idempotent_and_ends_the_key(mill: Mill, answers: Answers) -> None:
    door = await mill.gateway(await mill.engine(StandIn([answers.text("x")])))
    mill.plan("a")
    key = await door.open("a")
    await door.say(key, [USER])
    first = await door.admin("POST", "/sessions/a/seal", {"submission_key": "submissions/a.json"})
    second = await door.admin("POST", "/sessions/a/seal", {"submission_key": "submissions/a.json"})
    assert first == second and first[0] == 200
    assert door.trajectories.get("a").submission_key == "submissions/a.json"
    assert (await door.ask(key, [USER]))[0] == 401
    assert (await door.admin("POST", "/sessions", {"trajectory": "a"}))[0] == 409
    assert (await door.admin("POST", "/sessions/b/seal", {}))[0] == 404
    assert (await door.health())["sessions"] == 0


async def test_a_session_without_requests_can_be_sealed(mill: Mill, answers: Answers) -> None:
    door = await mill.gateway(await mill.engine(StandIn([answers.text("x")])))
    mill.plan("a")
    await door.open("a")
    assert (await door.seal("a")).segments == []


async def test_a_trajectory_the_index_gave_up_is_not_sealed(mill: Mill, answers: Answers) -> None:
    door = await mill.gateway(await mill.engine(StandIn([answers.text("x")])))
    mill.plan("a")
    await door.open("a")
    door.trajectories.fail("a", "the machine broke")
    assert (await door.admin("POST", "/sessions/a/seal", {}))[0] == 409
    assert (await door.admin("DELETE", "/sessions/a"))[1] == {"deleted": True}


async def test_a_deleted_session_leaves_the_log(mill: Mill, answers: Answers) -> None:
    endpoint = await mill.engine(StandIn([answers.text("x")]))
    async with mill.running(endpoint) as door:
        key = await door.open("a")
        await door.say(key, [USER])
        assert await door.admin("DELETE", "/sessions/a") == (200, {"deleted": True})
        assert await door.admin("DELETE", "/sessions/a") == (200, {"deleted": False})
        assert (await door.ask(key, [USER]))[0] == 401
    async with mill.running(endpoint) as door:
        assert (await door.health())["sessions"] == 0


async def test_sessions_continue_after_a_restart_with_the_same_key(mill: Mill, answers: Answers) -> None:
    engine = StandIn([answers.text("one"), answers.text("two")])
    endpoint = await mill.engine(engine)
    mill.plan("a")
    messages: list[Any] = [USER]
    async with mill.running(endpoint) as door:
        key = await door.open("a")
        await door.say(key, messages)
    async with mill.running(endpoint) as door:
        assert await door.open("a") == key
        await door.say(key, [*messages, USER])
        (segment,) = (await door.seal("a")).segments
    assert len(segment.spans) == 2
    assert segment.routes_valid is not None and segment.routes_valid[:-1].all()


async def test_no_answer_is_sent_before_it_is_on_disk(
    mill: Mill, answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    door = await mill.gateway(await mill.engine(StandIn([answers.text("one")])))
    key = await door.open("a")
    disk, write = threading.Event(), recorder.write_through
    monkeypatch.setattr(recorder, "write_through", lambda *given: (disk.wait(), write(*given)))
    asked = asyncio.create_task(door.ask(key, [USER]))
    done, _ = await asyncio.wait([asked], timeout=0.3)
    assert not done
    disk.set()
    assert (await asked)[0] == 200


async def test_an_answer_that_may_not_have_arrived_is_repeated(mill: Mill, answers: Answers) -> None:
    engine = StandIn([answers.text("one"), answers.text("two"), answers.text("three")])
    endpoint = await mill.engine(engine)
    async with mill.running(endpoint) as door:
        key = await door.open("a")
        await door.ask(key, [USER])
    async with mill.running(endpoint) as door:  # the client may not have received it before the gateway stopped
        assert (await door.ask(key, [USER]))[1]["choices"][0]["message"]["content"] == "one"
        assert (await door.ask(key, [USER]))[1]["choices"][0]["message"]["content"] == "two"
        events = await _stream(door, key, [USER])
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == "three"
    assert len(engine.requests) == 3


async def test_production_conversations_are_found_by_name_or_by_their_history(mill: Mill, answers: Answers) -> None:
    engine = StandIn([answers.call("read", path="a"), answers.text("two"), answers.text("three")])
    door = await mill.gateway(await mill.engine(engine), config=QUICK.model_copy(update={"seal_idle_s": 1e9}))
    messages: list[Any] = [USER]
    first = await door.say(LIVE, messages)
    messages[1]["tool_calls"][0]["function"]["arguments"] = '{"path":"a"}'  # re-formatted by the client
    second = await door.say(LIVE, [*messages, {"role": "tool", "content": "x"}])
    assert all(second["rollmill"][name] == first["rollmill"][name] for name in ("trajectory", "segment"))
    other = await door.say(LIVE, [USER])
    assert other["rollmill"]["trajectory"] != first["rollmill"]["trajectory"]
    named = [(await door.ask(LIVE, [USER], {"x-rollmill-session": "chat-7"}))[1]["rollmill"] for _ in range(2)]
    assert named[0]["trajectory"] == named[1]["trajectory"]
    assert named[0]["segment"] != named[1]["segment"]  # the same question again
    assert {request["traffic"] for request in engine.requests} == {"production"}


async def nothing_open(door: Door) -> bool:
    return await door.sessions() == 0


async def test_an_idle_production_conversation_is_sealed(
    mill: Mill, answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollmill.gateway.recording.sealing._SWEEP_S", 0.02)
    config = QUICK.model_copy(update={"seal_idle_s": 0.05, "expire_idle_s": 0.05})
    door = await mill.gateway(await mill.engine(StandIn([answers.text("x")])), config=config)
    mill.plan("a")
    key = await door.open("a")
    reply = await door.say(LIVE, [USER], user="ann")
    await until(lambda: nothing_open(door))
    row = door.trajectories.get(reply["rollmill"]["trajectory"])
    assert (row.state, row.traffic, row.run) == ("finished", "production", "production")
    assert row.provenance["run"] == "run" and "ann" not in json.dumps(row.provenance)
    assert (await door.ask(key, [USER]))[0] == 401  # a rollout that nobody seals expires


async def test_bad_requests_get_openai_errors_with_a_hint(mill: Mill, answers: Answers) -> None:
    config = QUICK.model_copy(update={"max_body_bytes": 1 << 20})
    door = await mill.gateway(await mill.engine(StandIn([answers.text("x")])), config=config)
    key = await door.open("a")
    for fields, status, says in _BAD_REQUESTS:
        got, body = await door.ask(key, **{"messages": [USER], **fields})
        assert (got, set(body["error"])) == (status, {"message", "type", "param", "code"})
        assert says in body["error"]["message"]


_BAD_REQUESTS: list[tuple[dict[str, Any], int, str]] = [
    ({"messages": []}, 400, "messages"),
    ({"messages": "hi"}, 400, "messages must be of type list"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, 400, "messages[0].role"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        400,
        'messages[0].content[0] is "image_url"',
    ),
    ({"messages": [{"role": "user", "content": 3}]}, 400, "must be a string"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]}, 400, "is not a call"),
    ({"messages": [{"role": "user", "content": "x"}] * 4097}, 400, "4097"),
    ({"temperature": "hot"}, 400, "temperature"),
    ({"temperature": float("nan")}, 400, "finite"),
    ({"top_p": 1.5}, 400, "top_p"),
    ({"top_p": 0}, 400, "top_p"),
    ({"max_tokens": 0}, 400, "max_tokens"),
    ({"max_tokens": True}, 400, "max_tokens"),
    ({"n": 99}, 400, "n must be from 1"),
    ({"model": "gpt-4o"}, 404, "rollmill"),
    ({"top_logprobs": 3}, 400, "ask for logprobs too"),
    ({"logprobs": True, "top_logprobs": 21}, 400, "from 0 to 20"),
    ({"temprature": 0.5}, 400, 'unknown field "temprature"'),
    ({"logit_bias": {"x": 1}}, 400, "logit_bias"),
    ({"logit_bias": {"5": 101}}, 400, "from -100 to 100"),
    ({"logit_bias": {str(token): 1 for token in range(1025)}}, 400, "up to 1024"),
    ({"min_p": 2}, 400, "min_p"),
    ({"presence_penalty": 3}, 400, "presence_penalty"),
    ({"repetition_penalty": 0}, 400, "repetition_penalty"),
    ({"tools": [{"type": "function"}]}, 400, "tools[0]"),
    ({"tool_choice": "sometimes"}, 400, "tool_choice"),
    ({"stop": [""]}, 400, "stop"),
    ({"stop": ["x" * 257]}, 400, "256 characters"),
    ({"messages": [{"role": "user", "content": "x" * (1 << 20)}]}, 413, "larger than"),
]


async def test_bodies_that_are_not_json_and_unknown_sessions_are_refused(mill: Mill, answers: Answers) -> None:
    door = await mill.gateway(await mill.engine(StandIn([answers.text("x")])))
    key = await door.open("a")
    url, headers = f"{door.url}/v1/chat/completions", {"Authorization": f"Bearer {key}"}
    for data in (b"{", b"[]", b"[" * 100_000, b"\xff"):
        async with door.http.post(url, data=data, headers=headers) as response:
            assert response.status == 400
            assert (await response.json())["error"]["type"] == "invalid_request_error"
    for wrong in ("", "nonsense", key[:-1] + "0", "rm-a-", "rm-b-" + key[5:]):
        status, body = await door.ask(wrong, [USER])
        assert (status, body["error"]["type"]) == (401, "authentication_error")
    assert (await door.admin("GET", "/nowhere"))[0] == 404
    assert (await door.admin("POST", "/sessions", {"trajectory": "b"}, token=LIVE))[0] == 403
    wrong_facts: list[dict[str, Any]] = [{}, {"trajectory": "../b"}, {"traffic": "x"}, {"min_version": "1"}]
    for facts in wrong_facts:
        assert (await door.admin("POST", "/sessions", {"trajectory": "b", **facts} if facts else {}))[0] == 400
    assert (await door.admin("POST", "/sessions", {"trajectory": "b", "min_verion": 1}))[0] == 400
    assert (await door.admin("POST", "/sessions", {"trajectory": "a", "task_id": "other"}))[0] == 409


async def test_secrets_and_contents_stay_out_of_the_logs(
    mill: Mill, answers: Answers, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    engine = StandIn([answers.text("x")], refuse=(500, "broken"))
    door = await mill.gateway(await mill.engine(engine), config=GatewayConfig(engine_wait_s=0.2))
    key = await door.open("a")
    assert (await door.ask(key, [{"role": "user", "content": "my password"}]))[0] == 503
    assert (await door.ask("wrong-key", [USER]))[0] == 401
    for secret in (key, ADMIN, LIVE, "wrong-key", "my password"):
        assert secret not in caplog.text
    assert key.encode() not in (mill.directory / "gateway" / "sessions.log").read_bytes()
    assert (mill.directory / "gateway" / "sessions.log").stat().st_mode & 0o077 == 0


async def test_a_key_with_a_bad_byte_is_an_unknown_key(mill: Mill, answers: Answers) -> None:
    door = await mill.gateway(await mill.engine(StandIn([answers.text("one")])))
    await door.open("a")
    url = URL(door.url)
    reader, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nx-api-key: rm-a-\xff\r\nContent-Length: 2\r\n\r\n{}"
    )
    assert b" 401 " in await reader.readline()
    writer.close()


async def test_the_body_of_a_stranger_is_not_waited_for(mill: Mill, answers: Answers) -> None:
    door = await mill.gateway(await mill.engine(StandIn([answers.text("one")])))
    url = URL(door.url)
    for path, status in ((b"/v1/chat/completions", b" 401 "), (b"/sessions", b" 401 "), (b"/nowhere", b" 404 ")):
        reader, writer = await asyncio.open_connection(url.host, url.port)
        writer.write(b"POST %b HTTP/1.1\r\nHost: x\r\nx-api-key: wrong\r\nContent-Length: 1000000\r\n\r\n" % path)
        assert status in await reader.readline()  # although no byte of the body has arrived
        writer.close()
