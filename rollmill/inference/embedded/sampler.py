"""Draws tokens, with the exact log-prob of each under the distribution it was drawn from.

`Sampling` says in which order logits are changed and tokens excluded; all in FP32, for the whole batch at once, on the
device of the logits. Where tokens are excluded, the ones that are kept are returned too: the trainer needs them.
Temperature 0 takes the most likely token and records its log-prob at temperature 1. The random number depends only on
(seed, position), so a request gives the same draws in any batch and on any engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rollmill.inference.embedded.grammar import GrammarState, apply_masks
from rollmill.models.kernels.heads.head import log_softmax
from rollmill.models.shaping import change_logits, change_of, pack_bits
from rollmill.models.triton import has_triton
from rollmill.trajectories.allowed_tokens import encode_kept
from rollmill.types import Sampling

# the largest vocabulary that is searched at once, and the chunks of a larger one, in tokens
_ONE_LEVEL, _CHUNK = 4096, 512
_LIKELIEST = 512  # tokens that are sorted at first; all are sorted only if these do not reach top p


@dataclass(frozen=True)
class Draw:
    """How to sample one row. `position` is the index of the new token in its context."""

    sampling: Sampling
    seed: int
    position: int
    context: Sequence[int] = ()  # the tokens before it, for penalties
    start: int = 0  # where the answer begins in the context
    grammar: GrammarState | None = None


class Drawn(NamedTuple):
    """One entry per row."""

    tokens: list[int]
    logprobs: list[float]
    kept: list[bytes]  # the tokens that could be drawn, see trajectories/allowed_tokens.py; b"" if all could


def sample(logits_MV: Tensor, draws: Sequence[Draw]) -> Drawn:
    """Draws one token per row. Waits for the device at the end."""
    if not has_triton(logits_MV.device):
        return _sample(logits_MV, draws)
    # rows with nothing but a temperature are always drawn by the kernel, so a token does not depend on the others
    plain = [row for row, draw in enumerate(draws) if is_plain(draw.sampling, draw.grammar)]
    others = [row for row, draw in enumerate(draws) if not is_plain(draw.sampling, draw.grammar)]
    if not others:
        return _sample_plain(logits_MV, draws)
    found = list(zip(*_sample(logits_MV[others], [draws[row] for row in others]), strict=True))
    found += zip(*_sample_plain(logits_MV[plain], [draws[row] for row in plain]), strict=True)
    rows = sorted(zip(others + plain, found, strict=True))
    return Drawn(*(list(column) for column in zip(*(one for _, one in rows), strict=True)))


def begin_sample(logits_MV: Tensor, draws: Sequence[Draw]) -> Callable[[], Drawn]:
    """`sample`, but its result waits. On CUDA nothing waits before, if all rows have nothing but a temperature."""
    if not logits_MV.is_cuda or not draws or not all(is_plain(draw.sampling, draw.grammar) for draw in draws):
        drawn = sample(logits_MV, draws)
        return lambda: drawn
    host_2M = torch.empty((2, len(draws)), dtype=torch.int32, pin_memory=True)
    tokens_M, logprobs_M = _draw_plain(logits_MV, draws)
    host_2M[0].copy_(tokens_M, non_blocking=True)
    host_2M[1].copy_(logprobs_M.view(torch.int32), non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def wait() -> Drawn:
        copied.synchronize()
        return Drawn(host_2M[0].tolist(), host_2M[1].view(torch.float32).tolist(), [b""] * len(draws))

    return wait


def _sample(logits_MV: Tensor, draws: Sequence[Draw]) -> Drawn:
    if not draws:
        return Drawn([], [], [])
    logprobs_MV = log_distribution(logits_MV, draws)
    uniform_M = torch.from_numpy(uniform([draw.seed for draw in draws], [draw.position for draw in draws]))
    tokens_M1 = _draw(logprobs_MV, uniform_M.to(logits_MV.device, non_blocking=True).unsqueeze(1))
    greedy = [row for row, draw in enumerate(draws) if draw.sampling.temperature == 0]
    if greedy:
        tokens_M1[greedy] = logprobs_MV[greedy].argmax(-1, keepdim=True)
    return listed(_with_logprobs(tokens_M1, logprobs_MV), _kept(logprobs_MV, draws))


def _sample_plain(logits_MV: Tensor, draws: Sequence[Draw]) -> Drawn:
    tokens_M, logprobs_M = _draw_plain(logits_MV, draws)
    return Drawn(tokens_M.tolist(), logprobs_M.tolist(), [b""] * len(draws))


def _draw_plain(logits_MV: Tensor, draws: Sequence[Draw]) -> tuple[Tensor, Tensor]:
    from rollmill.inference.embedded.kernels.sampler_triton import draw as draw_rows

    device = logits_MV.device
    seeds = np.array([draw.seed for draw in draws], dtype=np.uint64).view(np.int64)
    positions = np.array([draw.position - 1 for draw in draws], dtype=np.int32)
    temperatures = np.array([draw.sampling.temperature for draw in draws], dtype=np.float32)
    given = [torch.from_numpy(each) for each in (seeds, positions, temperatures)]
    if logits_MV.is_cuda:  # a copy from memory that is not pinned may wait for all that was launched
        given = [each.pin_memory() for each in given]
    return draw_rows(logits_MV, *(each.to(device, non_blocking=True) for each in given))


def _kept(logprobs_MV: Tensor, draws: Sequence[Draw]) -> list[bytes] | None:
    rows = [row for row, draw in enumerate(draws) if draw.sampling.cuts]
    if not rows:
        return None
    kept = [b""] * len(draws)
    for row, bits in zip(rows, pack_bits(logprobs_MV[rows] > -torch.inf).cpu().numpy(), strict=True):
        kept[row] = encode_kept(bits)
    return kept


def most_likely(logits_MV: Tensor, draws: Sequence[Draw], counts: Sequence[int]) -> list[list[tuple[int, float]]]:
    """Per row the `counts[row]` most likely tokens and their log-probs, under the distribution that is sampled from.
    Fewer if it has fewer tokens."""
    found: list[list[tuple[int, float]]] = [[] for _ in counts]
    rows = [row for row, count in enumerate(counts) if count]
    if not rows:
        return found
    logprobs_RV = log_distribution(logits_MV[rows], [draws[row] for row in rows])
    best_RK, token_RK = logprobs_RV.topk(min(max(counts), logprobs_RV.shape[1]))
    for row, best, tokens in zip(rows, best_RK.tolist(), token_RK.tolist(), strict=True):
        pairs = list(zip(tokens, best, strict=True))[: counts[row]]
        found[row] = [(token, logprob) for token, logprob in pairs if math.isfinite(logprob)]
    return found


def is_plain(sampling: Sampling, grammar: GrammarState | None) -> bool:
    """Whether logits are changed by nothing but a temperature."""
    return not (sampling.cuts or sampling.changes_logits or grammar is not None)


def listed(drawn_M2: Tensor, kept: list[bytes] | None = None) -> Drawn:
    """The draws on the host, with one wait."""
    drawn = drawn_M2.tolist()
    return Drawn([int(token) for token, _ in drawn], [logprob for _, logprob in drawn], kept or [b""] * len(drawn))


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
    # in FP64: in FP32 the order of the sum, which may follow from the batch, could decide between two tokens
    mass_MC = padded_MV.unflatten(1, (-1, _CHUNK)).sum(-1, dtype=torch.float64)
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


def log_distribution(logits_MV: Tensor, draws: Sequence[Draw]) -> Tensor:
    """FP32 log-probs [M, vocab], -inf for tokens that cannot be drawn."""
    logits_MV = change_logits(logits_MV, [change_of(draw.sampling, draw.context, draw.start) for draw in draws])
    temperatures = [draw.sampling.temperature or 1.0 for draw in draws]
    if any(temperature != 1 for temperature in temperatures):
        logits_MV = logits_MV / torch.tensor(temperatures, device=logits_MV.device).unsqueeze(1)
    logits_MV = apply_masks(logits_MV, [draw.grammar for draw in draws])
    logprobs_MV = log_softmax(logits_MV)
    cut = [row for row, draw in enumerate(draws) if draw.sampling.cuts and draw.sampling.temperature]
    if cut:
        lowest_C1 = _lowest_kept(logprobs_MV[cut], [draws[row].sampling for row in cut])
        kept_CV = logits_MV[cut].masked_fill(logprobs_MV[cut] < lowest_C1, -torch.inf)
        logprobs_MV[cut] = log_softmax(kept_CV)
    return logprobs_MV


def _lowest_kept(logprobs_MV: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """[M, 1]: the smallest log-prob that min p, then top k, then top p keep. The most likely token always stays, and so
    do tokens with exactly the same probability as one that stays."""
    device, vocabulary = logprobs_MV.device, logprobs_MV.shape[1]
    top_k_M1 = torch.tensor([[sampling.top_k or vocabulary] for sampling in samplings], device=device)
    top_p_M1 = torch.tensor([[sampling.top_p] for sampling in samplings], device=device)
    min_p_M1 = torch.tensor([[sampling.min_p] for sampling in samplings], device=device)
    floor_M1 = logprobs_MV.amax(-1, keepdim=True) + min_p_M1.log()
    # without top k the cut of top p counts all that min p leaves, whether it is among the likeliest or not
    mass_M1 = logprobs_MV.exp().masked_fill(logprobs_MV < floor_M1, 0.0).sum(-1, keepdim=True)
    count = min(vocabulary, max([_LIKELIEST, *(sampling.top_k for sampling in samplings)]))
    lowest_M1, reached = _cut(logprobs_MV.topk(count).values, top_k_M1, top_p_M1, floor_M1, mass_M1)
    if count < vocabulary and not bool(reached.all()):
        lowest_M1, _ = _cut(logprobs_MV.sort(descending=True).values, top_k_M1, top_p_M1, floor_M1, mass_M1)
    return lowest_M1


def _cut(
    ordered_MK: Tensor, top_k_M1: Tensor, top_p_M1: Tensor, floor_M1: Tensor, mass_M1: Tensor
) -> tuple[Tensor, Tensor]:
    """The smallest log-prob kept, [M, 1], and whether the K likeliest tokens were enough to know it, [M, 1]."""
    count = ordered_MK.shape[1]
    rank_K = torch.arange(count, device=ordered_MK.device)
    probability_MK = ordered_MK.exp().masked_fill((rank_K >= top_k_M1) | (ordered_MK < floor_M1), 0.0)
    cumulative_MK = probability_MK.cumsum(-1)
    mass_M1 = torch.where(top_k_M1 <= count, cumulative_MK[:, -1:], mass_M1)
    kept_MK = (probability_MK > 0) & (cumulative_MK - probability_MK < top_p_M1 * mass_M1)
    kept_M1 = kept_MK.sum(-1, keepdim=True).clamp_(min=1)
    lowest_M1 = ordered_MK.gather(1, kept_M1 - 1)
    # with top p = 1 rounding must not cut anything
    whole_M1 = top_p_M1 >= 1
    bound_M1 = torch.where(top_k_M1 <= count, ordered_MK.gather(1, top_k_M1.clamp(max=count) - 1), -torch.inf)
    lowest_M1 = torch.where(whole_M1, torch.maximum(bound_M1, floor_M1), lowest_M1)
    return lowest_M1, (kept_M1 < count) | whole_M1 | (top_k_M1 <= count)


def uniform(seeds: Sequence[int], positions: Sequence[int]) -> np.ndarray:
    """Uniform numbers in [0, 1) with 52 bits: SplitMix64's finaliser over (seed, position)."""
    with np.errstate(over="ignore"):
        state = np.array(seeds, dtype=np.uint64) * np.uint64(0xD1342543DE82EF95)
        state += np.array(positions, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            state = (state ^ (state >> np.uint64(shift))) * np.uint64(factor)
        state ^= state >> np.uint64(31)
    return (state >> np.uint64(12)).astype(np.float64) * 2.0**-52
