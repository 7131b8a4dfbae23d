"""Causal attention over packed sequences of any lengths, and its gradients. Tiles of scores are never written to
memory.

    forward   a tile of queries of one head walks over the keys before it, with an online softmax; one number per row
              (log2 of the sum of powers) is kept
    grad_q    the same walk; computes the scores again, and Σ grad · out of each row
    grad_kv   a tile of keys and values walks over the queries after it, of all heads that share it

Every number is summed by one program in a fixed order, so bits repeat, and gradients need no extra memory. This
computes the scores once more than a kernel that adds to all three gradients, but such a kernel needs atomic adds.

The tensor memory accelerator (TMA) copies tiles in which every pair counts. It does not know where sequences end. Tiles
on the diagonal and tiles that reach past a sequence's end are copied with a mask, and rows of the next sequence become
0. Masking the scores alone would not keep out NaN of the next sequence, since 0 · NaN is not 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import Function
from triton.tools.tensor_descriptor import TensorDescriptor

from rollmill.models.kernels.call import call
from rollmill.models.kernels.tiles import descriptor, has_accelerator

_LOG2_E = math.log2(math.e)
_HALF = (torch.bfloat16, torch.float16)
Dials = dict[str, int]

# by head width: a tile has ROWS queries and KEYS keys and values
_FORWARD: dict[int, Dials] = {
    32: {"ROWS": 64, "KEYS": 64, "num_warps": 4, "num_stages": 3},
    64: {"ROWS": 128, "KEYS": 64, "num_warps": 8, "num_stages": 3, "maxnreg": 128},
    128: {"ROWS": 128, "KEYS": 64, "num_warps": 8, "num_stages": 2, "maxnreg": 128},
}
_GRAD_Q: dict[int, Dials] = {
    32: {"ROWS": 64, "KEYS": 64, "num_warps": 4, "num_stages": 3},
    64: {"ROWS": 128, "KEYS": 64, "num_warps": 8, "num_stages": 3, "maxnreg": 128},
    128: {"ROWS": 128, "KEYS": 32, "num_warps": 8, "num_stages": 3, "maxnreg": 128},
}
_GRAD_KV: dict[int, Dials] = {
    32: {"ROWS": 64, "KEYS": 64, "num_warps": 4, "num_stages": 3, "maxnreg": 128},
    64: {"ROWS": 64, "KEYS": 64, "num_warps": 4, "num_stages": 3, "maxnreg": 168},
    128: {"ROWS": 32, "KEYS": 64, "num_warps": 4, "num_stages": 3},
}


class Tiles:
    """How packed sequences of `lengths` are cut into tiles: int32 [tiles, 4], in the order in which programs start, the
    longest walk first. A row is (the sequence's first token, its offset in a line, its length, the tile's start in it).

    Values that each row has one of (sums, deltas) are stored in lines of `width`. In a line each sequence starts at a
    multiple of 16 bytes.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device | str) -> None:
        assert all(length > 0 for length in lengths), "an empty sequence has no token to pack"
        self._device = torch.device(device)
        self._lengths = np.array(lengths, np.int64)
        rounded = -(-self._lengths // 4) * 4
        self._firsts, self._lines = (np.cumsum(each) - each for each in (self._lengths, rounded))
        self.tokens = sum(lengths)
        self.width = -(-int(rounded.sum()) // 16) * 16  # a multiple of 16, so one compiled kernel serves all lengths
        self._made: dict[tuple[int, bool], Tensor] = {}
        # made now for every head width: while a graph is recorded, nothing may come from the host
        for dials in (*_FORWARD.values(), *_GRAD_Q.values()):
            self.queries(dials["ROWS"])
        for dials in _GRAD_KV.values():
            self.keys(dials["KEYS"])

    def queries(self, size: int) -> Tensor:
        """Tiles of queries, which walk from the sequence's start."""
        return self._table(size, keys=False)

    def keys(self, size: int) -> Tensor:
        """Tiles of keys, which walk to the sequence's end."""
        return self._table(size, keys=True)

    def _table(self, size: int, *, keys: bool) -> Tensor:
        if (size, keys) not in self._made:
            counts = -(-self._lengths // size)
            of = np.repeat(np.arange(len(counts)), counts)
            start = size * (np.arange(len(of)) - (np.cumsum(counts) - counts)[of])
            length = self._lengths[of]
            order = np.argsort(start - length if keys else -np.minimum(start + size, length), kind="stable")
            cut = np.stack((self._firsts[of], self._lines[of], length, start), 1)[order].astype(np.int32)
            self._made[size, keys] = torch.from_numpy(cut).to(self._device, non_blocking=True)
        return self._made[size, keys]


@triton.jit
def _tile(tiles_ptr, index):
    at = tiles_ptr + 4 * index
    return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)


@triton.jit
def _at(ptr, STRIDE: tl.constexpr, row, column, ROWS: tl.constexpr, D: tl.constexpr):
    return ptr + row.to(tl.int64) * STRIDE + column + tl.arange(0, ROWS)[:, None] * STRIDE + tl.arange(0, D)[None, :]


@triton.jit
def _rows(ptr, STRIDE: tl.constexpr, row, column, inside, ROWS: tl.constexpr, D: tl.constexpr):
    """Loads rows without the TMA, with 0 for rows outside the sequence."""
    return tl.load(_at(ptr, STRIDE, row, column, ROWS, D), inside[:, None], 0.0)


@triton.jit
def _weigh(q, k, v, scale, best, total, out, keep):
    """Adds one tile of keys; earlier sums are rescaled if the maximum grew."""
    scores = tl.dot(q, k.T)
    if keep is not None:
        scores = tl.where(keep, scores, float("-inf"))
    above = tl.maximum(best, tl.max(scores, 1) * scale)
    powers = tl.exp2(scores * scale - above[:, None])
    shrink = tl.exp2(best - above)
    total = total * shrink + tl.sum(powers, 1)
    out = tl.dot(powers.to(v.dtype), v, out * shrink[:, None])
    return above, total, out


@triton.jit
def _forward(
    q_ptr, k_ptr, v_ptr, k_desc, v_desc, out_ptr, sums_ptr, tiles_ptr, width, scale, Q_STRIDE: tl.constexpr,
    KV_STRIDE: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0) % HEADS
    first, line, length, start = _tile(tiles_ptr, tl.program_id(0) // HEADS)
    column = head // GROUP * D
    at, key = start + tl.arange(0, ROWS), tl.arange(0, KEYS)
    inside, whole = at < length, start // KEYS * KEYS
    q = _rows(q_ptr, Q_STRIDE, first + start, head * D, inside, ROWS, D)
    best, total = tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, D], tl.float32)
    # keys past the sequence's end come after every query that is stored
    for begin in tl.range(whole, tl.minimum(start + ROWS, length), KEYS):
        keys, keep = begin + key, at[:, None] >= (begin + key)[None, :]
        k = _rows(k_ptr, KV_STRIDE, first + begin, column, keys < length, KEYS, D)
        v = _rows(v_ptr, KV_STRIDE, first + begin, column, keys < length, KEYS, D)
        best, total, out = _weigh(q, k, v, scale, best, total, out, keep)
    if whole > 0:  # the branch ends the loop's products here; without it the assembler makes each wait for the last
        for begin in tl.range(0, whole, KEYS):
            k, v = k_desc.load([first + begin, column]), v_desc.load([first + begin, column])
            best, total, out = _weigh(q, k, v, scale, best, total, out, None)
    tl.store(sums_ptr + head * width + line + at, best + tl.log2(total), inside)
    out = (out * (1.0 / total)[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(_at(out_ptr, HEADS * D, first + start, head * D, ROWS, D), out, inside[:, None])


@triton.jit
def _slope_q(q, grad, k, v, scale, sums, delta, into, keep):
    powers = tl.exp2(tl.dot(q, k.T) * scale - sums[:, None])
    slopes = powers * (tl.dot(grad, v.T) - delta[:, None])
    if keep is not None:
        slopes = tl.where(keep, slopes, 0.0)
    return tl.dot(slopes.to(k.dtype), k, into)


@triton.jit
def _grad_q(
    q_ptr, k_ptr, v_ptr, k_desc, v_desc, grad_ptr, out_ptr, sums_ptr, delta_ptr, into_ptr, tiles_ptr, width, scale,
    scale_log2, Q_STRIDE: tl.constexpr, KV_STRIDE: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr,
    D: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    PACKED: tl.constexpr = (HEADS + 2 * (HEADS // GROUP)) * D
    head = tl.program_id(0) % HEADS
    first, line, length, start = _tile(tiles_ptr, tl.program_id(0) // HEADS)
    column = head // GROUP * D
    at, key = start + tl.arange(0, ROWS), tl.arange(0, KEYS)
    inside, whole = at < length, start // KEYS * KEYS
    q = _rows(q_ptr, Q_STRIDE, first + start, head * D, inside, ROWS, D)
    grad = _rows(grad_ptr, HEADS * D, first + start, head * D, inside, ROWS, D)
    out = _rows(out_ptr, HEADS * D, first + start, head * D, inside, ROWS, D)
    sums = tl.load(sums_ptr + head * width + line + at, inside, 0.0)
    delta = tl.sum(grad.to(tl.float32) * out.to(tl.float32), 1)
    tl.store(delta_ptr + head * width + line + at, delta, inside)
    into = tl.zeros([ROWS, D], tl.float32)
    for begin in tl.range(whole, tl.minimum(start + ROWS, length), KEYS):
        keys, keep = begin + key, at[:, None] >= (begin + key)[None, :]
        k = _rows(k_ptr, KV_STRIDE, first + begin, column, keys < length, KEYS, D)
        v = _rows(v_ptr, KV_STRIDE, first + begin, column, keys < length, KEYS, D)
        into = _slope_q(q, grad, k, v, scale_log2, sums, delta, into, keep)
    if whole > 0:
        for begin in tl.range(0, whole, KEYS):
            k, v = k_desc.load([first + begin, column]), v_desc.load([first + begin, column])
            into = _slope_q(q, grad, k, v, scale_log2, sums, delta, into, None)
    into = (into * scale).to(into_ptr.dtype.element_ty)
    tl.store(_at(into_ptr, PACKED, first + start, head * D, ROWS, D), into, inside[:, None])


@triton.jit
def _slope_kv(k, v, q, grad, scale, sums_desc, delta_desc, at, into_k, into_v, keep, inside):
    """Scores are transposed (keys × queries), as the products that sum over queries need them."""
    sums = sums_desc.load([at])
    if inside is not None:  # past the end, powers and slopes are 0
        sums = tl.where(inside, sums, float("inf"))
    powers = tl.exp2(tl.dot(k, q.T) * scale - sums[None, :])
    if keep is not None:
        powers = tl.where(keep, powers, 0.0)
    into_v = tl.dot(powers.to(q.dtype), grad, into_v)
    slopes = tl.dot(v, grad.T)
    delta = delta_desc.load([at])  # loaded late, because it takes registers
    if inside is not None:
        delta = tl.where(inside, delta, 0.0)
    into_k = tl.dot((powers * (slopes - delta[None, :])).to(q.dtype), q, into_k)
    return into_k, into_v


@triton.jit
def _grad_kv(
    q_ptr, k_ptr, v_ptr, grad_ptr, q_desc, grad_desc, sums_desc, delta_desc, into_k_ptr, into_v_ptr, tiles_ptr, width,
    scale, scale_log2, Q_STRIDE: tl.constexpr, KV_STRIDE: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr,
    D: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    KV_HEADS: tl.constexpr = HEADS // GROUP
    PACKED: tl.constexpr = (HEADS + 2 * KV_HEADS) * D
    kv_head = tl.program_id(0) % KV_HEADS
    first, line, length, start = _tile(tiles_ptr, tl.program_id(0) // KV_HEADS)
    key = start + tl.arange(0, KEYS)
    inside = key < length
    k = _rows(k_ptr, KV_STRIDE, first + start, kv_head * D, inside, KEYS, D)
    v = _rows(v_ptr, KV_STRIDE, first + start, kv_head * D, inside, KEYS, D)
    into_k, into_v = tl.zeros([KEYS, D], tl.float32), tl.zeros([KEYS, D], tl.float32)
    # tiles of queries: first those on the diagonal, then whole ones, then the rest of the sequence
    DIAGONAL: tl.constexpr = (KEYS + ROWS - 1) // ROWS
    after = tl.maximum(length - start - DIAGONAL * ROWS, 0)
    whole, masked = after // ROWS, DIAGONAL + (after % ROWS > 0).to(tl.int32)
    for index in tl.range(0, GROUP * masked):  # one loop over all heads keeps the pipeline full
        head, which = kv_head * GROUP + index // masked, index % masked
        begin = start + tl.where(which < DIAGONAL, which, which + whole) * ROWS
        at = begin + tl.arange(0, ROWS)
        q = _rows(q_ptr, Q_STRIDE, first + begin, head * D, at < length, ROWS, D)
        grad = _rows(grad_ptr, HEADS * D, first + begin, head * D, at < length, ROWS, D)
        into_k, into_v = _slope_kv(
            k, v, q, grad, scale_log2, sums_desc, delta_desc, head * width + line + begin, into_k, into_v,
            at[None, :] >= key[:, None], at < length,
        )  # fmt: skip
    if whole > 0:
        for index in tl.range(0, GROUP * whole):
            head = kv_head * GROUP + index // whole
            begin = start + (DIAGONAL + index % whole) * ROWS
            q, grad = q_desc.load([first + begin, head * D]), grad_desc.load([first + begin, head * D])
            at = head * width + line + begin
            into_k, into_v = _slope_kv(k, v, q, grad, scale_log2, sums_desc, delta_desc, at, into_k, into_v, None, None)
    into_k, into_v = (into_k * scale).to(into_k_ptr.dtype.element_ty), into_v.to(into_v_ptr.dtype.element_ty)
    tl.store(_at(into_k_ptr, PACKED, first + start, kv_head * D, KEYS, D), into_k, inside[:, None])
    tl.store(_at(into_v_ptr, PACKED, first + start, kv_head * D, KEYS, D), into_v, inside[:, None])


def fits(q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor) -> bool:
    """Whether the kernels take these: heads side by side, rows of a multiple of 16 bytes, keys and values alike."""
    tensors, dim = (q_NHD, k_NKD, v_NKD), q_NHD.shape[2]
    alike = all(each.dtype == q_NHD.dtype and each.shape[2] == dim for each in tensors)
    side_by_side = all(each.stride(2) == 1 and (each.stride(1) == dim or each.shape[1] == 1) for each in tensors)
    whole = all(each.data_ptr() % 16 == 0 and each.stride(0) % 8 == 0 for each in tensors)
    paired = k_NKD.shape == v_NKD.shape and k_NKD.stride(0) == v_NKD.stride(0)
    known = dim in _FORWARD and q_NHD.dtype in _HALF and q_NHD.shape[1] % k_NKD.shape[1] == 0
    return known and alike and side_by_side and whole and paired and has_accelerator(q_NHD.device)


def attention_forward(q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, tiles: Tiles) -> tuple[Tensor, Tensor]:
    """Returns (the attention output, log2 of the sums of powers [H, width of lines])."""
    tokens, heads, dim = q_NHD.shape
    assert tokens == tiles.tokens, f"{tokens} tokens, and sequences of {tiles.tokens}"
    dials = _FORWARD[dim]
    table = tiles.queries(dials["ROWS"])
    out_NHD = q_NHD.new_empty(tokens, heads, dim)
    sums_HL = torch.empty((heads, tiles.width), dtype=torch.float32, device=q_NHD.device)
    pair = (_tall(each, dials["KEYS"]) for each in (k_NKD, v_NKD))
    _forward[(len(table) * heads,)](
        q_NHD, k_NKD, v_NKD, *pair, out_NHD, sums_HL, table, tiles.width, _LOG2_E / dim**0.5, **_shape(q_NHD, k_NKD),
        **dials,
    )  # fmt: skip
    return out_NHD, sums_HL


def attention_backward(
    q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, out_NHD: Tensor, sums_HL: Tensor, grad_NHD: Tensor, tiles: Tiles
) -> Tensor:
    """[N, H + 2K, D]: the gradients of q, k and v side by side."""
    (tokens, heads, dim), kv_heads = q_NHD.shape, k_NKD.shape[1]
    into = q_NHD.new_empty(tokens, heads + 2 * kv_heads, dim)
    into_q, into_k, into_v = into.split((heads, kv_heads, kv_heads), 1)
    delta_HL = grad_q(q_NHD, k_NKD, v_NKD, out_NHD, sums_HL, grad_NHD, into_q, tiles)
    grad_kv(q_NHD, k_NKD, v_NKD, sums_HL, delta_HL, grad_NHD, into_k, into_v, tiles)
    return into


def grad_q(
    q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, out_NHD: Tensor, sums_HL: Tensor, grad_NHD: Tensor, into: Tensor,
    tiles: Tiles,
) -> Tensor:  # fmt: skip
    """Writes the gradient of q into `into`, and returns Σ grad · out per row and head."""
    heads, dim = q_NHD.shape[1:]
    dials, scale = _GRAD_Q[dim], dim**-0.5
    table = tiles.queries(dials["ROWS"])
    delta_HL = torch.empty_like(sums_HL)
    pair = (_tall(each, dials["KEYS"]) for each in (k_NKD, v_NKD))
    _grad_q[(len(table) * heads,)](
        q_NHD, k_NKD, v_NKD, *pair, grad_NHD, out_NHD, sums_HL, delta_HL, into, table, tiles.width, scale,
        scale * _LOG2_E, **_shape(q_NHD, k_NKD), **dials,
    )  # fmt: skip
    return delta_HL


def grad_kv(
    q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, sums_HL: Tensor, delta_HL: Tensor, grad_NHD: Tensor, into_k: Tensor,
    into_v: Tensor, tiles: Tiles,
) -> None:  # fmt: skip
    kv_heads, dim = k_NKD.shape[1:]
    dials, scale = _GRAD_KV[dim], dim**-0.5
    table = tiles.keys(dials["KEYS"])
    pair = (_tall(each, dials["ROWS"]) for each in (q_NHD, grad_NHD))
    lines = (descriptor(each.flatten(), [dials["ROWS"]]) for each in (sums_HL, delta_HL))
    _grad_kv[(len(table) * kv_heads,)](
        q_NHD, k_NKD, v_NKD, grad_NHD, *pair, *lines, into_k, into_v, table, tiles.width, scale, scale * _LOG2_E,
        **_shape(q_NHD, k_NKD), **dials,
    )  # fmt: skip


def _tall(x_NHD: Tensor, rows: int) -> TensorDescriptor:
    """A TMA descriptor for tiles of `rows` rows, one head wide."""
    return descriptor(x_NHD.flatten(1), [rows, x_NHD.shape[2]])


def _shape(q_NHD: Tensor, k_NKD: Tensor) -> Dials:
    heads, dim = q_NHD.shape[1:]
    strides = {"Q_STRIDE": q_NHD.stride(0), "KV_STRIDE": k_NKD.stride(0)}
    return {**strides, "HEADS": heads, "GROUP": heads // k_NKD.shape[1], "D": dim}


class _Attend(Function):
    @staticmethod
    def forward(ctx: Any, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, tiles: Tiles) -> Tensor:
        out_NHD, sums_HL = attention_forward(q_NHD, k_NKD, v_NKD, tiles)
        ctx.save_for_backward(q_NHD, k_NKD, v_NKD, out_NHD, sums_HL)
        ctx.tiles = tiles
        return out_NHD

    @staticmethod
    def backward(ctx: Any, grad_NHD: Tensor) -> tuple[Tensor | None, ...]:
        q_NHD, k_NKD, v_NKD, out_NHD, sums_HL = ctx.saved_tensors
        into = attention_backward(q_NHD, k_NKD, v_NKD, out_NHD, sums_HL, grad_NHD.contiguous(), ctx.tiles)
        kv_heads = k_NKD.shape[1]
        return *into.split((q_NHD.shape[1], kv_heads, kv_heads), 1), None


def attend(q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, tiles: Tiles) -> Tensor:
    """Block-diagonal causal attention, [N, H, D]. The gradients of q, k and v are views of one [N, H + 2K, D]."""
    return call(_Attend, q_NHD, k_NKD, v_NKD, tiles)
