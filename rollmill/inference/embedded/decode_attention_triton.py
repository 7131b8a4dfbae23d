"""Attention of a decode step: norm and rotation of heads, store and attention over pages in one launch.

A program takes one sequence and one KV head, with all query heads that share it. The new key and value go to their
page, and enter the sums from registers. The time is that of the loads: with few programs each takes many keys at once,
with many programs each is one warp, so that many run at once on a multiprocessor. Among the kernels of `narrow_triton`
it starts early, by their rules.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollmill.inference.embedded.cache import KVCache
from rollmill.inference.embedded.paged_triton import Plan, kept
from rollmill.models.kernels.narrow_triton import begin, starts_early

FEW = {"KEYS": 128, "num_warps": 4, "num_stages": 2}
MANY = {"KEYS": 32, "num_warps": 1, "num_stages": 5}  # measured on an H200
_FEW_PROGRAMS = 132  # the multiprocessors of an H200
_LOG2_E = 1.4426950408889634


@triton.jit
def _halves(ptr, at, d, inside, D: tl.constexpr, PAST: tl.constexpr):
    """Heads, and for each column the one that is rotated with it."""
    heads = tl.load(ptr + at + d, inside, 0.0, cache_modifier=PAST)
    return heads, tl.load(ptr + at + (d + D // 2) % D, inside, 0.0, cache_modifier=PAST)


@triton.jit
def _place(position, table_ptr, cos_ptr, sin_ptr, d, PAGE: tl.constexpr, D: tl.constexpr, PAST: tl.constexpr):
    """(page, cos, sin) of a position."""
    angle = position.to(tl.int64) * (D // 2) + d % (D // 2)
    cos, sin = tl.load(cos_ptr + angle), tl.load(sin_ptr + angle)
    return tl.load(table_ptr + position // PAGE, cache_modifier=PAST).to(tl.int64), cos, sin


@triton.jit
def _rotated(x, y, d, weight_ptr, cos, sin, eps, D: tl.constexpr, NORM: tl.constexpr):
    """Rotated heads, rounded like those of `rotate_triton`. `cos` and `sin` are of all columns, `sin` negative in the
    first half."""
    kind = x.dtype
    x, y = x.to(tl.float32), y.to(tl.float32)
    if NORM:
        scale = 1.0 / tl.sqrt(tl.sum(x * x, 1) / D + eps)[:, None]
        x = (x * scale * tl.load(weight_ptr + d).to(tl.float32)).to(kind).to(tl.float32)
        y = (y * scale * tl.load(weight_ptr + (d + D // 2) % D).to(tl.float32)).to(kind).to(tl.float32)
    return (x * cos + y * sin).to(kind)


@triton.jit(do_not_specialize=["pages"])
def _attend_one(
    qkv_ptr, cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr, keys_ptr, values_ptr, positions_ptr, tables_ptr, out_ptr, pages,
    scale, eps, NORM: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr, PAGE: tl.constexpr,
    D: tl.constexpr, KEYS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    table_ptr = tables_ptr + sequence * pages
    own = qkv_ptr + sequence * (GROUP + 2) * HEADS * D
    row, d = tl.arange(0, ROWS)[:, None], tl.arange(0, D)[None, :]
    inside = (row < GROUP) & (d >= 0)
    PAST: tl.constexpr = ".cg" if EARLY else ""  # the multiprocessor's cache
    # written before the layers began
    position = tl.load(positions_ptr + sequence, cache_modifier=PAST)
    if EARLY:
        page, cos, sin = _place(position, table_ptr, cos_ptr, sin_ptr, d, PAGE, D, PAST)
    begin(EARLY)
    # what depends on nothing is loaded first
    q, q_other = _halves(own, (head * GROUP + row) * D, d, inside, D, PAST)
    one = tl.zeros([1, 1], tl.int32)
    k, k_other = _halves(own, (GROUP * HEADS + head + one) * D, d, d >= 0, D, PAST)
    v = tl.load(own + ((GROUP + 1) * HEADS + head) * D + d, cache_modifier=PAST)
    if not EARLY:
        page, cos, sin = _place(position, table_ptr, cos_ptr, sin_ptr, d, PAGE, D, PAST)
    slot = (page * HEADS + head) * PAGE + position % PAGE
    sin = tl.where(d < D // 2, -sin, sin)
    q = _rotated(q, q_other, d, q_norm_ptr, cos, sin, eps, D, NORM)
    k = _rotated(k, k_other, d, k_norm_ptr, cos, sin, eps, D, NORM)
    k, v = kept(k, keys_ptr), kept(v, values_ptr)
    tl.store(keys_ptr + slot * D + d, k)
    tl.store(values_ptr + slot * D + d, v)
    # the new key comes first: so no row is empty
    largest = tl.sum(q.to(tl.float32) * k.to(tl.float32), 1) * scale
    total = tl.full([ROWS], 1.0, tl.float32)
    out = tl.zeros([ROWS, D], tl.float32) + v.to(tl.float32)
    for start in tl.range(0, position, KEYS):
        key = start + tl.arange(0, KEYS)
        known = key < position
        block = tl.load(table_ptr + key // PAGE, known, 0, cache_modifier=PAST).to(tl.int64)
        at = ((block * HEADS + head) * PAGE + key % PAGE)[:, None] * D + d
        old_k = tl.load(keys_ptr + at, known[:, None], 0.0, cache_modifier=PAST).to(q.dtype)
        old_v = tl.load(values_ptr + at, known[:, None], 0.0, cache_modifier=PAST).to(q.dtype)
        scores = tl.where(known[None, :], tl.dot(q, old_k.T) * scale, float("-inf"))
        larger = tl.maximum(largest, tl.max(scores, 1))
        powers = tl.exp2(scores - larger[:, None])
        shrink = tl.exp2(largest - larger)
        total = total * shrink + tl.sum(powers, 1)
        out = tl.dot(powers.to(old_v.dtype), old_v, out * shrink[:, None])
        largest = larger
    out = (out / total[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + ((sequence * HEADS + head) * GROUP + row) * D + d, out, inside)


def attend_one(
    qkv: Tensor,
    angles: tuple[Tensor, Tensor],
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    cache: KVCache,
    layer: int,
    plan: Plan,
    *,
    early: bool = False,
) -> Tensor:
    """[B, H · D] from packed rows q|k|v before rotation. `angles` are the tables of all positions. `early`: it is
    launched among kernels of `narrow_triton`."""
    heads, group, dim = cache.kv_heads, cache.group, cache.head_dim
    out = torch.empty((len(qkv), heads * group * dim), dtype=qkv.dtype, device=qkv.device)
    early = early and starts_early(qkv.device)
    dials = FEW if len(qkv) * heads <= _FEW_PROGRAMS else MANY
    _attend_one[(len(qkv), heads)](
        qkv, *angles, *(norms or (qkv, qkv)), cache.keys[layer], cache.values[layer], plan.positions_N,
        plan.tables_SP, out, plan.tables_SP.stride(0), dim**-0.5 * _LOG2_E, eps, NORM=norms is not None, GROUP=group,
        ROWS=max(16, int(triton.next_power_of_2(group))), HEADS=heads, PAGE=cache.block_size, D=dim, EARLY=early,
        launch_pdl=early, **dials,
    )  # fmt: skip
    return out
