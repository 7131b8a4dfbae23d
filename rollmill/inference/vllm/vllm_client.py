"""The HTTP routes of a vLLM server that an engine uses, over a Unix socket in a directory of the engine's own.

POST /inference/v1/generate                          tokens in, a stream of tokens and log-probs out
POST /pause, /resume                                 stop all work and drop what was cached; go on
POST /start_weight_update, /update_weights, /finish_weight_update      new weights, read by our `plugin`
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp

from rollmill.errors import EngineError
from rollmill.inference.engine import EngineUnavailable
from rollmill.inference.vllm.generation import Generation, TokenSample
from rollmill.types import FinishReason

SOCKET = "vllm.sock"
_POLL_SECONDS = 0.2


class Piece(NamedTuple):
    sampled: list[TokenSample]
    finish: FinishReason | None


class Client:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._session: aiohttp.ClientSession | None = None
        self._ready = False

    async def open(self) -> None:
        connector = aiohttp.UnixConnector(str(self.directory / SOCKET), limit=0)
        timeout = aiohttp.ClientTimeout(total=None)
        self._session = aiohttp.ClientSession("http://vllm", connector=connector, timeout=timeout)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def ready(self) -> None:
        """Waits until the server has started."""
        while not self._ready:
            try:
                async with self._http.get("/health") as response:
                    self._ready = response.status == 200
            except (aiohttp.ClientError, OSError):
                pass  # it is starting
            if not self._ready:
                await asyncio.sleep(_POLL_SECONDS)

    async def pause(self) -> None:
        """Ends every stream and drops the KV cache. Once this returns, nothing is computed."""
        await self._post("/pause?mode=abort")

    async def resume(self) -> None:
        await self._post("/resume")

    async def load(self, weights: Path, version: str) -> None:
        """The server must be paused."""
        await self._post("/start_weight_update")
        await self._post("/update_weights", {"update_info": {"path": str(weights)}})
        await self._post("/finish_weight_update", {"weight_version": version})

    async def generate(self, one: Generation, version: str) -> AsyncGenerator[Piece, None]:
        """Ends without a `finish` if the server is paused meanwhile. Closing it frees the request. `version` is what
        `load` was told."""
        body = {
            "token_ids": one.tokens,
            "sampling_params": one.parameters(),
            "priority": int(one.is_rollout),  # lower is sooner
            "stream": True,
        }
        try:
            async with self._http.post("/inference/v1/generate", json=body) as response:
                if response.status != 200:
                    raise await _refusal(response)
                pending = b""  # read in pieces: an event may be longer than readline() allows
                async for arrived in response.content.iter_any():
                    *lines, pending = (pending + arrived).split(b"\n")
                    for line in lines:
                        if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
                            yield _piece(line[6:], one.top_count, version)
        except (aiohttp.ClientError, OSError) as error:
            raise EngineUnavailable(f"the vLLM server does not answer: {error}", hint="its log says why") from None

    @property
    def _http(self) -> aiohttp.ClientSession:
        assert self._session is not None, "the client is open"
        return self._session

    async def _post(self, path: str, body: Mapping[str, Any] | None = None) -> None:
        try:
            async with self._http.post(path, json=body) as response:
                if response.status != 200:
                    raise await _refusal(response)
        except (aiohttp.ClientError, OSError) as error:
            raise EngineUnavailable(f"the vLLM server does not answer: {error}", hint="its log says why") from None


async def _refusal(response: aiohttp.ClientResponse) -> EngineError:
    text = (await response.content.read(2000)).decode(errors="replace")
    return EngineError(f"vLLM answered {response.status} to {response.url.path}: {text}")


def _piece(data: bytes, top_count: int, version: str) -> Piece:
    """One event of a stream. Raises EngineUnavailable if it tells of tokens by another version."""
    try:
        event = json.loads(data)
        if "error" in event:
            raise EngineUnavailable(f"the vLLM server failed: {event['error']}")
        (choice,) = event["choices"]
        tokens = choice["token_ids"] or []
        entries = choice["logprobs"]["content"] if tokens else []
        sampled = [_sampled(entry, top_count) for entry in entries]
        if [one.token for one in sampled] != tokens:
            raise ValueError("tokens and log-probs disagree")
        others = {span["version"] for span in choice.get("weight_versions") or ()} - {version}
    except (ValueError, LookupError, TypeError) as error:
        raise EngineUnavailable(f"the vLLM server sent an event that cannot be read: {error!r}") from None
    if others:
        raise EngineUnavailable(f"tokens of {version} were sampled by {', '.join(others)}")
    finish = choice.get("finish_reason")
    return Piece(sampled, finish if finish in ("stop", "length") else None)


def _sampled(entry: Mapping[str, Any], top_count: int) -> TokenSample:
    """The server lists the sampled token first, and then the most likely ones."""
    listed = {int(each["token_id"]): float(each["logprob"]) for each in entry["top_logprobs"]} if top_count else {}
    best = sorted(listed.items(), key=lambda pair: -pair[1])[:top_count]
    return TokenSample(int(entry["token_id"]), float(entry["logprob"]), best)
