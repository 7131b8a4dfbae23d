"""Exact numerics beside fast ones: what they cost in the engine and in a training step, and which bits differ.

    python -m benchmarks.exact [--quick] [--only CELL]

Both modes take turns in one run, and each figure is the median of its rounds:

    engine     tokens per second of a batch of requests, prefill included
    step       seconds of a step on the sampled answers: log-probs, backward pass, update
    differing  log-probs of the sampled tokens that the trainer does not find bit for bit, with k3 of the difference
    sessions   the same for sessions as in a run: prompts of a group share their beginning, sessions continue, prefill
               is computed in pieces, and new weights arrive in the middle (`recompute_kv`). Every token is computed
               again under the version that it names, in micro-batches of several sizes

On a GPU the models have the sizes of `benchmarks.engine`, and sessions sample over 100,000 tokens each.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.engine import SMALL
from benchmarks.output import at_most, finish
from benchmarks.train_step_models import LLAMA_1B, MIXTURE, SMOLLM2, draw_
from rollmill.inference.config import EngineConfig
from rollmill.inference.embedded.engine import EmbeddedEngine
from rollmill.inference.engine import GenerateRequest
from rollmill.models.config import ModelConfig
from rollmill.models.decoder import Decoder
from rollmill.models.device import Device, decoder_on
from rollmill.models.host_tensors import load_host, to_host
from rollmill.training.batching import MicroBatch, PackedSequence, SampledFacts, pack
from rollmill.training.config import OptimizerConfig
from rollmill.training.optimizers.master_optimizer import MasterOptimizer
from rollmill.training.single import SINGLE
from rollmill.types import PolicyRef, Sampling
from rollmill.weights.format.manifest import describe, root_digest
from rollmill.weights.reading.line_follower import Update

MODES = ("fast", "exact")
VERSIONS = 3  # that sessions see
MICROBATCHES = (1000, 16384)  # tokens
TRAINED = {"cpu": 1024, "cuda": 16384}  # tokens of a step
DEVICE: Device = "cuda" if torch.cuda.is_available() else "cpu"
SMALL_MIXTURE = SMALL | {"experts": 16, "experts_per_token": 4, "expert_width": 128}


class Sizes(NamedTuple):
    sessions: int
    shared: int  # tokens at the beginning of a group's prompts
    own: int  # most tokens of its own in a prompt
    new: int  # most sampled tokens per turn


class Cell(NamedTuple):
    """`batch` prompts of `prompt` tokens, `new` sampled tokens each; every mode has `rounds` turns."""

    name: str
    shape: dict[str, Any]
    batch: int
    prompt: int
    new: int
    rounds: int = 3

    @property
    def model(self) -> ModelConfig:
        return ModelConfig.model_validate(self.shape)

    def prompts(self, number: int) -> list[list[int]]:
        random = np.random.default_rng(number)
        return random.integers(0, self.shape["vocab_size"], (self.batch, self.prompt)).tolist()


def cells(quick: bool) -> list[Cell]:
    if DEVICE == "cuda":
        found = [Cell("dense_256", SMOLLM2, 256, 128, 256), Cell("mixture_256", MIXTURE, 256, 128, 256)]
        if not quick:
            found += [Cell("dense_1", SMOLLM2, 1, 128, 256), Cell("dense_1024", SMOLLM2, 1024, 128, 256)]
            found += [Cell("llama_1b_256", LLAMA_1B, 256, 128, 256)]
        return found
    if quick:
        return [
            Cell("small_1", SMALL, 1, 64, 48),
            Cell("small_32", SMALL, 32, 64, 48),
            Cell("small_mixture_32", SMALL_MIXTURE, 32, 64, 48),
        ]
    # a mixture of fewer layers: the whole one does not fit the memory of a laptop in FP32 with its optimizer
    return [Cell("dense_32", SMOLLM2, 32, 64, 32), Cell("mixture_32", MIXTURE | {"layers": 2}, 32, 64, 32)]


def sessions() -> list[tuple[str, dict[str, Any], str, Sizes]]:
    """(name, shape, form, sizes)."""
    if DEVICE == "cuda":
        many = Sizes(sessions=600, shared=200, own=200, new=128)
        fewer = MIXTURE | {"layers": 4}
        return [("dense", SMOLLM2, "bf16", many), ("mixture", fewer, "bf16", many), ("mixture_fp8", fewer, "fp8", many)]
    few = Sizes(sessions=24, shared=40, own=40, new=24)
    return [("small", SMALL, "bf16", few), ("small_mixture", SMALL_MIXTURE, "bf16", few)]


@dataclass
class Measured:
    """Of one mode."""

    rates: list[float] = field(default_factory=list)  # tokens per second
    steps: list[float] = field(default_factory=list)  # seconds
    deltas: list[np.ndarray] = field(default_factory=list)  # of the log-probs


def measure(cell: Cell) -> dict[str, float]:
    update = update_of(cell.model, 0)
    found = {mode: Measured() for mode in MODES}
    answers = asyncio.run(_decode(cell, update, found))
    for mode in MODES:
        model = _model(cell, update)
        if mode == "exact":
            model.compute_exactly()
        for part in pack(answers[mode], 4096):
            assert part.facts is not None
            with torch.no_grad():
                logprobs_M = SINGLE.passes.recompute(model, part, None).logprobs_M.cpu().numpy()
            found[mode].deltas.append(logprobs_M - part.facts.logprobs)
    del model
    _train(cell, update, pack(answers["exact"], TRAINED[DEVICE])[0], found)
    return _figures(cell, found)


def _model(cell: Cell, update: Update) -> Decoder:
    model = decoder_on(torch.device(DEVICE), cell.model)
    load_host(model, update.tensors)
    model.recompute_mlp = True
    return model


async def _decode(cell: Cell, update: Update, found: dict[str, Measured]) -> dict[str, list[PackedSequence]]:
    """Returns the answers of each mode, ready to be trained on."""
    length = -(-(cell.prompt + cell.new) // 16) * 16
    config = EngineConfig(
        max_batch=cell.batch,
        cache_tokens=2 * cell.batch * length,
        prefill_chunk=16384 if DEVICE == "cuda" else 512,
        threads=torch.get_num_threads(),
    )
    answers: dict[str, list[PackedSequence]] = {mode: [] for mode in MODES}
    engines = {mode: EmbeddedEngine(cell.model, config, device=DEVICE, exact=mode == "exact") for mode in MODES}
    for engine in engines.values():
        await engine.__aenter__()
        await engine.apply(update)
        await asyncio.gather(*(_answer(engine, 0, tokens, 4) for tokens in cell.prompts(1000)))
    for number in range(cell.rounds):
        for mode in MODES if number % 2 else reversed(MODES):
            started = time.perf_counter()
            prompts = enumerate(cell.prompts(number))
            done = await asyncio.gather(*(_answer(engines[mode], index, each, cell.new) for index, each in prompts))
            found[mode].rates.append(cell.batch * cell.new / (time.perf_counter() - started))
            answers[mode] += done
    for engine in engines.values():
        await engine.__aexit__()
    return answers


async def _answer(engine: EmbeddedEngine, number: int, tokens: list[int], new: int) -> PackedSequence:
    request = GenerateRequest(f"s{tokens[:4]}", tokens, Sampling(max_tokens=new, seed=number))
    chunks = [chunk async for chunk in engine.generate(request)]
    sampled = [token for chunk in chunks for token in chunk.tokens]
    rows = np.arange(len(tokens) - 1, len(tokens) - 1 + len(sampled))
    facts = _facts(np.array([logprob for chunk in chunks for logprob in chunk.logprobs], np.float32))
    return PackedSequence(np.array(tokens + sampled[:-1]), rows, np.array(sampled), facts=facts)


def _facts(logprobs: np.ndarray) -> SampledFacts:
    """The engine's log-probs, for a pass that only computes them again."""
    zeros = np.zeros(len(logprobs), np.int64)
    ones = np.ones(len(logprobs), np.float32)
    return SampledFacts(logprobs, temperatures=ones, advantages=0 * ones, staleness=zeros, trajectory=zeros)


def _train(cell: Cell, update: Update, part: MicroBatch, found: dict[str, Measured]) -> None:
    """The first step of each mode is not counted."""
    model = _model(cell, update)
    optimizer = MasterOptimizer(model, OptimizerConfig(), "bf16")
    modules = [module for module in model.modules() if hasattr(module, "exact")]
    for number in range(cell.rounds + 1):
        for mode in MODES if number % 2 else reversed(MODES):
            for module in modules:
                module.exact = mode == "exact"  # type: ignore[assignment]
            started = time.perf_counter()
            logprobs_M = SINGLE.passes.recompute(model, part, None).logprobs_M
            (-logprobs_M.sum() / len(logprobs_M)).backward()
            optimizer.update(1e-6)
            if DEVICE == "cuda":
                torch.cuda.synchronize()
            if number:
                found[mode].steps.append(time.perf_counter() - started)


def _figures(cell: Cell, found: dict[str, Measured]) -> dict[str, float]:
    figures: dict[str, float] = {}
    for mode, measured in found.items():
        deltas = np.concatenate(measured.deltas).astype(np.float64)
        figures |= {
            f"engine_{mode}": statistics.median(measured.rates),
            f"step_{mode}_s": statistics.median(measured.steps),
            f"tokens_{mode}": len(deltas),
            f"differing_{mode}": int((deltas != 0).sum()),
            f"k3_{mode}": float(np.mean(np.expm1(deltas) - deltas)),
        }
    figures["engine_slowdown"] = figures["engine_fast"] / figures["engine_exact"]
    figures["step_slowdown"] = figures["step_exact_s"] / figures["step_fast_s"]
    return {f"{cell.name}_{name}": value for name, value in figures.items()}


# --- sessions


class Turn(NamedTuple):
    context: np.ndarray
    start: int  # of the answer
    logprobs: np.ndarray
    numbers: np.ndarray  # of the version that sampled each token


def update_of(model: ModelConfig, number: int, form: str = "bf16") -> Update:
    """Version `number`, with random weights of its own."""
    decoder = decoder_on(torch.device(DEVICE), model, form)
    draw_(decoder, number + 1)
    tensors = dict(to_host(decoder.state_dict(), form))
    policy = PolicyRef("main", number, form, root_digest(describe(tensors)))
    return Update(policy, tensors, None, None, 0, {}, time.time())


def measure_sessions(model: ModelConfig, form: str, sizes: Sizes) -> dict[str, float]:
    updates = [update_of(model, number, form) for number in range(VERSIONS)]
    started = time.perf_counter()
    turns, metrics = asyncio.run(_sample(model, updates, sizes))
    sampled_s = time.perf_counter() - started
    decoder = decoder_on(torch.device(DEVICE), model, form)
    decoder.recompute_mlp = True
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


async def _sample(model: ModelConfig, updates: list[Update], sizes: Sizes) -> tuple[list[Turn], dict[str, Any]]:
    batch = 256 if DEVICE == "cuda" else 16
    longest = -(-(sizes.shared + sizes.own + 2 * sizes.new + 16) // 16) * 16
    config = EngineConfig(
        max_batch=batch,
        cache_tokens=(batch + 8) * longest,
        prefill_chunk=1024 if DEVICE == "cuda" else 64,
        max_waiting=sizes.sessions,
        recompute_kv=True,
    )
    form = updates[0].policy.form
    async with EmbeddedEngine(model, config, form=form, device=DEVICE, exact=True) as engine:
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
        found.append(SINGLE.passes.recompute(decoder, part, None).logprobs_M.cpu().numpy() - part.facts.logprobs)
    return found


def _sequences(turn: Turn, number: int) -> list[PackedSequence]:
    """The tokens of one version with their whole context; none if it sampled none."""
    places = np.flatnonzero(turn.numbers == number)
    if not len(places):
        return []
    rows, facts = turn.start + places - 1, _facts(turn.logprobs[places])
    return [PackedSequence(turn.context[: rows[-1] + 1], rows, turn.context[rows + 1], facts=facts)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small models; on a GPU fewer of them")
    parser.add_argument("--only", help="the cell with this name, `sessions`, or sessions_NAME")
    options, figures, bars = parser.parse_args(), dict[str, float](), dict[str, dict[str, Any]]()
    for name, shape, form, sizes in sessions():
        if options.only not in (None, "sessions", f"sessions_{name}"):
            continue
        measured = measure_sessions(ModelConfig.model_validate(shape), form, sizes)
        print(name, measured, flush=True)
        figures |= {f"sessions_{name}_{key}": value for key, value in measured.items()}
        bars[f"sessions_{name}_differing"] = at_most(measured["differing"], 0)
    for cell in cells(options.quick):
        if options.only not in (None, cell.name):
            continue
        found = measure(cell)
        figures |= found
        for name, bar in (("engine_slowdown", 1.15), ("step_slowdown", 1.2), ("differing_exact", 0)):
            bars[f"{cell.name}_{name}"] = at_most(found[f"{cell.name}_{name}"], bar)
    for name, value in figures.items():
        print(f"{name:44} {value:12.4g}")
    finish("exact", figures, bars)


if __name__ == "__main__":
    main()
