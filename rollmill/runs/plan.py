"""What a run needs and yields on GPUs, from its configuration: memory, tokens per second, weight traffic.

The rates are models with few constants, fitted to measurements on one H200 (tests/runs/test_plan.py holds them
against each of these, within 10 %). They say which layout to try first. Several GPUs are taken to add up,
which was not measured.

    trainer   products, attention and memory traffic at `EFFICIENCY` of what the GPU can do
    engine    reading weights and keys per decode step, and what else a step takes, which grows with the batch
    deltas    their size by learning rate, as recorded with real optimizer steps (docs/log/2026-11-15-weights.md)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from rollmill.errors import ConfigError
from rollmill.models.config import ModelConfig
from rollmill.models.counts import (
    active_parameters,
    adapter_parameters,
    all_parameters,
    cache_numbers,
    quantised_parameters,
    trained_parameters,
)
from rollmill.runs.run import RunConfig
from rollmill.training.config import TrainingConfig
from rollmill.training.memory_estimate import HEAD_BYTES, fitting_tokens, kept_bytes, recomputes_mlp, state_bytes
from rollmill.training.stage import RolloutSettings, StageSection

EFFICIENCY = 0.81  # of a training step: what it would take at full speed over what it takes
DECODE_S = 0.85e-3  # of a decode step, beside reading: always. Batches of up to four take less
SEQUENCE_S, MIXTURE_SEQUENCE_S = 1.9e-6, 3.3e-6  # and per sequence: a dense model, a mixture
# On the device an engine holds bf16 in every form: a form saves bytes on the way there and in host memory.
ENGINE_BYTES_PER_WEIGHT = 2
_CODE_BYTES = {"bf16": 2.0, "fp8": 1.0, "nvfp4": 0.5625}
# times smaller than all bytes, by learning rate
DENSE_DELTAS = {1e-7: 642.0, 1e-6: 111.0, 1e-5: 24.0, 1e-4: 6.0}
MIXTURE_DELTAS = {1e-7: 770.0, 1e-6: 140.0, 1e-5: 27.0, 1e-4: 6.5}
_WEIGHTS_SHARE = 0.7  # of an engine's memory; the rest is for keys and values


@dataclass(frozen=True)
class Gpu:
    name: str
    memory: int
    operations: float  # per second: bf16 products
    bandwidth: float  # bytes per second: read
    traffic: float  # bytes per second: read and written
    measured: bool


GPUS = {
    "h200": Gpu("h200", 139 << 30, 790e12, 4.8e12, 4.3e12, True),
    "h100": Gpu("h100", 79 << 30, 790e12, 3.35e12, 3.0e12, False),
}


@dataclass(frozen=True)
class TrainerPlan:
    ranks: int
    least_ranks: int  # fewer do not hold weights, gradients and optimizer state
    tokens_per_pass: int  # of one rank
    state_bytes: int
    kept_bytes: int
    tokens_per_second: float

    @property
    def bytes(self) -> int:
        return self.state_bytes + self.kept_bytes + HEAD_BYTES


@dataclass(frozen=True)
class EnginePlan:
    engines: int
    gpus: int  # per engine
    weight_bytes: int
    cache_tokens: int  # that fit beside the weights
    batch: int
    tokens_per_second: float  # of one engine


@dataclass(frozen=True)
class Plan:
    gpu: Gpu
    model: ModelConfig
    trainer: TrainerPlan
    engine: EnginePlan
    shared: bool  # trainer and engine take turns on one GPU
    step_tokens: float
    train_seconds: float
    generate_seconds: float
    delta_bytes: float  # of a version in the run's own form
    region_bytes: Mapping[str, float]  # region → bytes of a version in the forms of its engines

    @property
    def step_seconds(self) -> float:
        if self.shared:
            return self.train_seconds + self.generate_seconds
        return max(self.train_seconds, self.generate_seconds)


def plan(config: RunConfig, gpu: Gpu, gpus: int, rollout_tokens: int | None = None) -> Plan:
    """The fastest division of `gpus` between trainer and engines for the run's RL stage."""
    stage = _rollout_stage(config)
    assert isinstance(stage, RolloutSettings)
    model, lr = config.model_of(stage.name), stage.training.optimizer.lr
    tokens = rollout_tokens or model.max_context // 2
    step_tokens = float(tokens * stage.groups_per_step * stage.group_size)
    shared = gpus == 1

    def layout(ranks: int) -> Plan:
        trainer = plan_trainer(model, stage.training, gpu, ranks, tokens)
        left, settings = gpus if shared else gpus - ranks, config.engine
        engine = plan_engine(model, gpu, left, settings.max_batch, tokens, shared, settings.fp8_kv)
        return Plan(
            gpu=gpu,
            model=model,
            trainer=trainer,
            engine=engine,
            shared=shared,
            step_tokens=step_tokens,
            train_seconds=step_tokens / trainer.tokens_per_second,
            generate_seconds=step_tokens / (engine.tokens_per_second * engine.engines),
            delta_bytes=delta_bytes(model, config.form, lr),
            region_bytes=region_bytes(config, model, lr),
        )

    return min(map(layout, _divisions(gpus, model, gpu)), key=lambda each: each.step_seconds)


def _rollout_stage(config: RunConfig) -> StageSection:
    stages = [stage for stage in config.stages if isinstance(stage, RolloutSettings)]
    if not stages:
        raise ConfigError("the run has no RL stage: there is nothing to divide", hint="add [[stages]] kind = 'rl'")
    return stages[-1]


def _divisions(gpus: int, model: ModelConfig, gpu: Gpu) -> range:
    """The numbers of trainer ranks to compare."""
    least, engine = least_ranks(model, gpu), engine_gpus(model, gpu)
    if gpus == 1 and least == 1 and engine == 1:
        return range(1, 2)
    if gpus < least + engine:
        raise ConfigError(
            f"{gpus} × {gpu.name} is too little: the trainer needs at least {least} and an engine {engine}",
            hint=f"use at least {least + engine} GPUs, or a smaller model",
        )
    return range(least, gpus - engine + 1)


def region_bytes(config: RunConfig, model: ModelConfig, lr: float) -> dict[str, float]:
    """What a step sends to each region: a delta for each form that its engines serve."""
    forms: dict[str, set[str]] = {}
    for spec in config.engine_specs:
        forms.setdefault(spec.region, set()).add(config.form_of(spec))
    return {region: sum(delta_bytes(model, form, lr) for form in found) for region, found in forms.items()}


def least_ranks(model: ModelConfig, gpu: Gpu) -> int:
    room = gpu.memory // 2 - HEAD_BYTES
    return max(1, math.ceil(state_bytes(model) / room))


def plan_trainer(model: ModelConfig, training: TrainingConfig, gpu: Gpu, ranks: int, length: int) -> TrainerPlan:
    """`length`: mean tokens per sequence."""
    fitted = training.model_copy(update={"ranks": ranks})
    tokens = training.tokens_per_microbatch or fitting_tokens(fitted, model, gpu.memory)
    recompute = recomputes_mlp(fitted, model, gpu.memory)
    seconds = pass_seconds(model, gpu, tokens, length, recompute, ranks)
    return TrainerPlan(
        ranks=ranks,
        least_ranks=least_ranks(model, gpu),
        tokens_per_pass=tokens,
        state_bytes=state_bytes(model) // ranks,
        kept_bytes=kept_bytes(model, recompute) * tokens,
        tokens_per_second=ranks * tokens / seconds,
    )


def pass_seconds(
    model: ModelConfig, gpu: Gpu, tokens: int, length: int, recompute_mlp: bool = True, ranks: int = 1
) -> float:
    """Seconds of a step with one pass of `tokens` per rank: forward, backward and optimizer."""
    dense = model.layers - model.moe_layers
    again = 4 * dense * model.width * model.mlp_width if recompute_mlp else 0
    each = 6 if model.adapter is None else 4  # frozen weights get no gradient
    products = (each * (active_parameters(model) + adapter_parameters(model)) + again) * tokens / gpu.operations
    attention = 6 * model.layers * model.heads * model.head_dim * length * tokens / (gpu.operations / 2)
    inner = dense * 2 * model.mlp_width
    inner += model.moe_layers * model.experts_per_token * (2 * model.expert_width + 4 * model.width)
    rows = 6 * (model.layers * 12 * model.width + inner) * tokens / gpu.traffic
    optimizer = 30 * trained_parameters(model) / ranks / gpu.traffic
    return (products + attention + rows + optimizer) / EFFICIENCY


def engine_gpus(model: ModelConfig, gpu: Gpu) -> int:
    return math.ceil(all_parameters(model) * ENGINE_BYTES_PER_WEIGHT / (gpu.memory * _WEIGHTS_SHARE))


def plan_engine(
    model: ModelConfig,
    gpu: Gpu,
    gpus: int,
    max_batch: int,
    context: int,
    shared: bool = False,
    fp8_kv: bool = False,
) -> EnginePlan:
    """`context`: mean tokens of a request while it is decoded, at its end."""
    each = engine_gpus(model, gpu)
    weights = all_parameters(model) * ENGINE_BYTES_PER_WEIGHT
    memory = gpu.memory * each / (2 if shared else 1)
    cache = max(0, int((0.9 * memory - weights) // cache_bytes(model, fp8_kv)))
    batch = max(1, min(max_batch, cache // max(1, context)))
    seconds = decode_seconds(model, gpu, batch, context / 2, each, fp8_kv)
    return EnginePlan(gpus // each, each, weights, cache, batch, batch / seconds)


def cache_bytes(model: ModelConfig, fp8: bool = False) -> int:
    """Of the KV cache, per token, in bf16 or FP8."""
    return (1 if fp8 else 2) * cache_numbers(model)


def decode_seconds(
    model: ModelConfig, gpu: Gpu, batch: int, context: float, gpus: int = 1, fp8_kv: bool = False
) -> float:
    """Seconds of one decode step with `context` tokens per sequence. FP8 latents are not read faster (measured)."""
    experts = 3 * model.width * model.expert_width * model.moe_layers
    read = 1 - (1 - model.experts_per_token / model.experts) ** batch if model.experts else 0.0
    idle = experts * model.experts * (1 - read)
    embedding = 0 if model.tie_embeddings else model.vocab_size * model.width
    weights = (all_parameters(model) - embedding - idle) * ENGINE_BYTES_PER_WEIGHT
    each = MIXTURE_SEQUENCE_S if model.experts else SEQUENCE_S
    held = batch * context * cache_bytes(model, fp8_kv and model.latent is None)
    return (weights + held) / (gpu.bandwidth * gpus) + DECODE_S + each * batch


def delta_bytes(model: ModelConfig, form: str, lr: float) -> float:
    """Of one version as a delta. Between two recorded learning rates the ratio follows a power law."""
    if model.adapter is not None:  # rates of adapters are larger, and nearly all of it changes
        return 2.0 * adapter_parameters(model)
    table = MIXTURE_DELTAS if model.experts else DENSE_DELTAS
    rates = sorted(table)
    lr = min(max(lr, rates[0]), rates[-1])
    upper = next(rate for rate in rates if rate >= lr)
    lower = max((rate for rate in rates if rate <= lr), default=upper)
    share = 0.0 if upper == lower else math.log(lr / lower) / math.log(upper / lower)
    ratio = table[lower] ** (1 - share) * table[upper] ** share
    return form_bytes(model, form) / ratio


def form_bytes(model: ModelConfig, form: str) -> float:
    """Of a whole version. Embedding, head, norms and router are bf16 in every form."""
    coded = quantised_parameters(model)
    return coded * _CODE_BYTES[form] + (all_parameters(model) - coded) * 2.0
