"""The decoder's pass for a decode step with fast numerics: fewer launches than the pass for any tokens, other bits.

Attention with all that belongs to it is one launch (decode_attention_triton), and the residual is added to in place.
Steps of one to four sequences through a dense model have own products too (models.kernels.narrow_triton).
"""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn

from rollmill.inference.embedded.cache import KVCache
from rollmill.inference.embedded.decode_attention_triton import attend_one
from rollmill.inference.embedded.paged_triton import Plan
from rollmill.models.decoder import Decoder, DecoderOutput, Layer
from rollmill.models.kernels.forms import add_product_, product
from rollmill.models.kernels.fused_triton import norm_forward, swiglu_forward
from rollmill.models.kernels.narrow_triton import ROWS, multiply
from rollmill.models.moe import MLP, Routing


def fits(model: Decoder) -> bool:
    """Whether `decode_pass` computes this model: grouped-query attention, not exactly."""
    config = model.config
    half = config.head_dim // 2
    shapes = half >= 16 and half & (half - 1) == 0 and config.value_dim == config.head_dim
    plain = all(cast(Layer, layer)._score_scale == 1.0 for layer in model.layers)
    return config.latent is None and not model.exact and shapes and plain


def decode_pass(model: Decoder, cache: KVCache, plan: Plan) -> DecoderOutput:
    x_BW = nn.functional.embedding(plan.tokens_N, model.embedding)
    narrow = len(x_BW) <= ROWS and not model.config.moe_layers and model.form == "bf16"
    routings: list[Routing] = []
    for number, each in enumerate(model.layers):
        layer = cast(Layer, each)
        if narrow:
            x_BW = _narrow_layer(model, layer, x_BW, cache, number, plan)
        else:
            x_BW, routing = _layer(model, layer, x_BW, cache, number, plan)
            routings += [] if routing is None else [routing]
    return DecoderOutput(norm_forward(x_BW, model.norm, model.config.norm_eps)[0], routings)


def _attend(
    model: Decoder, layer: Layer, qkv: Tensor, cache: KVCache, number: int, plan: Plan, *, early: bool = False
) -> Tensor:
    norms = None if layer.q_norm is None or layer.k_norm is None else (layer.q_norm, layer.k_norm)
    return attend_one(qkv, (model._cos, model._sin), norms, model.config.norm_eps, cache, number, plan, early=early)


def _layer(
    model: Decoder, layer: Layer, x_BW: Tensor, cache: KVCache, number: int, plan: Plan
) -> tuple[Tensor, Routing | None]:
    eps, form = model.config.norm_eps, model.form
    qkv = product(norm_forward(x_BW, layer.attention_norm, eps)[0], layer.qkv, layer.qkv_bias, form)
    attended = _attend(model, layer, qkv, cache, number, plan)
    x_BW = add_product_(x_BW, attended, layer.output, layer.output_bias, form)
    normal_BW, _ = norm_forward(x_BW, layer.mlp_norm, eps)
    if not isinstance(layer.mlp, MLP):
        return layer.mlp(normal_BW, x_BW, None)
    inner = swiglu_forward(product(normal_BW, layer.mlp.gate_up, None, form))
    return add_product_(x_BW, inner, layer.mlp.down, None, form), None


def _narrow_layer(model: Decoder, layer: Layer, x_BW: Tensor, cache: KVCache, number: int, plan: Plan) -> Tensor:
    """Five launches: norm and qkv; attention; output and residual; norm, gate, up and SwiGLU; down and residual."""
    eps, mlp = model.config.norm_eps, cast(MLP, layer.mlp)
    qkv = multiply(x_BW, layer.qkv, norm_I=layer.attention_norm, eps=eps, bias_O=layer.qkv_bias)
    attended = _attend(model, layer, qkv, cache, number, plan, early=True)
    x_BW = multiply(attended, layer.output, bias_O=layer.output_bias, skip_BO=x_BW)
    inner = multiply(x_BW, mlp.gate_up, norm_I=layer.mlp_norm, eps=eps, gated=True)
    return multiply(inner, mlp.down, skip_BO=x_BW)
