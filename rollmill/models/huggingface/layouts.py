"""Tensor names in Hugging Face checkpoints, and ours. All supported layouts share most names.

One of our tensors may hold several of theirs: q, k and v are one matrix, gate and up are one, and the experts of a
layer are stacked [expert, in, out]. Each of theirs is a *view* of ours, in their orientation. Loading copies into the
views, and saving writes them out, so one table serves both ways.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rollmill.models.config import ModelConfig
from rollmill.models.huggingface.config import Layout

OUTER: Mapping[str, str] = {
    "embedding": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "head": "lm_head.weight",
}
# In a layer, after model.layers.N. — several names are row ranges of our tensor, in order.
LAYER: Mapping[str, tuple[str, ...]] = {
    "attention_norm": ("input_layernorm.weight",),
    "qkv": ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    "qkv_bias": ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
    "q_norm": ("self_attn.q_norm.weight",),
    "k_norm": ("self_attn.k_norm.weight",),
    "latent.q": ("self_attn.q_proj.weight",),
    "latent.q_down": ("self_attn.q_a_proj.weight",),
    "latent.q_norm": ("self_attn.q_a_layernorm.weight",),
    "latent.q_up": ("self_attn.q_b_proj.weight",),
    "latent.kv_down": ("self_attn.kv_a_proj_with_mqa.weight",),
    "latent.kv_norm": ("self_attn.kv_a_layernorm.weight",),
    "latent.kv_up": ("self_attn.kv_b_proj.weight",),
    "output": ("self_attn.o_proj.weight",),
    "output_bias": ("self_attn.o_proj.bias",),
    "mlp_norm": ("post_attention_layernorm.weight",),
    "mlp.gate_up": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.down": ("mlp.down_proj.weight",),
    "mlp.router.weight": ("mlp.gate.weight",),
    "mlp.router.bias": ("mlp.gate.e_score_correction_bias",),
    "mlp.shared.gate_up": ("mlp.shared_experts.gate_proj.weight", "mlp.shared_experts.up_proj.weight"),
    "mlp.shared.down": ("mlp.shared_experts.down_proj.weight",),
}
# Per expert of a layer.
EXPERTS: Mapping[str, tuple[str, ...]] = {
    "mlp.gate_up": ("mlp.experts.{expert}.gate_proj.weight", "mlp.experts.{expert}.up_proj.weight"),
    "mlp.down": ("mlp.experts.{expert}.down_proj.weight",),
}
# Names that differ in an architecture.
RENAMED: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "MixtralForCausalLM": {
        "mlp.router.weight": ("block_sparse_moe.gate.weight",),
        "mlp.gate_up": ("block_sparse_moe.experts.{expert}.w1.weight", "block_sparse_moe.experts.{expert}.w3.weight"),
        "mlp.down": ("block_sparse_moe.experts.{expert}.w2.weight",),
    }
}
_ROTATED = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.q_norm", "self_attn.k_norm")
_IN_LAYER = re.compile(r"layers\.(\d+)\.(.+)")


class NamedView(NamedTuple):
    """One tensor of a checkpoint, as a view of ours."""

    name: str
    view: Tensor
    order: Tensor | None = None  # our row i is their row order[i]; None: the same order

    def theirs(self) -> Tensor:
        """With rows in the checkpoint's order: the view itself, or a copy."""
        return self.view if self.order is None else self.view.index_select(0, self.order.argsort())


def named_views(layout: Layout, state: Mapping[str, Tensor]) -> Iterator[NamedView]:
    """Every tensor of a checkpoint of this layout, as views of `state`, the state_dict of a decoder of its shape."""
    renamed = RENAMED.get(layout.architecture, {})
    for ours, tensor in state.items():
        if ours in OUTER:
            yield NamedView(layout.prefix + OUTER[ours], tensor)
            continue
        match = _IN_LAYER.fullmatch(ours)
        assert match is not None, ours
        number, inner = int(match[1]), match[2]
        prefix = f"{layout.prefix}model.layers.{number}."
        if inner in EXPERTS and layout.model.is_mixture(number):
            names = renamed.get(inner, EXPERTS[inner])
            for expert, matrix in enumerate(tensor.unbind()):
                for name, view in zip(names, matrix.t().chunk(len(names)), strict=True):
                    yield NamedView(prefix + name.format(expert=expert), view)
        else:
            names = renamed.get(inner, LAYER[inner]) if layout.model.is_mixture(number) else LAYER[inner]
            for name, view in zip(names, tensor.split(_rows(inner, tensor, names, layout.model)), strict=True):
                yield NamedView(prefix + name, view, _row_order(inner, name, len(view), layout))


def halves_order(blocks: int, kept: int, rotated: int) -> Tensor:
    """The row order from rotation in pairs (0, 1), (2, 3) … to pairs (i, i + D/2): ours[i] = theirs[order[i]].

    Each of `blocks` blocks has `kept` rows that are not rotated and stay, then `rotated` rows.
    """
    pairs = torch.arange(rotated).view(-1, 2).t().flatten() + kept
    block = torch.cat((torch.arange(kept), pairs))
    return (torch.arange(blocks).unsqueeze(1) * (kept + rotated) + block).flatten()


def _rows(inner: str, tensor: Tensor, names: Sequence[str], config: ModelConfig) -> list[int]:
    if inner.startswith("qkv"):
        return [config.heads * config.head_dim, *[config.kv_heads * config.head_dim] * 2]
    return [tensor.shape[0] // len(names)] * len(names)


def _row_order(inner: str, name: str, rows: int, layout: Layout) -> Tensor | None:
    config, latent = layout.model, layout.model.latent
    if layout.interleaved and latent is not None and inner in ("latent.q", "latent.q_up"):
        return halves_order(config.heads, latent.plain_dim, latent.rope_dim)
    if layout.interleaved and latent is not None and inner == "latent.kv_down":
        return halves_order(1, latent.kv_rank, latent.rope_dim)
    if config.rotated_dim is not None and name.startswith(_ROTATED):
        return _partial_order(rows // config.head_dim, config.head_dim, config.rotated_dim)
    return None


def _partial_order(blocks: int, dim: int, rotated: int) -> Tensor:
    """The row order from heads whose first `rotated` rows are pairs (i, i + rotated/2) to pairs (i, i + dim/2), of
    which the first ones are rotated."""
    turning, still = (rows.view(2, -1) for rows in torch.arange(dim).split((rotated, dim - rotated)))
    block = torch.cat((turning, still), dim=1).flatten()
    return (torch.arange(blocks).unsqueeze(1) * dim + block).flatten()
