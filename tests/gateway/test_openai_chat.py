"""What OpenAI chat completions promise on the wire."""

from __future__ import annotations

from typing import Any

from tests.gateway.conftest import USER, Answers, Mill
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
