"""The base of harnesses whose agent is a program, unmodified: it finds the model at an address of a proxy.

The proxy is reached from a machine or from a process of this host. The episode ends with the program, or when the proxy
ends it. However the program ended, its work is graded as it stands.
"""

from __future__ import annotations

import asyncio
import socket
from abc import abstractmethod
from collections.abc import Coroutine
from typing import Any, Literal, NamedTuple

import aiohttp
from pydantic import Field

from rollmill.config import Config
from rollmill.environments.harness import Harness, HarnessResult
from rollmill.environments.harnesses.proxy import ModelProxy
from rollmill.environments.task import Task
from rollmill.errors import HarnessError
from rollmill.keepalive import keepalive_connector
from rollmill.machines.machine import Machine
from rollmill.types import Sampling

NOTE = 600  # characters


class ProxiedConfig(Config):
    model: str = Field(
        default="rollmill",
        description="Model name in requests to the gateway. It replaces the name that the program uses.",
    )
    max_turns: int = Field(
        default=200, ge=1, description="Most answers of the model in one episode; the program is stopped after that."
    )
    max_request_bytes: int = Field(
        default=4 << 20, ge=1024, description="Largest request of the program to the model in bytes."
    )
    request_deadline_s: float = Field(
        default=600.0,
        gt=0,
        description="Seconds to wait for a model that cannot be reached or has no engine, per answer. An answer that "
        "is being sampled may take longer: only the episode's time limits it.",
    )


class ProgramEnd(NamedTuple):
    """How a program ended by itself."""

    failed: bool
    why: str
    output: str = ""


class ProxiedHarness(Harness):
    """One per dispatcher: all episodes share its connections to the gateway."""

    def __init__(self, config: ProxiedConfig) -> None:
        self._settings = config
        self._session: aiohttp.ClientSession | None = None

    @abstractmethod
    async def listen(self, machine: Machine) -> tuple[socket.socket, int]:
        """A listener, and the port at which the program finds it on its loopback."""

    @abstractmethod
    async def run_program(self, task: Task, machine: Machine, url: str, api_key: str) -> ProgramEnd:
        """Run the program until it ends, with the model at `url`. HarnessError if it could not begin."""

    async def run(
        self, task: Task, machine: Machine, *, base_url: str, api_key: str, sampling: Sampling
    ) -> HarnessResult:
        proxy = self._proxy(base_url, api_key, sampling)
        listener, port = await self.listen(machine)
        async with proxy.serve(listener):
            try:
                program = self.run_program(task, machine, f"http://127.0.0.1:{port}/v1", api_key)
                end = await _until_ended(program, proxy)
            except asyncio.CancelledError:  # its time is over
                if proxy.problem is not None:
                    raise HarnessError(proxy.problem) from None
                raise
        if proxy.problem is not None:
            raise HarnessError(proxy.problem, hint="is the gateway running? its log says more")
        return _describe(end, proxy)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _proxy(self, base_url: str, api_key: str, sampling: Sampling) -> ModelProxy:
        if self._session is None:
            self._session = aiohttp.ClientSession(connector=keepalive_connector())
        return ModelProxy(
            self._session,
            base_url,
            api_key,
            sampling,
            model=self._settings.model,
            deadline_s=self._settings.request_deadline_s,
            max_requests=self._settings.max_turns,
            max_bytes=self._settings.max_request_bytes,
        )


async def _until_ended(program: Coroutine[Any, Any, ProgramEnd], proxy: ModelProxy) -> ProgramEnd | None:
    """None if the program was stopped because the proxy ended the episode."""
    running, ended = asyncio.ensure_future(program), asyncio.ensure_future(proxy.ended.wait())
    try:
        await asyncio.wait([running, ended], return_when=asyncio.FIRST_COMPLETED)
    finally:
        ended.cancel()
        running.cancel()  # without effect if it has ended
        await asyncio.wait([running, ended])
    return None if running.cancelled() else running.result()


def _describe(end: ProgramEnd | None, proxy: ModelProxy) -> HarnessResult:
    stop: Literal["done", "max_turns", "error"]
    if end is None:
        stop, why, output = "max_turns", "stopped: too many requests to the model", ""
    else:
        stop, why, output = ("error" if end.failed else "done"), end.why, end.output
    if proxy.turns == 0:
        why += "; it never got an answer of the model"
    note = f"{why}; its output ends: {output[-NOTE:]}" if output else why
    return HarnessResult(stop, turns=proxy.turns, tool_calls=0, note=note)
