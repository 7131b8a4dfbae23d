"""Asking a model at a URL: plain OpenAI chat completions, with retries, a deadline and the overflow of a context."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
from pydantic import Field

from rollmill.backoff import Backoff
from rollmill.config import Config
from rollmill.environments.harnesses.summary import Contexts, Messages, SummaryConfig, derived_threshold
from rollmill.errors import HarnessError
from rollmill.keepalive import keepalive_connector
from rollmill.types import Sampling

# Retry on these: the server is starting, draining, or has no engine right now.
RETRY_STATUS = frozenset({429, 502, 503, 504, 529})
UNREACHABLE = (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, TimeoutError)
_WINDOW_TIMEOUT = aiohttp.ClientTimeout(total=10.0)
GATEWAY_HINT = "is the gateway running? `harness.request_deadline_s` is the time limit"


class RequestRefused(HarnessError):
    """The model's server answered, and refused this request: another one may be served."""


class ModelSettings(Config):
    """What every harness of ours is told about the model."""

    system_prompt: str = Field("", description="System message before the task. Empty: none.")
    model: str = Field("rollmill", description="Model name in requests to the gateway.")
    request_deadline_s: float = Field(
        default=120.0,
        gt=0,
        description="Seconds to wait for a model that cannot be reached or has no engine, per answer. An answer that "
        "is being sampled may take longer: only the episode's time limits it.",
    )
    summaries: SummaryConfig | None = Field(
        None,
        description="Long tasks in a short window: when the context is nearly full, the model summarises its work and "
        "goes on in a fresh context. An empty table turns it on. Not set: a full context ends the episode.",
    )


class ModelClient:
    """All episodes of a harness share its connections."""

    def __init__(self, *, deadline_s: float, hint: str = GATEWAY_HINT, key_hint: str | None = None) -> None:
        """The model may be away for `deadline_s` per answer. `hint` is what to do if it stays away, `key_hint` if it
        refuses the key."""
        self._deadline_s = deadline_s
        self._hint, self._key_hint = hint, key_hint
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def answer(
        self, base_url: str, api_key: str, body: dict[str, Any], headers: Mapping[str, str] | None = None
    ) -> dict[str, Any] | None:
        """The first choice of the answer, or None when the conversation no longer fits the model's context. The
        choice also has the answer's `usage`.

        HarnessError if the model cannot be reached or refuses. A caller that is cancelled while the model cannot be
        reached gets that error too: the time was lost waiting for the model.
        """
        url = base_url.rstrip("/") + "/chat/completions"
        problems: list[str] = []
        try:
            return await self._ask(url, api_key, body, problems, headers or {})
        except asyncio.CancelledError:
            if problems:
                raise HarnessError(problems[-1]) from None
            raise

    async def window(self, base_url: str, api_key: str, model: str) -> int | None:
        """The tokens that fit the model's context, as the server tells at /models; None if it does not."""
        url, tree = base_url.rstrip("/") + "/models", None
        with contextlib.suppress(*UNREACHABLE, ValueError, RecursionError):  # the question that follows is patient
            async with self._opened().get(url, headers=_authorization(api_key), timeout=_WINDOW_TIMEOUT) as response:
                tree = await response.json(content_type=None)
        return _window(tree, model)

    async def _ask(
        self, url: str, api_key: str, body: dict[str, Any], problems: list[str], headers: Mapping[str, str]
    ) -> dict[str, Any] | None:
        """`problems` is empty while the model is being asked: that time is the agent's, whatever failed before."""
        backoff = Backoff(0.05, 2.0, patience=self._deadline_s, jitter=0.5)
        while True:
            problems.clear()
            began = time.monotonic()
            try:
                status, answer = await self._post(url, api_key, body, headers, backoff.left())
                problem = f"{url} answered {status}: {error_message(answer)}"
            except UNREACHABLE as error:
                status, problem = 0, f"{url} cannot be reached: {error!r}"
                if broke_off(error):
                    backoff.excuse(time.monotonic() - began)
            problems.append(problem)
            if status == 200:
                return _first_choice(answer, url)
            if status == 400 and _error_code(answer) == "context_length_exceeded":
                return None
            if status and status not in RETRY_STATUS:
                meant = url_hint(url.removesuffix("/chat/completions")) if status == 404 else None
                meant = self._key_hint if status in (401, 403) else meant
                raise RequestRefused(problem, hint=meant or "the server's log says why it refused the request")
            pause = backoff.failed()
            if pause > backoff.left():
                raise HarnessError(f"{problem} (tried for {self._deadline_s:.0f} s)", hint=self._hint)
            await asyncio.sleep(pause)

    async def _post(
        self, url: str, api_key: str, body: dict[str, Any], headers: Mapping[str, str], timeout_s: float
    ) -> tuple[int, Any]:
        headers = {**headers, **_authorization(api_key)}
        timeout = answer_timeout(timeout_s)
        async with self._opened().post(url, json=body, headers=headers, timeout=timeout) as response:
            try:
                return response.status, await response.json(content_type=None)
            except (ValueError, RecursionError):
                return response.status, None

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            # no connection limit: the dispatcher already bounds how many episodes run at once
            self._session = aiohttp.ClientSession(connector=keepalive_connector())
        return self._session


@dataclass(frozen=True)
class Asking:
    """How one episode asks its model."""

    client: ModelClient
    base_url: str
    api_key: str
    settings: ModelSettings
    sampling: Sampling
    tools: Sequence[Mapping[str, Any]] = ()

    async def contexts(self, first: Messages, max_result: int = 0) -> Contexts:
        """The contexts of an episode that starts with these messages. `max_result`: characters of one tool result."""
        config, most = self.settings.summaries, self.sampling.max_tokens
        at = None if config is None else config.at
        if at == 0:
            window = await self.client.window(self.base_url, self.api_key, self.settings.model)
            at = derived_threshold(window, most, max_result)
        return Contexts(config, first, at, most)

    async def answer(self, messages: Messages, turn: int, headers: Mapping[str, str]) -> dict[str, Any] | None:
        """As ModelClient.answer."""
        body = {"model": self.settings.model, "messages": messages, **({"tools": self.tools} if self.tools else {})}
        fields = sampling_fields(self.sampling, turn)
        return await self.client.answer(self.base_url, self.api_key, body | fields, headers)


def answer_timeout(left_s: float) -> aiohttp.ClientTimeout:
    """Limits the time to connect. An answer takes as long as it is sampled: the episode's own time limits that."""
    return aiohttp.ClientTimeout(total=None, sock_connect=max(left_s, 0.1))


def broke_off(error: Exception) -> bool:
    """Whether the connection broke while the model was answering: until then it was not away."""
    return not isinstance(error, aiohttp.ClientConnectorError | TimeoutError)


def sampling_fields(sampling: Sampling, turn: int) -> dict[str, Any]:
    """The fields of a request that say how the answer to `turn` is sampled."""
    fields: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "max_tokens": sampling.max_tokens,
    }
    if sampling.top_k:
        fields["top_k"] = sampling.top_k
    if sampling.seed is not None:
        # another seed each turn: the same one would draw the same random numbers for every answer of the episode
        fields["seed"] = sampling.seed + turn
    return fields


def _first_choice(answer: Any, url: str) -> dict[str, Any]:
    try:
        choice = answer["choices"][0]
        if not isinstance(choice["message"], dict):
            raise TypeError("message is not an object")
        return {**choice, "usage": answer.get("usage")}
    except (TypeError, KeyError, IndexError) as error:
        raise HarnessError(f"{url} did not answer in the chat completions format: {error!r}") from None


def _authorization(api_key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"}


def _window(listed: Any, model: str) -> int | None:
    """`max_model_len` of this model in a list of models, or of the first one that has it."""
    data = listed.get("data") if isinstance(listed, dict) else None
    models = [each for each in data if isinstance(each, dict)] if isinstance(data, list) else []
    told = {each.get("id"): each["max_model_len"] for each in models if isinstance(each.get("max_model_len"), int)}
    return told.get(model, next(iter(told.values()), None))


def url_hint(base_url: str) -> str | None:
    """What to try if the server knows no such path; None if the base URL has its /v1."""
    given = base_url.rstrip("/")
    base = given.removesuffix("/chat/completions")
    meant = base if base.endswith("/v1") else f"{base}/v1"
    return None if given == meant else f"did you mean {meant}? A base URL is up to and with /v1"


def error_message(answer: Any) -> str:
    error = answer.get("error") if isinstance(answer, dict) else None
    return str(error.get("message", error) if isinstance(error, dict) else error or "no explanation")[:500]


def _error_code(answer: Any) -> str | None:
    error = answer.get("error") if isinstance(answer, dict) else None
    return error.get("code") if isinstance(error, dict) else None
