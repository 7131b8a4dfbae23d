"""Drawing tokens, with the exact log-prob of each under the very distribution it was drawn from.

That distribution is softmax(logits / temperature), cut to the top k, then to the nucleus top p, then renormalised, all
in FP32. Temperature 0 takes the most likely token and records its log-prob at temperature 1. Randomness is a function
of (seed, position) alone, so a request gives the same draws in any batch and on any engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rollmill.types import Sampling


@dataclass(frozen=True)
class Draw:
    """What one row needs to be sampled: `position` is the index the new token gets in its context."""

    sampling: Sampling
    seed: int
    position: int


def sample(logits_MV: Tensor, draws: Sequence[Draw]) -> tuple[list[int], list[float]]:
    """One token and its log-prob for each row."""
    logprobs_MV = log_distribution(logits_MV, [draw.sampling for draw in draws])
    cumulative_MV = logprobs_MV.double().exp_().cumsum(-1)
    uniform_M1 = torch.from_numpy(uniform([draw.seed for draw in draws], [draw.position for draw in draws])).unsqueeze(
        1
    )
    # the first token whose cumulative probability exceeds the draw: never one of probability zero
    tokens_M1 = torch.searchsorted(cumulative_MV, uniform_M1 * cumulative_MV[:, -1:], right=True)
    tokens_M1.clamp_(max=logits_MV.shape[1] - 1)  # beyond the end only where logits are not finite
    greedy = [row for row, draw in enumerate(draws) if draw.sampling.temperature == 0]
    if greedy:
        tokens_M1[greedy] = logprobs_MV[greedy].argmax(-1, keepdim=True)
    return tokens_M1.squeeze(1).tolist(), logprobs_MV.gather(1, tokens_M1).squeeze(1).tolist()


def log_distribution(logits_MV: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """FP32 log-probs [M, vocab], -inf for tokens that cannot be drawn."""
    temperatures = torch.tensor([sampling.temperature or 1.0 for sampling in samplings])
    logprobs_MV = torch.log_softmax(logits_MV / temperatures.unsqueeze(1), -1)
    cut = [row for row, one in enumerate(samplings) if one.temperature and (one.top_k or one.top_p < 1)]
    if cut:
        logprobs_MV[cut] = _truncate(logprobs_MV[cut], [samplings[row] for row in cut])
    return logprobs_MV


def _truncate(logprobs_MV: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Keep each row's top k, then the smallest set of those that reaches its top p; the likeliest always stays."""
    vocabulary = logprobs_MV.shape[1]
    top_k_M1 = torch.tensor([[sampling.top_k or vocabulary] for sampling in samplings])
    top_p_M1 = torch.tensor([[sampling.top_p] for sampling in samplings])
    ordered_MV, token_MV = logprobs_MV.sort(descending=True, stable=True)
    rank_V = torch.arange(vocabulary)
    ordered_MV = ordered_MV.masked_fill(rank_V >= top_k_M1, -torch.inf)
    probability_MV = ordered_MV.softmax(-1)
    before_MV = probability_MV.cumsum(-1) - probability_MV
    ordered_MV = ordered_MV.masked_fill((before_MV >= top_p_M1) & (rank_V > 0), -torch.inf)
    return torch.empty_like(logprobs_MV).scatter_(1, token_MV, ordered_MV.log_softmax(-1))


def uniform(seeds: Sequence[int], positions: Sequence[int]) -> np.ndarray:
    """Uniform in [0, 1), 52 bits: SplitMix64's finaliser over (seed, position)."""
    with np.errstate(over="ignore"):
        state = np.array(seeds, dtype=np.uint64) * np.uint64(0xD1342543DE82EF95)
        state += np.array(positions, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            state = (state ^ (state >> np.uint64(shift))) * np.uint64(factor)
        state ^= state >> np.uint64(31)
    return (state >> np.uint64(12)).astype(np.float64) * 2.0**-52
