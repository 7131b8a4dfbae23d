"""How many tokens a micro-batch has where nobody said: on a GPU as many as half of it holds, up to 32,768.

With few tokens a GPU waits for Python to queue its kernels, with more than that it gains nothing. The other half is for
an engine that shares the device, and for what is not counted here. The device's size decides, not what happens to be
free: the same run is cut the same way again, and has the same bits.
"""

from __future__ import annotations

import torch

from rollmill.models.config import ModelConfig
from rollmill.models.decoder import Decoder
from rollmill.training.config import TrainingConfig

_ON_CPU = 8192
_LEAST, _MOST, _STEP = 1024, 32768, 1024
_STATE = 20  # bytes a parameter: weight and gradient in bf16, master, moments and sum of gradients in FP32
_HEAD = 1 << 30  # the head in pieces, and one layer's gradients


def fitted(config: TrainingConfig, model: ModelConfig, device: torch.device) -> TrainingConfig:
    """The configuration with `tokens_per_microbatch` filled in."""
    if config.tokens_per_microbatch:
        return config
    tokens = _ON_CPU
    if device.type == "cuda":
        tokens = fitting_tokens(config, model, torch.cuda.get_device_properties(device).total_memory)
    return config.model_copy(update={"tokens_per_microbatch": tokens})


def fitting_tokens(config: TrainingConfig, model: ModelConfig, memory: int) -> int:
    """Of each rank, on devices with so many bytes."""
    room = memory // 2 - _HEAD - _STATE * _parameters(model) // config.ranks
    return min(_MOST, max(_LEAST, room // kept_bytes(model, config.recompute_mlp) // _STEP * _STEP))


def kept_bytes(model: ModelConfig, recompute_mlp: bool) -> int:
    """What a token keeps for the backward pass on CUDA, in bf16 (see models.kernels.fused)."""
    attended = model.heads * (model.latent.value_dim if model.latent else model.head_dim)
    if model.latent is None:
        qkv = (model.heads + 2 * model.kv_heads) * model.head_dim
    else:  # normalised rows and small vectors too, and keys and values before and after they are put together
        ranks = 2 * (model.latent.q_rank or 0) + 2 * (model.latent.kv_rank + model.latent.rope_dim)
        apart = model.heads * (model.latent.plain_dim + model.latent.value_dim)
        qkv = 3 * model.heads * model.head_dim + apart + attended + ranks + model.width
    dense = 0 if recompute_mlp else model.width + 2 * model.mlp_width
    chosen = model.experts_per_token * (2 * model.expert_width + 16)  # with where each row went
    mixture = 2 * model.width + chosen + model.shared_experts * 3 * model.expert_width + 4 * model.experts
    mixtures = model.moe_layers
    elements = model.layers * (model.width + qkv + attended) + (model.layers - mixtures) * dense + mixtures * mixture
    return 2 * elements


def _parameters(model: ModelConfig) -> int:
    with torch.device("meta"):
        return sum(each.numel() for each in Decoder(model.model_copy(update={"max_context": 1})).parameters())
