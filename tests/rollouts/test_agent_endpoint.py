"""The proxy before a foreign endpoint: agents that stream get a stream, and the transcript has the whole answer."""

from __future__ import annotations

import json
from typing import Any

import aiohttp

from rollmill.rollouts.agent_endpoint import Endpoint, EndpointProxy
from tests.environments.harnesses.test_coding import ScriptedModel, call


async def test_an_agent_that_streams_is_answered_with_a_stream() -> None:
    model = ScriptedModel()
    text = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "hello"}}
    nonsense: Any = {"finish_reason": "stop", "message": 3}
    model.answers = [nonsense, text, call("bash", command="ls")]
    async with model.server() as server, EndpointProxy(Endpoint(str(server.make_url("/v1")), "key", "m")) as proxy:
        url, transcript = proxy.open()
        headers = {"Authorization": f"Bearer {transcript.key}"}
        body = {"messages": [{"role": "user", "content": "hi"}], "stream": True, "stream_options": {}}
        answers = []
        async with aiohttp.ClientSession(headers=headers) as session:
            for cause in ({}, {}, {"x-rollmill-cause": "summary", "x-other": "not forwarded"}):
                async with session.post(f"{url}/chat/completions", json=body, headers=cause) as response:
                    answers.append((response.content_type, await response.text()))
    assert [kind for kind, _ in answers] == ["application/json", "text/event-stream", "text/event-stream"]
    events = [text.removeprefix("data: ").split("\n\n") for _, text in answers[1:]]
    assert all(event[1:] == ["data: [DONE]", ""] for event in events)
    first, second = (json.loads(event[0])["choices"][0] for event in events)
    assert (first["delta"]["content"], first["finish_reason"]) == ("hello", "stop")
    assert second["delta"]["tool_calls"][0]["index"] == 0
    assert transcript.messages[-1]["tool_calls"] and "stream" not in model.requests[0]
    assert model.causes == [None, None, "summary"] and set(model.keys) == {"Bearer key"}
