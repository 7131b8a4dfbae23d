"""Adapters (LoRA): two small matrices beside a matrix that stays as it is.

    y = W·x + bias + B·(scale · A·x)        A [rank, in], B [out, rank]; for experts A [E, in, rank], B [E, rank, out]

Only A and B are trained. B begins with zeros, so a fresh adapter changes nothing. q, k and v are one matrix of ours and
share A, as do gate and up. Trainer and engine compute both products apart and add them in the same order, so exact
numerics hold: nothing is merged while a model is served. A version of an adapted line holds the frozen tensors too;
they never change, so its deltas hold adapters alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from rollmill.models.config import Adapter
from rollmill.models.kernels.call import call
from rollmill.models.kernels.forms import OutputGradient, add_product_, linear, product, seen
from rollmill.models.kernels.fused import add_linear, fuses
from rollmill.models.kernels.grouped import ExpertRows, sort_by_expert
from rollmill.models.kernels.rows import grouped_linear

_MARK = "_adapter."  # in the names of an adapter's tensors, between the matrix it is beside and A or B
SCALE = "adapter_scale"  # a tensor of every version with adapters, so that the version alone says what they add


def is_adapter(name: str) -> bool:
    return _MARK in name


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are trained: all, or only an adapter's."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def adds_anything(model: nn.Module) -> bool:
    """Whether the model has an adapter that was begun: its A is not all zeros."""
    return any(bool(each.any()) for name, each in model.named_parameters() if name.endswith("_adapter.a"))


class LowRank(nn.Module):
    """The adapter of one matrix."""

    def __init__(self, outputs: int, inputs: int, adapter: Adapter, dtype: torch.dtype) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.empty(adapter.rank, inputs, dtype=dtype))
        self.b = nn.Parameter(torch.empty(outputs, adapter.rank, dtype=dtype))
        self.scale = adapter.scale


class ExpertsLowRank(nn.Module):
    """The adapters of one matrix of every expert of a layer, [in, out] as the experts are."""

    def __init__(self, experts: int, inputs: int, outputs: int, adapter: Adapter, dtype: torch.dtype) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.empty(experts, inputs, adapter.rank, dtype=dtype))
        self.b = nn.Parameter(torch.empty(experts, adapter.rank, outputs, dtype=dtype))
        self.scale = adapter.scale


def add_adapter_(out_NO: Tensor, x_NI: Tensor, adapter: LowRank | None, exact: bool) -> Tensor:
    """Adds B·(scale · A·x) to `out` in place, on CUDA, without a backward pass."""
    if adapter is None:
        return out_NO
    low_NR = product(x_NI, adapter.a, None, "bf16", exact).mul_(adapter.scale)
    return add_product_(out_NO, low_NR, adapter.b, None, "bf16", exact)


class _Adapted(Function):
    """`gated`: x is gate and up, and the product is of their SwiGLU, which the backward pass computes again."""

    @staticmethod
    def forward(
        ctx: Any,
        skip_NO: Tensor | None,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        a: Tensor,
        b: Tensor,
        scale: float,
        form: str,
        exact: bool,
        gated: bool,
    ) -> Tensor:
        from rollmill.models.kernels.fused_triton import swiglu_forward

        inner = swiglu_forward(x) if gated else x
        if skip_NO is None:
            out_NO = product(inner, weight, bias, form, exact)
        else:
            ctx.mark_dirty(skip_NO)
            out_NO = add_product_(skip_NO, inner, weight, bias, form, exact)
        low_NR = product(inner, a, None, "bf16", exact).mul_(scale)
        ctx.save_for_backward(x, weight, a, b, low_NR)
        ctx.scale, ctx.form, ctx.gated = scale, form, gated
        return add_product_(out_NO, low_NR, b, None, "bf16", exact)

    @staticmethod
    def backward(ctx: Any, grad_NO: Tensor) -> tuple[Tensor | None, ...]:
        from rollmill.models.kernels.fused_triton import swiglu_backward

        x, weight, a, b, low_NR = ctx.saved_tensors
        grad_low = (grad_NO @ b).mul_(ctx.scale)
        grad_x: Tensor | None = None
        inner = x
        if ctx.needs_input_grad[1]:
            grad_x = OutputGradient(grad_NO, weight, ctx.form).of_input().addmm_(grad_low, a)
            if ctx.gated:
                grad_x, inner, _ = swiglu_backward(x, grad_x)
        skips = grad_NO if ctx.needs_input_grad[0] else None
        return skips, grad_x, None, None, grad_low.t() @ inner, grad_NO.t() @ low_NR, None, None, None, None


def adapted(
    x_NI: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    adapter: LowRank,
    form: str,
    exact: bool,
    skip_NO: Tensor | None = None,
    gated: bool = False,
) -> Tensor:
    """The linear map of x with its adapter, added to `skip` if given: in place on CUDA, where it must be a copy. The
    weight and the bias get no gradient. `gated`: of the SwiGLU of x."""
    if fuses(x_NI):
        low = (adapter.a, adapter.b, adapter.scale)
        return call(_Adapted, skip_NO, x_NI, weight, bias, *low, form, exact, gated)
    if gated:
        from rollmill.models.kernels.elementwise import swiglu

        x_NI = swiglu(x_NI)
    out_NO = linear(x_NI, weight, bias, form, exact)
    out_NO = out_NO if skip_NO is None else skip_NO + out_NO
    return out_NO + linear(linear(x_NI, adapter.a, exact=exact) * adapter.scale, adapter.b, exact=exact)


def add_adapted(
    skip_NO: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, adapter: LowRank | None, form: str, exact: bool
) -> Tensor:
    """`skip` + the linear map of x, with its adapter if it has one."""
    if adapter is None:
        return add_linear(skip_NO, x, weight, bias, form, exact)
    return adapted(x, weight, bias, adapter, form, exact, skip_NO)


class _AdaptedExperts(Function):
    """`grouped._Experts` with adapters, for experts that stay as they are."""

    @staticmethod
    def forward(
        ctx: Any,
        x_NW: Tensor,
        weights_Nk: Tensor,
        skip_NW: Tensor | None,
        rows: ExpertRows,
        form: str,
        scale: float,
        *matrices: Tensor,
    ) -> Tensor:
        from rollmill.models.kernels.fused_triton import gather_sum, spread, swiglu_forward

        gate_up, up_a, up_b, down, down_a, down_b = matrices
        x_RW = spread(x_NW, rows.place_Nk)
        low_Rr = _grouped(x_RW, up_a, rows).mul_(scale)
        gate_up_RF = _grouped(seen(x_RW, form), gate_up, rows).add_(_grouped(low_Rr, up_b, rows))
        ctx.save_for_backward(x_NW, weights_Nk, gate_up_RF, low_Rr, *rows, *matrices)
        ctx.scale, ctx.skips = scale, skip_NW is not None
        inner_Rf = swiglu_forward(gate_up_RF)
        down_Rr = _grouped(inner_Rf, down_a, rows).mul_(scale)
        out_RW = _grouped(seen(inner_Rf, form), down, rows).add_(_grouped(down_Rr, down_b, rows))
        return gather_sum(out_RW, rows.place_Nk, weights_Nk, skip_NW)

    @staticmethod
    def backward(ctx: Any, grad_NW: Tensor) -> tuple[Tensor | None, ...]:
        from rollmill.models.kernels.fused_triton import gather_sum, spread, swiglu_backward

        x_NW, weights_Nk, gate_up_RF, low_Rr, *rest = ctx.saved_tensors
        rows, scale = ExpertRows(*rest[:4]), ctx.scale
        gate_up, up_a, up_b, down, down_a, down_b = rest[4:]
        grad_RW = spread(grad_NW, rows.place_Nk)  # without the gate weight, which `inner` has below
        grad_low = _grouped(grad_RW, down_b.mT, rows).mul_(scale)
        grad_Rf = _grouped(grad_RW, down.mT, rows).add_(_grouped(grad_low, down_a.mT, rows))
        grad_gate_up, inner_Rf, grad_weights = swiglu_backward(
            gate_up_RF, grad_Rf, weights_Nk.contiguous(), rows.order_R
        )
        assert grad_weights is not None
        grad_down_a = _grouped(inner_Rf.t(), grad_low, rows)
        grad_down_b = _grouped(_grouped(inner_Rf, down_a, rows).mul_(scale).t(), grad_RW, rows)
        del grad_RW, grad_Rf, inner_Rf
        grad_low = _grouped(grad_gate_up, up_b.mT, rows).mul_(scale)
        grad_up_a = _grouped(spread(x_NW, rows.place_Nk).t(), grad_low, rows)
        grad_up_b = _grouped(low_Rr.t(), grad_gate_up, rows)
        grad_rows = _grouped(grad_gate_up, gate_up.mT, rows).add_(_grouped(grad_low, up_a.mT, rows))
        found = (None, grad_up_a, grad_up_b, None, grad_down_a, grad_down_b)
        grad_skip = grad_NW if ctx.skips else None
        return gather_sum(grad_rows, rows.place_Nk), grad_weights.to(weights_Nk), grad_skip, None, None, None, *found


def _grouped(left: Tensor, right: Tensor, rows: ExpertRows) -> Tensor:
    return torch._grouped_mm(left, right, offs=rows.ends_E)


def adapted_experts(
    x_NW: Tensor,
    weights_Nk: Tensor,
    chosen_Nk: Tensor,
    experts: tuple[Tensor, ExpertsLowRank, Tensor, ExpertsLowRank],
    skip_NW: Tensor | None,
    form: str,
) -> Tensor:
    """`grouped.experts` on CUDA, with the adapters of gate_up and down behind these. The bits of a row do not depend on
    the other rows."""
    gate_up, up, down, low = experts
    rows = sort_by_expert(chosen_Nk, len(gate_up))
    matrices = (gate_up, up.a, up.b, down, low.a, low.b)
    return call(_AdaptedExperts, x_NW, weights_Nk, skip_NW, rows, form, up.scale, *matrices)


def adapted_rows(
    x_RI: Tensor, weight: Tensor, adapter: ExpertsLowRank | None, counts: Sequence[int], form: str, exact: bool
) -> Tensor:
    """`rows.grouped_linear` with the experts' adapters, if they have any."""
    out_RO = grouped_linear(x_RI, weight, counts, form, exact)
    if adapter is None:
        return out_RO
    low_Rr = grouped_linear(x_RI, adapter.a, counts, exact=exact) * adapter.scale
    return out_RO + grouped_linear(low_Rr, adapter.b, counts, exact=exact)
