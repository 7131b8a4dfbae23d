"""Sessions as in a run, sampled with exact numerics and computed again by the trainer: which log-probs differ.

Sessions of two turns start at random moments, so that batches have all sizes. Groups of four share the beginning of
their prompt, prompts are computed in pieces, and new weights arrive in the middle (`recompute_kv`). Every token is
computed again under the version that it names, in micro-batches of several sizes.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.train_step_shapes import draw_
from rollmill.inference.config import EngineConfig
from rollmill.inference.embedded.engine import EmbeddedEngine
from rollmill.inference.engine import GenerateRequest
from rollmill.models.config import ModelConfig
from rollmill.models.decoder import Decoder
from rollmill.models.device import Device, decoder_on
from rollmill.models.host_tensors import load_host, to_host
from rollmill.training.batching import PackedSequence, SampledFacts, pack
from rollmill.training.single import WHOLE
from rollmill.types import PolicyRef, Sampling
from rollmill.weights.format.manifest import describe, root_digest
from rollmill.weights.reading.line_follower import Update

VERSIONS = 3
MICROBATCHES = (1000, 16384)  # tokens


class Sizes(NamedTuple):
    sessions: int
    shared: int  # tokens at the beginning of a group's prompts
    own: int  # most tokens of its own in a prompt
    new: int  # most sampled tokens per turn


class Turn(NamedTuple):
    context: np.ndarray
    start: int  # of the answer
    logprobs: np.ndarray
    numbers: np.ndarray  # of the version that sampled each token


def update_of(model: ModelConfig, number: int, form: str = "bf16", device: Device = "cpu") -> Update:
    """Version `number`, with random weights of its own."""
    decoder = decoder_on(torch.device(device), model, form)
    draw_(decoder, number + 1)
    tensors = dict(to_host(decoder.state_dict(), form))
    policy = PolicyRef("main", number, form, root_digest(describe(tensors)))
    return Update(policy, tensors, None, None, 0, {}, time.time())


def measure(model: ModelConfig, form: str, device: Device, sizes: Sizes, exact: bool = True) -> dict[str, float]:
    updates = [update_of(model, number, form, device) for number in range(VERSIONS)]
    started = time.perf_counter()
    turns, metrics = asyncio.run(_sample(model, updates, device, sizes, exact))
    sampled_s = time.perf_counter() - started
    decoder = decoder_on(torch.device(device), model, form)
    decoder.recompute_mlp = True
    if exact:
        decoder.compute_exactly()
    deltas = {tokens: [delta for update in updates for delta in _deltas(decoder, update, turns, tokens)]
              for tokens in MICROBATCHES}  # fmt: skip
    first = np.concatenate(deltas[MICROBATCHES[0]])
    every = np.concatenate([np.concatenate(each) for each in deltas.values()])
    return {
        "tokens": len(first),
        "differing": int((every != 0).sum()),
        "largest": float(np.abs(every).max()),
        "versions_per_turn": float(np.mean([len(np.unique(turn.numbers)) for turn in turns])),
        "prefix_hit_tokens": metrics["prefix_hit_tokens_total"],
        "sampled_s": sampled_s,
    }


async def _sample(
    model: ModelConfig, updates: list[Update], device: Device, sizes: Sizes, exact: bool
) -> tuple[list[Turn], dict[str, Any]]:
    batch = 256 if device == "cuda" else 16
    longest = -(-(sizes.shared + sizes.own + 2 * sizes.new + 16) // 16) * 16
    config = EngineConfig(
        max_batch=batch,
        cache_tokens=(batch + 8) * longest,
        prefill_chunk=1024 if device == "cuda" else 64,
        max_waiting=sizes.sessions,
        recompute_kv=True,
    )
    form = updates[0].policy.form
    async with EmbeddedEngine(model, config, form=form, device=device, exact=exact) as engine:
        await engine.apply(updates[0])
        tasks = [asyncio.create_task(_converse(engine, number, model, sizes)) for number in range(sizes.sessions)]
        for number, update in enumerate(updates[1:], 1):
            enough = number * sizes.sessions * sizes.new // len(updates)
            while engine.metrics()["sampled_tokens_total"] < enough:
                await asyncio.sleep(0.01)
                for task in tasks:
                    if task.done():
                        task.result()  # raises if the engine broke
            await engine.apply(update)
        turns = [turn for task in tasks for turn in await task]
        return turns, dict(engine.metrics())


async def _converse(engine: EmbeddedEngine, number: int, model: ModelConfig, sizes: Sizes) -> list[Turn]:
    random = np.random.default_rng(number)
    shared = np.random.default_rng(10**6 + number // 4).integers(0, model.vocab_size, sizes.shared).tolist()
    tokens = shared + random.integers(0, model.vocab_size, int(random.integers(1, sizes.own + 1))).tolist()
    await asyncio.sleep(float(random.random()))
    turns = []
    for _ in range(2):
        count = int(random.integers(sizes.new // 2, sizes.new + 1))
        request = GenerateRequest(f"s{number}", list(tokens), Sampling(max_tokens=count, seed=number))
        chunks = [chunk async for chunk in engine.generate(request)]
        sampled = [token for chunk in chunks for token in chunk.tokens]
        logprobs = np.array([each for chunk in chunks for each in chunk.logprobs], np.float32)
        numbers = np.array([chunk.policies[index].number for chunk in chunks for index in chunk.policy])
        turns.append(Turn(np.array(tokens + sampled, np.int64), len(tokens), logprobs, numbers))
        tokens = [*tokens, *sampled, *random.integers(0, model.vocab_size, 7).tolist()]
    return turns


@torch.no_grad()
def _deltas(decoder: Decoder, update: Update, turns: list[Turn], tokens: int) -> list[np.ndarray]:
    """The trainer's log-probs minus the engine's, of the tokens that this version sampled."""
    load_host(decoder, update.tensors)
    found = []
    for part in pack([each for turn in turns for each in _sequences(turn, update.policy.number)], tokens):
        assert part.facts is not None
        found.append(WHOLE.recompute(decoder, part, None).logprobs_M.cpu().numpy() - part.facts.logprobs)
    return found


def _sequences(turn: Turn, number: int) -> list[PackedSequence]:
    """The tokens of one version with their whole context; none if it sampled none."""
    places = np.flatnonzero(turn.numbers == number)
    if not len(places):
        return []
    rows, count = turn.start + places - 1, len(places)
    facts = SampledFacts(
        logprobs=turn.logprobs[places],
        temperatures=np.ones(count, np.float32),
        advantages=np.zeros(count, np.float32),
        staleness=np.zeros(count, np.int64),
        trajectory=np.zeros(count, np.int64),
    )
    return [PackedSequence(turn.context[: rows[-1] + 1], rows, turn.context[rows + 1], facts=facts)]
