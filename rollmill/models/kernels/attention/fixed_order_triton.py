"""Causal attention that walks over the keys of a sequence from first to last, in blocks of a fixed size.

So the bits of a row depend only on its own context: not on the batch, nor on whether the token was in a prompt or
sampled. The engine reads keys and values from pages, a trainer with exact numerics from packed rows, through the same
code. For equal bits both also need tiles of a multiple of 64 rows, for which Hopper multiplies with the same
instruction, and as many warps per 64 rows (`shape_of`), which fixes the order of the sums.

Latents (models.latent) are keys whose first DIM columns are the values: a block of them is loaded once. Their last REST
columns are multiplied apart, because the sizes of blocks are powers of two.

A product and a sum are joined explicitly (`fma`): otherwise the compiler decides, and not alike in all places.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollmill.models.kernels.attention.packed_triton import Tiles
from rollmill.models.kernels.attention.varlen import values_in_keys

KEYS = 64  # at once
ROWS = 128  # of a tile of packed rows
LOG2_E = 1.4426950408889634


@triton.jit
def _rows(ptr, at, column, inside, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Rows that start at `at`. 0 for columns beyond SIZE and, if `inside` is given, for rows outside."""
    if inside is not None:
        return tl.load(ptr + at[:, None] + column[None, :], inside[:, None] & (column < SIZE)[None, :], 0.0)
    if SIZE == BLOCK:
        return tl.load(ptr + at[:, None] + column[None, :])
    return tl.load(ptr + at[:, None] + column[None, :], (column < SIZE)[None, :], 0.0)


@triton.jit
def weigh(q, q_rest, k, k_rest, v, scale, largest, total, out, keep):
    """Adds one block of keys; earlier sums are rescaled if the maximum grew."""
    scores = tl.dot(q, k.T)
    if q_rest is not None:
        scores = tl.dot(q_rest, k_rest.T, scores)
    if keep is not None:
        scores = tl.where(keep, scores, float("-inf"))
    larger = tl.maximum(largest, tl.max(scores, 1) * scale)
    powers = tl.exp2(tl.fma(scores, tl.zeros_like(scores) + scale, tl.zeros_like(scores) - larger[:, None]))
    shrink = tl.exp2(largest - larger)
    total = tl.fma(total, shrink, tl.sum(powers, 1))
    out = tl.dot(powers.to(v.dtype), v, out * shrink[:, None])
    return larger, total, out


@triton.jit
def _places(
    table_ptr, base, key, inside, kv_head, k_row, k_head, v_row, v_head, HEADS: tl.constexpr, PAGED: tl.constexpr,
    PAGE: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
):  # fmt: skip
    """Where the rows of keys and values start."""
    if PAGED:
        if inside is not None:
            block = tl.load(table_ptr + key // PAGE, inside, 0).to(tl.int64)
        else:
            block = tl.load(table_ptr + key // PAGE).to(tl.int64)
        slot = (block * HEADS + kv_head) * PAGE + key % PAGE
        return slot * KEY_DIM, slot * VALUE_DIM
    else:
        token = base + key
        return token * k_row + kv_head * k_head, token * v_row + kv_head * v_head


@triton.jit(do_not_specialize=["pages", "width"])
def _attend(
    q_ptr, keys_ptr, values_ptr, out_ptr, sums_ptr, tiles_ptr, tables_ptr, q_token, q_head, k_row, k_head, v_row,
    v_head, pages, width, scale, GROUP: tl.constexpr, TOGETHER: tl.constexpr, HEADS: tl.constexpr, PAGED: tl.constexpr,
    PAGE: tl.constexpr, DIM: tl.constexpr, REST: tl.constexpr, VALUE_DIM: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """TOGETHER query heads of a position are in one tile. They share a KV head."""
    if PAGED:  # all heads of a tile before those of the next: the longest tiles come first
        number, heads = tl.program_id(0) // (HEADS * GROUP // TOGETHER), tl.program_id(0) % (HEADS * GROUP // TOGETHER)
    else:
        number, heads = tl.program_id(0), tl.program_id(1)
    tile = tiles_ptr + number * 4
    if PAGED:
        first, count, start = tl.load(tile).to(tl.int64), tl.load(tile + 1), tl.load(tile + 2)
        table_ptr = tables_ptr + tl.load(tile + 3).to(tl.int64) * pages
        base = first
    else:
        base, start = tl.load(tile).to(tl.int64), tl.load(tile + 3)
        first, count = base + start, tl.minimum(tl.load(tile + 2) - start, ROWS)
        table_ptr = tables_ptr
    row, d, e = tl.arange(0, ROWS), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    token, head = row // TOGETHER, heads * TOGETHER + row % TOGETHER
    kv_head = heads * TOGETHER // GROUP
    inside, position = token < count, start + token
    rest = tl.arange(0, BLOCK_R)
    q_at = (first + token) * q_token + head * q_head
    q = _rows(q_ptr, q_at, d, inside, DIM, BLOCK_D)
    q_rest = _rows(q_ptr, q_at + DIM, rest, inside, REST, BLOCK_R) if REST else None
    largest, total = tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, BLOCK_E], tl.float32)
    length, whole = start + count, (start + 1) // KEYS * KEYS
    for begin in tl.range(0, whole, KEYS):  # every row sees these keys
        key = begin + tl.arange(0, KEYS)
        k_at, v_at = _places(table_ptr, base, key, None, kv_head, k_row, k_head, v_row, v_head, HEADS, PAGED, PAGE,
            DIM + REST, VALUE_DIM)  # fmt: skip
        k = _rows(keys_ptr, k_at, d, None, DIM, BLOCK_D).to(q.dtype)
        k_rest = _rows(keys_ptr, k_at + DIM, rest, None, REST, BLOCK_R).to(q.dtype) if REST else None
        v = k if REST else _rows(values_ptr, v_at, e, None, VALUE_DIM, BLOCK_E).to(q.dtype)
        largest, total, out = weigh(q, q_rest, k, k_rest, v, scale, largest, total, out, None)
    for begin in tl.range(whole, length, KEYS):
        key = begin + tl.arange(0, KEYS)
        k_at, v_at = _places(table_ptr, base, key, key < length, kv_head, k_row, k_head, v_row, v_head, HEADS, PAGED,
            PAGE, DIM + REST, VALUE_DIM)  # fmt: skip
        k = _rows(keys_ptr, k_at, d, key < length, DIM, BLOCK_D).to(q.dtype)
        k_rest = _rows(keys_ptr, k_at + DIM, rest, key < length, REST, BLOCK_R).to(q.dtype) if REST else None
        v = k if REST else _rows(values_ptr, v_at, e, key < length, VALUE_DIM, BLOCK_E).to(q.dtype)
        # the first block has a key for every row, so no row is empty
        keep = key[None, :] <= position[:, None]
        largest, total, out = weigh(q, q_rest, k, k_rest, v, scale, largest, total, out, keep)
    if not PAGED:
        line = tl.load(tile + 1)
        tl.store(sums_ptr + head * width + line + position, largest + tl.log2(total), inside)
    out = (out / total[:, None]).to(out_ptr.dtype.element_ty)
    at = ((first + token) * (HEADS * GROUP) + head) * VALUE_DIM
    tl.store(out_ptr + at[:, None] + e[None, :], out, inside[:, None] & (e < VALUE_DIM)[None, :])


def shape_of(
    kv_heads: int, group: int, dim: int, value_dim: int, rows: int, *, together: int, latent: bool
) -> dict[str, int]:
    """The sizes with which `_attend` is launched, for tiles of `rows` rows that hold `together` heads of a position."""
    widest = max(dim, value_dim)
    first = value_dim if latent else dim
    return {
        "GROUP": group,
        "TOGETHER": together,
        "HEADS": kv_heads,
        "DIM": first,
        "REST": dim - first,
        "VALUE_DIM": value_dim,
        "ROWS": rows,
        "KEYS": KEYS // 2 if widest > 256 else KEYS,  # registers and shared memory hold no more
        "BLOCK_D": _block(first),
        "BLOCK_R": _block(dim - first),
        "BLOCK_E": _block(value_dim),
        "num_warps": max(8 if widest > 256 else 4, rows // 16),
        "num_stages": 2 if widest > 128 else 3,
    }


def _block(columns: int) -> int:
    return max(16, triton.next_power_of_2(columns))


def attend_pages(
    q_NHD: Tensor, keys_RD: Tensor, values_RE: Tensor, tiles_T4: Tensor, tables_SP: Tensor, page: int,
    shape: dict[str, int],
) -> Tensor:  # fmt: skip
    """[N, H · E] from the pages of `tables`. A tile is (first token, number of tokens, position of the first,
    sequence)."""
    tokens, heads, dim = q_NHD.shape
    out = torch.empty((tokens, heads * values_RE.shape[1]), dtype=q_NHD.dtype, device=q_NHD.device)
    _attend[(len(tiles_T4) * heads // shape["TOGETHER"],)](
        q_NHD, keys_RD, values_RE, out, out, tiles_T4, tables_SP, *q_NHD.stride()[:2], 0, 0, 0, 0,
        tables_SP.stride(0), 0, dim**-0.5 * LOG2_E, PAGED=True, PAGE=page, **shape,
    )  # fmt: skip
    return out


def attend_packed(q_NHD: Tensor, k_NKD: Tensor, v_NKE: Tensor, tiles: Tiles) -> tuple[Tensor, Tensor]:
    """Returns ([N, H, E], log2 of the sums of powers [H, width of lines]), as `attention_triton` does."""
    (tokens, heads, dim), (kv_heads, value_dim) = q_NHD.shape, v_NKE.shape[1:]
    out_NHE = torch.empty((tokens, heads, value_dim), dtype=q_NHD.dtype, device=q_NHD.device)
    sums_HL = torch.empty((heads, tiles.width), dtype=torch.float32, device=q_NHD.device)
    rows = ROWS if max(dim, value_dim) <= 128 else ROWS // 2
    table, latent = tiles.queries(rows), values_in_keys(k_NKD, v_NKE)
    _attend[(len(table), heads)](
        q_NHD, k_NKD, v_NKE, out_NHE, sums_HL, table, table, *q_NHD.stride()[:2], *k_NKD.stride()[:2],
        *v_NKE.stride()[:2], 0, tiles.width, dim**-0.5 * LOG2_E, PAGED=False, PAGE=1,
        **shape_of(kv_heads, heads // kv_heads, dim, value_dim, rows, together=1, latent=latent),
    )  # fmt: skip
    return out_NHE, sums_HL
