"""Triton kernels of the element-wise passes between products: one read and one write of each tensor, FP32 inside.

Each program works on whole rows in a fixed order, so a row's bits do not depend on the rows beside it, and sums over
rows are made of partial sums in a fixed order: nothing is added atomically.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# Programs that each keep a partial sum over their rows: as many as an H200 has room for at once, by their registers six
# or four for each of its 132 multiprocessors. A few more would run alone after the others.
_NORM_PROGRAMS, _HEAD_PROGRAMS = 792, 528


def _block(width: int) -> int:
    return int(triton.next_power_of_2(width))


def _tile(width: int, elements: int) -> dict[str, int]:
    """Rows a program takes at once, so that it has about so many elements in flight."""
    block = _block(width)
    return {"BLOCK": block, "ROWS": max(1, elements // block), "num_warps": 4 if block <= 4096 else 8}


@triton.jit
def _norm_forward(
    x_ptr, weight_ptr, out_ptr, scale_ptr, rows, width, stride, eps, BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    x = tl.load(x_ptr + row[:, None] * stride + column[None, :], inside, 0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, column < width, 0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 1) / width + eps)
    tl.store(scale_ptr + row, scale, row < rows)
    out = x * scale[:, None] * weight[None, :]
    tl.store(out_ptr + row[:, None] * width + column[None, :], out.to(out_ptr.dtype.element_ty), inside)


def norm_forward(x_NW: Tensor, weight_W: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    rows, width = x_NW.shape
    out_NW = torch.empty((rows, width), dtype=x_NW.dtype, device=x_NW.device)
    scale_N = torch.empty(rows, dtype=torch.float32, device=x_NW.device)
    tile = _tile(width, 4096)
    grid = (triton.cdiv(rows, tile["ROWS"]),)
    _norm_forward[grid](x_NW, weight_W, out_NW, scale_N, rows, width, x_NW.stride(0), eps, **tile)
    return out_NW, scale_N


@triton.jit
def _norm_backward(
    x_ptr,
    weight_ptr,
    scale_ptr,
    grad_ptr,
    skip_ptr,
    grad_x_ptr,
    normal_ptr,
    partial_ptr,
    rows,
    width,
    stride,
    SKIP: tl.constexpr,
    NORMAL: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    column = tl.arange(0, BLOCK)
    weight = tl.load(weight_ptr + column, column < width, 0.0).to(tl.float32)
    partial = tl.zeros([BLOCK], tl.float32)
    for start in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = (start + tl.arange(0, ROWS)).to(tl.int64)
        inside = (row < rows)[:, None] & (column < width)[None, :]
        at = row[:, None] * width + column[None, :]
        x = tl.load(x_ptr + row[:, None] * stride + column[None, :], inside, 0.0).to(tl.float32)
        grad = tl.load(grad_ptr + at, inside, 0.0).to(tl.float32)
        scale = tl.load(scale_ptr + row, row < rows, 0.0)[:, None]
        normal = x * scale
        partial += tl.sum(grad * normal, 0)
        grad_normal = grad * weight[None, :]
        projection = tl.sum(grad_normal * normal, 1)[:, None] / width
        grad_x = (grad_normal - normal * projection) * scale
        if SKIP:
            grad_x += tl.load(skip_ptr + at, inside, 0.0).to(tl.float32)
        tl.store(grad_x_ptr + at, grad_x.to(grad_x_ptr.dtype.element_ty), inside)
        if NORMAL:
            out = normal * weight[None, :]
            tl.store(normal_ptr + at, out.to(normal_ptr.dtype.element_ty), inside)
    tl.store(partial_ptr + tl.program_id(0) * width + column, partial, column < width)


def norm_backward(
    x_NW: Tensor, weight_W: Tensor, scale_N: Tensor, grad_NW: Tensor, skip_NW: Tensor | None, *, normal: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(gradient of x, plus `skip`; gradient of the weight; the normalised rows again, if wanted)."""
    rows, width = x_NW.shape
    grad_x = torch.empty((rows, width), dtype=x_NW.dtype, device=x_NW.device)
    normal_NW = torch.empty_like(grad_x) if normal else None
    tile = _tile(width, 2048)  # of several tensors
    programs = min(_NORM_PROGRAMS, triton.cdiv(rows, tile["ROWS"]))
    partial = torch.empty((programs, width), dtype=torch.float32, device=x_NW.device)
    _norm_backward[(programs,)](
        x_NW,
        weight_W,
        scale_N,
        grad_NW.contiguous(),
        grad_x if skip_NW is None else skip_NW.contiguous(),
        grad_x,
        grad_x if normal_NW is None else normal_NW,
        partial,
        rows,
        width,
        x_NW.stride(0),
        SKIP=skip_NW is not None,
        NORMAL=normal,
        **tile,
    )
    return grad_x, partial.sum(0).to(weight_W.dtype), normal_NW


@triton.jit
def _swiglu_forward(x_ptr, out_ptr, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < width
        gate = tl.load(x_ptr + row * 2 * width + column, inside, 0.0).to(tl.float32)
        up = tl.load(x_ptr + row * 2 * width + width + column, inside, 0.0).to(tl.float32)
        out = gate * tl.sigmoid(gate) * up
        tl.store(out_ptr + row * width + column, out.to(out_ptr.dtype.element_ty), inside)


def swiglu_forward(gate_up_RF: Tensor) -> Tensor:
    rows, width = gate_up_RF.shape[0], gate_up_RF.shape[1] // 2
    out = torch.empty((rows, width), dtype=gate_up_RF.dtype, device=gate_up_RF.device)
    if rows:
        _swiglu_forward[(rows,)](gate_up_RF, out, width, BLOCK=min(_block(width), 2048), num_warps=4)
    return out


@triton.jit
def _swiglu_backward(
    x_ptr,
    grad_ptr,
    weight_ptr,
    grad_x_ptr,
    out_ptr,
    grad_weight_ptr,
    width,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    weight = 1.0
    if WEIGHTED:
        weight = tl.load(weight_ptr + row).to(tl.float32)
    dots = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < width
        gate = tl.load(x_ptr + row * 2 * width + column, inside, 0.0).to(tl.float32)
        up = tl.load(x_ptr + row * 2 * width + width + column, inside, 0.0).to(tl.float32)
        grad = tl.load(grad_ptr + row * width + column, inside, 0.0).to(tl.float32)
        sigmoid = tl.sigmoid(gate)
        silu = gate * sigmoid
        out = silu * up
        dots += grad * out
        grad *= weight
        tl.store(out_ptr + row * width + column, (out * weight).to(out_ptr.dtype.element_ty), inside)
        grad_gate = grad * up * (sigmoid + silu * (1.0 - sigmoid))
        at = grad_x_ptr + row * 2 * width + column
        tl.store(at, grad_gate.to(grad_x_ptr.dtype.element_ty), inside)
        tl.store(at + width, (grad * silu).to(grad_x_ptr.dtype.element_ty), inside)
    if WEIGHTED:
        tl.store(grad_weight_ptr + row, tl.sum(dots, 0))


def swiglu_backward(
    gate_up_RF: Tensor, grad_Rf: Tensor, weights_R: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(gradient of gate_up, weights · swiglu(gate_up) again, gradient of the weights) of weights · swiglu(gate_up)."""
    rows, width = grad_Rf.shape
    grad_x, out = torch.empty_like(gate_up_RF), torch.empty_like(grad_Rf)
    grad_weights = None if weights_R is None else torch.empty(rows, dtype=torch.float32, device=grad_Rf.device)
    if rows:
        _swiglu_backward[(rows,)](
            gate_up_RF,
            grad_Rf,
            grad_Rf if weights_R is None else weights_R,
            grad_x,
            out,
            grad_x if grad_weights is None else grad_weights,
            width,
            WEIGHTED=weights_R is not None,
            BLOCK=min(_block(width), 2048),
            num_warps=4,
        )
    return grad_x, out, grad_weights


@triton.jit
def _gather_sum(
    y_ptr, weights_ptr, place_ptr, skip_ptr, out_ptr, width, K: tl.constexpr, WEIGHTED: tl.constexpr,
    SKIP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros([BLOCK], tl.float32)
    for choice in tl.static_range(K):  # in top-k order: another order of the same experts would give other bits
        place = tl.load(place_ptr + row * K + choice).to(tl.int64)
        y = tl.load(y_ptr + place * width + column, inside, 0.0).to(tl.float32)
        if WEIGHTED:
            y *= tl.load(weights_ptr + row * K + choice).to(tl.float32)
        total += y
    if SKIP:
        total += tl.load(skip_ptr + row * width + column, inside, 0.0).to(tl.float32)
    tl.store(out_ptr + row * width + column, total.to(out_ptr.dtype.element_ty), inside)


def gather_sum(y_RW: Tensor, place_Nk: Tensor, weights_Nk: Tensor | None = None, skip: Tensor | None = None) -> Tensor:
    """[N, W]: for each token the (weighted) sum of its rows, plus `skip`."""
    (tokens, k), width = place_Nk.shape, y_RW.shape[1]
    out = torch.empty((tokens, width), dtype=y_RW.dtype, device=y_RW.device)
    block = min(_block(width), 1024)
    if tokens:
        _gather_sum[(tokens, triton.cdiv(width, block))](
            y_RW,
            y_RW if weights_Nk is None else weights_Nk.contiguous(),
            place_Nk,
            y_RW if skip is None else skip.contiguous(),
            out,
            width,
            K=k,
            WEIGHTED=weights_Nk is not None,
            SKIP=skip is not None,
            BLOCK=block,
            num_warps=4,
        )
    return out


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
        # rounded as a separate norm's output would be
        first = (first * scale * w1.to(tl.float32)).to(out_ptr.dtype.element_ty).to(tl.float32)
        second = (second * scale * w2.to(tl.float32)).to(out_ptr.dtype.element_ty).to(tl.float32)
    angle = token * (D // 2) + pair
    cos = tl.load(cos_ptr + angle, pair < D // 2, 0.0)
    sin = tl.load(sin_ptr + angle, pair < D // 2, 0.0)
    tl.store(out_ptr + at, (first * cos - second * sin).to(out_ptr.dtype.element_ty), inside)
    tl.store(out_ptr + at + D // 2, (second * cos + first * sin).to(out_ptr.dtype.element_ty), inside)
    if NORM:  # into fresh memory: the values have to come along
        value = Q * D + K * D + head * D + pair
        is_v = (head < K) & (pair < D // 2)
        for side in tl.static_range(2):
            here = token * width + value + side * (D // 2)
            tl.store(out_ptr + here, tl.load(x_ptr + here, is_v, 0.0), is_v)


def rotate_heads(
    x: Tensor, cos: Tensor, sin: Tensor, heads: tuple[int, int, int], norms: tuple[Tensor, Tensor] | None, eps: float
) -> Tensor:
    """q and k of packed q|k|v rows [N, (q + 2k)·D] rotated: in place, or with `norms` (of each head) a new tensor."""
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
        HEADS=_block(q + k),
        HALF=_block(dim // 2),
        num_warps=2 if norms is None else 4,
    )
    return out


@triton.jit
def _unrotate_heads(
    dq_ptr, dk_ptr, dv_ptr, x_ptr, cos_ptr, sin_ptr, q_weight_ptr, k_weight_ptr, out_ptr, partial_ptr, tokens, width,
    q_stride, k_stride, v_stride, eps, Q: tl.constexpr, K: tl.constexpr, D: tl.constexpr, NORM: tl.constexpr,
    HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    head, pair = tl.arange(0, HEADS)[:, None], tl.arange(0, HALF)[None, :]
    paired = pair < D // 2
    is_q, is_k = (head < Q) & paired, (head >= Q) & (head < Q + K) & paired
    inside, is_v = is_q | is_k, (head < K) & paired
    q_sum1 = tl.zeros([HEADS, HALF], tl.float32)
    q_sum2 = tl.zeros([HEADS, HALF], tl.float32)
    if NORM:
        w1 = (tl.load(q_weight_ptr + pair, is_q, 0.0) + tl.load(k_weight_ptr + pair, is_k, 0.0)).to(tl.float32)
        w2 = tl.load(q_weight_ptr + D // 2 + pair, is_q, 0.0) + tl.load(k_weight_ptr + D // 2 + pair, is_k, 0.0)
        w2 = w2.to(tl.float32)
    for index in range(tl.program_id(0), tokens, tl.num_programs(0)):
        token = index + tl.zeros([1, 1], tl.int64)
        q_at, k_at = dq_ptr + token * q_stride + head * D + pair, dk_ptr + token * k_stride + (head - Q) * D + pair
        first = tl.load(q_at, is_q, 0.0).to(tl.float32) + tl.load(k_at, is_k, 0.0).to(tl.float32)
        second = tl.load(q_at + D // 2, is_q, 0.0).to(tl.float32) + tl.load(k_at + D // 2, is_k, 0.0).to(tl.float32)
        cos = tl.load(cos_ptr + token * (D // 2) + pair, paired, 0.0)
        sin = tl.load(sin_ptr + token * (D // 2) + pair, paired, 0.0)
        back1, back2 = first * cos + second * sin, second * cos - first * sin
        at = token * width + head * D + pair
        if NORM:
            x1 = tl.load(x_ptr + at, inside, 0.0).to(tl.float32)
            x2 = tl.load(x_ptr + at + D // 2, inside, 0.0).to(tl.float32)
            scale = 1.0 / tl.sqrt((tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1)) / D + eps)[:, None]
            x1, x2 = x1 * scale, x2 * scale
            q_sum1 += back1 * x1
            q_sum2 += back2 * x2
            back1, back2 = back1 * w1, back2 * w2
            projection = (tl.sum(back1 * x1, 1) + tl.sum(back2 * x2, 1))[:, None] / D
            back1, back2 = (back1 - x1 * projection) * scale, (back2 - x2 * projection) * scale
        tl.store(out_ptr + at, back1.to(out_ptr.dtype.element_ty), inside)
        tl.store(out_ptr + at + D // 2, back2.to(out_ptr.dtype.element_ty), inside)
        v_at = dv_ptr + token * v_stride + head * D + pair
        o_at = out_ptr + token * width + (Q + K + head) * D + pair
        tl.store(o_at, tl.load(v_at, is_v, 0.0), is_v)
        tl.store(o_at + D // 2, tl.load(v_at + D // 2, is_v, 0.0), is_v)
    if NORM:
        here = partial_ptr + tl.program_id(0) * (Q + K) * D + head * D + pair
        tl.store(here, q_sum1, inside)
        tl.store(here + D // 2, q_sum2, inside)


def unrotate_heads(
    grads: tuple[Tensor, Tensor, Tensor],
    x: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The packed gradient of `rotate_heads`' input, and those of the two norms. `x` is that input, for the norms."""
    dq, dk, dv = (grad if grad.stride()[1:] == (grad.shape[2], 1) else grad.contiguous() for grad in grads)
    (tokens, q, dim), k = dq.shape, dk.shape[1]
    width = (q + 2 * k) * dim
    out = torch.empty((tokens, width), dtype=dq.dtype, device=dq.device)
    programs = tokens if norms is None else min(tokens, _HEAD_PROGRAMS)
    partial = torch.empty((programs if norms else 1, q + k, dim), dtype=torch.float32, device=dq.device)
    arguments: tuple[Any, ...] = (dq, dk, dv, out if x is None else x, cos, sin, *(norms or (out, out)), out, partial)
    _unrotate_heads[(programs,)](
        *arguments, tokens, width, dq.stride(0), dk.stride(0), dv.stride(0), eps, Q=q, K=k, D=dim,
        NORM=norms is not None, HEADS=_block(q + k), HALF=_block(dim // 2), num_warps=2 if norms is None else 8,
    )  # fmt: skip
    if norms is None:
        return out, None, None
    sums = partial.sum(0)
    return out, sums[:q].sum(0).to(norms[0].dtype), sums[q:].sum(0).to(norms[1].dtype)
