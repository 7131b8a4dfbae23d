"""One training step, compared: ours, `transformers` compiled by torch, and the same with `liger-kernel`.

    python -m benchmarks.train_step [--quick] [--only SHAPE …] [--ours] [--plain]

Forward, backward and AdamW on 32k tokens in sequences of 2048: a dense model of the shape of SmolLM2-135M and a mixture
of experts (16 layers, width 1024, 32 experts of 512, top-4), with random weights; then on 16k tokens the shapes of
Llama-3.2-1B, 8 layers of Llama-3-8B and 6 layers of Qwen3-30B-A3B. Whether "ours" keeps its MLPs follows from the GPU's
memory, as in a run. All sides have the same weights and tokens, compute in bf16 with FP32 masters and moments, and
scale gradients by their norm. Their first losses must agree. `--adapter RANK` trains adapters beside whole models,
Llama-3.2-1B, Llama-3-8B and Qwen3-30B-A3B; the peer is then PEFT. Only rows that say "same bits" are deterministic (a
run is unless training.deterministic is off). "ragged": the same tokens in sequences of all lengths, as in a run. "fp8"
and "nvfp4": weights and activations in that form. Compilation and warm-up are not timed. Shares are of 790 TFLOP/s,
counting 6 operations per token and active parameter. The floor is the least time an H200 could take by operations and
by bytes. Without a CUDA device a tiny version runs on the CPU, uncompiled and without bars.

Of transformers' implementations of experts the grouped product is used. The batched one gathers the weights per token,
which does not fit into memory at this size. The loop over experts breaks the compiled graph.
"""

from __future__ import annotations

import argparse
import functools
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from benchmarks import train_step_models as models
from benchmarks.output import at_least, at_most, finish
from rollmill.models.decoder import Decoder
from rollmill.models.host_tensors import round_to_form_
from rollmill.training.batching import MicroBatch, PackedSequence, pack
from rollmill.training.config import OptimizerConfig, TrainingConfig
from rollmill.training.memory_estimate import fitted
from rollmill.training.numerics.next_token import NextTokenPasses
from rollmill.training.optimizers.master_optimizer import MasterOptimizer, Update
from rollmill.training.reproducible import fix_bits

LR = 1e-4
CONFIG = OptimizerConfig(lr=LR, max_grad_norm=1.0)
LOSS_TOLERANCE = 1e-2  # of a loss of about 11: activations are rounded in other places, which changes a few experts
SIZES = {"llama-1b": (1.2, 0.85), "llama-8b": (1.15, 0.85), "qwen3-30b": (1.8, None)}  # speedup, share of memory
ADAPTERS = {"llama-8b": 12_500, "qwen3-30b": 12_000}  # tokens/s
Step = Callable[[], float]


class Result(NamedTuple):
    loss: float  # of the first step
    seconds: list[float]
    peak_bytes: int | None
    error: str | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def measure(make: Callable[[], Step], repeats: int, warmup: int) -> Result:
    """Times the steps one by one. The device is idle before and after each."""
    cuda = torch.cuda.is_available()
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        step = make()
        # the peak over all steps: the memory of a CUDA graph is counted when it is recorded
        losses = [step() for _ in range(warmup)]
        seconds = [_timed(step) for _ in range(repeats)]
        return Result(losses[0], seconds, torch.cuda.max_memory_allocated() if cuda else None)
    except Exception as error:  # a side that cannot run is reported, and the others still run
        return Result(float("nan"), [float("nan")], None, f"{type(error).__name__}: {error}"[:500])
    finally:
        gc.collect()
        torch.compiler.reset()


def _timed(step: Step) -> float:
    started = time.perf_counter()
    step()  # returns the loss as a number, so the device has finished
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started


class NextTokenStep:
    """Updates of a model on the next-token loss, outside of any run."""

    def __init__(
        self, model: Decoder, optimizer: MasterOptimizer, *, balance: float = 0.0, graphs: bool = True
    ) -> None:
        self._passes, self._optimizer = NextTokenPasses(model, balance, graphs), optimizer

    def __call__(self, parts: Sequence[MicroBatch], lr: float) -> tuple[float, Update]:
        """One update on all targets of the micro-batches. Returns their mean loss."""
        targets = sum(len(part.targets_M) for part in parts)
        tokens = sum(len(part.tokens_N) for part in parts)
        losses = []
        for part in parts:
            losses.append(self._passes(part, targets, tokens)[0])
            if len(parts) > 1:
                self._optimizer.accumulate()
        update = self._optimizer.update(lr)
        return float(torch.stack(losses).sum()), update


class Batch(NamedTuple):
    tokens: np.ndarray  # [sequences, length]
    targets: np.ndarray


def batch_of(shape: models.Shape) -> Batch:
    drawn = np.random.default_rng(0).integers(0, shape.model.vocab_size, (shape.sequences, shape.length + 1))
    return Batch(np.ascontiguousarray(drawn[:, :-1]), np.ascontiguousarray(drawn[:, 1:]))


def model_of(shape: models.Shape, device: str, form: str = "bf16") -> Decoder:
    """The same random weights every time, with values that are exact in bf16 or in a quantised form."""
    generator = torch.Generator(device).manual_seed(0)
    with torch.device(device), torch.no_grad():
        model = Decoder(shape.model, torch.bfloat16 if device == "cuda" else torch.float32, form)
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 or name.endswith("_adapter.b"):
                parameter.fill_(1.0 if parameter.ndim == 1 else 0.0)
            else:
                fan_in = parameter.shape[-2] if parameter.ndim == 3 else parameter.shape[-1]
                parameter.normal_(std=fan_in**-0.5, generator=generator)
        round_to_form_(model.parameters(), "bf16")
        if form != "bf16":
            round_to_form_(model.named_parameters(), form)
    return model


def ours(
    shape: models.Shape,
    device: str,
    tokens_per_microbatch: int,
    *,
    recompute_mlp: bool | None = None,
    recompute_every: int = 0,
    deterministic: bool = False,
    ragged: bool = False,
    form: str = "bf16",
) -> Step:
    model = model_of(shape, device, form)
    settings = TrainingConfig(tokens_per_microbatch=tokens_per_microbatch, recompute_mlp=recompute_mlp)
    model.recompute_mlp = bool(fitted(settings, shape.model, torch.device(device)).recompute_mlp)
    model.recompute_every = recompute_every
    optimizer = MasterOptimizer(model, CONFIG, form)
    lengths = _ragged_lengths(shape) if ragged else [shape.length] * shape.sequences
    parts = [_moved(part, device) for part in _packed(batch_of(shape), lengths, tokens_per_microbatch)]
    step = NextTokenStep(model, optimizer)

    def run() -> float:
        fix_bits(deterministic)
        try:
            return step(parts, LR)[0]
        finally:
            fix_bits(False)

    return run


def _packed(batch: Batch, lengths: list[int], tokens_per_microbatch: int) -> list[MicroBatch]:
    cuts = np.cumsum(lengths)[:-1]
    tokens, targets = (np.split(array.reshape(-1), cuts) for array in batch)
    sequences = [
        PackedSequence(tokens=own, rows=np.arange(len(own)), targets=wanted)
        for own, wanted in zip(tokens, targets, strict=True)
    ]
    return pack(sequences, tokens_per_microbatch)


def _ragged_lengths(shape: models.Shape) -> list[int]:
    """Lengths up to the longest, for the same number of tokens."""
    lengths, left = [], shape.tokens
    for drawn in np.random.default_rng(1).integers(shape.length // 16, shape.length + 1, shape.tokens):
        lengths.append(min(int(drawn), left))
        left -= lengths[-1]
        if not left:
            break
    return lengths


def _moved(part: MicroBatch, device: str) -> MicroBatch:
    names = ("tokens_N", "positions_N", "rows_M", "targets_M")
    return replace(part, **{name: getattr(part, name).to(device) for name in names})


def theirs(
    shape: models.Shape,
    device: str,
    *,
    liger: bool = False,
    compile: Literal["all", "layers"] = "all",
    recompute: bool = False,
) -> Step:
    batch = batch_of(shape)
    tokens, targets = (torch.from_numpy(array).to(device) for array in batch)
    how = compile if device == "cuda" else None
    step = models.transformers_step(
        model_of(shape, device), tokens, targets, CONFIG, liger=liger, compile=how, recompute=recompute
    )
    return lambda: float(step(LR))


def sides(shape: models.Shape, device: str, *, peers: bool, variants: bool) -> dict[str, Callable[[], Step]]:
    """Ours in one pass over all tokens, the peers, and ours with other settings."""
    whole = max(shape.tokens, shape.length)
    found: dict[str, Callable[[], Step]] = {"ours": lambda: ours(shape, device, whole)}
    if peers and models.has("transformers"):
        found["transformers"] = lambda: theirs(shape, device)
    found["ours, MLPs remade"] = lambda: ours(shape, device, whole, recompute_mlp=True)
    if variants:
        found |= {
            "ours, same bits again": lambda: ours(shape, device, whole, deterministic=True),
            "ours, ragged": lambda: ours(shape, device, whole, ragged=True),
            "ours, ragged, same bits": lambda: ours(shape, device, whole, ragged=True, deterministic=True),
            "ours, MLPs kept": lambda: ours(shape, device, whole, recompute_mlp=False),
            "ours, layers recomputed": lambda: ours(shape, device, whole, recompute_every=1),
            "ours, fp8": lambda: ours(shape, device, whole, form="fp8"),
            "ours, nvfp4": lambda: ours(shape, device, whole, form="nvfp4"),
        }
    if shape.model.experts:  # the rows of gate_up are always recomputed
        found = {name: make for name, make in found.items() if "kept" not in name and "remade" not in name}
    elif peers and device == "cuda" and models.has("liger_kernel"):
        # last: with its head compiled it has broken the device's context, and with it everything after
        found["liger, layers compiled"] = lambda: theirs(shape, device, liger=True, compile="layers")
        found["liger, compiled"] = lambda: theirs(shape, device, liger=True)
    return found


def adapter_sides(shape: models.Shape, device: str, *, peers: bool) -> dict[str, Callable[[], Step]]:
    found = {"ours": lambda: ours(shape, device, shape.tokens)}
    found["ours, layers recomputed"] = lambda: ours(shape, device, shape.tokens, recompute_every=1)
    if peers and models.has("peft") and not shape.model.experts:  # PEFT has none for experts in one tensor
        found["peft"] = lambda: theirs(shape, device)
        found["peft, recomputed"] = lambda: theirs(shape, device, recompute=True)
    return found


def print_heading(shape: models.Shape) -> None:
    parameters, attention = models.step_operations(shape)
    by_operations, by_bytes = models.floor_seconds(shape)
    gigabytes = models.step_bytes(shape) / 1e9
    print(f"\n{shape.name}: {shape.sequences} sequences of {shape.length}; a step has {parameters / 1e12:.3g} TFLOP of")
    print(f"parameters, {attention / 1e12:.3g} of attention, {gigabytes:.3g} GB: on an H200 at least")
    print(f"{by_operations * 1e3:.3g} ms by operations and {by_bytes * 1e3:.3g} ms by bytes")
    print(f"{'':24} {'ms':>8} {'least–most':>15} {'tokens/s':>10} {'share':>6} {'floor':>6} {'GiB':>6} {'loss':>9}")


def print_row(shape: models.Shape, name: str, result: Result) -> None:
    if result.error:
        print(f"{name:24} did not run: {result.error}", flush=True)
        return
    spread = f"{min(result.seconds) * 1e3:.1f}–{max(result.seconds) * 1e3:.1f}"
    memory = "" if result.peak_bytes is None else f"{result.peak_bytes / 2**30:.1f}"
    floor = max(models.floor_seconds(shape)) / result.median
    print(
        f"{name:24} {result.median * 1e3:8.1f} {spread:>15} {shape.tokens / result.median:10,.0f} "
        f"{_share(shape, result):6.1%} {floor:6.1%} {memory:>6} {result.loss:9.5f}",
        flush=True,
    )


def _share(shape: models.Shape, result: Result) -> float:
    return models.step_operations(shape)[0] / result.median / models.PEAK_OPERATIONS


def figures_of(shape: models.Shape, results: dict[str, Result]) -> dict[str, float]:
    figures: dict[str, float] = {}
    for name, result in results.items():
        if result.error:
            continue
        key = f"{shape.name}_{name}".replace(",", "").replace("+ ", "").replace(" ", "_").replace("-", "_")
        figures[f"{key}_tokens_s"] = shape.tokens / result.median
        figures[f"{key}_share"] = _share(shape, result)
        figures[f"{key}_ms_least"], figures[f"{key}_ms_most"] = (f(result.seconds) * 1e3 for f in (min, max))
        if result.peak_bytes is not None:
            figures[f"{key}_peak_gib"] = result.peak_bytes / 2**30
    return figures


def bars_of(shape: models.Shape, results: dict[str, Result]) -> dict[str, dict[str, Any]]:
    """Compares with the sides that ran. A bar about another side is left out."""
    if shape.model.adapter is not None:
        return _adapter_bars(shape, results)
    if shape.name in SIZES:
        return _size_bars(shape, results)
    mine = results["ours" if shape.model.experts else "ours, MLPs remade"]
    bars: dict[str, dict[str, Any]] = {}
    peers = {name: result for name, result in results.items() if "ours" not in name and not result.error}
    if mine.error:
        return bars
    if shape.model.experts:
        bars["mixture_share"] = at_least(_share(shape, mine), 0.15)
        if peers:
            fastest = min(result.median for result in peers.values())
            bars["mixture_speedup_transformers"] = at_least(fastest / mine.median, 1.5)
        return bars
    for key, speedup, memory in (("transformers", 1.5, 0.25), ("liger", 1.3, 0.5)):
        alike = [result for name, result in peers.items() if name.startswith(key)]
        if alike:
            fastest, least = min(each.median for each in alike), min(each.peak_bytes or 0 for each in alike)
            assert mine.peak_bytes is not None and least
            bars[f"dense_speedup_{key}"] = at_least(fastest / mine.median, speedup)
            bars[f"dense_memory_{key}"] = at_most(mine.peak_bytes / least, memory)
    return bars


def _size_bars(shape: models.Shape, results: dict[str, Result]) -> dict[str, dict[str, Any]]:
    key, (speedup, memory) = shape.name.replace("-", "_"), SIZES[shape.name]
    mine, theirs, fp8 = (results.get(name) for name in ("ours", "transformers", "ours, fp8"))
    bars: dict[str, dict[str, Any]] = {}
    if mine is None or mine.error:
        return bars
    if theirs is not None and not theirs.error:
        bars[f"{key}_speedup_transformers"] = at_least(theirs.median / mine.median, speedup)
        if memory is not None and mine.peak_bytes and theirs.peak_bytes:
            bars[f"{key}_memory_transformers"] = at_most(mine.peak_bytes / theirs.peak_bytes, memory)
    if fp8 is not None and not fp8.error and shape.name == "llama-8b":
        bars[f"{key}_fp8_speedup"] = at_least(mine.median / fp8.median, 1.35)
    return bars


def _adapter_bars(shape: models.Shape, results: dict[str, Result]) -> dict[str, dict[str, Any]]:
    runs = [result for name, result in results.items() if not result.error and name.startswith("ours")]
    fastest = min((result.median for result in runs), default=None)
    if fastest is None:
        return {}
    key = f"{shape.name.replace('-', '_')}_adapter"
    bars = {f"{key}_tokens_s": at_least(shape.tokens / fastest, ADAPTERS[shape.name])} if shape.name in ADAPTERS else {}
    peers = [result.median for name, result in results.items() if not result.error and name.startswith("peft")]
    return bars | ({f"{key}_speedup_peft": at_least(min(peers) / fastest, 1.0)} if peers else {})


def check_losses(results: dict[str, Result]) -> None:
    """For sides that have the same sequences and weights."""
    others = {name for name in results if any(word in name for word in ("ragged", "fp8", "nvfp4"))}
    losses = {name: result.loss for name, result in results.items() if not result.error and name not in others}
    assert losses, "no side ran"
    spread = max(losses.values()) - min(losses.values())
    assert spread < LOSS_TOLERANCE, f"the sides do not compute the same: first losses {losses}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer repeats; without a device under a minute")
    parser.add_argument("--only", nargs="+", metavar="SHAPE", help="dense, mixture, llama-1b, llama-8b, qwen3-30b")
    parser.add_argument("--form", help="also ours in this form, if the other variants are left out")
    parser.add_argument("--adapter", type=int, metavar="RANK", help="instead: adapters beside whole models, and PEFT's")
    parser.add_argument("--ours", action="store_true", help="leave out the peers")
    parser.add_argument("--plain", action="store_true", help="leave out our own variants")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    figures: dict[str, float] = {}
    bars: dict[str, dict[str, Any]] = {}
    for shape in models.adapter_shapes(device, options.adapter) if options.adapter else models.shapes(device):
        if options.only is not None and shape.name not in options.only:
            continue
        print_heading(shape)
        results = {}
        if options.adapter:
            made = adapter_sides(shape, device, peers=not options.ours)
        else:
            made = sides(shape, device, peers=not options.ours, variants=not options.plain)
        if options.form:
            made[f"ours, {options.form}"] = functools.partial(ours, shape, device, shape.tokens, form=options.form)
        for name, make in made.items():
            results[name] = measure(make, 5 if options.quick else 15, warmup=4)
            print_row(shape, name, results[name])
        check_losses(results)
        figures |= figures_of(shape, results)
        if device == "cuda":
            bars |= bars_of(shape, results)
    finish("train_step", figures, bars)


if __name__ == "__main__":
    main()
