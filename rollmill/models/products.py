"""How a layer multiplies: in the type of its parameters, or as a quantised form does.

A quantised form quantises what goes into a product, token by token (so no token's result depends on its neighbours),
and multiplies it with the weights that are served. The gradient is that of the product as if nothing had been
quantised: dX = dY · W and dW = dYᵀ · X, in the type of the parameters.

On Hopper products of fp8 run in FP8 where shapes allow it (kernels.fp8, kernels.fp8_grouped_triton). Elsewhere, and for
nvfp4, codes are multiplied as the bf16 or FP32 numbers they stand for, exactly, and summed in FP32: only the order of
the sum differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, _grouped_mm
from torch.autograd import Function
from torch.nn.functional import linear

from rollmill.models.kernels import fp8, fused, grouped, nvfp4, rows
from rollmill.models.kernels.call import call
from rollmill.models.kernels.elementwise import swiglu
from rollmill.models.quantize import is_quantised


class Products:
    """In the type of the parameters."""

    norm_linear = staticmethod(fused.norm_linear)
    add_linear = staticmethod(fused.add_linear)
    add_mlp = staticmethod(fused.add_mlp)
    linear = staticmethod(linear)
    grouped_linear = staticmethod(rows.grouped_linear)
    experts = staticmethod(grouped.experts)


class QuantisedProducts:
    """The same, by the rules of a form."""

    def __init__(self, form: str) -> None:
        self._form = form

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return call(_Linear, x, weight, bias, self._form)

    def norm_linear(
        self, x_NW: Tensor, norm_W: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        normal_NW, x_NW = fused.norm_fork(x_NW, norm_W, eps, copy=False)
        return self.linear(normal_NW, weight, bias), x_NW

    def add_linear(self, x_NW: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return x_NW + self.linear(y, weight, bias)

    def add_mlp(
        self, copy_NW: Tensor, x_NW: Tensor, attended: Tensor, mlp: fused.DenseMLP, eps: float, *, remakes: bool = False
    ) -> Tensor:
        """Keeps what it needs: `remakes` is for the kernels of the plain one."""
        y_NW = self.add_linear(copy_NW, attended, mlp.output, mlp.output_bias)
        gate_up, y_NW = self.norm_linear(y_NW, mlp.norm, eps, mlp.gate_up)
        return y_NW + self.linear(swiglu(gate_up), mlp.down)

    def grouped_linear(self, x_RI: Tensor, weight_EIO: Tensor, counts: Sequence[int]) -> Tensor:
        return call(_GroupedLinear, x_RI, weight_EIO, counts, self._form)

    def experts(
        self,
        x_NW: Tensor,
        weights_Nk: Tensor,
        chosen_Nk: Tensor,
        gate_up_EWF: Tensor,
        down_EfW: Tensor,
        skip_NW: Tensor | None = None,
    ) -> Tensor:
        sorted_rows = grouped.sort_by_expert(chosen_Nk, gate_up_EWF.shape[0])
        return call(_Experts, x_NW, weights_Nk, gate_up_EWF, down_EfW, sorted_rows, skip_NW, self._form)


def products(form: str) -> Products | QuantisedProducts:
    return QuantisedProducts(form) if is_quantised(form) else Products()


def activation(x_NW: Tensor, form: str) -> Tensor:
    """What a product of this form sees of its input, in the input's type."""
    return fp8.rounded_tokens(x_NW) if form == "fp8" else nvfp4.rounded_tokens(x_NW)


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, form: str) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        if form == "fp8" and fp8.multiplies(x, weight):
            out = fp8.product(x, weight)
            return out if bias is None else out + bias
        return linear(activation(x, form), weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x, grad.sum(0) if ctx.has_bias else None, None


class _GroupedLinear(Function):
    @staticmethod
    def forward(ctx: Any, x_RI: Tensor, weight_EIO: Tensor, counts: Sequence[int], form: str) -> Tensor:
        ctx.save_for_backward(x_RI, weight_EIO)
        ctx.counts = counts
        return rows.grouped_linear(activation(x_RI, form), weight_EIO, counts)

    @staticmethod
    def backward(ctx: Any, grad_RO: Tensor) -> tuple[Tensor | None, ...]:
        return (*rows._GroupedLinear.backward(ctx, grad_RO), None)


class _Experts(Function):
    """`grouped.experts` with quantised inputs of both products; what is kept, and the backward pass, are the same."""

    @staticmethod
    def forward(
        ctx: Any,
        x_NW: Tensor,
        weights_Nk: Tensor,
        gate_up_EWF: Tensor,
        down_EfW: Tensor,
        order: grouped.Sorted,
        skip_NW: Tensor | None,
        form: str,
    ) -> Tensor:
        from rollmill.models.kernels.fused_triton import gather_sum

        gate_up_RF, out_RW = _through_experts(x_NW, order, gate_up_EWF, down_EfW, form)
        ctx.save_for_backward(x_NW, weights_Nk, gate_up_EWF, down_EfW, gate_up_RF, *order)
        ctx.skips = skip_NW is not None
        return gather_sum(out_RW, order.place_Nk, weights_Nk, skip_NW)

    @staticmethod
    def backward(ctx: Any, grad_NW: Tensor) -> tuple[Tensor | None, ...]:
        return (*grouped._Experts.backward(ctx, grad_NW), None)


def _through_experts(
    x_NW: Tensor, order: grouped.Sorted, gate_up_EWF: Tensor, down_EfW: Tensor, form: str
) -> tuple[Tensor, Tensor]:
    """(rows of gate_up, the experts' outputs)."""
    from rollmill.models.kernels import fp8_grouped_triton
    from rollmill.models.kernels.fused_triton import swiglu_forward

    weights = (gate_up_EWF, down_EfW)
    if form == "fp8" and fp8_grouped_triton.multiplies(x_NW, order.place_Nk, *weights):
        return fp8_grouped_triton.through_experts(x_NW, order.place_Nk, order.ends_E, *weights)
    seen_RW = activation(x_NW, form).index_select(0, order.token_R)
    gate_up_RF = _grouped_mm(seen_RW, gate_up_EWF, offs=order.ends_E)
    return gate_up_RF, _grouped_mm(activation(swiglu_forward(gate_up_RF), form), down_EfW, offs=order.ends_E)
