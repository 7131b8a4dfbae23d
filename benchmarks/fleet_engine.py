"""An engine with SIMULATED decode time, for benchmarks.fleet, balance_run and day_night.

It has PLACES requests at a time, and each token of a request waits TOKEN_S, as on a GPU that is the bottleneck. Engines
on a few CPU cores then speed each other up as engines with a GPU each do. Everything else is the embedded engine.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from pydantic import Field

from rollmill.config import Config
from rollmill.inference.embedded.kind import Embedded
from rollmill.inference.engine import EngineContext, GenerateChunk, GenerateRequest

PLACES, TOKEN_S = 4, 0.05
KIND = "benchmarks.fleet_engine:Slowed"


class SlowedConfig(Config):
    token_s: float = Field(TOKEN_S, description="Seconds that each token of a request waits.")
    places: int = Field(PLACES, description="Requests at a time.")


class Slowed:
    """A kind of engine: the embedded one, with simulated decode time."""

    def __init__(self, config: SlowedConfig) -> None:
        self._config = config

    def open(self, context: EngineContext) -> SlowedEngine:
        return SlowedEngine(Embedded().open(context), self._config)


class SlowedEngine:
    def __init__(self, engine: Any, config: SlowedConfig) -> None:
        self._engine, self._token_s, self._places = engine, config.token_s, asyncio.Semaphore(config.places)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def __aenter__(self) -> SlowedEngine:
        await self._engine.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._engine.__aexit__(*error)

    async def generate(self, request: GenerateRequest, *, stream: bool = False) -> AsyncIterator[GenerateChunk]:
        async with self._places, contextlib.aclosing(self._engine.generate(request, stream=stream)) as chunks:
            async for chunk in chunks:
                await asyncio.sleep(self._token_s * len(chunk.tokens))
                yield chunk
