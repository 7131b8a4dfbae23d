"""What a request may do to the logits before a token is drawn. Engine and trainer use the same functions.

    logits ─► repetition penalty ─► − presence and frequency penalties + bias ─► ÷ temperature ─► excluded tokens −inf

A repetition penalty counts the whole context; presence and frequency penalties count the answer. So both follow from
the recorded tokens. Which tokens were excluded is recorded (trajectories/allowed_tokens.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rollmill.trajectories.allowed_tokens import decode_kept
from rollmill.types import Sampling


@dataclass(frozen=True)
class Shape:
    """What besides the temperature shaped the distribution of one sampled token."""

    sampling: Sampling
    context: np.ndarray  # int32, the tokens before it
    start: int  # where its answer begins in the context
    kept: bytes  # the tokens that could be drawn, see trajectories/allowed_tokens.py; b"" if all could


class Change(NamedTuple):
    """How penalties and biases change the logits of one row. `ids` are unique."""

    ids: np.ndarray  # int64 [n]
    factors: np.ndarray  # float32 [n]: a positive logit is divided by it, a negative one multiplied
    added: np.ndarray  # float32 [n]: then this is added


def change_of(sampling: Sampling, context: Sequence[int] | np.ndarray, start: int) -> Change | None:
    """The change for the token after `context`, whose answer begins at `start`. None if the logits stay as they are."""
    if not sampling.changes_logits:
        return None
    tokens = np.asarray(context, np.int64)
    answer, counts = np.unique(tokens[start:], return_counts=True)
    seen = np.unique(tokens) if sampling.repetition_penalty != 1 else answer
    biased = np.array([token for token, _ in sampling.logit_bias], np.int64)
    ids = np.unique(np.concatenate((seen, biased)))
    factors, added = np.ones(len(ids), np.float32), np.zeros(len(ids), np.float32)
    if sampling.repetition_penalty != 1:
        factors[np.searchsorted(ids, seen)] = sampling.repetition_penalty
    penalties = sampling.presence_penalty + sampling.frequency_penalty * counts
    added[np.searchsorted(ids, answer)] -= penalties.astype(np.float32)
    np.add.at(added, np.searchsorted(ids, biased), np.array([bias for _, bias in sampling.logit_bias], np.float32))
    return Change(ids, factors, added)


def change_logits(logits_MV: Tensor, changes: Sequence[Change | None]) -> Tensor:
    """Rows without a change keep their bits. Differentiable."""
    listed = [(row, change) for row, change in enumerate(changes) if change is not None and len(change.ids)]
    if not listed:
        return logits_MV
    rows = np.repeat([row for row, _ in listed], [len(change.ids) for _, change in listed])
    ids, factors, added = (np.concatenate([change[part] for _, change in listed]) for part in range(3))
    rows_C, ids_C, factors_C, added_C = (
        torch.from_numpy(part).to(logits_MV.device, non_blocking=True) for part in (rows, ids, factors, added)
    )
    logits_C = logits_MV[rows_C, ids_C]
    logits_C = torch.where(logits_C > 0, logits_C / factors_C, logits_C * factors_C) + added_C
    return logits_MV.index_put((rows_C, ids_C), logits_C)


def shape_logits(logits_MV: Tensor, temperatures_M: Tensor | None, shapes: Sequence[Shape]) -> Tensor:
    """The logits of the distributions that the tokens were drawn from. Differentiable."""
    logits_MV = change_logits(logits_MV, [change_of(shape.sampling, shape.context, shape.start) for shape in shapes])
    if temperatures_M is not None:
        logits_MV = logits_MV / temperatures_M[:, None]
    rows = [row for row, shape in enumerate(shapes) if shape.kept]
    if not rows:
        return logits_MV
    bits = np.full((len(shapes), -(-logits_MV.shape[1] // 8)), 255, np.uint8)
    bits[rows] = [decode_kept(shapes[row].kept, logits_MV.shape[1]) for row in rows]
    kept_MV = unpack_bits(torch.from_numpy(bits).to(logits_MV.device, non_blocking=True), logits_MV.shape[1])
    return logits_MV.masked_fill(~kept_MV, -torch.inf)


def pack_bits(mask_MV: Tensor) -> Tensor:
    """uint8 [M, vocab / 8, rounded up], lowest bit first."""
    padded_MV = torch.nn.functional.pad(mask_MV.to(torch.uint8), (0, -mask_MV.shape[1] % 8))
    weights_8 = 1 << torch.arange(8, dtype=torch.uint8, device=mask_MV.device)
    return (padded_MV.unflatten(1, (-1, 8)) * weights_8).sum(-1, dtype=torch.uint8)


def unpack_bits(bits_MB: Tensor, vocab_size: int) -> Tensor:
    """The input of `pack_bits`."""
    places_8 = torch.arange(8, dtype=torch.uint8, device=bits_MB.device)
    return (bits_MB.unsqueeze(-1) >> places_8 & 1).flatten(1)[:, :vocab_size].bool()
