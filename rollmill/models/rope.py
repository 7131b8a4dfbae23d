"""Rotary embedding: the frequency of each pair, and the table of angles. FP64 on the CPU, so all machines agree."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from rollmill.models.config import Llama3Rope, ModelConfig, YarnRope


def angle_table(config: ModelConfig) -> tuple[Tensor, Tensor]:
    """cos and sin of every position, FP32 [max_context, 1, D/2]. Pairs after `rotated_dim` stand still."""
    scaling = config.rope_scaling
    angles = torch.outer(torch.arange(config.max_context, dtype=torch.float64, device="cpu"), _frequencies(config))
    cos, sin = angles.cos(), angles.sin()
    if isinstance(scaling, YarnRope):
        cos, sin = cos * scaling.angle_scale, sin * scaling.angle_scale
    still = config.rope_dim // 2 - cos.shape[1]
    cos, sin = pad(cos, (0, still), value=1.0), pad(sin, (0, still))
    return cos.float().unsqueeze(1), sin.float().unsqueeze(1)


def score_scale(config: ModelConfig) -> float:
    """The factor of the attention scores, besides 1/√D."""
    return config.rope_scaling.score_scale if isinstance(config.rope_scaling, YarnRope) else 1.0


def _frequencies(config: ModelConfig) -> Tensor:
    """Radians per position of the pairs that turn, FP64, fastest first."""
    rotated = config.rotated_dim or config.rope_dim
    exponents = torch.arange(0, rotated, 2, dtype=torch.float64, device="cpu") / rotated
    frequencies = config.rope_theta**-exponents
    if isinstance(config.rope_scaling, Llama3Rope):
        return _llama3(frequencies, config.rope_scaling)
    if isinstance(config.rope_scaling, YarnRope):
        return _yarn(frequencies, config.rope_scaling, config.rope_theta)
    return frequencies


def _llama3(frequencies: Tensor, scaling: Llama3Rope) -> Tensor:
    turns = scaling.original_context * frequencies / (2 * math.pi)
    keep = ((turns - scaling.low_factor) / (scaling.high_factor - scaling.low_factor)).clamp(0, 1)
    return frequencies * (keep + (1 - keep) / scaling.factor)


def _yarn(frequencies: Tensor, scaling: YarnRope, theta: float) -> Tensor:
    dim = 2 * frequencies.numel()

    def pair_turning(turns: float) -> float:
        """The (fractional) number of the pair that turns this often over the original context."""
        return dim * math.log(scaling.original_context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = pair_turning(scaling.beta_fast), pair_turning(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    if first == last:
        last += 0.001  # a step instead of a ramp, as in the reference implementations
    slow = ((torch.arange(dim // 2, dtype=torch.float64, device="cpu") - first) / (last - first)).clamp(0, 1)
    return frequencies * (1 - slow + slow / scaling.factor)
