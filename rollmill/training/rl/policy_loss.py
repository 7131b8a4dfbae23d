"""The policy losses with their importance-sampling corrections, on the log-probs of target tokens of one micro-batch.
Losses are minimised.

Per token, with π the policy being trained and μ what the engine sampled from:

    w = π/μ      Δ = log w      A the advantage

    loss = −keep · weight · bound(ratio, A)  +  penalty · Δ²  +  KL to a reference  −  entropy bonus

    loss              ratio                  bound     weight         keep
    policy_gradient   w                      cap
    dppo              w                      cap                      unless moved by more than δ in the direction of A
    ppo               w                      clip
    cispo             w                      detach
    gspo              w, geometric mean      clip
                      over the sequence
    tis               π/π                              min(w, cap)
    mis               π/π                              w              w ≤ cap
    icepop            π/π                              w              floor ≤ w ≤ cap

    cap      A·w up to the cap, linear in Δ above it: the gradient is A·min(w, cap)·∇log π
    clip     min(x·A, clip(x, 1 − low, 1 + high)·A): no gradient once x has left the range in the direction of A, nor
             where A < 0 and x > dual_clip
    detach   clip(x, 1 − low, 1 + high) as a constant times A·log π: every token keeps a gradient
    π/π      the ratio to the policy that the step trains from. A step is one update, so it is 1, and its gradient is
             ∇log π. A clip of it would do nothing, and decoupled PPO is the policy gradient

gspo is its form per token: the ratio of the sequence as a constant times π/π of the token. With one advantage for the
whole sequence that is GSPO; with others, each token is pushed by its own.

dppo masks by probabilities, not ratios: A > 0 and π − μ > δ, or A < 0 and π − μ < −δ. A token that goes from 1e-4 to
1e-3 has a ratio of ten and has hardly moved.

A sequence veto drops all terms of a sequence. The caller chooses the number that the sum over tokens is divided by; if
it is a mean, masked and dropped tokens still count.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rollmill.training.config import DIALS, RLConfig

Ratio = Literal["engine", "sequence", "own"]
Bound = Literal["cap", "clip", "detach", "none"]
Correction = Literal["none", "truncate", "band"]

# name → which ratio, how it is bounded, how w is used as a weight
_COMPOSITIONS: dict[str, tuple[Ratio, Bound, Correction]] = {
    "policy_gradient": ("engine", "cap", "none"),
    "dppo": ("engine", "cap", "none"),
    "ppo": ("engine", "clip", "none"),
    "cispo": ("engine", "detach", "none"),
    "gspo": ("sequence", "clip", "none"),
    "tis": ("own", "none", "truncate"),
    "mis": ("own", "none", "band"),
    "icepop": ("own", "none", "band"),
}
assert _COMPOSITIONS.keys() == DIALS.keys()

_MOST_LOG = 30.0  # e^30 does not overflow in FP32, not even squared, and no meaningful ratio is as large
_MOST_KL_LOG = math.log(20.0)  # the weight of a token in the KL: one token must not outweigh all others


@dataclass(frozen=True)
class PolicyTokens:
    """What the loss is computed from; all are [M], over the target tokens of a micro-batch."""

    logprobs: Tensor  # log π, with gradient
    engine_logprobs: Tensor  # log μ
    advantages: Tensor
    sequences: Tensor | None = None  # int64, ascending: which sequence of the micro-batch each token belongs to
    reference_logprobs: Tensor | None = None
    entropies: Tensor | None = None  # with gradient, if there is an entropy bonus
    sample_sizes: Tensor | None = None  # targets in the step of the token's trajectory; not set: those of its sequence


@dataclass(frozen=True)
class PolicyLoss:
    loss: Tensor  # scalar, differentiable
    log_weights_M: Tensor  # Δ, detached
    kept_M: Tensor  # bool: not masked
    clipped_M: Tensor  # bool: the ratio or the weight was bounded
    vetoed_M: Tensor  # bool: the whole sequence was dropped


def policy_loss(tokens: PolicyTokens, config: RLConfig, divisor: float) -> PolicyLoss:
    """`divisor`: see `step_divisor`."""
    ratio, bound, correction = _COMPOSITIONS[config.loss]
    log_weights_M = tokens.logprobs - tokens.engine_logprobs
    log_ratio_M = log_weights_M
    if ratio != "engine":
        log_ratio_M = tokens.logprobs - tokens.logprobs.detach()
    if ratio == "sequence":
        log_ratio_M = log_ratio_M + sequence_means(log_weights_M.detach(), _sequences(tokens, config.loss))
    gain_M, clipped_M = _BOUNDS[bound](log_ratio_M, tokens, config)
    kept_M = torch.ones_like(clipped_M)
    if config.mask_delta is not None:
        kept_M = probability_mask(tokens, config.mask_delta)
    if correction != "none":
        weight_M, kept_M, truncated_M = _correct(tokens, config, correction)
        gain_M, clipped_M = weight_M * gain_M, clipped_M | truncated_M
    loss_M = config.ratio_penalty * log_weights_M.square() - kept_M * gain_M
    loss_M = loss_M + _regularisers(tokens, config)
    vetoed_M = veto(tokens, config)
    loss = _aggregate(loss_M.masked_fill(vetoed_M, 0.0), tokens, config, divisor)
    return PolicyLoss(loss, log_weights_M.detach(), kept_M, clipped_M, vetoed_M)


# bounds: return (what is maximised, which tokens were bounded)


def _capped(log_ratio_M: Tensor, tokens: PolicyTokens, config: RLConfig) -> tuple[Tensor, Tensor]:
    assert config.weight_cap is not None
    ceiling = math.log(config.weight_cap)
    surrogate_M = log_ratio_M.clamp(max=ceiling).exp() + config.weight_cap * (log_ratio_M - ceiling).relu()
    return tokens.advantages * surrogate_M, log_ratio_M.detach() > ceiling


def _clipped(log_ratio_M: Tensor, tokens: PolicyTokens, config: RLConfig) -> tuple[Tensor, Tensor]:
    low, high = _clip_range(config)
    ratio_M = _exp(log_ratio_M)
    plain_M, bounded_M = ratio_M * tokens.advantages, ratio_M.detach().clamp(low, high) * tokens.advantages
    assert config.dual_clip is not None
    floor_M = torch.where(tokens.advantages < 0, config.dual_clip * tokens.advantages, -math.inf)
    least_M = torch.maximum(torch.minimum(bounded_M, plain_M.detach()), floor_M)
    clipped_M = least_M != plain_M.detach()
    return torch.where(clipped_M, least_M, plain_M), clipped_M


def _detached(log_ratio_M: Tensor, tokens: PolicyTokens, config: RLConfig) -> tuple[Tensor, Tensor]:
    low, high = _clip_range(config)
    ratio_M = _exp(log_ratio_M.detach())
    return ratio_M.clamp(low, high) * tokens.advantages * tokens.logprobs, (ratio_M < low) | (ratio_M > high)


def _unbounded(log_ratio_M: Tensor, tokens: PolicyTokens, config: RLConfig) -> tuple[Tensor, Tensor]:
    gain_M = log_ratio_M.exp() * tokens.advantages
    return gain_M, torch.zeros_like(gain_M, dtype=torch.bool)


_BOUNDS: dict[Bound, Callable[[Tensor, PolicyTokens, RLConfig], tuple[Tensor, Tensor]]] = {
    "cap": _capped,
    "clip": _clipped,
    "detach": _detached,
    "none": _unbounded,
}


def _clip_range(config: RLConfig) -> tuple[float, float]:
    assert config.clip_low is not None and config.clip_high is not None
    return 1 - config.clip_low, 1 + config.clip_high


# masks and weights: no gradient goes through them


@torch.no_grad()
def probability_mask(tokens: PolicyTokens, delta: float) -> Tensor:
    """bool: the token's probability has not moved by more than `delta` in its advantage's direction (DPPO-TV)."""
    moved_M = tokens.logprobs.exp() - tokens.engine_logprobs.exp()
    return moved_M * tokens.advantages.sign() <= delta


@torch.no_grad()
def _correct(tokens: PolicyTokens, config: RLConfig, how: Correction) -> tuple[Tensor, Tensor, Tensor]:
    """(weight, keep, truncated) from w, per token or as the product over the sequence."""
    assert config.weight_cap is not None
    log_weight_M = tokens.logprobs - tokens.engine_logprobs
    if config.weight_level == "sequence":
        log_weight_M = sequence_sums(log_weight_M, _sequences(tokens, config.loss))
    weight_M = _exp(log_weight_M)
    if how == "truncate":
        return weight_M.clamp(max=config.weight_cap), torch.ones_like(weight_M).bool(), weight_M > config.weight_cap
    keep_M = (weight_M >= (config.weight_floor or 0.0)) & (weight_M <= config.weight_cap)
    return weight_M, keep_M, torch.zeros_like(keep_M)


@torch.no_grad()
def veto(tokens: PolicyTokens, config: RLConfig) -> Tensor:
    """bool: the token's sequence is dropped. One nearly impossible token means that trainer and engine disagree about
    the whole sequence; a failure that the policy no longer produces teaches nothing (OPSM)."""
    log_weights_M = tokens.logprobs - tokens.engine_logprobs
    vetoed_M = torch.zeros_like(log_weights_M, dtype=torch.bool)
    if config.veto_ratio is not None:
        impossible_M = (log_weights_M < math.log(config.veto_ratio)).to(log_weights_M.dtype)
        vetoed_M |= sequence_sums(impossible_M, _sequences(tokens, "veto_ratio")) > 0
    if config.veto_drift is not None:
        drift_M = -sequence_means(log_weights_M, _sequences(tokens, "veto_drift"))
        vetoed_M |= (tokens.advantages < 0) & (drift_M > config.veto_drift)
    return vetoed_M


# regularisers


def _regularisers(tokens: PolicyTokens, config: RLConfig) -> Tensor | float:
    total: Tensor | float = 0.0
    if config.kl_factor and config.kl_form != "k1_reward":
        total = total + config.kl_factor * kl_loss(tokens, config.kl_form)
    if config.entropy_factor:
        entropies_M = _needed(tokens.entropies, "entropy_factor", "entropies")
        # without a gradient the bonus would only change the reported loss
        assert entropies_M.requires_grad or not tokens.logprobs.requires_grad, "an entropy bonus needs its gradient"
        total = total - config.entropy_factor * entropies_M
    return total


def kl_loss(tokens: PolicyTokens, form: Literal["k2", "k3"]) -> Tensor:
    """Per-token loss whose expected gradient is that of KL(π ‖ reference), with d = log π − log reference:

    k2   sg(w) · d²/2                  k3   w · (e^−d − 1 + d)

    Both have the gradient w·d·∇log π. As a loss, k1 = d would have no gradient in expectation, so it goes into the
    reward. k3 without the weight would have the gradient of the other direction, KL(reference ‖ π). w is at most 20.
    """
    reference_M = _needed(tokens.reference_logprobs, f"KL as {form}", "a reference: log-probs under a pinned version")
    distance_M = tokens.logprobs - reference_M
    log_weight_M = tokens.logprobs - tokens.engine_logprobs
    weight_M = log_weight_M.clamp(max=_MOST_KL_LOG).exp()
    if form == "k2":
        return weight_M.detach() * distance_M.square() / 2
    weight_M = weight_M + math.exp(_MOST_KL_LOG) * (log_weight_M - _MOST_KL_LOG).relu()
    return weight_M * (_exp(-distance_M) - 1 + distance_M)


# aggregation


def step_divisor(config: RLConfig, *, expected: float, tokens: int, samples: int) -> float:
    """What the sums of all micro-batches of a step are divided by. `expected` tokens is what it is meant to have;
    `tokens` and `samples` (trajectories) count what it trains on."""
    if config.aggregation == "constant":
        return expected
    return max(1, tokens if config.aggregation == "token_mean" else samples)


def _aggregate(loss_M: Tensor, tokens: PolicyTokens, config: RLConfig, divisor: float) -> Tensor:
    if config.aggregation == "sequence_mean":
        sizes_M = tokens.sample_sizes
        if sizes_M is None:
            sizes_M = sequence_sums(torch.ones_like(loss_M), _sequences(tokens, "sequence_mean"))
        loss_M = loss_M / sizes_M
    return loss_M.sum() / divisor


# sequences


def sequence_sums(values_M: Tensor, sequences_M: Tensor) -> Tensor:
    """[M]: for each token the sum over its sequence."""
    sums_S = values_M.new_zeros(int(sequences_M[-1]) + 1 if len(sequences_M) else 0)
    return sums_S.index_add(0, sequences_M, values_M).index_select(0, sequences_M)


def sequence_means(values_M: Tensor, sequences_M: Tensor) -> Tensor:
    return sequence_sums(values_M, sequences_M) / sequence_sums(torch.ones_like(values_M), sequences_M)


def _sequences(tokens: PolicyTokens, who: str) -> Tensor:
    return _needed(tokens.sequences, who, "to know which sequence each token belongs to")


def _needed(value: Tensor | None, who: str, what: str) -> Tensor:
    if value is None:
        raise ValueError(f"{who} needs {what}")
    return value


def _exp(log_M: Tensor) -> Tensor:
    return log_M.clamp(max=_MOST_LOG).exp()
