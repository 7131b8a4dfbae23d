"""Exact numerics beside fast ones: what they cost in the engine and in a training step, and which bits differ.

    python -m benchmarks.exact [--quick] [--only CELL]

Both modes take turns in one run, and each figure is the median of its rounds:

    engine     tokens per second of a batch of requests, prefill included
    step       seconds of a step on the sampled answers: log-probs, backward pass, update
    differing  log-probs of the sampled tokens that the trainer does not find bit for bit, with k3 of the difference
    sessions   the same for sessions as in a run (exact_sessions)

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

from benchmarks import exact_sessions
from benchmarks.engine import SMALL
from benchmarks.exact_sessions import Sizes, update_of
from benchmarks.output import at_most, finish
from benchmarks.train_step_shapes import LLAMA_1B, MIXTURE, SMOLLM2
from rollmill.inference.config import EngineConfig
from rollmill.inference.embedded.engine import EmbeddedEngine
from rollmill.inference.engine import GenerateRequest
from rollmill.models.config import ModelConfig
from rollmill.models.decoder import Decoder
from rollmill.models.device import Device, decoder_on
from rollmill.models.host_tensors import load_host
from rollmill.training.batching import MicroBatch, PackedSequence, SampledFacts, pack
from rollmill.training.config import OptimizerConfig
from rollmill.training.optimizers.master_optimizer import MasterOptimizer
from rollmill.training.single import WHOLE
from rollmill.types import Sampling
from rollmill.weights.reading.line_follower import Update

MODES = ("fast", "exact")
TRAINED = {"cpu": 1024, "cuda": 16384}  # tokens of a step
DEVICE: Device = "cuda" if torch.cuda.is_available() else "cpu"
SMALL_MIXTURE = SMALL | {"experts": 16, "experts_per_token": 4, "expert_width": 128}


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
    update = update_of(cell.model, 0, device=DEVICE)
    found = {mode: Measured() for mode in MODES}
    answers = asyncio.run(_decode(cell, update, found))
    for mode in MODES:
        model = _model(cell, update)
        if mode == "exact":
            model.compute_exactly()
        for part in pack(answers[mode], 4096):
            assert part.facts is not None
            with torch.no_grad():
                logprobs_M = WHOLE.recompute(model, part, None).logprobs_M.cpu().numpy()
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
    rows, zeros = np.arange(len(tokens) - 1, len(tokens) - 1 + len(sampled)), np.zeros(len(sampled), np.int64)
    facts = SampledFacts(
        logprobs=np.array([logprob for chunk in chunks for logprob in chunk.logprobs], np.float32),
        temperatures=np.ones(len(sampled), np.float32),
        advantages=zeros.astype(np.float32),
        staleness=zeros,
        trajectory=zeros,
    )
    return PackedSequence(np.array(tokens + sampled[:-1]), rows, np.array(sampled), facts=facts)


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
            logprobs_M = WHOLE.recompute(model, part, None).logprobs_M
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
        for name, values in (("engine", measured.rates), ("step", measured.steps)):
            print(f"{cell.name} {name} {mode}: {', '.join(f'{value:.4g}' for value in values)}")
    figures["engine_slowdown"] = figures["engine_fast"] / figures["engine_exact"]
    figures["step_slowdown"] = figures["step_exact_s"] / figures["step_fast_s"]
    return {f"{cell.name}_{name}": value for name, value in figures.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small models; on a GPU fewer of them")
    parser.add_argument("--only", help="the cell with this name, `sessions`, or sessions_NAME")
    options, figures, bars = parser.parse_args(), dict[str, float](), dict[str, dict[str, Any]]()
    for name, shape, form, sizes in sessions():
        if options.only not in (None, "sessions", f"sessions_{name}"):
            continue
        measured = exact_sessions.measure(ModelConfig.model_validate(shape), form, DEVICE, sizes)
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
