"""Engines that must all hold the contract: the embedded one, and a real vLLM server process with our engine before it.

vLLM is a large download with an environment of its own, so its part runs with `scripts/test --vllm` only, which sets
ROLLMILL_TEST_VLLM. One server per model is started for all tests: it takes about a minute.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from rollmill.inference.config import EngineConfig
from rollmill.inference.embedded.engine import EmbeddedEngine
from rollmill.inference.engine import Engine
from rollmill.inference.vllm.engine import VllmEngine
from rollmill.inference.vllm.vllm_client import Client
from rollmill.inference.vllm.vllm_process import Process, VllmSettings
from rollmill.models.config import ModelConfig

DENSE = ModelConfig(
    vocab_size=96, layers=2, width=64, heads=2, kv_heads=1, head_dim=32, mlp_width=128, experts=0, max_context=256
)
MIXTURE = DENSE.model_copy(update={"experts": 4, "experts_per_token": 2, "expert_width": 64})
SETTINGS = EngineConfig(max_batch=8, block_size=16, cache_tokens=4096, prefill_chunk=256, stream_seconds=0.0)

Opened = AbstractAsyncContextManager[Engine]
Open = Callable[..., Opened]


@pytest.fixture(scope="session", autouse=True)
def vllm_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Process]]:
    """Both start at once, when the first test of this folder runs."""
    servers: dict[str, Process] = {}
    with contextlib.ExitStack() as stack:
        if os.environ.get("ROLLMILL_TEST_VLLM"):
            for name, model in {"dense": DENSE, "mixture": MIXTURE}.items():
                log = stack.enter_context((_logs(tmp_path_factory) / f"vllm-{name}.log").open("wb"))
                servers[name] = Process(model, SETTINGS, VllmSettings(), device="cpu", output=log)
                stack.callback(servers[name].close)
        yield servers


def _logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(os.environ.get("ROLLMILL_TEST_VLLM_LOGS") or tmp_path_factory.mktemp("vllm"))


@pytest.fixture(params=["embedded", "vllm"])
def kind(request: pytest.FixtureRequest) -> str:
    if request.param == "vllm" and not os.environ.get("ROLLMILL_TEST_VLLM"):
        pytest.skip("scripts/test --vllm runs it")
    return str(request.param)


@pytest.fixture
def open_engine(kind: str, vllm_servers: dict[str, Process]) -> Open:
    """Opens an engine without weights: open_engine(model=DENSE, **settings)."""

    @contextlib.asynccontextmanager
    async def opened(model: ModelConfig = DENSE, **settings: object) -> AsyncIterator[Engine]:
        config = SETTINGS.model_copy(update=settings)
        if kind == "embedded":
            async with EmbeddedEngine(model, config, name="engine-test") as engine:
                yield engine
        else:
            process = vllm_servers["mixture" if model.experts else "dense"]
            assert not process.ended.done(), "the server has ended"
            server = Client(process.directory)
            async with VllmEngine(server, model, config, name="engine-test", ended=process.ended) as engine:
                yield engine

    return opened
