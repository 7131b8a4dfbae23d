"""Mixture-of-experts layers on CUDA. The host never waits to learn how many rows each expert got.

Rows are sorted by expert and multiplied in one grouped product per matrix. The backward pass keeps the layer's input
and the rows of gate_up. It gathers the dispatched rows again and recomputes the activations. It does not need the
experts' outputs: the gradient of a gate weight, ⟨g, h·D⟩, is computed as ⟨g·Dᵀ, h⟩.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from rollmill.models.kernels.call import call
from rollmill.models.kernels.forms import seen
from rollmill.models.triton import has_triton


class ExpertRows(NamedTuple):
    """(token, choice) pairs in expert order, R = N · k of them."""

    order_R: Tensor  # int64, row r is pair order[r] of the flattened [N, k]
    token_R: Tensor  # int64, the token of row r
    place_Nk: Tensor  # int64, the row of each pair
    ends_E: Tensor  # int32, where the rows of each expert end


def sort_by_expert(chosen_Nk: Tensor, experts: int) -> ExpertRows:
    """A stable sort, so the order of an expert's rows does not depend on the algorithm."""
    if has_triton(chosen_Nk.device):
        from rollmill.models.kernels.routing_triton import sort_pairs

        return ExpertRows(*sort_pairs(chosen_Nk.contiguous(), experts))
    expert_R = chosen_Nk.flatten().to(torch.uint8 if experts <= 256 else torch.int16)  # fewer digits to sort by
    sorted_R, order_R = expert_R.sort(stable=True)
    rank_R = torch.arange(order_R.numel(), device=order_R.device)
    place_Nk = torch.empty_like(order_R).index_copy_(0, order_R, rank_R).view_as(chosen_Nk)
    numbers_E = torch.arange(experts, device=sorted_R.device, dtype=sorted_R.dtype)
    ends_E = torch.searchsorted(sorted_R, numbers_E, right=True, out_int32=True)
    return ExpertRows(order_R, order_R // chosen_Nk.shape[1], place_Nk, ends_E)


def groups(x: Tensor, *weights: Tensor) -> bool:
    """Whether `experts` takes these: bf16 on CUDA, and rows of a multiple of 16 bytes."""
    bf16 = all(tensor.dtype == torch.bfloat16 for tensor in (x, *weights))
    return has_triton(x.device) and bf16 and all(size % 8 == 0 for weight in weights for size in weight.shape[1:])


class _Experts(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_NW: Tensor,
        weights_Nk: Tensor,
        gate_up_EWF: Tensor,
        down_EfW: Tensor,
        rows: ExpertRows,
        skip_NW: Tensor | None,
        form: str,
        exact: bool,
    ) -> Tensor:
        from rollmill.models.kernels.fused_triton import gather_sum

        gate_up_RF, out_RW = _products(x_NW, gate_up_EWF, down_EfW, rows, form, exact)
        ctx.save_for_backward(x_NW, weights_Nk, gate_up_EWF, down_EfW, gate_up_RF, *rows)
        ctx.skips = skip_NW is not None
        return gather_sum(out_RW, rows.place_Nk, weights_Nk, skip_NW)

    @staticmethod
    def backward(ctx: Any, grad_NW: Tensor) -> tuple[Tensor | None, ...]:
        from rollmill.models.kernels.fused_triton import gather_sum, spread, swiglu_backward

        x_NW, weights_Nk, gate_up_EWF, down_EfW, gate_up_RF, *rest = ctx.saved_tensors
        rows = ExpertRows(*rest)
        grad_RW = spread(grad_NW, rows.place_Nk)
        grad_Rf = torch._grouped_mm(grad_RW, down_EfW.transpose(1, 2), offs=rows.ends_E)  # without the gate weight
        grad_gate_up_RF, inner_Rf, grad_weights = swiglu_backward(
            gate_up_RF, grad_Rf, weights_Nk.contiguous(), rows.order_R
        )
        assert grad_weights is not None
        grad_down = grad_gate_up = None
        if ctx.needs_input_grad[2]:  # not frozen, as beside an adapter of other matrices
            grad_down = torch._grouped_mm(inner_Rf.t(), grad_RW, offs=rows.ends_E)
        del grad_RW, grad_Rf, inner_Rf
        if ctx.needs_input_grad[2]:
            grad_gate_up = torch._grouped_mm(spread(x_NW, rows.place_Nk).t(), grad_gate_up_RF, offs=rows.ends_E)
        grad_rows = torch._grouped_mm(grad_gate_up_RF, gate_up_EWF.transpose(1, 2), offs=rows.ends_E)
        return (
            gather_sum(grad_rows, rows.place_Nk),
            grad_weights.to(weights_Nk.dtype),
            grad_gate_up,
            grad_down,
            None,
            grad_NW if ctx.skips else None,
            None,
            None,
        )


def _products(
    x_NW: Tensor, gate_up_EWF: Tensor, down_EfW: Tensor, rows: ExpertRows, form: str, exact: bool
) -> tuple[Tensor, Tensor]:
    """Returns (rows of gate_up, the experts' outputs).

    Torch's grouped product does not split sums, so the bits of a row do not depend on the other rows. With FP8 codes
    they would depend on how many rows there are.
    """
    from rollmill.models.kernels.fused_triton import spread, swiglu_forward
    from rollmill.models.kernels.quantised import fp8_grouped_triton

    if form == "fp8" and not exact and fp8_grouped_triton.multiplies(x_NW, rows.place_Nk, gate_up_EWF, down_EfW):
        return fp8_grouped_triton.through_experts(x_NW, rows.place_Nk, rows.ends_E, gate_up_EWF, down_EfW)
    gate_up_RF = torch._grouped_mm(spread(seen(x_NW, form), rows.place_Nk), gate_up_EWF, offs=rows.ends_E)
    return gate_up_RF, torch._grouped_mm(seen(swiglu_forward(gate_up_RF), form), down_EfW, offs=rows.ends_E)


def experts(
    x_NW: Tensor,
    weights_Nk: Tensor,
    chosen_Nk: Tensor,
    gate_up_EWF: Tensor,
    down_EfW: Tensor,
    skip_NW: Tensor | None = None,
    form: str = "bf16",
    exact: bool = False,
) -> Tensor:
    """Sends each token through its chosen experts, sums the weighted outputs in top-k order, and adds `skip`."""
    rows = sort_by_expert(chosen_Nk, gate_up_EWF.shape[0])
    return call(_Experts, x_NW, weights_Nk, gate_up_EWF, down_EfW, rows, skip_NW, form, exact)
