"""The gate_up product with SwiGLU fused at its end, so gate_up is not written to memory and read again.

A program computes the same columns of gate and up together, so it can apply SwiGLU (or its gradient, given that of the
output) to the sums it holds. Elements of gate_up are rounded to their type first. The result equals a product followed
by a SwiGLU pass; only the order of the sums may differ.

The tensor memory accelerator (Hopper) copies the tiles; it needs rows of a multiple of 16 bytes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from rollmill.models.kernels.exact_triton import tile_of
from rollmill.models.kernels.forms import multiplies_codes, product, seen
from rollmill.models.kernels.fused_triton import swiglu_backward, swiglu_forward
from rollmill.models.kernels.tiles import descriptor, has_accelerator, programs

# of a tile: tokens, columns of gate and as many of up, columns of x per step; two programs fit on a multiprocessor, and
# one multiplies while the other writes
_SIZES = {"ROWS": 128, "COLUMNS": 64, "DEPTH": 64}
_FORWARD = {"num_warps": 4, "num_stages": 3}
_BACKWARD = {"num_warps": 8, "num_stages": 3, "maxnreg": 128}
_FEWEST_ROWS = 4096  # with fewer rows there are too few tiles, and torch's product is as fast


@triton.jit
def _gate_and_up(x_desc, weight_desc, row, column, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    """Gate and up are halves of one product, which reads x from shared memory once."""
    both = tl.zeros([ROWS, 2 * COLUMNS], tl.float32)
    for start in range(0, width, DEPTH):
        weight = weight_desc.load([0, column, start]).reshape(2 * COLUMNS, DEPTH)
        both = tl.dot(x_desc.load([row, start]), weight.T, both)
    gate, up = both.reshape(ROWS, 2, COLUMNS).permute(0, 2, 1).split()
    return gate.to(x_desc.dtype).to(tl.float32), up.to(x_desc.dtype).to(tl.float32)


@triton.jit
def _forward(
    x_desc, weight_desc, out_desc, rows, inner, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr
):
    across = tl.cdiv(inner, COLUMNS)
    # flat: the first loads of a tile overlap with the writes of the tile before
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS) * across, tl.num_programs(0), flatten=True):
        row, column = tile // across * ROWS, tile % across * COLUMNS
        gate, up = _gate_and_up(x_desc, weight_desc, row, column, width, ROWS, COLUMNS, DEPTH)
        out_desc.store([row, column], (gate * tl.sigmoid(gate) * up).to(x_desc.dtype))


@triton.jit
def _backward(
    x_desc, weight_desc, grad_desc, out_desc, gate_desc, up_desc, rows, inner, width, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(inner, COLUMNS)
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS) * across, tl.num_programs(0)):
        row, column = tile // across * ROWS, tile % across * COLUMNS
        gate, up = _gate_and_up(x_desc, weight_desc, row, column, width, ROWS, COLUMNS, DEPTH)
        grad = grad_desc.load([row, column]).to(tl.float32)
        sigmoid = tl.sigmoid(gate)
        silu = gate * sigmoid
        out_desc.store([row, column], (silu * up).to(x_desc.dtype))
        up_desc.store([row, column], (grad * silu).to(x_desc.dtype))
        gate_desc.store([row, column], (grad * up * (sigmoid + silu * (1.0 - sigmoid))).to(x_desc.dtype))


def swiglu_product(x_NW: Tensor, weight_FW: Tensor, form: str = "bf16", exact: bool = False) -> Tensor:
    """SwiGLU of x · weightᵀ. `exact`: with the bits of exact_triton, whose order of sums this kernel has too."""
    if not _fits(x_NW, weight_FW, form, exact):
        return swiglu_forward(product(x_NW, weight_FW, None, form, exact))
    x_NW = seen(x_NW, form)
    (rows, width), inner = x_NW.shape, len(weight_FW) // 2
    out = x_NW.new_empty(rows, inner)
    sizes, dials, each = _SIZES, _FORWARD, 2
    if rows < _FEWEST_ROWS:
        tile = tile_of(rows, len(weight_FW), out)
        sizes = {"ROWS": tile["ROWS"], "COLUMNS": tile["COLUMNS"] // 2, "DEPTH": tile["DEPTH"]}
        dials, each = {name: tile[name] for name in _FORWARD}, tile["EACH"]
    grid = programs(triton.cdiv(rows, sizes["ROWS"]) * triton.cdiv(inner, sizes["COLUMNS"]), each, x_NW.device)
    _forward[grid](*_tiles(sizes, x_NW, weight_FW, out), rows, inner, width, **sizes, **dials)
    return out


def swiglu_product_backward(
    x_NW: Tensor, weight_FW: Tensor, grad_Nf: Tensor, form: str = "bf16"
) -> tuple[Tensor, Tensor]:
    """Returns (gradient of gate_up, SwiGLU's output). Computes gate_up again."""
    if len(x_NW) < _FEWEST_ROWS or not _fits(x_NW, weight_FW, form):
        return swiglu_backward(product(x_NW, weight_FW, None, form), grad_Nf)[:2]
    x_NW = seen(x_NW, form)
    (rows, width), inner = x_NW.shape, len(weight_FW) // 2
    out, grad_gate_up = torch.empty_like(grad_Nf), x_NW.new_empty(rows, 2 * inner)
    outputs = (out, *grad_gate_up.split(inner, 1))
    grid = programs(triton.cdiv(rows, _SIZES["ROWS"]) * triton.cdiv(inner, _SIZES["COLUMNS"]), 2, x_NW.device)
    _backward[grid](*_tiles(_SIZES, x_NW, weight_FW, grad_Nf, *outputs), rows, inner, width, **_SIZES, **_BACKWARD)
    return grad_gate_up, out


def _fits(x_NW: Tensor, weight_FW: Tensor, form: str, exact: bool = False) -> bool:
    if not exact and multiplies_codes(x_NW, weight_FW, form):
        return False
    whole = x_NW.shape[1] % 8 == 0 and len(weight_FW) % 16 == 0
    alike = x_NW.dtype == weight_FW.dtype and x_NW.dtype in (torch.bfloat16, torch.float16)
    plain = x_NW.is_contiguous() and weight_FW.is_contiguous()
    enough = len(x_NW) >= _FEWEST_ROWS or _joins_few(x_NW, weight_FW)
    return whole and alike and plain and enough and has_accelerator(x_NW.device)


def _joins_few(x_NW: Tensor, weight_FW: Tensor) -> bool:
    """Whether few rows are multiplied in a tile of the exact product, with SwiGLU joined. The largest tile has no room
    for it: then apart is faster (measured on an H200)."""
    tile = tile_of(len(x_NW), len(weight_FW), x_NW)
    return 0 < len(x_NW) < _FEWEST_ROWS and tile["COLUMNS"] <= 2 * _SIZES["COLUMNS"]


def _tiles(sizes: dict[str, int], x: Tensor, weight: Tensor, *others: Tensor) -> list[TensorDescriptor]:
    rows, columns, depth = sizes["ROWS"], sizes["COLUMNS"], sizes["DEPTH"]
    weight_2fW = weight.view(2, len(weight) // 2, weight.shape[1])
    shapes = [[rows, depth], [2, columns, depth], *[[rows, columns] for _ in others]]
    tensors = (x, weight_2fW, *others)
    return [descriptor(each, shape) for each, shape in zip(tensors, shapes, strict=True)]
