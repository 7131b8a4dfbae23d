"""OpenAI-compatible servers as engines: a second gateway, and servers that tell less."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from rollmill.errors import EngineError
from rollmill.gateway.config import BackendConfig, EngineEndpoint
from rollmill.gateway.routing.openai_engine import policy_of, read_completion
from rollmill.training.batching import _reconstructible
from tests.gateway.conftest import QUICK, USER, Answers, Mill, until
from tests.gateway.serve import LIVE
from tests.gateway.stand_in import StandIn


class Server:
    """Speaks OpenAI completions, and tells only text unless `choice` has more."""

    def __init__(self, text: str, **choice: Any) -> None:
        self.choice = {"text": text, "index": 0, "finish_reason": "stop", **choice}
        self.requests: list[dict[str, Any]] = []

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_post("/v1/completions", self.complete)
        app.router.add_get("/v1/models", self.models)
        return app

    async def complete(self, request: web.Request) -> web.Response:
        self.requests.append(await request.json())
        return web.json_response({"object": "text_completion", "choices": [self.choice]})

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "m"}]})


class Streaming(Server):
    """Streams these choices, and an event without any."""

    def __init__(self, choices: list[dict[str, Any]]) -> None:
        super().__init__("")
        self.choices = choices

    async def complete(self, request: web.Request) -> web.Response:
        self.requests.append(await request.json())
        assert self.requests[-1]["stream"] is True
        events = [json.dumps({"choices": listed}) for listed in (*([choice] for choice in self.choices), [])]
        text = "".join(f"data: {event}\r\n\r\n" for event in [*events, "[DONE]"])
        return web.Response(text=text, content_type="text/event-stream")


async def backend(mill: Mill, server: Server) -> EngineEndpoint:
    running = await mill.stack.enter_async_context(TestServer(server.app()))
    return BackendConfig(url=str(running.make_url("")), model="big/model").endpoint()


async def test_a_server_that_tells_no_log_probs_is_recorded_with_what_is_missing(mill: Mill, answers: Answers) -> None:
    server, own = Server("fine", token_ids=answers.text("fine")), StandIn([answers.text("own")])
    door = await mill.gateway(await mill.engine(own), await backend(mill, server))
    mill.plan("a")
    key = await door.open("a")
    messages: list[Any] = [USER]
    assert (await door.say(key, messages))["choices"][0]["message"]["content"] == "own"  # the default is an own engine
    messages.append(USER)
    said = await door.say(key, messages, model="external-big-model", seed=5)
    assert said["choices"][0]["message"]["content"] == "fine"
    (segment,) = (await door.seal("a")).segments
    prompt = server.requests[0]["prompt"]
    assert segment.tokens.tolist()[: len(prompt)] == prompt and server.requests[0]["seed"] == 5
    assert [span.missing for span in segment.spans] == [
        "",
        "the server does not tell the weights, the log-probs",
    ]
    assert [policy.line for policy in segment.policies] == ["main", "external-big-model"]
    masked: Counter[str] = Counter()
    _, learn_T = _reconstructible(segment, masked)
    assert masked[segment.spans[1].missing] == segment.spans[1].end - segment.spans[1].start > 0
    assert not learn_T[segment.spans[1].start :].any() and learn_T[segment.spans[0].start : segment.spans[0].end].all()


async def test_the_url_of_a_server_may_have_its_v1_and_a_wrong_one_is_named(mill: Mill) -> None:
    running = await mill.stack.enter_async_context(TestServer(Server("fine").app()))
    urls = [str(running.make_url(path)) for path in ("/v1", "/v1/", "/else")]
    ends = [BackendConfig(url=url, model=f"m{number}").endpoint() for number, url in enumerate(urls)]
    door = await mill.gateway(*ends[:1], ends[2], follows=False, wait=False)

    async def looked() -> bool:
        return "no health check yet" not in str(await door.health())

    await until(looked)
    right, wrong = (await door.health())["engines"]
    assert ends[0].url == ends[1].url and right["alive"]
    assert wrong["problem"] == f"EngineError: engine: GET {urls[2]}/v1/models answered 404"


async def test_a_second_gateway_tells_tokens_and_log_probs(mill: Mill, answers: Answers) -> None:
    tokens = answers.text("one two")
    first = await mill.gateway(await mill.engine(StandIn([tokens])))
    behind = EngineEndpoint(first.url, "elsewhere", LIVE, "openai", "main")
    second = Mill(mill.directory / "second", mill.format, mill.tokenizer, mill.stack)
    second.directory.mkdir()
    door = await second.gateway(behind, follows=False)
    second.plan("a")
    key = await door.open("a")
    assert (await door.say(key, [USER]))["choices"][0]["message"]["content"] == "one two"
    (segment,) = (await door.seal("a")).segments
    assert segment.tokens[segment.sampled].tolist() == tokens
    assert (segment.logprobs[segment.sampled] < 0).all()
    assert [(span.missing, span.region) for span in segment.spans] == [
        ("the server does not tell the weights", "elsewhere")
    ]


async def test_a_second_gateway_streams(mill: Mill, answers: Answers) -> None:
    tokens = answers.text("one two three")
    engine = StandIn([tokens], hold_after=2)
    first = await mill.gateway(await mill.engine(engine))
    second = Mill(mill.directory / "second", mill.format, mill.tokenizer, mill.stack)
    second.directory.mkdir()
    door = await second.gateway(EngineEndpoint(first.url, "elsewhere", LIVE, "openai", "main"), follows=False)
    second.plan("a")
    key = await door.open("a")
    body = {"messages": [USER], "stream": True}
    headers = {"Authorization": f"Bearer {key}"}
    async with door.http.post(f"{door.url}/v1/chat/completions", json=body, headers=headers) as response:
        begun = await response.content.readany()  # the engine has not sampled the rest yet
        engine.release.set()
        text = (begun + await response.read()).decode()
    events = [json.loads(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")]
    said = [event["choices"][0]["delta"].get("content") or "" for event in events]
    assert "".join(said) == "one two three" and b"three" not in begun
    (segment,) = (await door.seal("a")).segments
    assert segment.tokens[segment.sampled].tolist() == tokens
    assert [span.missing for span in segment.spans] == ["the server does not tell the weights"]


async def test_after_a_stream_that_breaks_off_the_rest_is_asked_for(mill: Mill) -> None:
    server = Streaming([{"text": "one", "finish_reason": None}])
    door = await mill.gateway(await backend(mill, server), follows=False)
    status, body = await door.ask(LIVE, [USER], max_tokens=4, stop=["never"])
    assert (status, body["choices"][0]["finish_reason"]) == (200, "length")
    first, second = (request["prompt"] for request in server.requests[:2])
    assert second == first + mill.tokenizer.encode("one")


async def test_a_stream_of_text_is_tokenised_piece_by_piece(mill: Mill) -> None:
    pieces = [{"text": "one"}, {"text": " two", "finish_reason": None}, {"text": "", "finish_reason": "length"}]
    door = await mill.gateway(await backend(mill, Streaming(pieces)), follows=False)
    mill.plan("a")
    await door.say(await door.open("a"), [USER], max_tokens=100)
    (segment,) = (await door.seal("a")).segments
    assert mill.tokenizer.decode(segment.tokens[segment.sampled].tolist()) == "one two"
    assert [span.missing for span in segment.spans] == [
        "the server does not tell the weights, the token ids, the log-probs"
    ]


async def test_a_server_that_fails_is_an_engine_that_fails(mill: Mill) -> None:
    door = await mill.gateway(
        await backend(mill, Server("x", token_ids=[-1])),
        config=QUICK.model_copy(update={"engine_wait_s": 0.2}),
        follows=False,
    )
    status, body = await door.ask(LIVE, [USER])
    assert status == 503 and "every engine failed" in body["error"]["message"]


@pytest.mark.parametrize("body", [b"", b"[]", b'{"choices": []}', b'{"choices": [{"text": 1}]}', b"\xff", b"[" * 9999])
def test_malformed_answers_are_refused(body: bytes) -> None:
    endpoint = EngineEndpoint("http://x", "x", None, "openai", "m")
    with pytest.raises(EngineError):
        read_completion(body, policy_of(endpoint), lambda text: [])


@pytest.mark.parametrize("value", [None, float("nan"), float("-inf"), -1e300])
def test_log_probs_that_do_not_fit_are_missing(value: float | None) -> None:
    """A record with a log-prob that is not finite could not be sealed."""
    endpoint = EngineEndpoint("http://x", "x", None, "openai", "m")
    told = {"token_logprobs": [value, -1.0], "top_logprobs": [{"a": value} if value else None, {"b": -1.0}]}
    body = json.dumps({"choices": [{"text": "ab", "token_ids": [1, 2], "logprobs": told}]}).encode()
    chunk = read_completion(body, policy_of(endpoint), lambda text: [7], top_logprobs=1)
    assert chunk.tokens == [1, 2] and chunk.logprobs == [0.0, 0.0] and chunk.missing.endswith("the log-probs")
    assert chunk.top_logprobs == [[], [(7, -1.0)]]


def test_text_without_token_ids_is_tokenised_here() -> None:
    endpoint = EngineEndpoint("http://x", "x", None, "openai", "m")
    choice = {"text": "ab", "logprobs": {"token_logprobs": [-1.0, -2.0]}}  # of other tokens, perhaps
    chunk = read_completion(json.dumps({"choices": [choice]}).encode(), policy_of(endpoint), lambda text: [7, 8])
    assert (chunk.tokens, chunk.logprobs) == ([7, 8], [0.0, 0.0])
    assert chunk.missing == "the server does not tell the weights, the token ids, the log-probs"
