"""An RL step of 10,000 tokens while an engine decodes on the same device: how long the trainer needs for it.

    python -m benchmarks.rl_step [--quick] [--numerics fast] [--size llama-8b] [--adapter RANK]

The model has SmolLM2-135M's shape, or that of `--size`, and random weights; without CUDA it is small, and so is the
step. With `--adapter` only an adapter is trained, beside weights that stay as they are. A step is what the trainer does
between two groups of rollouts: it packs sequences of 64 to 600 tokens (other lengths every time), computes the policy
gradient and its figures, updates, and exports the weights. A thread publishes them while the next step runs, as in a
run; if it is late, the step waits for it. A process of its own serves the versions: it follows the line and always
decodes 64 requests. Rewards are SYNTHETIC: random advantages for random tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from benchmarks.output import at_most, finish
from benchmarks.swap import SMALL, child, decode_always
from benchmarks.train_step_models import LLAMA_1B, LLAMA_8B, SMOLLM2, draw_
from rollmill.inference.config import EngineConfig
from rollmill.inference.embedded.engine import EmbeddedEngine
from rollmill.inference.follower import EngineFollower
from rollmill.models.config import Adapter, ModelConfig, with_adapter
from rollmill.models.decoder import Decoder
from rollmill.models.device import Device
from rollmill.models.host_tensors import round_to_form_
from rollmill.storage.objects import Objects
from rollmill.training.batching import PackedSequence, SampledFacts, pack
from rollmill.training.config import OptimizerConfig, RLConfig, TrainingConfig
from rollmill.training.memory_estimate import fitted
from rollmill.training.optimizers.master_optimizer import MasterOptimizer
from rollmill.training.publishing.background import Background
from rollmill.training.publishing.exporter import Exporter
from rollmill.training.rl.policy_passes import PolicyGradient, StepSequences
from rollmill.training.single import SINGLE
from rollmill.types import Version
from rollmill.weights.reading.line_follower import LineFollower
from rollmill.weights.reading.weight_store import WeightStore

BATCH = 64 if torch.cuda.is_available() else 4
WARM = 4 if torch.cuda.is_available() else 1  # steps before those that count
Numerics = Literal["fast", "exact"]
SIZES = {"smollm2": SMOLLM2, "llama-1b": LLAMA_1B, "llama-8b": LLAMA_8B | {"layers": 32}}


def serve(directory: Path, config: ModelConfig, device: Device, numerics: Numerics, questions: Connection) -> None:
    """Decodes always. Answers each question with (tokens decoded so far, the version served)."""
    asyncio.run(_serve(directory, config, device, numerics, questions))


async def _serve(
    directory: Path, model: ModelConfig, device: Device, numerics: Numerics, questions: Connection
) -> None:
    config = EngineConfig(max_batch=BATCH, cache_tokens=BATCH * 512, poll_seconds=0.01)
    source = LineFollower(WeightStore(Objects.open(directory)), "main")
    async with EmbeddedEngine(model, config, device=device, exact=numerics == "exact") as engine:
        tasks = [asyncio.create_task(decode_always(engine, number)) for number in range(BATCH)]
        tasks.append(asyncio.create_task(EngineFollower(engine, source, config.poll_seconds).run()))
        with suppress(EOFError):
            while await asyncio.to_thread(questions.recv):
                metrics = engine.metrics()
                questions.send((int(metrics["sampled_tokens_total"]), int(metrics["version"])))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _asked(questions: Connection) -> tuple[int, int]:
    questions.send(True)
    answer: tuple[int, int] = questions.recv()
    return answer


class Trainer:
    """Takes RL steps, and publishes each version while the next step runs."""

    def __init__(self, directory: Path, config: ModelConfig, device: Device, numerics: Numerics) -> None:
        with torch.device(device):
            self._model = Decoder(config, torch.bfloat16 if device == "cuda" else torch.float32)
        draw_(self._model, 1)
        round_to_form_(self._model.parameters())
        if numerics == "exact":
            self._model.compute_exactly()
        settings = fitted(TrainingConfig(snapshot_every=1000), config, torch.device(device))
        self._model.recompute_mlp, self._tokens = bool(settings.recompute_mlp), settings.tokens_per_microbatch
        self._optimizer = MasterOptimizer(self._model, OptimizerConfig(lr=1e-6), "bf16")
        store = WeightStore(Objects.open(directory))
        self._publisher = Exporter(SINGLE, self._model, store, "main", ["bf16"], settings)
        self._writing: Background[float] = Background("publish")
        self.number = 0
        self.publish()

    def publish(self) -> None:
        exported, number = self._publisher.export(self._model), self.number
        self.number += 1

        def write() -> float:
            started = time.perf_counter()
            self._publisher.publish(number, exported, Version("main", number - 1) if number else None, {})
            return time.perf_counter() - started

        self._writing.start(write)

    def wait(self) -> float:
        """Seconds that the publication took."""
        return self._writing.wait() or 0.0

    def step(self, sequences: list[PackedSequence]) -> tuple[float, float]:
        """Seconds: of the step, and of publishing the version before."""
        started = time.perf_counter()
        gradient = PolicyGradient(RLConfig(), None, len(sequences))
        parts = pack(sequences, self._tokens or 1)
        figures = gradient.backward(self._model, StepSequences(parts, [], None), self._optimizer.accumulate, SINGLE)
        assert np.isfinite(figures["loss"])
        assert self._optimizer.update(1e-6).applied
        published = self.wait()
        self.publish()
        return time.perf_counter() - started, published


def drawn(rng: np.random.Generator, tokens: int, vocabulary: int) -> list[PackedSequence]:
    """Sequences of 64 to 600 tokens, `tokens` together. All but the first 32 tokens of each are trained on."""
    found: list[PackedSequence] = []
    while tokens:
        length = int(min(tokens, rng.integers(64, 600)))
        tokens -= length
        ids, rows = rng.integers(0, vocabulary, length + 1), np.arange(min(32, length - 1), length)
        facts = SampledFacts(
            logprobs=np.full(len(rows), -np.log(vocabulary), np.float32),
            temperatures=np.ones(len(rows), np.float32),
            advantages=np.full(len(rows), rng.normal(), np.float32),
            staleness=np.zeros(len(rows), np.int64),
            trajectory=np.full(len(rows), len(found)),
        )
        found.append(PackedSequence(ids[:-1], rows, ids[1:][rows], facts=facts))
    return found


def _steps(trainer: Trainer, tokens: int, vocabulary: int, count: int, seed: int) -> list[tuple[float, float]]:
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        found.append(trainer.step(drawn(rng, tokens, vocabulary)))
        print(f"step {trainer.number - 1}: {found[-1][0]:.3f} s, publishing before it {found[-1][1]:.3f} s", flush=True)
    return found


def measure(
    device: Device, numerics: Numerics, quick: bool, size: str, rank: int | None
) -> tuple[dict[str, float], dict[str, dict[str, Any]]]:
    small = device == "cpu"
    config = ModelConfig.model_validate(SMALL if small else SIZES[size])
    config = with_adapter(config, None if rank is None else Adapter(rank=rank, alpha=2.0 * rank))
    tokens, steps = (200, 3) if small else (10_000, 10 if quick else 30)
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as directory:
        trainer = Trainer(Path(directory), config, device, numerics)
        trainer.wait()
        trainer.publish()
        print("no engine yet", flush=True)
        figures |= _figures("alone", _steps(trainer, tokens, config.vocab_size, steps + WARM, 0)[WARM:])
        print("the engine starts", flush=True)
        with child(serve, Path(directory), config, device, numerics, stop=False) as questions:
            while _asked(questions)[0] < 20 * BATCH:  # until it decodes
                time.sleep(0.05)
            _steps(trainer, tokens, config.vocab_size, WARM, 1)
            before, started = _asked(questions)[0], time.perf_counter()
            figures |= _figures("decoding", _steps(trainer, tokens, config.vocab_size, steps, 2))
            seconds = time.perf_counter() - started
            after, version = _asked(questions)
            figures |= {"engine_tokens_s": (after - before) / seconds, "engine_version": version}
            trainer.wait()
    figures["version"] = trainer.number - 1
    figures["trained_tokens_s"] = tokens / figures["alone_step_s"]
    bars = {} if small or size != "smollm2" else {"decoding_step_s": at_most(figures["decoding_step_s"], 0.15)}
    return figures, bars


def _figures(name: str, times: list[tuple[float, float]]) -> dict[str, float]:
    seconds, publishing = zip(*times, strict=True)
    return {
        f"{name}_step_s": statistics.median(seconds),
        f"{name}_step_s_least": min(seconds),
        f"{name}_step_s_most": max(seconds),
        f"{name}_publish_s": statistics.median(publishing),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    parser.add_argument("--numerics", choices=("fast", "exact"), default="exact")
    parser.add_argument("--size", choices=tuple(SIZES), default="smollm2", help="whose shape the model has")
    parser.add_argument("--adapter", type=int, metavar="RANK", help="train an adapter beside frozen weights")
    options = parser.parse_args()
    device: Device = "cuda" if torch.cuda.is_available() else "cpu"
    figures, bars = measure(device, options.numerics, options.quick, options.size, options.adapter)
    for name, value in figures.items():
        print(f"{name:32} {value:12.4g}")
    finish("rl_step", figures, bars)


if __name__ == "__main__":
    main()
