"""Products with the same bits for a row in every batch, on Hopper.

An element is one chain of tensor-core instructions (wgmma, 64 rows, 16 columns of x each) in the order of the columns,
in one FP32 accumulator. Nothing splits the sum. Tiles of any size here consist of these instructions, so the size may
follow the number of rows: it decides which program computes an element, not how.

The tensor memory accelerator copies the tiles. It fills what is beyond the end of a matrix with zeros.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from rollmill.models.kernels.tiles import descriptor, multiprocessors, programs

_BAND = 8  # tiles of rows that take turns with the same columns, which then are in the L2 cache
# Largest first. A step takes DEPTH columns of x: many, where few programs have to keep the memory busy. EACH programs
# fit on a multiprocessor. ROWS is a multiple of 64, for which wgmma is used.
TILES = (
    {"ROWS": 128, "COLUMNS": 256, "DEPTH": 64, "num_warps": 8, "num_stages": 3, "EACH": 1},
    {"ROWS": 128, "COLUMNS": 128, "DEPTH": 64, "num_warps": 4, "num_stages": 3, "EACH": 2},
    {"ROWS": 64, "COLUMNS": 128, "DEPTH": 64, "num_warps": 4, "num_stages": 4, "EACH": 2},
    {"ROWS": 64, "COLUMNS": 64, "DEPTH": 128, "num_warps": 4, "num_stages": 4, "EACH": 1},
    {"ROWS": 64, "COLUMNS": 32, "DEPTH": 128, "num_warps": 4, "num_stages": 6, "EACH": 1},
)
_SECONDS = (1.3, 1.0, 0.7)  # of the tiles with 64 rows, compared with each other; measured on an H200


@triton.jit(do_not_specialize=["rows"])
def _multiply(
    x_desc, weight_desc, out_ptr, rows, inputs, outputs, stride, ADD: tl.constexpr, ACROSS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, BAND: tl.constexpr,
):  # fmt: skip
    high, wide = tl.cdiv(rows, ROWS), tl.cdiv(outputs, COLUMNS)
    # flat: the first loads of a tile overlap with the writes of the tile before
    for tile in tl.range(tl.program_id(0), high * wide, tl.num_programs(0), flatten=True):
        first = tile // (BAND * wide) * BAND
        count, place = tl.minimum(high - first, BAND), tile % (BAND * wide)
        row, column = (first + place % count) * ROWS, place // count * COLUMNS
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        for start in range(0, inputs, DEPTH):
            x = x_desc.load([row, start])
            if ACROSS:
                weight = weight_desc.load([column, start]).T
            else:
                weight = weight_desc.load([start, column])
            total = tl.dot(x, weight, total, input_precision="ieee")
        r, c = row + tl.arange(0, ROWS), column + tl.arange(0, COLUMNS)
        at = out_ptr + r.to(tl.int64)[:, None] * stride + c[None, :]
        inside = (r < rows)[:, None] & (c < outputs)[None, :]
        if ADD:
            total += tl.load(at, inside, 0.0).to(tl.float32)
        tl.store(at, total.to(out_ptr.dtype.element_ty), inside)


def product(
    x_NI: Tensor,
    weight_IO: Tensor,
    out_NO: Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
    add: bool = False,
    tile: dict[str, int] | None = None,
) -> Tensor:
    """x · weight, in `out`, or in a new tensor of `dtype` (that of x if None). With `add` it is added to `out`."""
    (rows, inputs), outputs = x_NI.shape, weight_IO.shape[1]
    if out_NO is None:
        out_NO = torch.empty((rows, outputs), dtype=dtype or x_NI.dtype, device=x_NI.device)
    assert out_NO.stride(1) == 1 or outputs == 1
    if not rows:
        return out_NO
    across = weight_IO.stride(0) == 1
    dials = dict(tile or tile_of(rows, outputs, out_NO))
    each, high, wide, deep = dials.pop("EACH"), dials["ROWS"], dials["COLUMNS"], dials["DEPTH"]
    grid = programs(triton.cdiv(rows, high) * triton.cdiv(outputs, wide), each, x_NI.device)
    shape = [wide, deep] if across else [deep, wide]
    _multiply[grid](
        descriptor(_aligned(x_NI), [high, deep]),
        descriptor(_aligned(weight_IO.t() if across else weight_IO), shape),
        out_NO, rows, inputs, outputs, out_NO.stride(0), ADD=add, ACROSS=across, BAND=_BAND, **dials,
    )  # fmt: skip
    return out_NO


def fits(tile: dict[str, int], out: Tensor) -> bool:
    """Whether the shared memory of a multiprocessor holds the tile's result on its way to `out`."""
    return tile["ROWS"] * tile["COLUMNS"] * out.element_size() <= 1 << 16


def tile_of(rows: int, outputs: int, out: Tensor) -> dict[str, int]:
    """The largest tile with more than 64 rows that gives every multiprocessor one. Else the one with which the busiest
    multiprocessor is ready first."""
    count = multiprocessors(out.device)

    def tiles(tile: dict[str, int]) -> int:
        return int(triton.cdiv(rows, tile["ROWS"]) * triton.cdiv(outputs, tile["COLUMNS"]))

    for tile in TILES[:2]:
        if rows > 64 and tiles(tile) >= count and fits(tile, out):
            return tile
    seconds = [-(-tiles(tile) // count) * each for tile, each in zip(TILES[2:], _SECONDS, strict=True)]
    return TILES[2 + seconds.index(min(seconds))]


def _aligned(x: Tensor) -> Tensor:
    """Rows of a multiple of 16 bytes that start at one: the accelerator needs it. Zeros change no sum."""
    item = x.element_size()
    if x.stride(1) == 1 and x.stride(0) * item % 16 == 0 and x.data_ptr() % 16 == 0:
        return x
    return pad(x, (0, -x.shape[1] % (16 // item))).contiguous()
