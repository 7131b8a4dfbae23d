"""The decoder's pass for a decode step of one to four sequences, with few launches (models.kernels.narrow_triton)."""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn

from rollmill.inference.embedded.cache import KVCache
from rollmill.inference.embedded.narrow_attention_triton import attend_one
from rollmill.inference.embedded.paged_triton import Plan
from rollmill.models.decoder import Decoder, Layer
from rollmill.models.kernels.fused import norm_fork
from rollmill.models.kernels.narrow_triton import ROWS, multiply
from rollmill.models.moe import MLP


def fits(model: Decoder, sequences: int) -> bool:
    """Whether `narrow_pass` computes this model: dense layers with grouped-query attention, in bf16, not exactly."""
    config = model.config
    dense = config.latent is None and not config.moe_layers and model.form == "bf16" and not model.exact
    half = config.head_dim // 2
    shapes = half >= 16 and half & (half - 1) == 0 and config.value_dim == config.head_dim
    plain = all(cast(Layer, layer)._score_scale == 1.0 for layer in model.layers)
    return sequences <= ROWS and dense and shapes and plain


def narrow_pass(model: Decoder, cache: KVCache, plan: Plan) -> Tensor:
    """[B, width] after the last norm."""
    x_BW, angles = nn.functional.embedding(plan.tokens_N, model.embedding), (model._cos, model._sin)
    eps = model.config.norm_eps
    for number, each in enumerate(model.layers):
        layer = cast(Layer, each)
        mlp = cast(MLP, layer.mlp)
        norms = None if layer.q_norm is None or layer.k_norm is None else (layer.q_norm, layer.k_norm)
        qkv = multiply(x_BW, layer.qkv, norm_I=layer.attention_norm, eps=eps, bias_O=layer.qkv_bias)
        attended = attend_one(qkv, angles, norms, eps, cache, number, plan)
        x_BW = multiply(attended, layer.output, bias_O=layer.output_bias, skip_BO=x_BW)
        inner = multiply(x_BW, mlp.gate_up, norm_I=layer.mlp_norm, eps=eps, gated=True)
        x_BW = multiply(inner, mlp.down, skip_BO=x_BW)
    return norm_fork(x_BW, model.norm, eps, copy=False)[0]
