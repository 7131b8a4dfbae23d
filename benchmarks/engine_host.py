"""What the embedded engine's bookkeeping costs on the host: bursts of decode steps with a model that takes no time.

Pages are reserved, the plan for the device is written, and the tokens are recorded and sent. Only the forward pass and
the sampler are left out: every sequence gets the same token. Times are CPU seconds of this thread. A model that takes
no time gets the longest bursts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.train_step_peers import has
from rollmill.inference.config import EngineConfig
from rollmill.inference.embedded.activity import Activity
from rollmill.inference.embedded.bursts import Bursts
from rollmill.inference.embedded.decode_loop import DecodeLoop
from rollmill.inference.embedded.generation import Generation
from rollmill.inference.embedded.outputs import BurstOutput, StepOutput
from rollmill.inference.embedded.scheduler import Work
from rollmill.inference.engine import GenerateRequest
from rollmill.models.config import ModelConfig
from rollmill.types import PolicyRef, Sampling

MODEL = ModelConfig(vocab_size=64, layers=1, width=16, heads=2, kv_heads=1, head_dim=8, experts=0, max_context=4096)
PROMPT, NEW = 64, 256


class InstantRunner:
    """Writes the plan of each burst, as on a device, and computes nothing."""

    bursts = True

    def __init__(self, loop: DecodeLoop, batch: int) -> None:
        self.model = loop._model
        self._decode: Any = None
        if has("triton"):
            from rollmill.inference.embedded.device_runner import _Decode

            room = 1 << (batch - 1).bit_length()
            self._decode = _Decode(loop._model, loop._cache, room, (PROMPT + NEW) // loop._config.block_size + 1)

    def warm_up(self, rows: int, tokens: int, guessed: int) -> None:
        pass

    def run(self, work: Sequence[Work]) -> StepOutput:
        return StepOutput(list(work), None, torch.zeros(sum(item.completes for item in work), 8))

    def launch(
        self, rows: Sequence[Generation | None], starts: Sequence[int] | None, steps: int
    ) -> Callable[[], BurstOutput]:
        if self._decode is not None and starts is not None:
            self._decode.start(rows, starts)
        elif self._decode is not None:
            self._decode.go_on(rows)
        drawn = np.full((steps, len(rows)), 5, np.int32), np.full((steps, len(rows)), -1.0, np.float32)
        return lambda: BurstOutput(*drawn, None, 0.0)


def host_microseconds(batch: int, bursts: int) -> float:
    """Per sampled token. Half of the sequences are streamed."""
    size = 16
    config = EngineConfig(max_batch=batch, block_size=size, cache_tokens=batch * (PROMPT + NEW), prefill_chunk=1 << 20)
    activity = Activity("engine", "home")
    loop = DecodeLoop(MODEL, config, activity, lambda outbox: None, device=torch.device("cpu"), form="bf16")
    loop.policy = PolicyRef("main", 0, "bf16", "none")
    loop._runner = InstantRunner(loop, batch)
    loop._bursts = Bursts(loop._runner, loop.scheduler, config.stream_seconds)
    for number in range(batch):
        tokens = [number % 64, number // 64, *[1] * (PROMPT - 2)]  # nobody shares a page
        request = GenerateRequest(f"s{number}", tokens, Sampling(max_tokens=NEW))
        loop.scheduler.add(Generation(number, request, number % 2 == 0, PROMPT + NEW, 7, lambda chunk: None))
    for _ in range(3):
        loop._step()
    started, before = time.thread_time(), activity.counters["sampled_tokens_total"]
    for _ in range(bursts):
        loop._step()
        loop._flush()
    return (time.thread_time() - started) / (activity.counters["sampled_tokens_total"] - before) * 1e6
