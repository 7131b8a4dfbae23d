"""vLLM as a kind of `[[engines]]`."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from rollmill.errors import ConfigError
from rollmill.inference.engine import EngineContext
from rollmill.inference.vllm.engine import VllmEngine
from rollmill.inference.vllm.handover import FORM
from rollmill.inference.vllm.vllm_client import Client
from rollmill.inference.vllm.vllm_process import Process, VllmSettings

if TYPE_CHECKING:
    from rollmill.models.device import Device


class Vllm:
    """A vLLM server, started and ended by the engine process."""

    def __init__(self, config: VllmSettings) -> None:
        self._settings = config

    @contextlib.asynccontextmanager
    async def open(self, context: EngineContext) -> AsyncIterator[VllmEngine]:
        if context.form != FORM:
            raise ConfigError(f"a vLLM engine serves {FORM}, not {context.form}", hint=f'set form = "{FORM}"')
        process = Process(context.model, context.settings, self._settings, device=_device(context.device))
        try:
            server = Client(process.directory)
            named = {"name": context.name, "region": context.region}
            async with VllmEngine(server, context.model, context.settings, ended=process.ended, **named) as engine:
                yield engine
        finally:
            process.close()


def _device(wanted: Device) -> str:
    """`auto` is the GPU if there is one."""
    from rollmill.models.device import choose_device  # torch

    return choose_device(wanted).type
