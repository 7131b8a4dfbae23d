"""Triton kernels for the element-wise passes between products. They read and write each tensor once and compute in
FP32.

Each program works on whole rows in a fixed order, so the bits of a row do not depend on other rows. Sums over rows add
partial sums in a fixed order; there are no atomic adds.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollmill.models.kernels.quantised.fp8_triton import scale_of

# Each program keeps a partial sum over its rows. An H200 has room for 4 of them, by their registers, on each of its 132
# multiprocessors. A few more would run alone after the others.
_NORM_PROGRAMS = 132 * 4
_NORM_WARPS, _NORM_ELEMENTS = 1, 1024


def _block(width: int) -> int:
    return int(triton.next_power_of_2(width))


def _tile(width: int, elements: int) -> dict[str, int]:
    """How a program takes rows: ROWS at once, for about `elements` elements in flight, each cut into a BLOCK, a power
    of two, and a REST (0 if none). One block of 1024 for rows of 576 would leave half of its threads idle.
    """
    block = _block(width + 1) // 2
    rest = 0 if block == width else _block(width - block)
    return {"BLOCK": block, "REST": rest, "ROWS": max(1, elements // block), "num_warps": 4 if block < 4096 else 8}


@triton.jit
def _norm_forward(
    x_ptr, weight_ptr, out_ptr, code_scale_ptr, copy_ptr, scale_ptr, rows, width, stride, eps, COPY: tl.constexpr,
    CODES: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None]
    x = tl.load(x_ptr + row[:, None] * stride + column[None, :], inside, 0.0).to(tl.float32)
    squares = tl.sum(x * x, 1)
    if REST:
        rest = BLOCK + tl.arange(0, REST)
        in_rest = inside & (rest < width)[None, :]
        y = tl.load(x_ptr + row[:, None] * stride + rest[None, :], in_rest, 0.0).to(tl.float32)
        squares += tl.sum(y * y, 1)
    scale = 1.0 / tl.sqrt(squares / width + eps)
    tl.store(scale_ptr + row, scale, row < rows)
    at = row[:, None] * width + column[None, :]
    out = x * scale[:, None] * tl.load(weight_ptr + column).to(tl.float32)[None, :]
    if CODES:  # of the rounded rows, as if a pass of its own made them
        parts = out.to(x_ptr.dtype.element_ty).to(tl.float32).reshape(ROWS, BLOCK // 128, 128)
        part_scale, inverse = scale_of(tl.max(tl.abs(parts), 2))
        codes = (parts * inverse[:, :, None]).to(tl.float8e4nv)
        # Eight columns per thread, as when rows are written: with 16, the squares would be summed in another order.
        tl.store(out_ptr + tl.max_contiguous(at, [1, 8]), codes.reshape(ROWS, BLOCK), inside)
        scale_at = tl.arange(0, BLOCK // 128).to(tl.int64)[None, :] * rows + row[:, None]
        tl.store(code_scale_ptr + scale_at, part_scale, inside)
    else:
        tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), inside)
    if COPY:
        tl.store(copy_ptr + at, x.to(copy_ptr.dtype.element_ty), inside)
    if REST:
        at = row[:, None] * width + rest[None, :]
        out = y * scale[:, None] * tl.load(weight_ptr + rest, rest < width, 0.0).to(tl.float32)[None, :]
        tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), in_rest)
        if COPY:
            tl.store(copy_ptr + at, y.to(copy_ptr.dtype.element_ty), in_rest)


def norm_forward(x_NW: Tensor, weight_W: Tensor, eps: float, copy_NW: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Returns (normalised rows, their scales). Writes x into `copy`."""
    out_NW = torch.empty(x_NW.shape, dtype=x_NW.dtype, device=x_NW.device)
    return out_NW, _normalise(x_NW, weight_W, eps, copy_NW, out_NW, None)


def writes_codes(x_NW: Tensor) -> bool:
    """Whether `norm_codes` takes these rows: their width is a power of two."""
    rows, width = x_NW.shape
    return rows > 0 and width >= 128 and _tile(width, 4096)["REST"] == 0


def norm_codes(
    x_NW: Tensor, weight_W: Tensor, eps: float, copy_NW: Tensor | None = None
) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Returns (the FP8 codes of the normalised rows with their scales [N, W / 128] stored column by column, the scales
    of the norm). Writes x into `copy`."""
    rows, width = x_NW.shape
    codes_NW = torch.empty((rows, width), dtype=torch.float8_e4m3fn, device=x_NW.device)
    scales_BN = torch.empty((width // 128, rows), dtype=torch.float32, device=x_NW.device)
    scale_N = _normalise(x_NW, weight_W, eps, copy_NW, codes_NW, scales_BN)
    return (codes_NW, scales_BN.t()), scale_N


def _normalise(
    x_NW: Tensor, weight_W: Tensor, eps: float, copy_NW: Tensor | None, out_NW: Tensor, scales_BN: Tensor | None
) -> Tensor:
    rows, width = x_NW.shape
    scale_N = torch.empty(rows, dtype=torch.float32, device=x_NW.device)
    tile = _tile(width, 4096)
    _norm_forward[(triton.cdiv(rows, tile["ROWS"]),)](
        x_NW,
        weight_W,
        out_NW,
        scale_N if scales_BN is None else scales_BN,
        x_NW if copy_NW is None else copy_NW,
        scale_N,
        rows,
        width,
        x_NW.stride(0),
        eps,
        COPY=copy_NW is not None,
        CODES=scales_BN is not None,
        **tile,
    )
    return scale_N


@triton.jit
def _load(pointer, at, inside, GIVEN: tl.constexpr):
    return tl.load(pointer + at, inside, 0.0).to(tl.float32) if GIVEN else 0.0


@triton.jit
def _norm_columns(x, grad, weight, scale, projection, skip, grad_x_at, normal_at, inside, NORMAL: tl.constexpr):
    """The second half of `_norm_backward` for a range of columns; `x` is normalised."""
    grad_x = (grad * weight[None, :] - x * projection) * scale + skip
    tl.store(grad_x_at, grad_x.to(grad_x_at.dtype.element_ty), inside)
    if NORMAL:
        tl.store(normal_at, (x * weight[None, :]).to(normal_at.dtype.element_ty), inside)


@triton.jit
def _norm_backward(
    x_ptr, weight_ptr, scale_ptr, grad_ptr, skip_ptr, grad_x_ptr, normal_ptr, partial_ptr, rows, width, stride,
    SKIP: tl.constexpr, NORMAL: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)
    weight = tl.load(weight_ptr + column).to(tl.float32)
    partial = tl.zeros([ROWS, BLOCK], tl.float32)
    if REST:
        rest = BLOCK + tl.arange(0, REST)
        rest_weight = tl.load(weight_ptr + rest, rest < width, 0.0).to(tl.float32)
        rest_partial = tl.zeros([ROWS, REST], tl.float32)
    # pipelined: rows are loaded while earlier ones are computed
    for start in tl.range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS, num_stages=3):
        row = (start + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        inside = row < rows
        at = row * width + column[None, :]
        scale = tl.load(scale_ptr + row, inside, 0.0)
        x = tl.load(x_ptr + row * stride + column[None, :], inside, 0.0).to(tl.float32) * scale
        grad = tl.load(grad_ptr + at, inside, 0.0).to(tl.float32)
        skip = _load(skip_ptr, at, inside, SKIP)
        projection = tl.sum(grad * weight[None, :] * x, 1)
        partial += grad * x
        if REST:
            in_rest, rest_at = inside & (rest < width)[None, :], row * width + rest[None, :]
            y = tl.load(x_ptr + row * stride + rest[None, :], in_rest, 0.0).to(tl.float32) * scale
            rest_grad = tl.load(grad_ptr + rest_at, in_rest, 0.0).to(tl.float32)
            rest_skip = _load(skip_ptr, rest_at, in_rest, SKIP)
            projection += tl.sum(rest_grad * rest_weight[None, :] * y, 1)
            rest_partial += rest_grad * y
        projection = projection[:, None] / width
        _norm_columns(x, grad, weight, scale, projection, skip, grad_x_ptr + at, normal_ptr + at, inside, NORMAL)
        if REST:
            _norm_columns(
                y, rest_grad, rest_weight, scale, projection, rest_skip, grad_x_ptr + rest_at, normal_ptr + rest_at,
                in_rest, NORMAL,
            )  # fmt: skip
    tl.store(partial_ptr + tl.program_id(0) * width + column, tl.sum(partial, 0))
    if REST:
        tl.store(partial_ptr + tl.program_id(0) * width + rest, tl.sum(rest_partial, 0), rest < width)


def norm_backward(
    x_NW: Tensor, weight_W: Tensor, scale_N: Tensor, grad_NW: Tensor, skip_NW: Tensor | None, *, normal: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns (gradient of x plus `skip`, gradient of the weight, the normalised rows again if `normal`)."""
    rows, width = x_NW.shape
    grad_x = torch.empty((rows, width), dtype=x_NW.dtype, device=x_NW.device)
    normal_NW = torch.empty_like(grad_x) if normal else None
    # one warp for short rows: then warps exchange nothing while a row is summed
    tile = _tile(width, _NORM_ELEMENTS) | {"num_warps": max(_NORM_WARPS, min(8, width // 1024))}
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
    return grad_x, sum_rows(partial, weight_W.dtype), normal_NW


@triton.jit
def _sum_rows(x_ptr, out_ptr, rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, rows, ROWS):
        row = start + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < width)[None, :]
        total += tl.load(x_ptr + row[:, None] * width + column[None, :], inside, 0.0)
    tl.store(out_ptr + column, tl.sum(total, 0).to(out_ptr.dtype.element_ty), column < width)


def sum_rows(x_RW: Tensor, dtype: torch.dtype) -> Tensor:
    """Sums FP32 rows of partial sums into [W]. Torch's sum takes four times as long for so few columns."""
    rows, width = x_RW.shape
    out = torch.empty(width, dtype=dtype, device=x_RW.device)
    _sum_rows[(triton.cdiv(width, 8),)](x_RW, out, rows, width, ROWS=256, COLUMNS=8, num_warps=4)
    return out


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
    x_ptr, grad_ptr, weight_ptr, order_ptr, grad_x_ptr, out_ptr, grad_weight_ptr, width, WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    weight = 1.0
    if WEIGHTED:
        pair = tl.load(order_ptr + row)
        weight = tl.load(weight_ptr + pair).to(tl.float32)
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
        tl.store(grad_weight_ptr + pair, tl.sum(dots, 0))


def swiglu_backward(
    gate_up_RF: Tensor, grad_Rf: Tensor, weights: Tensor | None = None, order_R: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The backward pass of weights · swiglu(gate_up). Returns (gradient of gate_up, the output again, gradient of the
    weights).

    The weight of row r is weights[order[r]].
    """
    rows, width = grad_Rf.shape
    grad_x, out = torch.empty_like(gate_up_RF), torch.empty_like(grad_Rf)
    grad_weights = None if weights is None else torch.empty_like(weights, dtype=torch.float32)
    if rows:
        weighted = (weights, order_R, grad_weights) if weights is not None else (grad_Rf, grad_Rf, grad_x)
        block = min(_block(width), 2048)
        _swiglu_backward[(rows,)](
            gate_up_RF, grad_Rf, weighted[0], weighted[1], grad_x, out, weighted[2], width,
            WEIGHTED=weights is not None, BLOCK=block, num_warps=4,
        )  # fmt: skip
    return grad_x, out, grad_weights


@triton.jit
def _spread(x_ptr, place_ptr, out_ptr, width, K: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    x = tl.load(x_ptr + row * width + column, inside)
    for choice in tl.static_range(K):
        place = tl.load(place_ptr + row * K + choice).to(tl.int64)
        tl.store(out_ptr + place * width + column, x, inside)


def spread(x_NW: Tensor, place_Nk: Tensor) -> Tensor:
    """Copies each token's row to its k places: [N · k, W]. A gather would read the row k times."""
    (tokens, k), width = place_Nk.shape, x_NW.shape[1]
    out = torch.empty((tokens * k, width), dtype=x_NW.dtype, device=x_NW.device)
    block = min(_block(width), 1024)
    if tokens:
        _spread[(tokens, triton.cdiv(width, block))](
            x_NW.contiguous(), place_Nk, out, width, K=k, BLOCK=block, num_warps=4
        )
    return out


@triton.jit
def _gather_sum(
    y_ptr, weights_ptr, place_ptr, skip_ptr, out_ptr, width, K: tl.constexpr, WEIGHTED: tl.constexpr,
    SKIP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros([BLOCK], tl.float32)
    for choice in tl.static_range(K):  # in top-k order: another order would give other bits
        place = tl.load(place_ptr + row * K + choice).to(tl.int64)
        y = tl.load(y_ptr + place * width + column, inside, 0.0).to(tl.float32)
        if WEIGHTED:
            y *= tl.load(weights_ptr + row * K + choice).to(tl.float32)
        total += y
    if SKIP:
        total += tl.load(skip_ptr + row * width + column, inside, 0.0).to(tl.float32)
    tl.store(out_ptr + row * width + column, total.to(out_ptr.dtype.element_ty), inside)


def gather_sum(y_RW: Tensor, place_Nk: Tensor, weights_Nk: Tensor | None = None, skip: Tensor | None = None) -> Tensor:
    """[N, W]: the (weighted) sum of each token's rows, plus `skip`."""
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
