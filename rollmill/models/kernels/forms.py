"""Matrix products in each form: in the type of the weights, or quantised.

A quantised form quantises the input of a product per token, so no token's result depends on its neighbours, and
multiplies it with the served weights. The gradient ignores that quantisation: dX = dY · W and dW = dYᵀ · X.

On Hopper, fp8 products run in FP8 if their shapes allow it (fp8, fp8_grouped_triton). Elsewhere, and for nvfp4, codes
are converted to the bf16 or FP32 numbers they stand for, multiplied exactly, and summed in FP32. Only the order of the
sum differs. The gradients of products that fit (`fp8.differentiates`) are computed in FP8 too: their factors are
quantised along the sum. Other gradients are computed in the type of the weights.

With `exact`, the bits of a row do not depend on the rest of the batch (models.kernels.exact); FP8 codes are then always
converted, but not in the backward pass.
"""

from __future__ import annotations

import platform
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from rollmill.models.kernels import exact as exact_products
from rollmill.models.kernels.call import call
from rollmill.models.kernels.quantised import fp8, nvfp4

FORMS = ("fp8", "nvfp4")  # quantised ones
# Rows for which BLAS on Arm is faster with the weight as its left side, because it copies the right side into another
# order: 1.1 to 1.4 times for 32 rows. For fewer rows it does not copy, and for more rows it does not matter. Not
# measured on x86-64, whose BLAS is another one.
FEW_ROWS = range(8, 129) if platform.machine() == "aarch64" else range(0)


def is_quantised(form: str) -> bool:
    """Whether the bytes of a form are codes with scales."""
    return form in FORMS


def seen(x_NI: Tensor, form: str) -> Tensor:
    """`x` as a product of this form sees it: quantised and dequantised, in the type of `x`."""
    if form == "fp8":
        return fp8.rounded_tokens(x_NI)
    return nvfp4.rounded_tokens(x_NI) if form == "nvfp4" else x_NI


def multiplies_codes(x_NI: Tensor, weight_OI: Tensor, form: str) -> bool:
    return form == "fp8" and fp8.multiplies(x_NI, weight_OI)


def product(
    x_NI: Tensor | fp8.Codes, weight_OI: Tensor, bias_O: Tensor | None, form: str, exact: bool = False
) -> Tensor:
    """x · weightᵀ + bias, without a backward pass."""
    if isinstance(x_NI, fp8.Codes):
        out_NO = fp8.multiply(x_NI, fp8.Codes(*fp8.quantise(weight_OI, fp8.BLOCK)))
    elif exact:
        out_NO = exact_products.product(seen(x_NI, form), weight_OI.t())
    elif multiplies_codes(x_NI, weight_OI, form):
        out_NO = fp8.product(x_NI, weight_OI)
    else:
        return nn.functional.linear(seen(x_NI, form), weight_OI, bias_O)
    return out_NO if bias_O is None else out_NO.add_(bias_O)


def add_product_(
    out_NO: Tensor,
    x_NI: Tensor | fp8.Codes,
    weight_OI: Tensor,
    bias_O: Tensor | None,
    form: str,
    exact: bool = False,
) -> Tensor:
    """Adds x · weightᵀ + bias to `out` in place, on CUDA."""
    if isinstance(x_NI, fp8.Codes):
        out_NO.add_(fp8.multiply(x_NI, fp8.Codes(*fp8.quantise(weight_OI, fp8.BLOCK))))
    elif exact:
        exact_products.add_product_(out_NO, seen(x_NI, form), weight_OI.t())
    elif multiplies_codes(x_NI, weight_OI, form):
        out_NO.add_(fp8.product(x_NI, weight_OI))
    else:
        out_NO.addmm_(seen(x_NI, form), weight_OI.t())
    return out_NO if bias_O is None else out_NO.add_(bias_O)


class OutputGradient:
    """The gradient of a product's output, from which the gradients of its factors are computed."""

    def __init__(self, grad_NO: Tensor, weight_OI: Tensor, form: str) -> None:
        self._grad, self._weight = grad_NO, weight_OI
        in_fp8 = form == "fp8" and fp8.differentiates(grad_NO, weight_OI)
        self.codes = fp8.both_ways(grad_NO) if in_fp8 else None  # None: in the type of the weight

    def of_input(self) -> Tensor:
        """dY · W."""
        if self.codes is None:
            return self._grad @ self._weight
        return fp8.multiply(self.codes.rows, fp8.transposed(self._weight))[: len(self._grad)]

    def of_weight(self, x_NI: Tensor) -> Tensor:
        """dYᵀ · X."""
        if self.codes is None:
            return self._grad.t() @ x_NI
        return fp8.multiply(self.codes.columns, fp8.along_tokens(x_NI))


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, form: str, exact: bool) -> Tensor:
        ctx.save_for_backward(x_NI, weight_OI)
        ctx.has_bias, ctx.form = bias_O is not None, form
        return product(x_NI, weight_OI, bias_O, form, exact)

    @staticmethod
    def backward(ctx: Any, grad_NO: Tensor) -> tuple[Tensor | None, ...]:
        x_NI, weight_OI = ctx.saved_tensors
        grad = OutputGradient(grad_NO, weight_OI, ctx.form)
        grad_weight = grad.of_weight(x_NI) if ctx.needs_input_grad[1] else None
        return grad.of_input(), grad_weight, grad_NO.sum(0) if ctx.has_bias else None, None, None


def linear(
    x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None, form: str = "bf16", exact: bool = False
) -> Tensor:
    if exact or is_quantised(form):
        return call(_Linear, x_NI, weight_OI, bias_O, form, exact)
    if len(x_NI) in FEW_ROWS and x_NI.dim() == 2 and x_NI.device.type == "cpu" and not torch.is_grad_enabled():
        out_NO = torch.mm(weight_OI, x_NI.t()).t().contiguous()
        return out_NO if bias_O is None else out_NO.add_(bias_O)
    return nn.functional.linear(x_NI, weight_OI, bias_O)
