"""What OpenAI chat completions promise on the wire."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.gateway.conftest import USER, Answers, Door, Mill
from tests.gateway.stand_in import StandIn


async def test_a_prompt_that_is_too_long_gets_the_code_that_harnesses_expect(mill: Mill, answers: Answers) -> None:
    """An engine with a full context answers with no token. Streams get the status too."""
    door = await mill.gateway(await mill.engine(StandIn([answers.text("x")], context_limit=5)))
    key = await door.open("a")
    for fields in ({}, {"stream": True}):
        status, body = await door.ask(key, [USER], **fields)
        assert (status, body["error"]["code"]) == (400, "context_length_exceeded")


async def test_an_unknown_model_is_not_echoed(mill: Mill, answers: Answers) -> None:
    door = await mill.gateway(await mill.engine(StandIn([answers.text("x")])))
    key = await door.open("a")
    status, body = await door.ask(key, [USER], model="gpt-9000")
    assert (status, body["error"]["code"]) == (404, "model_not_found")
    assert "gpt-9000" not in str(body)
    for name in ("rollmill", "main"):  # the stand-in serves the line main
        assert (await door.ask(key, [USER], model=name))[1]["model"] == name


async def test_fields_that_clients_send_unasked_are_accepted(mill: Mill, answers: Answers) -> None:
    door = await mill.gateway(await mill.engine(StandIn([answers.text("x")])))
    key = await door.open("a")
    described: dict[str, Any] = {
        "store": False,
        "metadata": {"a": "b"},
        "parallel_tool_calls": True,
        "service_tier": "auto",
        "prompt_cache_key": "k",
        "reasoning_effort": "low",
        "verbosity": "low",
        "safety_identifier": "s",
        "response_format": {"type": "text"},
    }
    assert (await door.ask(key, [USER], **described))[0] == 200


async def test_log_probs_are_those_of_the_record(mill: Mill, answers: Answers) -> None:
    door = await mill.gateway(await mill.engine(StandIn([answers.text("one two")])))
    mill.plan("a")
    key = await door.open("a")
    _, body = await door.ask(key, [USER], logprobs=True)
    told = body["choices"][0]["logprobs"]["content"]
    assert "".join(each["token"] for each in told) == "<text>one two<end>"
    (segment,) = (await door.seal("a")).segments
    assert [round(each["logprob"], 5) for each in told] == [
        round(float(each), 5) for each in segment.logprobs[segment.sampled]
    ]


@pytest.mark.parametrize("stream", [False, True])
async def test_the_most_likely_tokens_are_told_in_every_openai_format(
    mill: Mill, answers: Answers, stream: bool
) -> None:
    """The stand-in names the sampled token and the next id, one less likely."""
    script = answers.text("one two")
    door = await mill.gateway(await mill.engine(StandIn([script])))
    key = await door.open("a")
    texts = [[mill.tokenizer.decode([each]) for each in (token, token + 1)] for token in script]
    bodies: dict[str, dict[str, Any]] = {
        "chat/completions": {"messages": [USER], "logprobs": True, "top_logprobs": 2},
        "completions": {"prompt": "Fix add.", "logprobs": 2},
        "responses": {"input": "x", "include": ["message.output_text.logprobs"], "top_logprobs": 2},
    }
    for path, body in bodies.items():
        replies = await events(door, f"/v1/{path}", {**body, "stream": stream}, key)
        told = [each for reply in replies for each in _told(path, reply)]
        if path == "completions":
            assert [list(each) for each in told] == texts
        elif path == "chat/completions" or not stream:
            assert [[best["token"] for best in each["top_logprobs"]] for each in told] == texts
            assert all(each["top_logprobs"][0]["logprob"] == each["logprob"] for each in told)
        else:  # tokens without text of their own have no event
            assert told and all(len(each["top_logprobs"]) == 2 for each in told)


async def test_a_repeated_stream_has_the_tokens_and_log_probs_of_the_first(mill: Mill, answers: Answers) -> None:
    script = answers.text("one")
    engine = StandIn([script])
    endpoint = await mill.engine(engine)
    body = {"prompt": "Fix add.", "stream": True, "logprobs": 0}
    async with mill.running(endpoint) as door:
        key = await door.open("a")
        await events(door, "/v1/completions", body, key)
    async with mill.running(endpoint) as door:  # the client may not have received it before the gateway stopped
        choices = [reply["choices"][0] for reply in await events(door, "/v1/completions", body, key)]
    assert len(engine.requests) == 1
    assert [token for choice in choices for token in choice["token_ids"]] == script
    told = [value for choice in choices if choice["logprobs"] for value in choice["logprobs"]["token_logprobs"]]
    assert len(told) == len(script)


async def events(door: Door, path: str, body: Any, key: str) -> list[Any]:
    """The whole reply, or the events of a stream."""
    async with door.http.post(door.url + path, json=body, headers={"Authorization": f"Bearer {key}"}) as response:
        text = await response.text()
        assert response.status == 200, text
    if not body["stream"]:
        return [json.loads(text)]
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


def _told(path: str, reply: Any) -> list[Any]:
    """The log-probs in a reply, or in one event."""
    if path == "completions":
        return list((reply["choices"][0]["logprobs"] or {}).get("top_logprobs", ()))
    if path == "chat/completions":
        return list((reply["choices"][0]["logprobs"] or {}).get("content", ()))
    if reply.get("object") == "response":
        return list(reply["output"][0]["content"][0]["logprobs"])
    return list(reply.get("logprobs", ())) if reply["type"] == "response.output_text.delta" else []
