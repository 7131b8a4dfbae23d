"""The vLLM server process of one engine.

It listens on a Unix socket in a temporary directory that only this user can enter: its routes for new weights ask for
no password. It starts with random weights, and ends with the engine (`guard`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import IO

from pydantic import Field

from rollmill.config import Config
from rollmill.errors import ConfigError, EngineError
from rollmill.inference.config import EngineConfig
from rollmill.inference.vllm.generation import MOST_LOGPROBS
from rollmill.inference.vllm.vllm_client import SOCKET
from rollmill.models.config import ModelConfig
from rollmill.models.counts import cache_numbers
from rollmill.models.huggingface.describe import describe_model

BACKEND = "rollmill"  # the name under which `plugin` registers
ENVIRONMENT = ".venv-vllm"
PAGE = 128  # tokens per page of vLLM's KV cache, at most: the last one of each request is partly empty
# What the server needs of our environment. Credentials of stores are not among it.
PASSED = (
    "PATH", "HOME", "LANG", "LC_", "LD_", "TMPDIR", "XDG_CACHE_HOME", "CUDA", "NVIDIA", "NCCL", "OMP_", "TORCH",
    "TRITON", "VLLM_", "PYTHONPATH",
)  # fmt: skip


class VllmSettings(Config):
    python: str | None = Field(
        None,
        description="Python of the environment that has vLLM and Rollmill. Not set: this one if it has vLLM, else "
        f"{ENVIRONMENT} in the current directory or beside this environment, which `scripts/setup-vllm` makes.",
    )
    arguments: tuple[str, ...] = Field(
        (),
        description='Further arguments of `vllm serve`, for example ["--tensor-parallel-size", "2"].',
    )


class Process:
    """Starts when constructed. `ended` is done when the server has ended, with the error."""

    def __init__(
        self,
        model: ModelConfig,
        config: EngineConfig,
        settings: VllmSettings,
        *,
        device: str,
        output: IO[bytes] | None = None,
    ) -> None:
        python = find_python(settings.python)
        self.directory = Path(tempfile.mkdtemp(prefix="rollmill-vllm-"))
        self.ended: Future[None] = Future()
        self.ended.set_running_or_notify_cancel()  # who stops waiting for it does not cancel it
        (self.directory / "config.json").write_text(json.dumps(describe_model(model)))
        command = [python, *arguments(self.directory, model, config, device), *settings.arguments]
        self._guard = subprocess.Popen(
            [sys.executable, "-m", "rollmill.inference.vllm.vllm_guard", str(self.directory), *command],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            env=environment(self.directory, config),
            process_group=0,
        )
        threading.Thread(target=self._watch, name="vllm-watch", daemon=True).start()

    def close(self) -> None:
        """Ends the server and all its processes."""
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        self._guard.wait()

    def _watch(self) -> None:
        self._guard.wait()
        self.ended.set_exception(EngineError("the vLLM server has ended", hint="the engine's log says why"))


def find_python(given: str | None) -> str:
    """The interpreter of the environment that has vLLM."""
    folders = [Path.cwd(), Path(sys.prefix).parent]
    places = [Path(given).expanduser()] if given else [folder / ENVIRONMENT / "bin" / "python" for folder in folders]
    if given is None and any((Path(folder) / "vllm").is_dir() for folder in sys.path):
        return sys.executable
    found = next((place for place in places if os.access(place, os.X_OK)), None)
    if found is None:
        raise ConfigError(
            f"vLLM was not found: there is no {', nor '.join(map(str, dict.fromkeys(places)))}",
            hint="`scripts/setup-vllm` makes an environment for it, or set `python` of [[engines]]",
        )
    return str(found.absolute())


def arguments(directory: Path, model: ModelConfig, config: EngineConfig, device: str) -> list[str]:
    """`vllm serve`, for a model with random weights and the sizes of [engine]."""
    if config.fp8_kv and device == "cpu":
        raise ConfigError("engine.fp8_kv: vLLM keeps no FP8 keys and values on a CPU", hint="turn it off")
    width, context = 4 if device == "cpu" else 1 if config.fp8_kv else 2, min(model.max_context, config.cache_tokens)
    options = {
        "uds": str(directory / SOCKET),
        "load-format": "dummy",
        "dtype": "float32" if device == "cpu" else "bfloat16",
        "max-model-len": context,
        "max-num-seqs": config.max_batch,
        "max-num-batched-tokens": max(config.prefill_chunk, config.max_batch, context if device == "cpu" else 0),
        "kv-cache-memory-bytes": (config.cache_tokens + config.max_batch * PAGE) * cache_numbers(model) * width,
        "scheduling-policy": "priority",
        "max-logprobs": MOST_LOGPROBS + 1,
        "logprobs-mode": "processed_logprobs",
        "generation-config": "vllm",
        "weight-transfer-config": json.dumps({"backend": BACKEND}),
    }
    options |= {"kv-cache-dtype": "fp8"} if config.fp8_kv else {}
    switches = ["--skip-tokenizer-init", "--disable-uvicorn-access-log", "--enable-scale-out"]  # tokens in and out
    if device == "cpu":
        switches.append("--enforce-eager")  # a compiled graph would keep the packed weights of its first version
        switches.append("--no-enable-chunked-prefill")  # 0.32 ends when it computes a part of a prompt with a seed
    written = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    # not `vllm serve`: the command asks for the version of the package vllm, which the build for CPUs is not called
    return ["-m", "vllm.entrypoints.openai.api_server", "--model", str(directory), *written, *switches]


def environment(directory: Path, config: EngineConfig) -> dict[str, str]:
    passed = {name: value for name, value in os.environ.items() if name.startswith(PASSED)}
    fixed: Mapping[str, str] = {
        "VLLM_SERVER_DEV_MODE": "1",  # the routes for pauses and new weights
        "VLLM_PLUGINS": "rollmill",
        "VLLM_RPC_BASE_PATH": str(directory),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(config.threads),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # engines may share cores
    }
    return {**passed, **fixed}
