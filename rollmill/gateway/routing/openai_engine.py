"""Any OpenAI-compatible server as an engine: POST /v1/completions with token ids in.

Recorded is what the server tells. Token ids and log-probs come back from servers that know `return_token_ids` and
`logprobs` (vLLM, SGLang, a Rollmill gateway). Else the text is tokenised here, which need not give the sampled ids, and
log-probs are 0. No such server names the exact weights. What is missing is kept with the span, and such spans are never
trained on. An answer that is wanted piece by piece is streamed by the server. Without token ids each piece is tokenised
on its own.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

import aiohttp
from pydantic import BaseModel, TypeAdapter

from rollmill.errors import EngineError, GatewayError
from rollmill.gateway.config import EngineEndpoint
from rollmill.gateway.routing.own_engine import refuse
from rollmill.inference.engine import GenerateChunk, GenerateRequest
from rollmill.strict import parse_json
from rollmill.types import FinishReason, PolicyRef, Sampling

NO_WEIGHTS, NO_TOKENS, NO_LOGPROBS = "the weights", "the token ids", "the log-probs"
_LARGEST_ID = 1 << 31
_LONGEST_EVENT = 8 << 20
_LEAST_LOGPROB = -1e30  # NaN, and what float32 cannot hold, count as not told
# sent only if they are asked for: not every server knows them
_OPTIONAL = ("seed", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")


class _Logprobs(BaseModel):
    token_logprobs: list[float | None] | None = None
    top_logprobs: list[dict[str, float] | None] | None = None


class _Choice(BaseModel):
    text: str
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None


class _Completion(BaseModel):
    choices: list[_Choice]


_COMPLETION = TypeAdapter(_Completion)


def body_of(request: GenerateRequest, endpoint: EngineEndpoint, stream: bool = False) -> dict[str, Any]:
    sampling = request.sampling
    if sampling.grammar is not None:
        raise GatewayError("this engine cannot follow a JSON schema or a forced tool_choice", hint="leave it out")
    body: dict[str, Any] = {
        "model": endpoint.model,
        "prompt": list(request.tokens),
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "logprobs": max(1, request.top_logprobs),
        "return_token_ids": True,
        **({"stream": True} if stream else {}),
    }
    plain = Sampling()
    body |= {name: getattr(sampling, name) for name in _OPTIONAL if getattr(sampling, name) != getattr(plain, name)}
    if sampling.logit_bias:
        body["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias}
    return body


def read_completion(
    data: bytes, policy: PolicyRef, encode: Callable[[str], list[int]], top_logprobs: int = 0, *, piece: bool = False
) -> GenerateChunk:
    """The answer, or a `piece` of a streamed one, as one chunk. Raises EngineError if it is not a completion."""
    try:
        completion = parse_json(data, _COMPLETION)
        choice = completion.choices[0] if completion.choices or not piece else _Choice(text="")
    except (ValueError, IndexError) as error:
        raise EngineError(f"the server's answer is no completion: {error}") from None
    tokens, missing = choice.token_ids, [NO_WEIGHTS]
    if tokens is None:
        tokens = encode(choice.text)
        missing += [NO_TOKENS] if choice.text or not piece else []
    if any(not 0 <= token < _LARGEST_ID for token in tokens):
        raise EngineError("the server's answer has a token id that is negative or too large")
    told = choice.logprobs.token_logprobs if choice.logprobs is not None else None
    logprobs = [min(0.0, value) for value in told or () if value is not None and value > _LEAST_LOGPROB]
    if len(missing) > 1 or len(logprobs) != len(tokens):
        logprobs = [0.0] * len(tokens)
        missing.append(NO_LOGPROBS)
    ended = not piece or choice.finish_reason is not None
    finish: FinishReason | None = "length" if choice.finish_reason == "length" else "stop"
    return GenerateChunk(
        tokens,
        logprobs,
        [0] * len(tokens),
        [policy],
        finish=finish if ended else None,
        oldest_kv_policy=policy if ended else None,
        missing=f"the server does not tell {', '.join(missing)}",
        top_logprobs=_best(choice.logprobs, len(tokens), encode) if top_logprobs else [],
    )


def _best(told: _Logprobs | None, count: int, encode: Callable[[str], list[int]]) -> list[list[tuple[int, float]]]:
    """The most likely tokens. Servers tell their texts; a text that is not one token is left out."""
    best = (told.top_logprobs if told is not None else None) or []
    if len(best) != count:
        return [[] for _ in range(count)]
    texts = [sorted((each or {}).items(), key=lambda item: -item[1]) for each in best]
    return [
        [(ids[0], value) for text, value in each if value > _LEAST_LOGPROB and len(ids := encode(text)) == 1]
        for each in texts
    ]


async def ask(
    client: aiohttp.ClientSession,
    endpoint: EngineEndpoint,
    request: GenerateRequest,
    timeout: aiohttp.ClientTimeout,
    encode: Callable[[str], list[int]],
    stream: bool,
) -> AsyncGenerator[list[GenerateChunk], None]:
    """Yields the chunks that have arrived since the last time; without `stream` all in one."""
    url = f"{endpoint.url.rstrip('/')}/v1/completions"
    async with client.post(
        url, json=body_of(request, endpoint, stream), headers=_headers(endpoint), timeout=timeout
    ) as response:
        if response.status != 200:
            refuse(response.status, await response.content.read(2000))
        policy, best = policy_of(endpoint), request.top_logprobs
        if response.content_type != "text/event-stream":  # not asked for, or the server cannot stream
            yield [read_completion(await response.read(), policy, encode, best)]
            return
        async for events in _events(response):
            chunks = [read_completion(event, policy, encode, best, piece=True) for event in events]
            if chunks:
                yield chunks


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[list[bytes]]:
    """The data of the server-sent events that have arrived since the last time."""
    pending = b""
    async for piece in response.content.iter_any():
        *lines, pending = (pending + piece).split(b"\n")
        if len(pending) > _LONGEST_EVENT:
            raise EngineError(f"the server sent an event of more than {_LONGEST_EVENT} bytes")
        events = [line.removeprefix(b"data:").strip() for line in lines if line.startswith(b"data:")]
        yield [event for event in events if event != b"[DONE]"]


async def ask_health(client: aiohttp.ClientSession, endpoint: EngineEndpoint) -> dict[str, Any]:
    """What the engine's own /health would say. The server is alive if it lists its models."""
    url = f"{endpoint.url.rstrip('/')}/v1/models"
    timeout = aiohttp.ClientTimeout(total=5)
    async with client.get(url, headers=_headers(endpoint), timeout=timeout) as response:
        if response.status != 200:
            raise EngineError(f"GET {url} answered {response.status}")
        await response.read()
    policy = vars(policy_of(endpoint))
    return {"engine": f"openai:{endpoint.model}", "policy": policy, "running": 0, "waiting": 0}


def policy_of(endpoint: EngineEndpoint) -> PolicyRef:
    """Stands for weights that nobody names. Its line is never that of a run."""
    return PolicyRef("external-" + re.sub(r"[^A-Za-z0-9_-]", "-", endpoint.model), 0, "unknown", "unknown")


def _headers(endpoint: EngineEndpoint) -> dict[str, str]:
    return {"Authorization": f"Bearer {endpoint.token}"} if endpoint.token else {}
