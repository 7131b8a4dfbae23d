"""Products for one to four rows, joined with what comes before and after them: a decode step of a small batch.

Such a step is limited by the number of launches and by how soon the weights arrive, not by arithmetic. So a layer is
five launches: norm and qkv; rotation, store and attention over pages; output projection and residual; norm, gate, up
and SwiGLU; down projection and residual. A program takes a few rows of a weight and multiplies them with all rows of
the input. Intermediate results are rounded as between separate kernels; the order of sums differs.

On Hopper these kernels start early (programmatic dependent launch): while the one before them still runs, they load
their weights. Four rules keep that free of races:

- Every program of such a kernel calls `begin` once and unconditionally. It waits for the kernel before to be complete
  and only then lets the next one start. So at most two kernels run at once, and all earlier ones are complete.
- Before `begin` a kernel loads only what no kernel of the layers writes: weights, tables, the position of the step.
- What a kernel of the step writes is loaded past the multiprocessor's cache (".cg"). A kernel that starts early may
  find older contents of the same address there: buffers are used again in every layer.
- The kernels before and after the layers start as usual.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 4  # most rows of the input
_DEPTH = 2048  # columns at once
EARLY_STARTS = True  # False: every kernel starts when the one before it is complete


def starts_early(device: torch.device) -> bool:
    """Whether kernels of the layers are launched with `begin`."""
    return EARLY_STARTS and device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def begin(EARLY: tl.constexpr):
    """From here on, all that earlier kernels wrote can be loaded."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def _inputs(x_ptr, column, width):
    """Written by the kernel before: not from the multiprocessor's cache."""
    return tl.load(x_ptr + column, column < width, 0.0, cache_modifier=".cg").to(tl.float32)


@triton.jit
def _weights(at, inside, column, width):
    return tl.load(at + column[None, :], inside[:, None] & (column < width)[None, :], 0.0)


@triton.jit
def _scaled(x, scale, norm, kind: tl.constexpr, NORM: tl.constexpr):
    if NORM:
        return (x * scale * norm.to(tl.float32)).to(kind).to(tl.float32)
    return x


@triton.jit
def _multiply(
    x_ptr, norm_ptr, weight_ptr, bias_ptr, skip_ptr, out_ptr, inputs, outputs, eps, NORM: tl.constexpr,
    BIAS: tl.constexpr, SKIP: tl.constexpr, GATED: tl.constexpr, B: tl.constexpr, TILE: tl.constexpr,
    WIDE: tl.constexpr, DEPTH: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """out = skip + weight · norm(x) + bias, or, GATED, silu(gate) · up of a weight with the rows gate|up."""
    kind: tl.constexpr = out_ptr.dtype.element_ty
    row, first = tl.program_id(0) * TILE + tl.arange(0, TILE), tl.arange(0, DEPTH)
    inside = row < outputs
    at = weight_ptr + row.to(tl.int64)[:, None] * inputs
    up_at = at + outputs.to(tl.int64) * inputs
    # the first columns of the weights stay in registers for all rows of x
    weight = _weights(at, inside, first, inputs)
    up = _weights(up_at, inside, first, inputs) if GATED else weight
    norm = tl.load(norm_ptr + first, first < inputs, 0.0) if NORM else 1.0
    bias = tl.load(bias_ptr + row, inside, 0.0).to(tl.float32) if BIAS else 0.0
    begin(EARLY)
    for b in tl.static_range(B):
        own = x_ptr + b * inputs
        x, scale = _inputs(own, first, inputs), 1.0
        skip = _inputs(skip_ptr + b * outputs, row, outputs) if SKIP else 0.0
        if NORM:
            squares = tl.sum(x * x, 0)
            for start in tl.static_range(DEPTH, WIDE, DEPTH):
                later = _inputs(own, start + first, inputs)
                squares += tl.sum(later * later, 0)
            scale = 1.0 / tl.sqrt(squares / inputs + eps)
        x = _scaled(x, scale, norm, kind, NORM)[None, :]
        total = tl.sum(weight.to(tl.float32) * x, 1)
        second = tl.sum(up.to(tl.float32) * x, 1) if GATED else total
        for start in tl.static_range(DEPTH, WIDE, DEPTH):
            # of the next rows of x, these weights are in the cache of the multiprocessor
            column = start + first
            later_norm = tl.load(norm_ptr + column, column < inputs, 0.0) if NORM else 1.0
            x = _scaled(_inputs(own, column, inputs), scale, later_norm, kind, NORM)[None, :]
            total += tl.sum(_weights(at, inside, column, inputs).to(tl.float32) * x, 1)
            if GATED:
                second += tl.sum(_weights(up_at, inside, column, inputs).to(tl.float32) * x, 1)
        if GATED:
            gate = total.to(kind).to(tl.float32)
            total = gate * tl.sigmoid(gate) * second.to(kind).to(tl.float32)
        if BIAS:
            total += bias
        if SKIP:
            total += skip
        tl.store(out_ptr + b * outputs + row, total.to(kind), inside)


def multiply(
    x_BI: Tensor,
    weight_OI: Tensor,
    *,
    norm_I: Tensor | None = None,
    eps: float = 0.0,
    bias_O: Tensor | None = None,
    skip_BO: Tensor | None = None,
    gated: bool = False,
) -> Tensor:
    """skip + weight · RMSNorm(x) + bias. With `gated`, SwiGLU of a weight with the rows gate|up."""
    rows, inputs = x_BI.shape
    outputs = weight_OI.shape[0] // (2 if gated else 1)
    out_BO = torch.empty((rows, outputs), dtype=x_BI.dtype, device=x_BI.device)
    tile = 4 if outputs <= 1024 or gated else 8
    depth = min(int(triton.next_power_of_2(inputs)), _DEPTH)
    early = starts_early(x_BI.device)
    _multiply[(triton.cdiv(outputs, tile),)](
        x_BI, x_BI if norm_I is None else norm_I, weight_OI, x_BI if bias_O is None else bias_O,
        x_BI if skip_BO is None else skip_BO, out_BO, inputs, outputs, eps, NORM=norm_I is not None,
        BIAS=bias_O is not None, SKIP=skip_BO is not None, GATED=gated, B=rows, TILE=tile,
        WIDE=triton.cdiv(inputs, depth) * depth, DEPTH=depth, EARLY=early, num_warps=4 if depth <= 1024 else 8,
        launch_pdl=early,
    )  # fmt: skip
    return out_BO
