"""The trainer's own view of sampled tokens: one forward pass of a micro-batch, under whichever weights the model holds.

The loss and every figure of a step come out of this one pass; measuring mismatch runs the same pass on other weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rollmill.models.decoder import Decoder
from rollmill.models.moe import Replay, Routing
from rollmill.training.batching import MicroBatch
from rollmill.training.parallel.rows import shards_of
from rollmill.training.step import forward_packed, token_logprobs


class Recomputed(NamedTuple):
    logprobs_M: Tensor  # of the targets, under the distribution they were sampled from
    entropies_M: Tensor
    routings: Sequence[Routing]  # on many ranks those of this one's tokens
    replay: Replay | None  # what the routings were made with


def recompute(model: Decoder, part: MicroBatch, replay: Replay | None) -> Recomputed:
    assert part.facts is not None, "sequences of sampled tokens carry their facts"
    shards = shards_of(model)
    if shards is not None:
        from rollmill.training.parallel.spread import spread_logprobs

        return Recomputed(*spread_logprobs(model, shards, part, replay))
    output, hidden_MW = forward_packed(model, part, replay)
    temperatures_M = torch.from_numpy(part.facts.temperatures)
    logprobs_M, entropies_M = token_logprobs(model, hidden_MW, part.targets_M, temperatures_M)
    return Recomputed(logprobs_M, entropies_M, output.routings, replay)
