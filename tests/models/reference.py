"""A plain decoder, one sequence at a time, to compare the fast one with."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from rollmill.models.config import ModelConfig
from rollmill.models.decoder import Decoder

TINY = ModelConfig(
    vocab_size=37,
    layers=2,
    width=24,
    heads=4,
    kv_heads=2,
    head_dim=8,
    mlp_width=40,
    experts=5,
    experts_per_token=2,
    expert_width=12,
    max_context=64,
)


def make_decoder(config: ModelConfig = TINY, seed: int = 0) -> Decoder:
    model = Decoder(config)
    model.initialise(seed)
    with torch.no_grad():  # norms of exactly 1 would hide a missing weight
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)))
    return model


def reference_logits(model: Decoder, tokens: Tensor) -> Tensor:
    """FP32 logits [T, vocab] of one sequence."""
    config = model.config
    x = model.embedding[tokens]
    for layer in model.layers:
        x = x + linear(_attention(layer, _norm(x, layer.attention_norm, config), config), layer.output)
        normal = _norm(x, layer.mlp_norm, config)
        x = x + (_mixture(layer.mlp, normal, config) if hasattr(layer.mlp, "router") else _dense(layer.mlp, normal))
    return linear(_norm(x, model.norm, config), model.embedding if model.head is None else model.head)


def _norm(x: Tensor, weight: Tensor, config: ModelConfig) -> Tensor:
    return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + config.norm_eps) * weight


def _attention(layer: torch.nn.Module, x: Tensor, config: ModelConfig) -> Tensor:
    length, group = x.shape[0], config.heads // config.kv_heads
    qkv = linear(x, layer.qkv).view(length, -1, config.head_dim)
    q, k, v = qkv.split((config.heads, config.kv_heads, config.kv_heads), 1)
    q, k = _rope(q, config), _rope(k, config)
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
    outs = []
    for head in range(config.heads):
        scores = (q[:, head] @ k[:, head // group].T / config.head_dim**0.5).masked_fill(hidden, -torch.inf)
        outs.append(scores.softmax(-1) @ v[:, head // group])
    return torch.cat(outs, -1)


def _rope(x: Tensor, config: ModelConfig) -> Tensor:
    half = config.head_dim // 2
    frequency = config.rope_theta ** -(torch.arange(half, dtype=torch.float64) * 2 / config.head_dim)
    angle = (torch.arange(x.shape[0])[:, None] * frequency).unsqueeze(1)
    cos, sin = angle.cos().float(), angle.sin().float()
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def _dense(mlp: torch.nn.Module, x: Tensor) -> Tensor:
    gate, up = linear(x, mlp.gate_up).chunk(2, -1)
    return linear(silu(gate) * up, mlp.down)


def _mixture(moe: torch.nn.Module, x: Tensor, config: ModelConfig) -> Tensor:
    logits = linear(x, moe.router.weight)
    scores = logits.softmax(-1) if config.gate == "softmax" else logits.sigmoid()
    rows = []
    for row, score in zip(x, scores, strict=True):
        weights, experts = score.topk(config.experts_per_token)
        if config.experts_per_token > 1:
            weights = weights / weights.sum()
        out = torch.zeros_like(row)
        for weight, expert in zip(weights, experts.tolist(), strict=True):
            gate, up = (row @ moe.gate_up[expert]).chunk(2, -1)
            out = out + weight * ((silu(gate) * up) @ moe.down[expert])
        rows.append(out)
    out = torch.stack(rows)
    return out if moe.shared is None else out + _dense(moe.shared, x)
