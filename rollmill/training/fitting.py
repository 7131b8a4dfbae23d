"""The number of tokens per micro-batch, if not configured: on a GPU, as many as half its memory holds, up to 32,768.

With few tokens a GPU waits for Python to queue kernels; with more than 32,768 it gains nothing. The other half is for
an engine that shares the device, and for memory that is not counted here. The device's total memory decides, not what
is free: a run that starts again must be cut the same way, to give the same bits.
"""

from __future__ import annotations

import torch

from rollmill.models.config import ModelConfig
from rollmill.models.decoder import Decoder
from rollmill.training.config import TrainingConfig

_ON_CPU = 8192
_LEAST, _MOST, _STEP = 1024, 32768, 1024
_STATE = 20  # bytes per parameter: weight and gradient in bf16; master, moments and sum of gradients in FP32
_HEAD = 1 << 30  # bytes: the head in chunks, and one layer's gradients


def fitted(config: TrainingConfig, model: ModelConfig, device: torch.device) -> TrainingConfig:
    """The configuration with `tokens_per_microbatch` filled in."""
    if config.tokens_per_microbatch:
        return config
    tokens = _ON_CPU
    if device.type == "cuda":
        tokens = fitting_tokens(config, model, torch.cuda.get_device_properties(device).total_memory)
    return config.model_copy(update={"tokens_per_microbatch": tokens})


def fitting_tokens(config: TrainingConfig, model: ModelConfig, memory: int) -> int:
    """Tokens per rank, on devices with `memory` bytes."""
    room = memory // 2 - _HEAD - _STATE * _parameters(model) // config.ranks
    return min(_MOST, max(_LEAST, room // kept_bytes(model, config.recompute_mlp) // _STEP * _STEP))


def kept_bytes(model: ModelConfig, recompute_mlp: bool) -> int:
    """Bytes per token that are kept for the backward pass on CUDA, in bf16 (models/kernels/fused.py)."""
    mixtures, elements = model.moe_layers, model.layers * _attention(model)
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


def _parameters(model: ModelConfig) -> int:
    with torch.device("meta"):
        return sum(each.numel() for each in Decoder(model.model_copy(update={"max_context": 1})).parameters())
