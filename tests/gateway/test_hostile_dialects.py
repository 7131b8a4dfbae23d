"""Any body that a client can send is parsed or refused with a GatewayError, in every dialect, and can be answered."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollmill.chat.formats.compact import CompactFormat
from rollmill.errors import GatewayError
from rollmill.gateway.wire.answer import Answer
from rollmill.gateway.wire.dialect import Delta, Dialect, Identity, Limits, Reply, TokenLogprob
from rollmill.gateway.wire.dialects.anthropic import AnthropicMessages
from rollmill.gateway.wire.dialects.openai_chat import OpenAIChat
from rollmill.gateway.wire.dialects.openai_completions import OpenAICompletions
from rollmill.gateway.wire.dialects.openai_responses import OpenAIResponses
from tests.chat.conftest import tokenizer  # noqa: F401
from tests.gateway.conftest import USER, Answers, Mill
from tests.gateway.serve import LIVE
from tests.gateway.stand_in import StandIn
from tests.gateway.test_hostile import JSON, MESSAGES, REQUESTS, TEXT

BLOCKS = st.lists(
    st.fixed_dictionaries(
        {
            "type": st.sampled_from(["text", "tool_use", "tool_result", "thinking", "image", "input_text", "refusal"])
            | JSON
        },
        optional={
            **dict.fromkeys(("text", "name", "id", "tool_use_id", "thinking"), TEXT | JSON),
            **dict.fromkeys(("input", "content"), JSON | st.dictionaries(TEXT, JSON, max_size=2)),
        },
    ),
    max_size=3,
)
SAID = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system", "developer"]) | JSON, "content": TEXT | BLOCKS | JSON}
    )
    | MESSAGES,
    min_size=1,
    max_size=3,
)
ITEMS = SAID | st.lists(
    st.fixed_dictionaries(
        {"type": st.sampled_from(["function_call", "function_call_output", "reasoning", "message"])},
        optional=dict.fromkeys(("call_id", "name", "arguments", "output", "summary", "content", "role"), TEXT | JSON),
    ),
    max_size=3,
)
FIELDS = (
    "temperature top_p top_k max_tokens max_output_tokens seed stop stop_sequences n logprobs tools tool_choice"
    " model stream stream_options metadata system thinking instructions include text store previous_response_id"
    " response_format user top_logprobs"
).split()
BODIES = st.fixed_dictionaries({}, optional={"messages": SAID, "input": ITEMS | TEXT, "prompt": TEXT | JSON}).flatmap(
    lambda begun: st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=2).map(lambda more: {**more, **begun})
)
ANSWER = Answer(
    tokens=[1],
    logprobs=[-1.0],
    policy=[0],
    policies=[],
    spans=[],
    routes=[],
    finish="stop",
    closed=True,
    message={
        "role": "assistant",
        "content": "x",
        "reasoning_content": "r",
        "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "[" * 2000}}],
    },
)
LIMITS = Limits((1,), default_max_tokens=8, max_messages=64)
RESPONSES = OpenAIResponses()
DIALECTS: list[Dialect] = [OpenAIChat(), OpenAICompletions(), AnthropicMessages(), RESPONSES]


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(tree=BODIES | REQUESTS | JSON)
def test_any_body_is_refused_or_can_be_answered(format: CompactFormat, dialect: Dialect, tree: Any) -> None:
    try:
        request = dialect.parse(json.dumps(tree).encode(), LIMITS)
    except GatewayError as error:
        assert json.dumps(dialect.error(error)) and dialect.status(error) in (400, 404)
        return
    if isinstance(dialect, OpenAIResponses):
        request = dialect.continued(request, LIMITS, None, lambda id: {})
    if request.prompt is None:
        format.render_start(request.messages, request.tools)
    told = [TokenLogprob("x", -1.0, [("y", -2.0)])]
    reply = Reply(request, Identity(), [ANSWER] * request.count, 3, {"trajectory": "a"}, [told] * request.count)
    json.loads(dialect.reply(reply))
    writer = dialect.stream(request, reply.identity)
    pieces = [writer.delta(index, Delta("x", "r", [1], told)) for index in range(request.count)]
    events = (writer.start(3) + b"".join(pieces) + writer.finish(reply)).split(b"\n\n")
    for event in filter(None, events):
        data = event.split(b"data: ", 1)[1]
        assert data == b"[DONE]" or json.loads(data)


NAMED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": [USER]}),
    ("/v1/completions", {"prompt": "x"}),
    ("/v1/responses", {"input": "x"}),
    ("/v1/messages", {"messages": [USER], "max_tokens": 9}),
]


@pytest.mark.parametrize(("path", "body"), NAMED, ids=[path for path, _ in NAMED])
async def test_unknown_fields_are_named_in_every_dialect(
    mill: Mill, answers: Answers, path: str, body: dict[str, Any]
) -> None:
    engine = StandIn([answers.text("x")])
    door = await mill.gateway(await mill.engine(engine))
    for name in ("temprature", "mesages"):
        status, told = await door.admin("POST", path, {**body, name: 1}, token=LIVE)
        assert (status, told["error"]["type"]) == (400, "invalid_request_error"), told
        assert f'unknown field "{name}"' in told["error"]["message"]
    assert not engine.requests
    assert (await door.admin("POST", path, body, token=LIVE))[0] == 200  # nothing else was wrong
