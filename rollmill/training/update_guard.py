"""The step guard: an update that moves the policy too far is taken back by halves, before anything is published.

The drift that a step's samples show was made by the steps before it. What its own update does is seen here: a few
sequences of the step are computed before the update and after it. A learning rate that is far too large ruins a
pretrained model in three steps, and the next samples would tell too late.

All of it follows from the step's batch, so a step that runs again decides the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from rollmill.training.batching import PackedSequence

MOST_SEQUENCES = 8  # per step; they cost a forward pass each, before and after the update
MOST_TOKENS = 2048
_LEAST_KEPT = 0.0625  # below it the update is undone
_LEAST_ESS = 0.5
_ENTROPY_ROOM = 0.1  # nats: changes below it are noise
_MOST_LOG_RATIO = 2.3  # a factor of 10; a token that was nearly impossible before would decide alone without it


class Takeable(Protocol):
    def take_back(self, lr: float, kept: float, keep: float) -> None: ...


class TokenSample(NamedTuple):
    """A few sampled tokens under the weights of a moment."""

    logprobs_M: Tensor
    entropies_M: Tensor


class Move(NamedTuple):
    """What an update did to the policy, on a few sequences of its step."""

    drift: float  # k3, an estimate of the KL divergence between the policies before and after the update
    ess: float  # effective sample size of the tokens, weighted by after ÷ before
    entropy: float  # after the update
    entropy_before: float

    def too_far(self, most_drift: float) -> str | None:
        """Which bound the update leaves; None if it stays within all."""
        if not self.drift <= most_drift:  # also if it is not a number
            return f"it moves the policy by a KL divergence of {self.drift:.3g}, more than {most_drift:g}"
        if self.ess < _LEAST_ESS:
            return f"the effective sample size after it is {self.ess:.2g}"
        low, high = self.entropy_before / 2 - _ENTROPY_ROOM, self.entropy_before * 2 + _ENTROPY_ROOM
        if not low <= self.entropy <= high:
            return f"it changes the entropy from {self.entropy_before:.3g} to {self.entropy:.3g}"
        return None


def within_bounds(
    optimizer: Takeable, lr: float, move: Callable[[], Move], most_drift: float
) -> tuple[float, str | None]:
    """Take the update that `optimizer` has just made back by halves until it is within its bounds. `move()` measures it
    as it is. Returns the share of it that is kept, and which bound it left. Collective."""
    kept, why = 1.0, None
    while kept and (found := move().too_far(most_drift)) is not None:
        why = why or found
        keep = kept / 2 if kept > _LEAST_KEPT else 0.0
        optimizer.take_back(lr, kept, keep)
        kept = keep
    return kept, why


def few_sequences(sequences: Sequence[PackedSequence]) -> list[PackedSequence]:
    """Sequences from all over the step. At least one, if there is any."""
    found, tokens = list[PackedSequence](), 0
    for sequence in sequences[:: -(-len(sequences) // MOST_SEQUENCES) or 1]:
        tokens += len(sequence.tokens)
        if found and tokens > MOST_TOKENS:
            break
        found.append(sequence)
    return found


def measure_move(before: TokenSample, after: TokenSample) -> Move:
    delta_M = (after.logprobs_M - before.logprobs_M).double().clamp(max=_MOST_LOG_RATIO)
    weights_M = delta_M.exp()
    ess = weights_M.sum() ** 2 / (len(weights_M) * weights_M.square().sum())
    drift = (weights_M - 1 - delta_M).mean()
    entropies = [each.entropies_M.double().mean() for each in (after, before)]
    return Move(*torch.stack([drift, ess, *entropies]).tolist())
