"""Episodes against any OpenAI-compatible endpoint: no gateway, no store, nothing is trained on.

The harness talks to a small proxy on this machine. It forwards each request to the endpoint and keeps the transcript,
so every harness works unchanged, and the agent never sees the endpoint's key:

    harness ──(http://127.0.0.1:PORT/EPISODE/v1, a key of its own)──► proxy ──(URL, the real key)──► endpoint
"""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp
from aiohttp import web

from rollmill.environments.environment import Environment, Environments
from rollmill.environments.episode import Episode
from rollmill.environments.harness import HarnessResult
from rollmill.environments.harnesses.model import error_message, url_hint
from rollmill.environments.reward import grade_episode
from rollmill.environments.task import Task
from rollmill.environments.task_machine import create_machine
from rollmill.errors import ConfigError, HarnessError
from rollmill.keepalive import keepalive_connector
from rollmill.machines.machine import release
from rollmill.rollouts.config import RolloutConfig
from rollmill.rollouts.grading import own_limit
from rollmill.rollouts.hand_in import take_hand_in, with_counts
from rollmill.rollouts.rollout import reason_of
from rollmill.types import Grade, Sampling

MAX_BODY = 64 << 20
DECLARES = ("x-rollmill-cause", "x-rollmill-parent", "x-rollmill-outcome")  # a gateway records what they say
_NOT_RECORDED = {"x-rollmill-consent": "none"}  # a gateway then keeps nothing of the request
_ANSWER_S = 600.0  # for one answer of the endpoint
_CONNECT_S = 30.0


@dataclass(frozen=True)
class Endpoint:
    url: str  # with the /v1
    key: str = ""
    model: str = ""  # replaces the model that the harness names; "": it stays


@dataclass
class Transcript:
    """What went through the proxy for one episode."""

    key: str
    messages: list[dict[str, Any]] = field(default_factory=list)
    tokens: int = 0  # that the endpoint says it sampled
    problem: str | None = None  # the last time the endpoint could not be reached or failed
    answer: str | None = None  # the name that a gateway gave to the last answer: what signals of users are about


@dataclass(frozen=True)
class Played:
    """An episode, with its reward or the reason why it has none."""

    episode: Episode
    reward: Grade | None = None
    reason: str | None = None
    answer: str | None = None  # as in the transcript


class EndpointProxy:
    """One per process, as an async context manager. `open` starts a transcript."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._transcripts: dict[str, Transcript] = {}
        self._app = web.Application(client_max_size=MAX_BODY)
        self._app.router.add_post("/{episode}/v1/chat/completions", self._forward)
        self._app.router.add_get("/{episode}/v1/models", self._models)

    async def __aenter__(self) -> EndpointProxy:
        self._session = aiohttp.ClientSession(connector=keepalive_connector())
        self._runner = web.AppRunner(self._app, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self._port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()
        await self._session.close()

    async def check(self) -> None:
        """Raises ConfigError if nothing answers at the endpoint, or if it refuses the key or the model. Asks for one
        token before the first episode: a machine is not started for nothing, and a harness waits for minutes, because
        an endpoint may come back."""
        url, model = self._endpoint.url, self._endpoint.model
        body: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
        body |= {"model": model} if model else {}
        try:
            status, answer = await self._request("POST", "/chat/completions", body, _NOT_RECORDED)
            names = _model_names((await self._request("GET", "/models", None))[1]) if status == 404 else []
        except (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError):
            raise ConfigError(
                f"{url!r} is no URL of an endpoint", hint="for example http://127.0.0.1:8000/v1"
            ) from None
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise ConfigError(
                f"the endpoint {url} cannot be reached: {str(error) or type(error).__name__}",
                hint="is it running there? The URL is up to and with /v1; `rollmill serve RUN` prints that of a run",
            ) from None
        if status in (401, 403):
            given = "refuses the key" if self._endpoint.key else "wants a key"
            raise ConfigError(
                f"the endpoint {url} {given}: {status} {error_message(answer)}",
                hint="set OPENAI_API_KEY to a key of that endpoint; `rollmill serve RUN` names the file of its own",
            )
        if status == 404 and names:
            raise ConfigError(
                f"the endpoint {url} has no model {model!r}", hint=f"--model-name NAME, one of {', '.join(names[:8])}"
            )
        if status in (404, 405, 501):
            hint = url_hint(url) or "is that an OpenAI-compatible server? --model-name names the model"
            raise ConfigError(f"the endpoint {url} answered {status}: {error_message(answer)}", hint=hint)

    def open(self) -> tuple[str, Transcript]:
        """Returns the base URL for a harness, and what will be recorded of it."""
        name, transcript = secrets.token_hex(8), Transcript(secrets.token_urlsafe(16))
        self._transcripts[name] = transcript
        return f"http://127.0.0.1:{self._port}/{name}/v1", transcript

    async def _forward(self, request: web.Request) -> web.Response:
        """Forward a request to the endpoint and keep the transcript.

        Needs: the key of the episode.
        Takes: an OpenAI chat completion.
        Returns: the endpoint's answer, in one event if a stream is asked for; 503 if it cannot be reached.
        """
        transcript = self._transcript(request)
        if transcript is None:
            return _refusal(401, "the key is not that of this episode")
        try:
            body = await request.json()
            messages = [dict(message) for message in body["messages"]]
        except (ValueError, KeyError, TypeError, RecursionError):
            return _refusal(400, "the request is no chat completion")
        stream = bool(body.pop("stream", False))
        body.pop("stream_options", None)
        if self._endpoint.model:
            body["model"] = self._endpoint.model
        try:
            declared = {name: request.headers[name] for name in DECLARES if name in request.headers}
            status, answer = await self._request("POST", "/chat/completions", body, declared)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            transcript.problem = f"{self._endpoint.url} cannot be reached: {error!r}"
            return _refusal(503, transcript.problem)
        if status != 200:
            transcript.problem = f"{self._endpoint.url} answered {status}: {str(answer)[:300]}"
            return web.json_response(answer, status=status)
        transcript.problem = None
        _record(transcript, messages, answer)
        return _as_stream(answer) if stream else web.json_response(answer)

    async def _models(self, request: web.Request) -> web.Response:
        """List the endpoint's models: harnesses look there for the size of the context.

        Needs: the key of the episode.
        Returns: the endpoint's answer; 503 if it cannot be reached.
        """
        if self._transcript(request) is None:
            return _refusal(401, "the key is not that of this episode")
        try:
            status, answer = await self._request("GET", "/models", None)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            return _refusal(503, f"{self._endpoint.url} cannot be reached: {error!r}")
        return web.json_response(answer, status=status)

    def _transcript(self, request: web.Request) -> Transcript | None:
        """The episode of a request; None if its key is not that of the episode."""
        transcript = self._transcripts.get(request.match_info["episode"])
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        right = transcript is not None and hmac.compare_digest(given.encode(), transcript.key.encode())
        return transcript if right else None

    async def _request(
        self, method: str, path: str, body: dict[str, Any] | None, declared: Mapping[str, str] | None = None
    ) -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {self._endpoint.key}"} if self._endpoint.key else {}
        headers |= declared or {}
        timeout = aiohttp.ClientTimeout(total=_ANSWER_S, sock_connect=_CONNECT_S)
        url = self._endpoint.url.rstrip("/") + path
        async with self._session.request(method, url, json=body, headers=headers, timeout=timeout) as response:
            try:
                return response.status, await response.json(content_type=None)
            except ValueError:
                status = 502 if response.ok else response.status
                return status, {"error": {"message": f"{url} answered {response.status} without JSON"}}


def _as_stream(answer: Any) -> web.Response:
    """A whole answer as a stream of one piece."""
    try:
        choices = []
        for choice in answer["choices"]:
            delta = dict(choice["message"])
            if delta.get("tool_calls"):
                delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(delta["tool_calls"])]
            choices.append({"index": choice.get("index", 0), "delta": delta, "finish_reason": choice["finish_reason"]})
        chunk = {**answer, "object": "chat.completion.chunk", "choices": choices}
    except (KeyError, TypeError, AttributeError, ValueError):
        return web.json_response(answer)  # no chat completion: the harness tells what is wrong with it
    text = f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n"
    return web.Response(text=text, content_type="text/event-stream")


def _model_names(listed: Any) -> list[str]:
    try:
        return [str(model["id"]) for model in listed["data"]]
    except (KeyError, TypeError):
        return []


def _refusal(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message}}, status=status)


def _record(transcript: Transcript, messages: list[dict[str, Any]], answer: Any) -> None:
    """The conversation so far is the last request and its answer. An agent that forgets messages loses them here."""
    transcript.messages = messages
    try:
        transcript.messages.append(dict(answer["choices"][0]["message"]))
        transcript.answer = next(iter(answer.get("rollmill", {}).get("answers", ())), None)
        transcript.tokens += int(answer["usage"]["completion_tokens"])
    except (KeyError, IndexError, TypeError, ValueError):
        pass  # the harness tells what is wrong with it; usage is optional


async def play(
    environments: Environments, proxy: EndpointProxy, task: Task, sampling: Sampling, limits: RolloutConfig
) -> Played:
    """Play and grade one episode. Whatever fails becomes its reason."""
    environment = environments.of(task)
    own = environment.settings
    sampling = replace(sampling, max_tokens=own.max_answer_tokens or sampling.max_tokens)
    url, transcript = proxy.open()
    episode = Episode(task, {}, environment.machines)
    started = time.monotonic()
    wanted = environment.grader.wants_final_state
    try:
        machine = await create_machine(environment.machines, task)
        try:
            result = await _run_harness(
                environment, task, machine, url, transcript, sampling, own.timeout_s or limits.timeout_s
            )
            handed_in = await take_hand_in(machine, task, environment.machines, result, keep_state=wanted)
        finally:
            await machine.close()
        episode = _with_transcript(handed_in.episode(task, environment.machines), transcript, started)
        slower = machine.capabilities.slowdown
        async with asyncio.timeout(max(own.grading_timeout_s or limits.grading_timeout_s, own_limit(task)) * slower):
            reward = await grade_episode(environment.grader, episode)
            return Played(episode, reward, answer=transcript.answer)
    except Exception as error:  # harness and rewards may be code of the user
        reason = transcript.problem or reason_of(error, f"the episode of {task.id}")
        return Played(_with_transcript(episode, transcript, started), reason=reason)
    finally:
        await release(environment.machines, episode.final_state)


def _with_transcript(episode: Episode, transcript: Transcript, started: float) -> Episode:
    seconds = time.monotonic() - started
    return with_counts(replace(episode, messages=transcript.messages, tokens=transcript.tokens, seconds=seconds))


async def _run_harness(
    environment: Environment,
    task: Task,
    machine: Any,
    url: str,
    transcript: Transcript,
    sampling: Sampling,
    timeout_s: float,
) -> HarnessResult:
    """Running out of time is the agent's doing, and graded, unless the endpoint could not be reached."""
    try:
        async with asyncio.timeout((task.timeout_s or timeout_s) * machine.capabilities.slowdown) as limit:
            return await environment.harness.run(task, machine, base_url=url, api_key=transcript.key, sampling=sampling)
    except TimeoutError:
        if not limit.expired():
            raise
    if transcript.problem is not None:
        raise HarnessError(transcript.problem)
    return HarnessResult("time", turns=0, tool_calls=0)
