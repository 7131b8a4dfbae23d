"""A model with its own chat template behind the gateway."""

from __future__ import annotations

from typing import Any

import pytest

from rollmill.chat.format import assistant_message
from rollmill.chat.formats.template import TemplateFormat
from tests.chat.published import TOOLS, published
from tests.gateway.conftest import USER, Mill
from tests.gateway.stand_in import StandIn


async def test_a_template_that_drops_reasoning_branches_with_that_cause(mill: Mill) -> None:
    """The client sends no reasoning back. Tool results continue the segment, the next question starts a new one."""
    case = published("qwen3")
    mill.format, mill.tokenizer = case.format, case.tokenizer  # type: ignore[assignment]
    read = assistant_message(None, [("read", '{"path": "add.py"}')], "Look first.")
    said = [read, assistant_message("Fixed.", [], "It is clear."), assistant_message("You are welcome.", [], "Polite.")]
    script = [case.format.render_answer(message, TOOLS) for message in said]
    door = await mill.gateway(await mill.engine(StandIn(list(script))))
    mill.plan("a")
    key = await door.open("a", run="run", task_id="t", group_id="g")
    messages: list[Any] = [USER]
    for expected in said:
        body = {"model": "rollmill", "messages": messages, "tools": TOOLS}
        headers = {"Authorization": f"Bearer {key}"}
        async with door.http.post(f"{door.url}/v1/chat/completions", json=body, headers=headers) as response:
            assert response.status == 200, await response.text()
            answer = (await response.json())["choices"][0]["message"]
        assert answer["content"] == expected["content"]
        assert answer["reasoning_content"] == expected["reasoning_content"]
        calls = answer.get("tool_calls") or []
        messages.append({key: value for key, value in answer.items() if key != "reasoning_content"})
        results = [{"role": "tool", "tool_call_id": call["id"], "content": "def add"} for call in calls]
        messages += results or [{"role": "user", "content": "Thanks."}]
    first, second = (await door.seal("a")).segments
    assert (first.cause, second.cause) == ("start", "template")
    assert [len(first.spans), len(second.spans)] == [2, 1]
    sampled = [token for segment in (first, second) for token in segment.tokens[segment.sampled].tolist()]
    assert sampled == [token for tokens in script for token in tokens]
    text = case.tokenizer.decode(second.tokens.tolist())
    assert "It is clear." not in text and "Fixed." in text


@pytest.mark.parametrize(
    "behind_user",
    ["{{ ' of ' ~ asked | length }}", "{{ ' on ' ~ strftime_now('%d %b %Y') if m == asked[-1] else '' }}"],
    ids=["renumbers", "adds dates"],
)
async def test_a_template_that_renumbers_or_moves_a_date_branches_with_that_cause(mill: Mill, behind_user: str) -> None:
    """What the model read in the first turn stays as it was read. The second segment is what it reads then."""
    case = published("qwen2.5")
    source = (
        "{% set asked = messages | selectattr('role', 'equalto', 'user') | list %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% if m.role == 'user' %}"
        + behind_user
        + "{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    format = TemplateFormat(case.tokenizer, source, {}, stop_tokens=[case.tokenizer.token_id(case.eos)])
    mill.format, mill.tokenizer = format, case.tokenizer  # type: ignore[assignment]
    script = [format.render_answer(assistant_message(text, []), []) for text in ("One.", "Two.")]
    door = await mill.gateway(await mill.engine(StandIn(list(script))))
    mill.plan("a")
    key = await door.open("a", run="run", task_id="t", group_id="g")
    messages: list[Any] = [USER]
    await door.say(key, messages, tools=[])
    messages.append({"role": "user", "content": "And now?"})
    await door.say(key, messages, tools=[])
    segments = (await door.seal("a")).segments
    assert [each.cause for each in segments] == ["start", "template"]
    for segment, answer, sent in zip(segments, script, ([USER], messages[:3]), strict=True):
        assert segment.tokens[segment.sampled].tolist() == answer
        assert segment.tokens[~segment.sampled].tolist() == format.render_start(sent, [])


async def test_what_the_template_refuses_is_a_bad_request(mill: Mill) -> None:
    case = published("gemma2")
    mill.format, mill.tokenizer = case.format, case.tokenizer  # type: ignore[assignment]
    door = await mill.gateway(await mill.engine(StandIn([])))
    mill.plan("a")
    key = await door.open("a", run="run", task_id="t", group_id="g")
    body = {"model": "rollmill", "messages": [USER, USER]}
    headers = {"Authorization": f"Bearer {key}"}
    async with door.http.post(f"{door.url}/v1/chat/completions", json=body, headers=headers) as response:
        assert response.status == 400 and "roles must alternate" in await response.text()
