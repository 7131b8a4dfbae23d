"""A tiny model, its versions, and the trainer's log-probs for what an engine generated."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from rollmill.inference.config import EngineConfig
from rollmill.inference.embedded.engine import EmbeddedEngine
from rollmill.inference.engine import GenerateChunk, GenerateRequest
from rollmill.models.attention import packed_positions
from rollmill.models.config import ModelConfig
from rollmill.models.decoder import Decoder, DecoderOutput
from rollmill.models.device import Device, decoder_on
from rollmill.models.host_tensors import load_host, to_host
from rollmill.models.moe import Replay
from rollmill.models.packed_attention import packed_attention
from rollmill.types import PolicyRef, Sampling
from rollmill.weights.format.manifest import describe, root_digest
from rollmill.weights.reading.line_follower import Update

TINY = ModelConfig(
    vocab_size=40,
    layers=2,
    width=32,
    heads=4,
    kv_heads=2,
    head_dim=8,
    experts=6,
    experts_per_token=2,
    expert_width=16,
    max_context=256,
)
ENGINE = EngineConfig(max_batch=8, block_size=4, cache_tokens=1024, prefill_chunk=16, stream_seconds=0.0)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
DEVICE: Device = "cpu"  # of engines and of the trainer's models in a test


def use_device(device: Device, monkeypatch: pytest.MonkeyPatch) -> Device:
    """Sets DEVICE for one test. On CUDA a decode step takes a millisecond at least, and one with prompts five: a tiny
    model would answer before a test can pause the engine or change its weights."""
    if device == "cuda":
        if not torch.cuda.is_available():
            pytest.skip("no CUDA device")
        from rollmill.inference.embedded.device_runner import DeviceRunner  # needs triton

        launch, run = DeviceRunner.launch, DeviceRunner.run

        def paced_launch(runner: DeviceRunner, rows: Any, starts: Any, steps: int) -> Any:
            time.sleep(0.001 * steps)
            return launch(runner, rows, starts, steps)

        def paced_run(runner: DeviceRunner, work: Any) -> Any:
            time.sleep(0.005)
            return run(runner, work)

        monkeypatch.setattr(DeviceRunner, "launch", paced_launch)
        monkeypatch.setattr(DeviceRunner, "run", paced_run)
    monkeypatch.setattr("tests.inference.world.DEVICE", device)
    return device


def tolerance() -> float:
    """Tolerance of log-probs of tiny models, engine against trainer: FP32 rounding, or bf16 rounding on a GPU."""
    return 1e-4 if DEVICE == "cpu" else 0.05


def make_update(number: int, config: ModelConfig = TINY) -> Update:
    """Version `number`, with its own random weights."""
    model = Decoder(config)
    model.initialise(number)
    tensors = to_host(model.state_dict())
    policy = PolicyRef("main", number, "bf16", root_digest(describe(tensors)))
    return Update(policy, tensors, None, None, 0, {}, time.time())


def make_model(update: Update, config: ModelConfig = TINY) -> Decoder:
    model = decoder_on(torch.device(DEVICE), config)
    load_host(model, update.tensors)
    return model


@asynccontextmanager
async def engine_at(
    update: Update | None, config: EngineConfig = ENGINE, model: ModelConfig = TINY
) -> AsyncIterator[EmbeddedEngine]:
    async with EmbeddedEngine(model, config, name="engine-test", region="home", device=DEVICE) as engine:
        if update is not None:
            await engine.apply(update)
        yield engine


def request(tokens: list[int] = PROMPT, session: str = "s", **sampling: object) -> GenerateRequest:
    return GenerateRequest(session, list(tokens), Sampling(**{"max_tokens": 12, "seed": 7, **sampling}))


async def until(condition: Callable[[], bool]) -> None:
    """Waits for the condition. The test's timeout ends a wait that is too long."""
    while not condition():  # noqa: ASYNC110 - what is waited for happens in another thread or process
        await asyncio.sleep(0.005)


@dataclass
class Whole:
    """All chunks of one request, joined as the gateway joins them."""

    tokens: list[int]
    logprobs: list[float]
    policies: list[PolicyRef]  # one per token
    routes: dict[int, np.ndarray]  # by position
    last: GenerateChunk
    kept: list[bytes] = field(default_factory=list)  # one per token, or none at all


def put_together(chunks: list[GenerateChunk]) -> Whole:
    routes: dict[int, np.ndarray] = {}
    for chunk in chunks:
        for offset, row in enumerate(() if chunk.routes is None else chunk.routes):
            assert chunk.routes_start + offset not in routes, "a position is reported once"
            routes[chunk.routes_start + offset] = row
    return Whole(
        [token for chunk in chunks for token in chunk.tokens],
        [logprob for chunk in chunks for logprob in chunk.logprobs],
        [chunk.policies[index] for chunk in chunks for index in chunk.policy],
        routes,
        chunks[-1],
        [kept for chunk in chunks for kept in chunk.kept],
    )


async def generate(engine: EmbeddedEngine, wanted: GenerateRequest, *, stream: bool = False) -> Whole:
    return put_together([chunk async for chunk in engine.generate(wanted, stream=stream)])


@torch.no_grad()
def trainer_logprobs(model: Decoder, tokens: list[int], routes: dict[int, np.ndarray] | None = None) -> torch.Tensor:
    """Log-probs of tokens[1:] by the trainer's packed forward pass, with the engine's routes replayed where known."""
    replay = None
    if routes is not None:
        rows = torch.zeros(len(tokens), model.config.moe_layers, model.config.experts_per_token, dtype=torch.long)
        valid = torch.zeros(len(tokens), dtype=torch.bool)
        for position, row in routes.items():
            if position < len(tokens):
                rows[position], valid[position] = torch.from_numpy(row.astype(np.int64)), True
        replay = Replay(rows, valid)
    logprobs = model.logits(trainer_pass(model, tokens, replay).hidden)[:-1].log_softmax(-1).cpu()
    return logprobs.gather(1, torch.tensor(tokens[1:]).unsqueeze(1)).squeeze(1)


@torch.no_grad()
def trainer_pass(model: Decoder, tokens: list[int], replay: Replay | None = None) -> DecoderOutput:
    """The trainer's packed forward pass over one sequence."""
    device, lengths = model.embedding.device, [len(tokens)]
    if replay is not None:
        replay = Replay(replay.routes.to(device), replay.valid.to(device))
    attend = packed_attention(lengths, device, model.embedding.dtype)
    return model(torch.tensor(tokens, device=device), packed_positions(lengths, device), attend, replay)
