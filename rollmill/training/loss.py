"""The losses of one micro-batch, on the log-probs of target tokens. Losses are minimised.

RL, per token, with Δ = log π − log μ (π trained now, μ the engine's own log-prob) and w = e^Δ:

    −mask · A · f(Δ) + penalty · Δ²
    f(Δ) = w up to weight_cap, and goes on in a straight line in Δ above it: the gradient is A · min(w, cap) · ∇log π
    mask = 0 where the token has already moved by more than δ in probability the way A pushes it:
           A > 0 and π − μ > δ, or A < 0 and π − μ < −δ                                              (DPPO-TV)

The mask looks at probabilities, not ratios: a token going from 1e-4 to 1e-3 has a ratio of ten and has hardly moved.
The sum over tokens is divided by a constant the caller chooses, never by a length.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


class _TargetLogprobs(torch.autograd.Function):
    """Log-softmax at the targets, and the entropies. Only one [M, vocab] tensor, the probabilities, is kept."""

    @staticmethod
    def forward(ctx: Any, logits_MV: Tensor, targets_M: Tensor) -> tuple[Tensor, Tensor]:
        logprobs_MV = torch.log_softmax(logits_MV, dim=-1)
        logprobs_M = logprobs_MV.gather(1, targets_M[:, None]).squeeze(1)
        probabilities_MV = logprobs_MV.exp()
        entropies_M = -logprobs_MV.mul_(probabilities_MV).nansum(-1)  # 0 · −inf is 0 here
        ctx.save_for_backward(probabilities_MV, targets_M)
        ctx.mark_non_differentiable(entropies_M)
        return logprobs_M, entropies_M

    @staticmethod
    def backward(ctx: Any, grad_M: Tensor, _: Tensor) -> tuple[Tensor, None]:
        probabilities_MV, targets_M = ctx.saved_tensors
        grad_MV = probabilities_MV * -grad_M[:, None]
        grad_MV.scatter_add_(1, targets_M[:, None], grad_M[:, None])
        return grad_MV, None


def target_logprobs(
    logits_MV: Tensor, targets_M: Tensor, temperatures_M: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(log-probs of the targets, entropies) under the distribution sampled from. Entropies carry no gradient."""
    if temperatures_M is not None and not bool((temperatures_M == 1).all()):
        logits_MV = logits_MV / temperatures_M[:, None]
    return _TargetLogprobs.apply(logits_MV, targets_M)


@dataclass(frozen=True)
class PolicyLoss:
    loss: Tensor  # scalar, differentiable
    log_weights_M: Tensor  # Δ, detached
    kept_M: Tensor  # bool: not masked


def policy_loss(
    logprobs_M: Tensor,
    engine_logprobs_M: Tensor,
    advantages_M: Tensor,
    *,
    mask_delta: float,
    ratio_penalty: float,
    weight_cap: float,
    divisor: float,
) -> PolicyLoss:
    log_weights_M = logprobs_M - engine_logprobs_M
    with torch.no_grad():
        moved_M = logprobs_M.exp() - engine_logprobs_M.exp()
        kept_M = moved_M * advantages_M.sign() <= mask_delta
    ceiling = math.log(weight_cap)
    surrogate_M = log_weights_M.clamp(max=ceiling).exp() + weight_cap * (log_weights_M - ceiling).relu()
    loss_M = ratio_penalty * log_weights_M.square() - kept_M * advantages_M * surrogate_M
    return PolicyLoss(loss_M.sum() / divisor, log_weights_M.detach(), kept_M)
