"""Which rank computes which tokens of a micro-batch. Every rank computes the same split, so no messages are needed.

Whole sequences go to the data groups, longest first, each to the group with the fewest tokens so far. Within a group of
C ranks, each sequence is cut into 2·C slices, and rank c takes slices c and 2·C−1−c. A late query has many keys and an
early one few, so this gives every rank the same amount of work. With two ranks:

    slice      0  1  2  3
    rank       0  1  1  0

A rank without tokens computes one filler token that no target needs, since collectives wait for all ranks.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rollmill.models.moe import Replay
from rollmill.training.batching import MicroBatch


class SequenceSlice(NamedTuple):
    """Tokens [start, stop) of a sequence whose first token is token `first` of the micro-batch."""

    first: int
    start: int
    stop: int


@dataclass(frozen=True)
class Split:
    """`slices[r]` are rank r's, in the order it computes them."""

    slices: Sequence[Sequence[SequenceSlice]]
    tokens: Sequence[np.ndarray]  # [rank]: int64, the tokens of its slices, into N
    rows: Sequence[np.ndarray]  # [rank]: int64, its targets, into M

    @property
    def target_counts(self) -> list[int]:
        return [len(rows) for rows in self.rows]


def split(lengths: Sequence[int], rows_M: np.ndarray, data: int, context: int) -> Split:
    slices = [_cut(members, context, rank) for members in _groups(lengths, data) for rank in range(context)]
    tokens = [_tokens(each) for each in slices]
    owner_N = np.empty(sum(lengths), np.int64)
    for rank, own in enumerate(tokens):
        owner_N[own] = rank
    owner_M = owner_N[rows_M]
    by_owner = np.argsort(owner_M, kind="stable")  # one sort: a search per rank would cost ranks · M
    borders = np.cumsum(np.bincount(owner_M, minlength=data * context))
    return Split(slices, tokens, np.split(by_owner, borders[:-1]))


def _groups(lengths: Sequence[int], groups: int) -> list[list[tuple[int, int]]]:
    """The sequences of each group as (first token, length), in their order."""
    firsts = [0, *itertools.accumulate(lengths)]
    loads = [(0, group) for group in range(groups)]  # a heap: the fewest tokens first, then the lowest group
    members: list[list[int]] = [[] for _ in range(groups)]
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        load, group = loads[0]
        members[group].append(index)
        heapq.heapreplace(loads, (load + lengths[index], group))
    return [[(firsts[index], lengths[index]) for index in sorted(own)] for own in members]


def _cut(sequences: Sequence[tuple[int, int]], ranks: int, rank: int) -> list[SequenceSlice]:
    if ranks == 1:
        return [SequenceSlice(first, 0, length) for first, length in sequences]
    found = []
    for first, length in sequences:
        borders = [length * index // (2 * ranks) for index in range(2 * ranks + 1)]
        for index in (rank, 2 * ranks - 1 - rank):
            if borders[index] < borders[index + 1]:
                found.append(SequenceSlice(first, borders[index], borders[index + 1]))
    return found


def _tokens(slices: Sequence[SequenceSlice]) -> np.ndarray:
    ranges = [np.arange(each.first + each.start, each.first + each.stop) for each in slices]
    return np.concatenate([np.empty(0, np.int64), *ranges])


class Share(NamedTuple):
    """What one rank computes of a micro-batch. `n` counts its tokens, at least one, and `m` its targets."""

    tokens_n: Tensor
    positions_n: Tensor
    rows_m: Tensor  # into n
    targets_m: Tensor
    replay: Replay | None
    real: int  # 0 where the only token is a filler


def share_of(part: MicroBatch, replay: Replay | None, cut: Split, rank: int) -> Share:
    tokens, rows = cut.tokens[rank], cut.rows[rank]
    local_N = np.full(len(part.tokens_N), -1, np.int64)
    local_N[tokens] = np.arange(len(tokens))
    picked = torch.from_numpy(tokens if len(tokens) else np.zeros(1, np.int64))
    positions_n = part.positions_N[picked] if len(tokens) else torch.zeros(1, dtype=torch.long)
    return Share(
        tokens_n=part.tokens_N[picked],
        positions_n=positions_n,
        rows_m=torch.from_numpy(local_N[part.rows_M.numpy()[rows]]),
        targets_m=part.targets_M[torch.from_numpy(rows)],
        replay=None if replay is None else Replay(replay.routes[picked], replay.valid[picked], replay.plausibility),
        real=len(tokens),
    )
