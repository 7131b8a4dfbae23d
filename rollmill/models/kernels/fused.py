"""The element-wise passes between two products, joined to the products, so that the backward pass keeps little.

On other devices than CUDA these are plain compositions of `elementwise` and `linear`, bit for bit. On CUDA the passes
are Triton kernels, and the product itself adds the residual. What one cheap pass can recompute (normalised rows,
activations) is recomputed in the backward pass, in a kernel that reads the inputs anyway. With `exact`, products of the
forward pass have fixed bits (models.kernels.exact).

    kept per token and layer                 plain                    fused
    attention                                x n qkv q k a            x qkv a         (n normalised, a attended)
    dense MLP                                y n gate_up s h          y gate_up       (s sigmoid, h activation)
    dense MLP, `remakes`                                              —               (y is recomputed from x and a)

`norm_fork` starts a branch: it returns x a second time, for the residual. The gradient of this second output arrives
together with the branch's gradient and is added there, without a pass of its own. On CUDA the second output is a copy,
written by the norm, which reads the row anyway. So the product at the end of the branch can add to it in place.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from rollmill.models.kernels import elementwise
from rollmill.models.kernels.call import call
from rollmill.models.kernels.exact import fp32_product
from rollmill.models.kernels.forms import OutputGradient, add_product_, linear, multiplies_codes, product
from rollmill.models.kernels.quantised import fp8
from rollmill.models.triton import has_triton

Angles = tuple[Tensor, Tensor]  # cos and sin, FP32 [N, 1, D/2]


def fuses(x: Tensor) -> bool:
    return has_triton(x.device)


class _NormFork(Function):
    @staticmethod
    def forward(ctx: Any, x_NW: Tensor, norm_W: Tensor, eps: float, copy: bool) -> tuple[Tensor, Tensor]:
        from rollmill.models.kernels.fused_triton import norm_forward

        copy_NW = x_NW.new_empty(x_NW.shape) if copy else None
        normal_NW, scale_N = norm_forward(x_NW, norm_W, eps, copy_NW)
        ctx.save_for_backward(x_NW, norm_W, scale_N)
        ctx.set_materialize_grads(False)
        return normal_NW, x_NW.view_as(x_NW) if copy_NW is None else copy_NW

    @staticmethod
    def backward(ctx: Any, grad_NW: Tensor, skip_NW: Tensor | None) -> tuple[Tensor | None, ...]:
        from rollmill.models.kernels.fused_triton import norm_backward

        x_NW, norm_W, scale_N = ctx.saved_tensors
        grad_x, grad_norm, _ = norm_backward(x_NW, norm_W, scale_N, grad_NW, skip_NW, normal=False)
        return grad_x, grad_norm, None, None


def norm_fork(x_NW: Tensor, norm_W: Tensor, eps: float, *, copy: bool = True) -> tuple[Tensor, Tensor]:
    """Returns (RMSNorm of x, x for the residual). The second is a copy on CUDA if `copy`, and may be changed in
    place."""
    if not fuses(x_NW):
        return elementwise.rms_norm(x_NW, norm_W, eps), x_NW
    return call(_NormFork, x_NW, norm_W, eps, copy)  # type: ignore[return-value]


def _takes_codes(x: Tensor, weight: Tensor, form: str, exact: bool) -> bool:
    """Whether the product of such rows with `weight` takes FP8 codes, which the pass before it can write."""
    return not exact and len(x) % 4 == 0 and multiplies_codes(x, weight, form)


def _normal(
    x_NW: Tensor, norm_W: Tensor, eps: float, copy_NW: Tensor | None, weight: Tensor, form: str, exact: bool
) -> tuple[Tensor | fp8.Codes, Tensor]:
    """Returns (RMSNorm of x, as codes if the product with `weight` takes them; the scales of the norm). Writes x into
    `copy`."""
    from rollmill.models.kernels.fused_triton import norm_codes, norm_forward, writes_codes

    if writes_codes(x_NW) and _takes_codes(x_NW, weight, form, exact):
        codes, scale_N = norm_codes(x_NW, norm_W, eps, copy_NW)
        return fp8.Codes(*codes), scale_N
    return norm_forward(x_NW, norm_W, eps, copy_NW)


class _NormLinear(Function):
    @staticmethod
    def forward(
        ctx: Any, x_NW: Tensor, norm_W: Tensor, eps: float, weight: Tensor, bias: Tensor | None, form: str, exact: bool
    ) -> tuple[Tensor, Tensor]:
        copy_NW = x_NW.new_empty(x_NW.shape)
        normal, scale_N = _normal(x_NW, norm_W, eps, copy_NW, weight, form, exact)
        ctx.save_for_backward(x_NW, norm_W, scale_N, weight)
        ctx.has_bias, ctx.form = bias is not None, form
        ctx.set_materialize_grads(False)
        return product(normal, weight, bias, form, exact), copy_NW

    @staticmethod
    def backward(ctx: Any, grad: Tensor, skip_NW: Tensor | None) -> tuple[Tensor | None, ...]:
        from rollmill.models.kernels.fused_triton import norm_backward

        x_NW, norm_W, scale_N, weight = ctx.saved_tensors
        output = OutputGradient(grad, weight, ctx.form)
        grad_x, grad_norm, normal_NW = norm_backward(x_NW, norm_W, scale_N, output.of_input(), skip_NW, normal=True)
        assert normal_NW is not None
        grad_bias = grad.sum(0) if ctx.has_bias else None
        grad_weight = output.of_weight(normal_NW) if ctx.needs_input_grad[3] else None
        return grad_x, grad_norm, None, grad_weight, grad_bias, None, None


def norm_linear(
    x_NW: Tensor,
    norm_W: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None = None,
    form: str = "bf16",
    exact: bool = False,
) -> tuple[Tensor, Tensor]:
    """Returns (the linear map of x's RMSNorm, x for the residual: on CUDA a copy that `add_linear` may change)."""
    if not fuses(x_NW):
        return linear(elementwise.rms_norm(x_NW, norm_W, eps), weight, bias, form, exact), x_NW
    return call(_NormLinear, x_NW, norm_W, eps, weight, bias, form, exact)  # type: ignore[return-value]


class _AddLinear(Function):
    @staticmethod
    def forward(
        ctx: Any, x_NW: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, form: str, exact: bool
    ) -> Tensor:
        ctx.save_for_backward(y, weight)
        ctx.has_bias, ctx.form = bias is not None, form
        ctx.mark_dirty(x_NW)
        return add_product_(x_NW, y, weight, bias, form, exact)

    @staticmethod
    def backward(ctx: Any, grad_NW: Tensor) -> tuple[Tensor | None, ...]:
        y, weight = ctx.saved_tensors
        output = OutputGradient(grad_NW, weight, ctx.form)
        grad_bias = grad_NW.sum(0) if ctx.has_bias else None
        grad_weight = output.of_weight(y) if ctx.needs_input_grad[2] else None
        return grad_NW, output.of_input(), grad_weight, grad_bias, None, None


def add_linear(
    x_NW: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None = None, form: str = "bf16", exact: bool = False
) -> Tensor:
    """x + the linear map of y. In place on CUDA, where x must be the copy from `norm_linear` or `norm_fork`."""
    if not fuses(x_NW):
        return x_NW + linear(y, weight, bias, form, exact)
    return call(_AddLinear, x_NW, y, weight, bias, form, exact)


class DenseMLP(NamedTuple):
    """The weights of a dense layer that come after its attention."""

    output: Tensor
    output_bias: Tensor | None
    norm: Tensor
    gate_up: Tensor
    down: Tensor


class _AddMLP(Function):
    """`copy` is a copy of `x`. The backward pass needs `x`; the gradient is returned for `copy`."""

    @staticmethod
    def forward(
        ctx: Any,
        copy_NW: Tensor,
        x_NW: Tensor,
        attended: Tensor,
        eps: float,
        remakes: bool,
        form: str,
        exact: bool,
        *weights: Tensor | None,
    ) -> Tensor:
        from rollmill.models.kernels.fused_triton import norm_forward

        mlp = DenseMLP(*weights)  # type: ignore[arg-type]
        y_NW = add_product_(copy_NW, attended, mlp.output, mlp.output_bias, form, exact)
        inner: Tensor | fp8.Codes
        out_NW: Tensor | None
        if remakes:
            from rollmill.models.kernels.swiglu_triton import swiglu_product

            out_NW, (normal_NW, scale_N) = y_NW, norm_forward(y_NW, mlp.norm, eps)
            gate_up, inner = None, swiglu_product(normal_NW, mlp.gate_up, form, exact)
        else:
            # a product of codes cannot add: y is added to it, and no copy of y is needed
            out_NW = None if _takes_codes(y_NW, mlp.down, form, exact) else y_NW.new_empty(y_NW.shape)
            normal, scale_N = _normal(y_NW, mlp.norm, eps, out_NW, mlp.gate_up, form, exact)
            gate_up = product(normal, mlp.gate_up, None, form, exact)
            inner = _swiglu(gate_up, mlp.down, form, exact)
        ctx.save_for_backward(x_NW if remakes else y_NW, attended, scale_N, gate_up, *weights)
        ctx.eps, ctx.form = eps, form
        if remakes:  # otherwise `copy` now holds y, which nothing outside has
            ctx.mark_dirty(copy_NW)
        if out_NW is None:
            return product(inner, mlp.down, None, form, exact).add_(y_NW)
        return add_product_(out_NW, inner, mlp.down, None, form, exact)

    @staticmethod
    def backward(ctx: Any, grad_NW: Tensor) -> tuple[Tensor | None, ...]:
        from rollmill.models.kernels.fused_triton import norm_backward, norm_forward, swiglu_backward

        y_NW, attended, scale_N, gate_up, *weights = ctx.saved_tensors
        mlp, normal_NW = DenseMLP(*weights), None
        down = OutputGradient(grad_NW, mlp.down, ctx.form)
        if gate_up is None:
            from rollmill.models.kernels.swiglu_triton import swiglu_product_backward

            y_NW = add_product_(y_NW.clone(), attended, mlp.output, mlp.output_bias, ctx.form)
            normal_NW, _ = norm_forward(y_NW, mlp.norm, ctx.eps)
            slope, inner = swiglu_product_backward(normal_NW, mlp.gate_up, down.of_input(), ctx.form)
        else:
            slope, inner, _ = swiglu_backward(gate_up, down.of_input())
        grad_down, joined = down.of_weight(inner), OutputGradient(slope, mlp.gate_up, ctx.form)
        del inner, slope, down
        grad_normal, kept = joined.of_input(), normal_NW is not None
        grad_y, grad_norm, made = norm_backward(y_NW, mlp.norm, scale_N, grad_normal, grad_NW, normal=not kept)
        normal_NW = normal_NW if made is None else made
        assert normal_NW is not None
        grad_gate_up, grad_bias = joined.of_weight(normal_NW), None if mlp.output_bias is None else grad_y.sum(0)
        del joined
        output = OutputGradient(grad_y, mlp.output, ctx.form)
        found = (output.of_weight(attended), grad_bias, grad_norm, grad_gate_up, grad_down)
        return grad_y, None, output.of_input(), None, None, None, None, *found


def _swiglu(gate_up: Tensor, down: Tensor, form: str, exact: bool) -> Tensor | fp8.Codes:
    """SwiGLU's output, as codes if the product with `down` takes codes."""
    if _takes_codes(gate_up, down, form, exact):
        from rollmill.models.kernels.quantised.fp8_grouped_triton import swiglu_codes

        codes, scales = swiglu_codes(gate_up)
        return fp8.Codes(codes, scales.t())
    from rollmill.models.kernels.fused_triton import swiglu_forward

    return swiglu_forward(gate_up)


def add_mlp(
    copy_NW: Tensor,
    x_NW: Tensor,
    attended: Tensor,
    mlp: DenseMLP,
    eps: float,
    *,
    remakes: bool = False,
    form: str = "bf16",
    exact: bool = False,
) -> Tensor:
    """Computes y = x + the linear map of `attended`, and returns y + the MLP of y's RMSNorm.

    `copy` is the copy of x from `norm_linear` or `norm_fork`. With `remakes`, on CUDA, the MLP keeps nothing for the
    backward pass: two products compute y and gate_up again.
    """
    if fuses(copy_NW):
        return call(_AddMLP, copy_NW, x_NW, attended, eps, remakes, form, exact, *mlp)
    y_NW = add_linear(x_NW, attended, mlp.output, mlp.output_bias, form, exact)
    gate_up = linear(elementwise.rms_norm(y_NW, mlp.norm, eps), mlp.gate_up, form=form, exact=exact)
    return y_NW + linear(elementwise.swiglu(gate_up), mlp.down, form=form, exact=exact)


class _RotateHeads(Function):
    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, angles: Angles, heads: tuple[int, int, int], q_norm: Any, k_norm: Any, eps: float
    ) -> tuple[Tensor, ...]:
        from rollmill.models.kernels.attention.rotate_triton import rotate_heads

        norms = None if q_norm is None else (q_norm, k_norm)
        rotated = rotate_heads(qkv, *angles, heads, norms, eps)
        ctx.save_for_backward(*angles, *((qkv, *norms) if norms else ()))
        ctx.eps = eps
        q, k, dim = heads
        return rotated.view(-1, q + 2 * k, dim).split((q, k, k), dim=1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from rollmill.models.kernels.attention.rotate_triton import unrotate_heads

        cos, sin, *rest = ctx.saved_tensors
        qkv, norms = (rest[0], (rest[1], rest[2])) if rest else (None, None)
        grad_qkv, grad_q_norm, grad_k_norm = unrotate_heads(grads, qkv, cos, sin, norms, ctx.eps)  # type: ignore[arg-type]
        return grad_qkv, None, None, grad_q_norm, grad_k_norm, None


def rotate_heads(
    qkv: Tensor, angles: Angles, heads: tuple[int, int, int], norms: tuple[Tensor, Tensor] | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """q [N, H, D], k and v [N, K, D] from packed rows q|k|v. Each head of q and k is rotated, and normalised before if
    `norms` is given.

    `heads` is (H, K, D). On CUDA the rows are rotated in place, so nothing else may hold them.
    """
    if fuses(qkv) and qkv.is_contiguous():
        return call(_RotateHeads, qkv, angles, heads, *(norms or (None, None)), eps)  # type: ignore[return-value]
    q_heads, k_heads, dim = heads
    qk, v_NKD = qkv.view(qkv.shape[0], -1, dim).split((q_heads + k_heads, k_heads), dim=1)
    if norms is not None:
        q_NHD, k_NKD = qk.split((q_heads, k_heads), dim=1)
        q_NHD, k_NKD = (
            elementwise.rms_norm(x.reshape(-1, dim), norm, eps).view(x.shape)
            for x, norm in zip((q_NHD, k_NKD), norms, strict=True)
        )
        return elementwise.rotate(q_NHD, *angles), elementwise.rotate(k_NKD, *angles), v_NKD
    q_NHD, k_NKD = elementwise.rotate(qk, *angles).split((q_heads, k_heads), dim=1)
    return q_NHD, k_NKD, v_NKD


class _FP32Linear(Function):
    @staticmethod
    def forward(ctx: Any, x_NW: Tensor, weight: Tensor, exact: bool) -> Tensor:
        ctx.save_for_backward(x_NW, weight)
        if exact:
            return fp32_product(x_NW, weight.t())
        return torch.mm(x_NW, weight.t(), out_dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x_NW, weight = ctx.saved_tensors
        # FP32 as the sum of two bf16 numbers: sixteen significant bits, at the speed of bf16
        high = grad.to(x_NW.dtype)
        low = (grad - high).to(x_NW.dtype)
        grad_weight = torch.mm(high.t(), x_NW, out_dtype=torch.float32) + torch.mm(
            low.t(), x_NW, out_dtype=torch.float32
        )
        return torch.mm(high, weight), grad_weight.to(weight.dtype), None


def fp32_linear(x_NW: Tensor, weight: Tensor, exact: bool = False) -> Tensor:
    """An FP32 result. Products of bf16 numbers are exact in FP32, so only the order of the sum differs."""
    if x_NW.is_cuda and x_NW.dtype == weight.dtype == torch.bfloat16:
        return call(_FP32Linear, x_NW, weight, exact)
    return linear(x_NW.float(), weight.float(), exact=exact)
