"""A client that wants one tool call at a time gets one: the answer ends behind its first call."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rollmill.chat.first_call import FirstCall
from rollmill.chat.format import assistant_message
from tests.chat.conftest import TOOLS
from tests.chat.published import TOOLS as TEMPLATE_TOOLS
from tests.chat.published import published
from tests.gateway.conftest import USER, Answers, Mill
from tests.gateway.stand_in import StandIn

FUNCTIONS: list[dict[str, Any]] = [dict(tool["function"]) for tool in TOOLS]  # type: ignore[arg-type]
BOTH = assistant_message("I look.", [("read", json.dumps({"path": "a.py"})), ("run", "{}")])
BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": [USER], "tools": TOOLS, "parallel_tool_calls": False},
    "responses": {
        "input": "x",
        "tools": [{"type": "function", **function} for function in FUNCTIONS],
        "parallel_tool_calls": False,
    },
    "messages": {
        "messages": [USER],
        "max_tokens": 99,
        "tools": [{"name": each["name"], "input_schema": each["parameters"]} for each in FUNCTIONS],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    },
}


@pytest.mark.parametrize("path", BODIES)
async def test_the_answer_ends_behind_its_first_call(mill: Mill, answers: Answers, path: str) -> None:
    script = answers.format.render_answer(BOTH, TOOLS)
    one = answers.format.render_answer({**BOTH, "tool_calls": BOTH["tool_calls"][:1]}, TOOLS)[:-1]
    engine = StandIn([script])
    door = await mill.gateway(await mill.engine(engine))
    mill.plan("a")
    key = await door.open("a")
    headers = {"Authorization": f"Bearer {key}"}
    async with door.http.post(f"{door.url}/v1/{path}", json=BODIES[path], headers=headers) as response:
        assert response.status == 200, await response.text()
        text = await response.text()
    assert "a.py" in text and text.count('"run"') == (1 if path == "responses" else 0)  # it names its tools
    (segment,) = (await door.seal("a")).segments
    assert segment.tokens[segment.sampled].tolist() == one
    assert [span.finish for span in segment.spans] == ["stop"]


async def test_a_call_that_the_model_ends_itself_keeps_its_end(mill: Mill, answers: Answers) -> None:
    script = answers.call("read", path="a.py")
    door = await mill.gateway(await mill.engine(StandIn([script])))
    mill.plan("a")
    messages: list[Any] = [USER]
    key = await door.open("a")
    await door.say(key, messages, parallel_tool_calls=False)
    messages.append({"role": "tool", "content": "def add"})
    await door.say(key, messages, parallel_tool_calls=False)
    (segment,) = (await door.seal("a")).segments
    assert segment.tokens[segment.sampled].tolist() == script + script


@pytest.mark.parametrize("name", ["qwen2.5", "qwen3-coder", "glm4.5", "deepseek-v3.1", "kimi-k2"])
def test_published_formats_end_behind_the_first_call(name: str) -> None:
    case = published(name)
    calls = [("read", '{"path": "add.py"}'), ("read", '{"path": "b.py"}')]
    tokens = case.format.render_answer(assistant_message("I look.", calls), TEMPLATE_TOOLS)
    first = FirstCall(case.format, case.tokenizer, TEMPLATE_TOOLS)
    ends = (first.cut(tokens, count) for count in range(1, len(tokens) + 1))
    kept = next(end for end in ends if end is not None)
    (call,) = case.format.parse(tokens[:kept], TEMPLATE_TOOLS)["tool_calls"]
    assert call["function"]["arguments"] == calls[0][1]
    one = case.format.render_answer(assistant_message("I look.", calls[:1]), TEMPLATE_TOOLS)
    first = FirstCall(case.format, case.tokenizer, TEMPLATE_TOOLS)
    assert all(first.cut(one, count) is None for count in range(1, len(one) + 1))


async def test_a_format_that_cannot_do_it_says_so(mill: Mill, answers: Answers) -> None:
    """Mistral writes its calls as one list."""
    case = published("mistral-nemo")
    mill.tokenizer, mill.format = case.tokenizer, case.format  # type: ignore[assignment]
    door = await mill.gateway(await mill.engine(StandIn([[1]])))
    status, body = await door.ask(await door.open("a"), [USER], tools=TEMPLATE_TOOLS, parallel_tool_calls=False)
    assert (status, "one tool call at a time" in body["error"]["message"]) == (400, True)
