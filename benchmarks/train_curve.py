"""The loss over 200 steps in fp8 and in bf16, from the same weights and on the same tokens.

    python -m benchmarks.train_curve [--quick] [--seeds N] [--emulated]

Layers of Llama-3-8B's width (4096, MLP 14336), byte by byte on the text of this repository, in sequences of 2048. Each
seed draws the weights and the order of the text; fp8 and bf16 share both. Noise is the spread of bf16's final losses
over the seeds, and a final loss is the mean of the last 20 steps. On a GPU that multiplies FP8, products of the layers
and the gradients of layers and head are in FP8. Without CUDA a tiny model runs, whose products are emulated, without
bars. `--emulated`, a SIMULATION of the GPU's gradients: without CUDA, 200 steps of a small model in FP32, whose
gradients are those of the codes too.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import numpy as np
import torch

from benchmarks.output import at_most, finish
from benchmarks.train_step import NextTokenStep
from benchmarks.train_step_shapes import LLAMA_8B, SMOLLM2, TINY, draw_
from rollmill.models.config import ModelConfig
from rollmill.models.decoder import Decoder
from rollmill.models.host_tensors import round_to_form_
from rollmill.models.kernels.quantised import fp8
from rollmill.training import step
from rollmill.training.batching import MicroBatch, PackedSequence, pack
from rollmill.training.config import OptimizerConfig
from rollmill.training.optimizers.master_optimizer import MasterOptimizer, learning_rate

LAST = 20  # steps whose mean is the final loss
CONFIG = OptimizerConfig(lr=2e-4, warmup_steps=20, max_grad_norm=1.0)
ROOT = Path(__file__).parent.parent


def text() -> np.ndarray:
    """The repository's own text as bytes, always in the same order."""
    files = sorted(path for folder in ("rollmill", "docs", "tests") for path in (ROOT / folder).rglob("*.[pm][yd]"))
    return np.frombuffer(b"".join(path.read_bytes() for path in files), np.uint8)


def batches(data: np.ndarray, steps: int, sequences: int, length: int, seed: int) -> list[MicroBatch]:
    starts = np.random.default_rng(seed).integers(0, len(data) - length - 1, (steps, sequences))
    found = []
    for row in starts:
        pieces = [data[start : start + length + 1].astype(np.int64) for start in row]
        packed = [PackedSequence(tokens=p[:-1], rows=np.arange(length), targets=p[1:]) for p in pieces]
        (part,) = pack(packed, sequences * length)
        found.append(part)
    return found


def curve(config: ModelConfig, device: str, form: str, seed: int, parts: list[MicroBatch]) -> list[float]:
    with torch.device(device):
        model = Decoder(config, torch.bfloat16 if device == "cuda" else torch.float32, form)
    draw_(model, seed)
    round_to_form_(model.parameters(), "bf16")
    take = NextTokenStep(model, MasterOptimizer(model, CONFIG, form))
    return [take([part], learning_rate(CONFIG, number, len(parts)))[0] for number, part in enumerate(parts, 1)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two seeds, and fewer tokens per step")
    parser.add_argument("--seeds", type=int, default=None)
    parser.add_argument("--emulated", action="store_true", help="on the CPU, with gradients in emulated FP8")
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() and not given.emulated else "cpu"
    if given.emulated:  # as on Hopper, but for products of any size
        step.PIECE_ELEMENTS = 0  # the head in chunks
        fp8.differentiates = fp8.differentiates_head = lambda _, weight: not any(size % 128 for size in weight.shape)
    seeds = given.seeds or (2 if given.quick else 3)
    if device == "cuda":
        shape, length, sequences, steps = (
            LLAMA_8B | {"vocab_size": 512, "layers": 2},
            2048,
            2 if given.quick else 4,
            200,
        )
    elif given.emulated:
        sizes = {"width": 128, "head_dim": 32, "mlp_width": 256, "vocab_size": 256, "max_context": 256}
        shape, length, sequences, steps = SMOLLM2 | TINY | sizes | {"tie_embeddings": False}, 256, 2, 200
    else:
        shape, length, sequences, steps = SMOLLM2 | TINY | {"mlp_width": 128}, 64, 2, 30
    config, data = ModelConfig.model_validate(shape), text()
    found: dict[str, list[list[float]]] = {"bf16": [], "fp8": []}
    for seed in range(seeds):
        parts = batches(data, steps, sequences, length, seed)
        for form, curves in found.items():
            started = time.perf_counter()
            curves.append(curve(config, device, form, seed, parts))
            every = " ".join(f"{loss:.3f}" for loss in curves[-1][:: max(1, steps // 10)])
            print(f"{form:5} seed {seed} {time.perf_counter() - started:6.1f} s: {every} … {_final(curves[-1]):.4f}")
    finals = {form: [_final(curve) for curve in curves] for form, curves in found.items()}
    difference = statistics.mean(fp8 - bf16 for fp8, bf16 in zip(finals["fp8"], finals["bf16"], strict=True))
    noise = max(finals["bf16"]) - min(finals["bf16"])
    figures = {
        "bf16_final_loss": statistics.mean(finals["bf16"]),
        "fp8_final_loss": statistics.mean(finals["fp8"]),
        "difference": difference,
        "noise": noise,
        "steps": steps,
        "seeds": seeds,
    }
    finish("train_curve", figures, {"fp8_difference": at_most(abs(difference), noise)} if device == "cuda" else {})


def _final(losses: list[float]) -> float:
    return statistics.mean(losses[-LAST:])


if __name__ == "__main__":
    main()
