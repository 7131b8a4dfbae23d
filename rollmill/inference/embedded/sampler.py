"""Draws tokens, with the exact log-prob of each under the distribution it was drawn from.

That distribution is softmax(logits / temperature), cut to the top k, then to the nucleus top p, then normalised again,
all in FP32. Temperature 0 takes the most likely token and records its log-prob at temperature 1. The random number
depends only on (seed, position), so a request gives the same draws in any batch and on any engine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rollmill.types import Sampling

_ONE_LEVEL, _CHUNK = (
    4096,
    512,
)  # tokens: the largest vocabulary that is searched at once, and the chunks of a larger one


@dataclass(frozen=True)
class Draw:
    """How to sample one row. `position` is the index of the new token in its context."""

    sampling: Sampling
    seed: int
    position: int


def sample(logits_MV: Tensor, draws: Sequence[Draw]) -> tuple[list[int], list[float]]:
    """One token and its log-prob per row. Waits for the device once, at the end."""
    if not draws:
        return [], []
    logprobs_MV = log_distribution(logits_MV, [draw.sampling for draw in draws])
    uniform_M = torch.from_numpy(uniform([draw.seed for draw in draws], [draw.position for draw in draws]))
    tokens_M1 = _draw(logprobs_MV, uniform_M.to(logits_MV.device, non_blocking=True).unsqueeze(1))
    greedy = [row for row, draw in enumerate(draws) if draw.sampling.temperature == 0]
    if greedy:
        tokens_M1[greedy] = logprobs_MV[greedy].argmax(-1, keepdim=True)
    return listed(_with_logprobs(tokens_M1, logprobs_MV))


def sample_uncut(logits_MV: Tensor, temperatures_M: Tensor, uniform_M: Tensor) -> Tensor:
    """`sample` without top k and top p, as [M, 2] for `listed`. It runs on the device only, so a graph can record
    it."""
    hot_M1 = (temperatures_M > 0).unsqueeze(1)
    divisor_M1 = torch.where(hot_M1, temperatures_M.unsqueeze(1), 1.0).to(logits_MV.dtype)
    logprobs_MV = torch.log_softmax(logits_MV / divisor_M1, -1)
    tokens_M1 = _draw(logprobs_MV, uniform_M.unsqueeze(1))
    return _with_logprobs(torch.where(hot_M1, tokens_M1, logprobs_MV.argmax(-1, keepdim=True)), logprobs_MV)


def most_likely(
    logits_MV: Tensor, samplings: Sequence[Sampling], counts: Sequence[int]
) -> list[list[tuple[int, float]]]:
    """Per row the `counts[row]` most likely tokens and their log-probs, under the distribution that is sampled from.
    Fewer if it has fewer tokens."""
    found: list[list[tuple[int, float]]] = [[] for _ in counts]
    rows = [row for row, count in enumerate(counts) if count]
    if not rows:
        return found
    logprobs_RV = log_distribution(logits_MV[rows], [samplings[row] for row in rows])
    best_RK, token_RK = logprobs_RV.topk(min(max(counts), logprobs_RV.shape[1]))
    for row, best, tokens in zip(rows, best_RK.tolist(), token_RK.tolist(), strict=True):
        pairs = list(zip(tokens, best, strict=True))[: counts[row]]
        found[row] = [(token, logprob) for token, logprob in pairs if math.isfinite(logprob)]
    return found


def is_cut(sampling: Sampling) -> bool:
    """Whether top k or top p exclude tokens."""
    return bool(sampling.temperature and (sampling.top_k or sampling.top_p < 1))


def needs_host(sampling: Sampling) -> bool:
    """Whether a token cannot be drawn by `sample_uncut`."""
    return is_cut(sampling) or sampling.grammar is not None


def listed(drawn_M2: Tensor) -> tuple[list[int], list[float]]:
    """Tokens and log-probs on the host, with one wait."""
    drawn = drawn_M2.tolist()
    return [int(token) for token, _ in drawn], [logprob for _, logprob in drawn]


def _with_logprobs(tokens_M1: Tensor, logprobs_MV: Tensor) -> Tensor:
    """Tokens and log-probs as FP64, which holds both exactly."""
    return torch.cat((tokens_M1.double(), logprobs_MV.gather(1, tokens_M1).double()), 1)


def _draw(logprobs_MV: Tensor, uniform_M1: Tensor) -> Tensor:
    """int64 [M, 1]. A large vocabulary is searched in two levels, with FP64 only for the chunk that a draw falls
    into."""
    vocabulary = logprobs_MV.shape[1]
    if vocabulary <= _ONE_LEVEL:
        return _search(logprobs_MV, uniform_M1)
    padded_MV = torch.nn.functional.pad(logprobs_MV.exp(), (0, -vocabulary % _CHUNK))
    mass_MC = padded_MV.unflatten(1, (-1, _CHUNK)).sum(-1).double()
    cumulative_MC = mass_MC.cumsum(-1)
    goal_M1 = uniform_M1 * cumulative_MC[:, -1:]
    chunk_M1 = torch.searchsorted(cumulative_MC, goal_M1, right=True).clamp_(max=mass_MC.shape[1] - 1)
    mass_M1 = mass_MC.gather(1, chunk_M1)
    rest_M1 = (goal_M1 - (cumulative_MC.gather(1, chunk_M1) - mass_M1)) / mass_M1
    token_MT = chunk_M1 * _CHUNK + torch.arange(_CHUNK, device=chunk_M1.device)
    chosen_MT = logprobs_MV.gather(1, token_MT.clamp(max=vocabulary - 1)).masked_fill_(
        token_MT >= vocabulary, -torch.inf
    )
    tokens_M1 = chunk_M1 * _CHUNK + _search(chosen_MT, rest_M1.clamp_(0.0, 1 - 2.0**-53))
    return tokens_M1.clamp_(max=vocabulary - 1)


def _search(logprobs_MV: Tensor, uniform_M1: Tensor) -> Tensor:
    """The first token whose cumulative probability exceeds the draw; never a token of probability zero."""
    cumulative_MV = logprobs_MV.double().exp_().cumsum(-1)
    tokens_M1 = torch.searchsorted(cumulative_MV, uniform_M1 * cumulative_MV[:, -1:], right=True)
    return tokens_M1.clamp_(max=logprobs_MV.shape[1] - 1)  # beyond the end only if logits are not finite


def log_distribution(logits_MV: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """FP32 log-probs [M, vocab], -inf for tokens that cannot be drawn."""
    temperatures = [sampling.temperature or 1.0 for sampling in samplings]
    if any(temperature != 1 for temperature in temperatures):
        logits_MV = logits_MV / torch.tensor(temperatures, device=logits_MV.device).unsqueeze(1)
    logprobs_MV = torch.log_softmax(logits_MV, -1)
    cut = [row for row, one in enumerate(samplings) if is_cut(one)]
    if cut:
        logprobs_MV[cut] = _truncate(logprobs_MV[cut], [samplings[row] for row in cut])
    return logprobs_MV


def _truncate(logprobs_MV: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Keeps each row's top k, then the smallest set of those that reaches top p. The most likely token always stays."""
    vocabulary = logprobs_MV.shape[1]
    device = logprobs_MV.device
    top_k_M1 = torch.tensor([[sampling.top_k or vocabulary] for sampling in samplings], device=device)
    top_p_M1 = torch.tensor([[sampling.top_p] for sampling in samplings], device=device)
    ordered_MV, token_MV = logprobs_MV.sort(descending=True, stable=True)
    rank_V = torch.arange(vocabulary, device=device)
    ordered_MV = ordered_MV.masked_fill(rank_V >= top_k_M1, -torch.inf)
    probability_MV = ordered_MV.softmax(-1)
    before_MV = probability_MV.cumsum(-1) - probability_MV
    ordered_MV = ordered_MV.masked_fill((before_MV >= top_p_M1) & (rank_V > 0), -torch.inf)
    return torch.empty_like(logprobs_MV).scatter_(1, token_MV, ordered_MV.log_softmax(-1))


def uniform(seeds: Sequence[int], positions: Sequence[int]) -> np.ndarray:
    """Uniform numbers in [0, 1) with 52 bits: SplitMix64's finaliser over (seed, position)."""
    with np.errstate(over="ignore"):
        state = np.array(seeds, dtype=np.uint64) * np.uint64(0xD1342543DE82EF95)
        state += np.array(positions, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            state = (state ^ (state >> np.uint64(shift))) * np.uint64(factor)
        state ^= state >> np.uint64(31)
    return (state >> np.uint64(12)).astype(np.float64) * 2.0**-52
