"""Memory that training takes on a GPU, counted from the model's shape, and the number of tokens per micro-batch, if not
configured: on a GPU, as many as half its memory holds, up to 32,768. No torch is imported before `fitted` is called.

With few tokens a GPU waits for Python to queue kernels; with more than 32,768 it gains nothing. The other half is for
an engine that shares the device, and for memory that is not counted here. The device's total memory decides, not what
is free: a run that starts again must be cut the same way, to give the same bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollmill.models.config import ModelConfig
from rollmill.models.counts import adapter_parameters, all_parameters
from rollmill.training.config import TrainingConfig

if TYPE_CHECKING:
    import torch

_ON_CPU = 8192
LEAST_TOKENS, MOST_TOKENS, _STEP = 1024, 32768, 1024
STATE_BYTES = 20  # per trained parameter: weight and gradient in bf16; master, moments, sum of gradients in FP32
FROZEN_BYTES = 2  # per parameter beside an adapter
HEAD_BYTES = 1 << 30  # the head in chunks, and one layer's gradients
_ENOUGH_TOKENS = 8192  # per pass: with more, products are hardly faster


def fitted(config: TrainingConfig, model: ModelConfig, device: torch.device) -> TrainingConfig:
    """The configuration with `tokens_per_microbatch` and `recompute_mlp` filled in."""
    import torch

    tokens, recompute = config.tokens_per_microbatch or _ON_CPU, bool(config.recompute_mlp)
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
        tokens = config.tokens_per_microbatch or fitting_tokens(config, model, memory)
        recompute = recomputes_mlp(config, model, memory)
    return config.model_copy(update={"tokens_per_microbatch": tokens, "recompute_mlp": recompute})


def fitting_tokens(config: TrainingConfig, model: ModelConfig, memory: int) -> int:
    """Tokens per rank, on devices with `memory` bytes."""
    each = kept_bytes(model, recomputes_mlp(config, model, memory))
    return min(MOST_TOKENS, max(LEAST_TOKENS, _room(config, model, memory) // each // _STEP * _STEP))


def recomputes_mlp(config: TrainingConfig, model: ModelConfig, memory: int) -> bool:
    """Whether dense layers compute their MLP again. If the setting does not say: only if keeping it does not fit."""
    if config.recompute_mlp is not None:
        return config.recompute_mlp
    tokens = config.tokens_per_microbatch or _ENOUGH_TOKENS
    return tokens * kept_bytes(model, recompute_mlp=False) > _room(config, model, memory)


def _room(config: TrainingConfig, model: ModelConfig, memory: int) -> int:
    """Bytes for what is kept for the backward pass."""
    return memory // 2 - HEAD_BYTES - state_bytes(model) // config.ranks


def state_bytes(model: ModelConfig) -> int:
    """Weights, gradients and the optimizer's state, of all ranks together."""
    if model.adapter is None:
        return STATE_BYTES * all_parameters(model)
    return STATE_BYTES * adapter_parameters(model) + FROZEN_BYTES * all_parameters(model)


def kept_bytes(model: ModelConfig, recompute_mlp: bool) -> int:
    """Bytes per token that are kept for the backward pass on CUDA, in bf16 (models/kernels/fused.py)."""
    mixtures, elements = model.moe_layers, model.layers * _attention(model)
    # beside an adapter, products keep their normalised input, and no MLP is computed again
    elements += model.layers * model.width if model.adapts("attention") else 0
    elements += (model.layers - mixtures) * model.width if model.adapter else 0
    recompute_mlp = recompute_mlp and model.adapter is None
    elements += (model.layers - mixtures) * _dense(model, recompute_mlp) + mixtures * _mixture(model)
    return 2 * elements


def _attention(model: ModelConfig) -> int:
    """Elements per token: the input, its products, queries, keys and values."""
    latent = model.latent
    if latent is None:
        return model.width + 2 * (model.heads + model.kv_heads) * model.head_dim
    # also normalised rows and small vectors, and keys and values before and after they are concatenated
    ranks = 2 * (latent.q_rank or 0) + 2 * (latent.kv_rank + latent.rope_dim)
    apart = model.heads * (latent.plain_dim + 3 * latent.value_dim)
    return 2 * model.width + ranks + apart + 3 * model.heads * model.head_dim


def _dense(model: ModelConfig, recompute_mlp: bool) -> int:
    return 0 if recompute_mlp else model.width + 2 * model.mlp_width


def _mixture(model: ModelConfig) -> int:
    chosen = model.experts_per_token * (2 * model.expert_width + 16)  # and the place of each row
    shared = 4 * model.shared_experts * model.expert_width
    return 2 * model.width + chosen + shared + 4 * model.experts
