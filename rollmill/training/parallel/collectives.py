"""Collectives with gradients. Rows are the first dimension; every rank knows how many rows each rank has.

gather_rows    gathers the rows of all ranks, which each rank uses differently: gradients are summed over the ranks
share_rows     gathers the rows of all ranks, which every rank uses in the same way, as in a loss that all of them
               compute: a rank keeps the gradient of its own rows, since the others compute the same
share_sum      a sum over ranks that every rank uses in the same way
send_rows      sends rows to other ranks; their gradients come back the same way
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from rollmill.models.kernels.call import call

# the older name is deprecated where the newer one exists
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def gather_rows(x: Tensor, counts: Sequence[int], group: dist.ProcessGroup | None = None) -> Tensor:
    return call(_GatherRows, x, counts, group)


def share_rows(x: Tensor, counts: Sequence[int], group: dist.ProcessGroup | None = None) -> Tensor:
    return call(_ShareRows, x, counts, group)


def share_sum(x: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    return call(_ShareSum, x, group)


def send_rows(
    x: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup | None = None
) -> Tensor:
    """The first `sent[0]` rows go to rank 0 of the group, and so on; `received[r]` rows come from rank r."""
    return call(_SendRows, x, sent, received, group)


class _GatherRows(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, counts: Sequence[int], group: dist.ProcessGroup | None) -> Tensor:
        ctx.counts, ctx.group = counts, group
        return _gather(x, counts, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        counts, most = ctx.counts, max(ctx.counts)
        padded = grad.new_zeros(len(counts), most, *grad.shape[1:])
        for rank, part in enumerate(grad.split(list(counts))):
            padded[rank, : len(part)] = part
        mine = grad.new_empty(most, *grad.shape[1:])
        _reduce_scatter(mine, padded.flatten(0, 1), group=ctx.group)
        return mine[: counts[dist.get_rank(ctx.group)]], None, None


class _ShareRows(_GatherRows):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.split(list(ctx.counts))[dist.get_rank(ctx.group)], None, None


class _ShareSum(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _SendRows(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup | None
    ) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _send(x, sent, received, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _send(grad, ctx.received, ctx.sent, ctx.group), None, None, None


def _gather(x: Tensor, counts: Sequence[int], group: dist.ProcessGroup | None) -> Tensor:
    most = max(counts)
    padded = x.contiguous()
    if len(x) < most:  # every rank must send the same number of rows
        padded = x.new_zeros(most, *x.shape[1:])
        padded[: len(x)] = x
    gathered = x.new_empty(len(counts) * most, *x.shape[1:])
    _all_gather(gathered, padded, group=group)
    if min(counts) == most:
        return gathered
    return torch.cat([part[:count] for part, count in zip(gathered.split(most), counts, strict=True)])


def _send(x: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup | None) -> Tensor:
    arrived = x.new_empty(sum(received), *x.shape[1:])
    dist.all_to_all_single(arrived, x.contiguous(), list(received), list(sent), group=group)
    return arrived
