"""Triton kernels for rotary embedding and per-head norms: packed q|k|v rows to rotated heads, and their gradient.

In the forward pass a program takes one token with all its heads. The backward pass reads more and sums the gradients of
the norms, so a program takes several tokens and goes over their heads one by one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollmill.models.kernels.fused_triton import sum_rows

_TOKENS = 32  # per program of the backward pass


def _power(size: int) -> int:
    return int(triton.next_power_of_2(size))


@triton.jit
def turned(x, other, cos, sin):
    """Joined explicitly: otherwise the compiler decides, and an engine's kernel must have the bits of a trainer's."""
    return tl.fma(x, cos + tl.zeros_like(x), other * sin)


@triton.jit
def _rotate_heads(
    x_ptr, out_ptr, cos_ptr, sin_ptr, q_weight_ptr, k_weight_ptr, tokens, width, eps, Q: tl.constexpr, K: tl.constexpr,
    D: tl.constexpr, NORM: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head, pair = tl.arange(0, HEADS)[:, None], tl.arange(0, HALF)[None, :]
    inside = (head < Q + K) & (pair < D // 2)
    at = token * width + head * D + pair
    first = tl.load(x_ptr + at, inside, 0.0).to(tl.float32)
    second = tl.load(x_ptr + at + D // 2, inside, 0.0).to(tl.float32)
    if NORM:
        scale = 1.0 / tl.sqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / D + eps)[:, None]
        is_q, is_k = inside & (head < Q), inside & (head >= Q)
        w1 = tl.load(q_weight_ptr + pair, is_q, 0.0) + tl.load(k_weight_ptr + pair, is_k, 0.0)
        w2 = tl.load(q_weight_ptr + D // 2 + pair, is_q, 0.0) + tl.load(k_weight_ptr + D // 2 + pair, is_k, 0.0)
        # rounded like the output of a separate norm
        first = (first * scale * w1.to(tl.float32)).to(out_ptr.dtype.element_ty).to(tl.float32)
        second = (second * scale * w2.to(tl.float32)).to(out_ptr.dtype.element_ty).to(tl.float32)
    angle = token * (D // 2) + pair
    cos = tl.load(cos_ptr + angle, pair < D // 2, 0.0)
    sin = tl.load(sin_ptr + angle, pair < D // 2, 0.0)
    tl.store(out_ptr + at, turned(first, second, cos, -sin).to(out_ptr.dtype.element_ty), inside)
    tl.store(out_ptr + at + D // 2, turned(second, first, cos, sin).to(out_ptr.dtype.element_ty), inside)
    if NORM:  # a new tensor, so v must be copied too
        value = Q * D + K * D + head * D + pair
        is_v = (head < K) & (pair < D // 2)
        for side in tl.static_range(2):
            here = token * width + value + side * (D // 2)
            tl.store(out_ptr + here, tl.load(x_ptr + here, is_v, 0.0), is_v)


def rotate_heads(
    x: Tensor, cos: Tensor, sin: Tensor, heads: tuple[int, int, int], norms: tuple[Tensor, Tensor] | None, eps: float
) -> Tensor:
    """Rotates q and k of packed q|k|v rows [N, (q + 2k)·D]: in place, or into a new tensor if `norms` are given."""
    q, k, dim = heads
    out = x if norms is None else torch.empty_like(x)
    _rotate_heads[(x.shape[0],)](
        x,
        out,
        cos,
        sin,
        *(norms or (x, x)),
        x.shape[0],
        x.shape[1],
        eps,
        Q=q,
        K=k,
        D=dim,
        NORM=norms is not None,
        HEADS=_power(q + k),
        HALF=_power(dim // 2),
        num_warps=2 if norms is None else 4,
    )
    return out


@triton.jit
def _unrotate_head(
    grad_at, x_at, out_at, weight_ptr, pair, cos, sin, inside, eps, sum1, sum2, D: tl.constexpr, NORM: tl.constexpr
):
    first = tl.load(grad_at, inside, 0.0).to(tl.float32)
    second = tl.load(grad_at + D // 2, inside, 0.0).to(tl.float32)
    back1, back2 = first * cos + second * sin, second * cos - first * sin
    if NORM:
        x1 = tl.load(x_at, inside, 0.0).to(tl.float32)
        x2 = tl.load(x_at + D // 2, inside, 0.0).to(tl.float32)
        scale = 1.0 / tl.sqrt((tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1)) / D + eps)[:, None]
        x1, x2 = x1 * scale, x2 * scale
        sum1 += back1 * x1
        sum2 += back2 * x2
        back1 *= tl.load(weight_ptr + pair, pair < D // 2, 0.0).to(tl.float32)
        back2 *= tl.load(weight_ptr + D // 2 + pair, pair < D // 2, 0.0).to(tl.float32)
        projection = (tl.sum(back1 * x1, 1) + tl.sum(back2 * x2, 1))[:, None] / D
        back1, back2 = (back1 - x1 * projection) * scale, (back2 - x2 * projection) * scale
    tl.store(out_at, back1.to(out_at.dtype.element_ty), inside)
    tl.store(out_at + D // 2, back2.to(out_at.dtype.element_ty), inside)
    return sum1, sum2


@triton.jit
def _store_sums(partial_at, sum1, sum2, D: tl.constexpr, HALF: tl.constexpr):
    column = tl.arange(0, HALF)
    tl.store(partial_at + column, tl.sum(sum1, 0), column < D // 2)
    tl.store(partial_at + D // 2 + column, tl.sum(sum2, 0), column < D // 2)


@triton.jit
def _unrotate_heads(
    dq_ptr, dk_ptr, dv_ptr, x_ptr, cos_ptr, sin_ptr, q_weight_ptr, k_weight_ptr, out_ptr, partial_ptr, tokens, q_stride,
    k_stride, v_stride, eps, Q: tl.constexpr, K: tl.constexpr, D: tl.constexpr, NORM: tl.constexpr, HALF: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)[:, None]
    pair = tl.arange(0, HALF)[None, :]
    inside = (token < tokens) & (pair < D // 2)
    cos = tl.load(cos_ptr + token * (D // 2) + pair, inside, 0.0)
    sin = tl.load(sin_ptr + token * (D // 2) + pair, inside, 0.0)
    at = token * ((Q + 2 * K) * D) + pair
    grad_at = dq_ptr + token * q_stride + pair
    sum1, sum2 = tl.zeros([TOKENS, HALF], tl.float32), tl.zeros([TOKENS, HALF], tl.float32)
    for _ in range(Q):
        sum1, sum2 = _unrotate_head(
            grad_at, x_ptr + at, out_ptr + at, q_weight_ptr, pair, cos, sin, inside, eps, sum1, sum2, D, NORM
        )
        at += D
        grad_at += D
    if NORM:
        _store_sums(partial_ptr + tl.program_id(0) * 2 * D, sum1, sum2, D, HALF)
    grad_at = dk_ptr + token * k_stride + pair
    sum1, sum2 = tl.zeros([TOKENS, HALF], tl.float32), tl.zeros([TOKENS, HALF], tl.float32)
    for _ in range(K):
        sum1, sum2 = _unrotate_head(
            grad_at, x_ptr + at, out_ptr + at, k_weight_ptr, pair, cos, sin, inside, eps, sum1, sum2, D, NORM
        )
        at += D
        grad_at += D
    if NORM:
        _store_sums(partial_ptr + tl.program_id(0) * 2 * D + D, sum1, sum2, D, HALF)
    grad_at = dv_ptr + token * v_stride + pair
    for _ in range(2 * K):
        tl.store(out_ptr + at, tl.load(grad_at, inside, 0.0), inside)
        at += D // 2
        grad_at += D // 2


def unrotate_heads(
    grads: tuple[Tensor, Tensor, Tensor],
    x: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Returns the packed gradient of `rotate_heads`' input, and those of the two norms. `x` is that input, if
    `norms`."""
    dq, dk, dv = (grad if grad.stride()[1:] == (grad.shape[2], 1) else grad.contiguous() for grad in grads)
    (tokens, q, dim), k = dq.shape, dk.shape[1]
    out = torch.empty((tokens, (q + 2 * k) * dim), dtype=dq.dtype, device=dq.device)
    programs = triton.cdiv(tokens, _TOKENS)
    partial = torch.empty((programs if norms else 1, 2 * dim), dtype=torch.float32, device=dq.device)
    _unrotate_heads[(programs,)](
        dq, dk, dv, out if x is None else x, cos, sin, *(norms or (out, out)), out, partial, tokens, dq.stride(0),
        dk.stride(0), dv.stride(0), eps, Q=q, K=k, D=dim, NORM=norms is not None, HALF=_power(dim // 2),
        TOKENS=_TOKENS, num_warps=4,
    )  # fmt: skip
    if norms is None:
        return out, None, None
    grad_q_norm, grad_k_norm = sum_rows(partial, norms[0].dtype).split(dim)
    return out, grad_q_norm, grad_k_norm
