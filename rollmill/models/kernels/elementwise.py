"""RMSNorm, rotary embedding and SwiGLU. Statistics and rotations are computed in FP32, whatever the type of the input.

The bits of a row do not depend on the other rows: models.kernels.exact needs that. So no forward pass here uses
`torch.sigmoid` or `addcmul`: torch computes them in vectors, but not at the end of a tensor, with other bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from rollmill.models.kernels.call import call


class _RMSNorm(Function):
    @staticmethod
    def forward(ctx: Any, x_NW: Tensor, weight_W: Tensor, eps: float) -> Tensor:
        x = x_NW.float()
        scale_N1 = torch.rsqrt((x * x).mean(-1, keepdim=True).add_(eps))
        ctx.save_for_backward(x_NW, weight_W, scale_N1)
        return (x * scale_N1).mul_(weight_W.float()).to(x_NW.dtype)

    @staticmethod
    def backward(ctx: Any, grad_NW: Tensor) -> tuple[Tensor, Tensor, None]:
        x_NW, weight_W, scale_N1 = ctx.saved_tensors
        normal, grad = x_NW.float() * scale_N1, grad_NW.float()
        grad_weight_W = (grad * normal).sum(0)
        grad_normal = grad * weight_W.float()
        projection_N1 = (grad_normal * normal).mean(-1, keepdim=True)
        grad_x = grad_normal.addcmul_(normal, projection_N1, value=-1).mul_(scale_N1)
        return grad_x.to(x_NW.dtype), grad_weight_W.to(weight_W.dtype), None


def rms_norm(x_NW: Tensor, weight_W: Tensor, eps: float) -> Tensor:
    return call(_RMSNorm, x_NW, weight_W, eps)


def _turn(x_NHD: Tensor, cos_N1d: Tensor, sin_N1d: Tensor) -> Tensor:
    half = x_NHD.shape[-1] // 2
    first, second = x_NHD[..., :half].float(), x_NHD[..., half:].float()
    out = torch.empty_like(x_NHD)
    out[..., :half] = (first * cos_N1d).sub_(second * sin_N1d)
    out[..., half:] = (second * cos_N1d).add_(first * sin_N1d)
    return out


class _Rotate(Function):
    @staticmethod
    def forward(ctx: Any, x_NHD: Tensor, cos_N1d: Tensor, sin_N1d: Tensor) -> Tensor:
        ctx.save_for_backward(cos_N1d, sin_N1d)
        return _turn(x_NHD, cos_N1d, sin_N1d)

    @staticmethod
    def backward(ctx: Any, grad_NHD: Tensor) -> tuple[Tensor, None, None]:
        cos_N1d, sin_N1d = ctx.saved_tensors
        return _turn(grad_NHD, cos_N1d, -sin_N1d), None, None


def rotate(x_NHD: Tensor, cos_N1d: Tensor, sin_N1d: Tensor) -> Tensor:
    """Rotary embedding over pairs (i, i + D/2), the layout of Llama-type checkpoints. `cos`, `sin` are FP32."""
    return call(_Rotate, x_NHD, cos_N1d, sin_N1d)


def sigmoid(x: Tensor) -> Tensor:
    return (-x).exp_().add(1).reciprocal_()


class _SwiGLU(Function):
    @staticmethod
    def forward(ctx: Any, gate_up_NF: Tensor) -> Tensor:
        gate, up = gate_up_NF.chunk(2, dim=-1)
        opened = sigmoid(gate)
        ctx.save_for_backward(gate_up_NF, opened)
        return (gate * opened).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad_Nf: Tensor) -> Tensor:
        gate_up_NF, opened = ctx.saved_tensors
        gate, up = gate_up_NF.chunk(2, dim=-1)
        silu = gate * opened
        grad = torch.empty_like(gate_up_NF)
        width = opened.shape[-1]
        torch.mul(grad_Nf, silu, out=grad[:, width:])
        slope = silu.addcmul_(silu, opened, value=-1).add_(opened)  # d silu = s + silu (1 - s)
        torch.mul(slope.mul_(up), grad_Nf, out=grad[:, :width])
        return grad


def swiglu(gate_up_NF: Tensor) -> Tensor:
    """silu(gate) · up, where gate and up are the two halves of each row."""
    return call(_SwiGLU, gate_up_NF)
