"""Moves rows between packed, padded and expert order, and multiplies the rows of each expert."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from rollmill.models.kernels import exact as exact_products
from rollmill.models.kernels.call import call
from rollmill.models.kernels.forms import seen


class _Pad(Function):
    @staticmethod
    def forward(ctx: Any, x_NW: Tensor, source_P: Tensor, slot_N: Tensor) -> Tensor:
        ctx.save_for_backward(slot_N)
        return x_NW.index_select(0, source_P)

    @staticmethod
    def backward(ctx: Any, grad_PW: Tensor) -> tuple[Tensor, None, None]:
        (slot_N,) = ctx.saved_tensors
        return grad_PW.index_select(0, slot_N), None, None


def pad_rows(x_NW: Tensor, source_P: Tensor, slot_N: Tensor) -> Tensor:
    """Packed rows into padded slots: slot p gets row source[p], and row n owns slot[n].

    Slots that no row owns hold copies, whose gradient is dropped.
    """
    return call(_Pad, x_NW, source_P, slot_N)


class _Unpad(Function):
    @staticmethod
    def forward(ctx: Any, x_PW: Tensor, slot_N: Tensor) -> Tensor:
        ctx.save_for_backward(slot_N)
        ctx.padded_shape = x_PW.shape
        return x_PW.index_select(0, slot_N)

    @staticmethod
    def backward(ctx: Any, grad_NW: Tensor) -> tuple[Tensor, None]:
        (slot_N,) = ctx.saved_tensors
        # slots are distinct, so each row is written once
        return grad_NW.new_zeros(ctx.padded_shape).index_copy_(0, slot_N, grad_NW), None


def unpad_rows(x_PW: Tensor, slot_N: Tensor) -> Tensor:
    """The inverse of `pad_rows`. Slots that no row owns get gradient zero."""
    return call(_Unpad, x_PW, slot_N)


class _Dispatch(Function):
    @staticmethod
    def forward(ctx: Any, x_NW: Tensor, token_R: Tensor, place_Nk: Tensor) -> Tensor:
        ctx.save_for_backward(place_Nk)
        return x_NW.index_select(0, token_R)

    @staticmethod
    def backward(ctx: Any, grad_RW: Tensor) -> tuple[Tensor, None, None]:
        (place_Nk,) = ctx.saved_tensors
        grad_x = grad_RW.index_select(0, place_Nk[:, 0])
        for choice in range(1, place_Nk.shape[1]):
            grad_x += grad_RW.index_select(0, place_Nk[:, choice])
        return grad_x, None, None


def dispatch_rows(x_NW: Tensor, token_R: Tensor, place_Nk: Tensor) -> Tensor:
    """One row per (token, chosen expert), in expert order: row r is token[r], and token n owns rows place[n]."""
    return call(_Dispatch, x_NW, token_R, place_Nk)


class _Combine(Function):
    @staticmethod
    def forward(ctx: Any, y_RW: Tensor, weights_Nk: Tensor, token_R: Tensor, place_Nk: Tensor) -> Tensor:
        ctx.save_for_backward(y_RW, weights_Nk, token_R, place_Nk)
        weights_Nk = weights_Nk.to(y_RW.dtype)
        # in top-k order: another order would give other bits
        out_NW = y_RW.index_select(0, place_Nk[:, 0]).mul_(weights_Nk[:, 0:1])
        for choice in range(1, place_Nk.shape[1]):
            # not addcmul, whose bits depend on the number of rows
            out_NW += y_RW.index_select(0, place_Nk[:, choice]).mul_(weights_Nk[:, choice : choice + 1])
        return out_NW

    @staticmethod
    def backward(ctx: Any, grad_NW: Tensor) -> tuple[Tensor, Tensor, None, None]:
        y_RW, weights_Nk, token_R, place_Nk = ctx.saved_tensors
        grad_RW = grad_NW.index_select(0, token_R)
        grad_weights_R = (grad_RW * y_RW).sum(-1, dtype=weights_Nk.dtype)
        grad_weights_Nk = grad_weights_R.index_select(0, place_Nk.flatten()).view_as(weights_Nk)
        weights_R = torch.empty_like(grad_weights_R).index_copy_(0, place_Nk.flatten(), weights_Nk.flatten())
        return grad_RW.mul_(weights_R.to(grad_RW.dtype).unsqueeze(1)), grad_weights_Nk, None, None


def combine_rows(y_RW: Tensor, weights_Nk: Tensor, token_R: Tensor, place_Nk: Tensor) -> Tensor:
    """Sums each token's expert outputs, weighted by its gate, in top-k order."""
    return call(_Combine, y_RW, weights_Nk, token_R, place_Nk)


class _GroupedLinear(Function):
    @staticmethod
    def forward(ctx: Any, x_RI: Tensor, weight_EIO: Tensor, counts: Sequence[int], form: str, exact: bool) -> Tensor:
        ctx.save_for_backward(x_RI, weight_EIO)
        ctx.counts = counts
        x_RI = seen(x_RI, form)
        out_RO = x_RI.new_empty(x_RI.shape[0], weight_EIO.shape[2])
        runs = zip(counts, x_RI.split(counts), weight_EIO.unbind(), out_RO.split(counts), strict=True)
        for count, x, weight, out in runs:
            if count and exact:
                exact_products.product(x, weight, out)
            elif count:
                torch.mm(x, weight, out=out)
        return out_RO

    @staticmethod
    def backward(ctx: Any, grad_RO: Tensor) -> tuple[Tensor | None, ...]:
        x_RI, weight_EIO = ctx.saved_tensors
        grad_x_RI, runs = torch.empty_like(x_RI), grad_RO.split(ctx.counts)
        for grad, weight, grad_x in zip(runs, weight_EIO.unbind(), grad_x_RI.split(ctx.counts), strict=True):
            torch.mm(grad, weight.t(), out=grad_x)
        if not ctx.needs_input_grad[1]:
            return grad_x_RI, None, None, None, None
        grad_weight_EIO = torch.empty_like(weight_EIO)
        for grad, x, grad_weight in zip(runs, x_RI.split(ctx.counts), grad_weight_EIO.unbind(), strict=True):
            torch.mm(x.t(), grad, out=grad_weight)
        return grad_x_RI, grad_weight_EIO, None, None, None


def grouped_linear(
    x_RI: Tensor, weight_EIO: Tensor, counts: Sequence[int], form: str = "bf16", exact: bool = False
) -> Tensor:
    """Multiplies rows in expert order by their expert's weight: the first counts[0] rows by expert 0, and so on.
    `exact`: see models.kernels.exact."""
    return call(_GroupedLinear, x_RI, weight_EIO, counts, form, exact)
