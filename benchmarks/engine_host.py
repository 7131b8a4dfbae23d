"""What the embedded engine's bookkeeping costs on the host: decode steps with a model that takes no time.

A step is scheduled, its plan for the device is written, and its tokens are recorded and sent. Only the forward pass and
the sampler are left out: every sequence gets the same token. Times are CPU seconds of this thread.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.train_step_peers import has
from rollmill.inference.config import EngineConfig
from rollmill.inference.embedded.activity import Activity
from rollmill.inference.embedded.decode_loop import DecodeLoop
from rollmill.inference.embedded.generation import Generation
from rollmill.inference.embedded.runner import StepOutput
from rollmill.inference.embedded.scheduler import Work
from rollmill.inference.engine import GenerateRequest
from rollmill.models.config import ModelConfig
from rollmill.types import PolicyRef, Sampling

MODEL = ModelConfig(vocab_size=64, layers=1, width=16, heads=2, kv_heads=1, head_dim=8, experts=0, max_context=4096)
PROMPT, NEW = 64, 256


class InstantRunner:
    """Writes the plan of a decode step, as on a device, and computes nothing."""

    def __init__(self, loop: DecodeLoop, batch: int) -> None:
        self.model = loop._model
        self._decode: Any = None
        if has("triton"):
            from rollmill.inference.embedded.device_runner import _Decode

            room = 1 << (batch - 1).bit_length()
            self._decode = _Decode(loop._model, loop._cache, room, (PROMPT + NEW) // loop._config.block_size + 1)

    def run(self, work: Sequence[Work]) -> StepOutput:
        drawn = torch.tensor([[5.0, -1.0]], dtype=torch.float64).repeat(sum(item.completes for item in work), 1)
        if self._decode is not None and all(item.count == 1 for item in work):
            self._decode.fill(work)
        return StepOutput(list(work), None, torch.zeros(len(drawn), 0), drawn)


def host_microseconds(batch: int, steps: int) -> float:
    """Per sequence and decode step. Half of the sequences are streamed."""
    size = 16
    config = EngineConfig(max_batch=batch, block_size=size, cache_tokens=batch * (PROMPT + NEW), prefill_chunk=1 << 20)
    loop = DecodeLoop(
        MODEL, config, Activity("engine", "home"), lambda outbox: None, device=torch.device("cpu"), form="bf16"
    )
    loop.policy = PolicyRef("main", 0, "bf16", "none")
    loop._runner = InstantRunner(loop, batch)
    for number in range(batch):
        tokens = [number % 64, number // 64, *[1] * (PROMPT - 2)]  # nobody shares a page
        request = GenerateRequest(f"s{number}", tokens, Sampling(max_tokens=NEW))
        loop.scheduler.add(Generation(number, request, number % 2 == 0, PROMPT + NEW, 7, lambda chunk: None))
    for _ in range(4):
        loop._step()
    started = time.thread_time()
    for _ in range(steps):
        loop._step()
        loop._flush()
    return (time.thread_time() - started) / steps / batch * 1e6
