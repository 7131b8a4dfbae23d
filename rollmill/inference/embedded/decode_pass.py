"""The decoder's pass for a decode step: fewer launches than the pass for any tokens.

Attention with all that belongs to it is one launch (decode_attention_triton), and the residual is added to in place.
With exact numerics the bits are those of any other pass, with fast ones they are not. Steps of one to four sequences
through a dense model without adapters then have own products too (models.kernels.small_batch_triton).
"""

from __future__ import annotations

from typing import NamedTuple, cast

from torch import Tensor, nn

from rollmill.inference.embedded.cache import KVCache
from rollmill.inference.embedded.kernels.decode_attention_triton import attend_one, attend_one_exactly
from rollmill.inference.embedded.kernels.paged_triton import Plan
from rollmill.models.adapters import add_adapter_
from rollmill.models.decoder import Decoder, DecoderOutput, Layer
from rollmill.models.kernels.attention.rotate_triton import rotate_heads
from rollmill.models.kernels.forms import add_product_, product
from rollmill.models.kernels.fused_triton import norm_forward
from rollmill.models.kernels.small_batch_triton import ROWS, multiply
from rollmill.models.kernels.swiglu_triton import swiglu_product
from rollmill.models.moe import MLP, Routing


def fits(model: Decoder) -> bool:
    """Whether `decode_pass` computes this model: grouped-query attention, heads of a power of two."""
    config = model.config
    half = config.head_dim // 2
    shapes = half >= 16 and half & (half - 1) == 0 and config.value_dim == config.head_dim
    plain = all(cast(Layer, layer)._score_scale == 1.0 for layer in model.layers)
    return config.latent is None and shapes and plain


class _Step(NamedTuple):
    model: Decoder
    cache: KVCache
    plan: Plan
    angles: tuple[Tensor, Tensor]  # of all positions; of these if `normed`

    @property
    def normed(self) -> bool:
        """Whether heads are normalised and rotated before attention: sums of a norm would have other bits there than
        in a trainer."""
        return self.model.exact and self.model.config.qk_norm


def decode_pass(model: Decoder, cache: KVCache, plan: Plan) -> DecoderOutput:
    step = _Step(model, cache, plan, (model._cos, model._sin))
    if step.normed:
        step = step._replace(angles=(model._cos[plan.positions_N], model._sin[plan.positions_N]))
    x_BW = nn.functional.embedding(plan.tokens_N, model.embedding)
    plain = not model.config.moe_layers and model.config.adapter is None and model.form == "bf16" and not model.exact
    narrow = plain and len(x_BW) <= ROWS
    routings: list[Routing] = []
    for number, each in enumerate(model.layers):
        layer = cast(Layer, each)
        if narrow:
            x_BW = _narrow_layer(step, layer, x_BW, number)
        else:
            x_BW, routing = _layer(step, layer, x_BW, number)
            routings += [] if routing is None else [routing]
    return DecoderOutput(norm_forward(x_BW, model.norm, model.config.norm_eps)[0], routings)


def _attend(step: _Step, layer: Layer, qkv: Tensor, number: int, *, early: bool = False) -> Tensor:
    model, cache, plan, angles = step
    eps = model.config.norm_eps
    norms = None if layer.q_norm is None or layer.k_norm is None else (layer.q_norm, layer.k_norm)
    if not model.exact:
        return attend_one(qkv, angles, norms, eps, cache, number, plan, early=early)
    if not step.normed:
        return attend_one_exactly(qkv, angles, cache, number, plan)
    heads = (cache.kv_heads * cache.group, cache.kv_heads, cache.head_dim)
    return attend_one_exactly(rotate_heads(qkv, *angles, heads, norms, eps), None, cache, number, plan)


def _layer(step: _Step, layer: Layer, x_BW: Tensor, number: int) -> tuple[Tensor, Routing | None]:
    eps, form, exact = step.model.config.norm_eps, step.model.form, step.model.exact
    normal_BW, _ = norm_forward(x_BW, layer.attention_norm, eps)
    qkv = product(normal_BW, layer.qkv, layer.qkv_bias, form, exact)
    qkv = add_adapter_(qkv, normal_BW, layer.qkv_adapter, exact)
    attended = _attend(step, layer, qkv, number)
    x_BW = add_product_(x_BW, attended, layer.output, layer.output_bias, form, exact)
    x_BW = add_adapter_(x_BW, attended, layer.output_adapter, exact)
    normal_BW, _ = norm_forward(x_BW, layer.mlp_norm, eps)
    if not isinstance(layer.mlp, MLP):
        return layer.mlp(normal_BW, x_BW, None)
    if layer.mlp.down_adapter is not None:
        return layer.mlp.add_to(x_BW, normal_BW), None
    inner = swiglu_product(normal_BW, layer.mlp.gate_up, form, exact)
    return add_product_(x_BW, inner, layer.mlp.down, None, form, exact), None


def _narrow_layer(step: _Step, layer: Layer, x_BW: Tensor, number: int) -> Tensor:
    """Five launches: norm and qkv; attention; output and residual; norm, gate, up and SwiGLU; down and residual."""
    eps, mlp = step.model.config.norm_eps, cast(MLP, layer.mlp)
    qkv = multiply(x_BW, layer.qkv, norm_I=layer.attention_norm, eps=eps, bias_O=layer.qkv_bias)
    attended = _attend(step, layer, qkv, number, early=True)
    x_BW = multiply(attended, layer.output, bias_O=layer.output_bias, skip_BO=x_BW)
    inner = multiply(x_BW, mlp.gate_up, norm_I=layer.mlp_norm, eps=eps, gated=True)
    return multiply(inner, mlp.down, skip_BO=x_BW)
