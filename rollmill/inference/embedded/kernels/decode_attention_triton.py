"""Attention of a decode step: norm and rotation of heads, store and attention over pages in one launch.

A program takes one sequence and one KV head, with all query heads that share it. The new key and value go to their
page, and enter the sums from registers. The time is that of the loads: with few programs each takes many keys at once,
with many programs each is one warp, so that many run at once on a multiprocessor. Among the kernels of
`small_batch_triton` it starts early, by their rules.

With exact numerics the sums are those of `attention.fixed_order_triton`: in its order, with its tiles of 64 rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollmill.inference.embedded.cache import KVCache
from rollmill.inference.embedded.kernels import paged_triton
from rollmill.inference.embedded.kernels.paged_triton import Plan, heads_together, kept
from rollmill.models.kernels.attention.fixed_order_triton import LOG2_E, shape_of, weigh
from rollmill.models.kernels.attention.rotate_triton import turned
from rollmill.models.kernels.small_batch_triton import begin, starts_early

FEW = {"KEYS": 128, "num_warps": 4, "num_stages": 2}
MANY = {"KEYS": 32, "num_warps": 1, "num_stages": 5}  # measured on an H200
_FEW_PROGRAMS = 132  # the multiprocessors of an H200


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
    return turned(x, y, cos, sin).to(kind)


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
    launched among kernels of `small_batch_triton`."""
    heads, group, dim = cache.kv_heads, cache.group, cache.head_dim
    out = torch.empty((len(qkv), heads * group * dim), dtype=qkv.dtype, device=qkv.device)
    early = early and starts_early(qkv.device)
    dials = FEW if len(qkv) * heads <= _FEW_PROGRAMS else MANY
    _attend_one[(len(qkv), heads)](
        qkv, *angles, *(norms or (qkv, qkv)), cache.keys[layer], cache.values[layer], plan.positions_N,
        plan.tables_SP, out, plan.tables_SP.stride(0), dim**-0.5 * LOG2_E, eps, NORM=norms is not None, GROUP=group,
        ROWS=max(16, int(triton.next_power_of_2(group))), HEADS=heads, PAGE=cache.block_size, D=dim, EARLY=early,
        launch_pdl=early, **dials,
    )  # fmt: skip
    return out


@triton.jit
def _load_keys(keys_ptr, values_ptr, table_ptr, key, known, head, d, HEADS: tl.constexpr, PAGE: tl.constexpr,
    D: tl.constexpr,
):  # fmt: skip
    if known is not None:
        block = tl.load(table_ptr + key // PAGE, known, 0).to(tl.int64)
    else:
        block = tl.load(table_ptr + key // PAGE).to(tl.int64)
    at = ((block * HEADS + head) * PAGE + key % PAGE)[:, None] * D + d
    if known is not None:
        return tl.load(keys_ptr + at, known[:, None], 0.0), tl.load(values_ptr + at, known[:, None], 0.0)
    return tl.load(keys_ptr + at), tl.load(values_ptr + at)


@triton.jit(do_not_specialize=["pages"])
def _attend_exactly(
    qkv_ptr, cos_ptr, sin_ptr, keys_ptr, values_ptr, positions_ptr, tables_ptr, out_ptr, pages, scale,
    ROTATE: tl.constexpr, GROUP: tl.constexpr, TOGETHER: tl.constexpr, HEADS: tl.constexpr, PAGE: tl.constexpr,
    D: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """TOGETHER query heads that share a KV head."""
    sequence, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * TOGETHER
    head = first // GROUP
    table_ptr = tables_ptr + sequence * pages
    own = qkv_ptr + sequence * (GROUP + 2) * HEADS * D
    row, d = tl.arange(0, ROWS)[:, None], tl.arange(0, D)[None, :]
    inside = (row < TOGETHER) & (d >= 0)
    position = tl.load(positions_ptr + sequence)
    q, q_other = _halves(own, (first + row) * D, d, inside, D, "")
    k, k_other = _halves(own, (GROUP * HEADS + head + tl.zeros([1, 1], tl.int32)) * D, d, d >= 0, D, "")
    v = tl.load(own + ((GROUP + 1) * HEADS + head) * D + d)
    # the last keys are loaded before the others, so that the end does not wait for them
    whole = position // KEYS * KEYS
    last = whole + tl.arange(0, KEYS)
    last_k, last_v = _load_keys(
        keys_ptr, values_ptr, table_ptr, last, last < position, head, d, HEADS, PAGE, D)  # fmt: skip
    if ROTATE:
        page, cos, sin = _place(position, table_ptr, cos_ptr, sin_ptr, d, PAGE, D, "")
        sin = tl.where(d < D // 2, -sin, sin)
        q = _rotated(q, q_other, d, None, cos, sin, 0.0, D, False)
        k = _rotated(k, k_other, d, None, cos, sin, 0.0, D, False)
    else:
        page = tl.load(table_ptr + position // PAGE).to(tl.int64)
    if first % GROUP == 0:
        slot = (page * HEADS + head) * PAGE + position % PAGE
        tl.store(keys_ptr + slot * D + d, k)
        tl.store(values_ptr + slot * D + d, v)
    new = (last == position)[:, None]
    last_k, last_v = tl.where(new, k, last_k), tl.where(new, v, last_v)
    largest, total = tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, D], tl.float32)
    for start in tl.range(0, whole, KEYS):
        old_k, old_v = _load_keys(
            keys_ptr, values_ptr, table_ptr, start + tl.arange(0, KEYS), None, head, d, HEADS, PAGE, D)  # fmt: skip
        largest, total, out = weigh(q, None, old_k, None, old_v, scale, largest, total, out, None)
    keep = (last <= position)[None, :] & (row >= 0)
    largest, total, out = weigh(q, None, last_k, None, last_v, scale, largest, total, out, keep)
    out = (out / total[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + (sequence * HEADS * GROUP + first + row) * D + d, out, inside)


def attend_one_exactly(
    qkv: Tensor, angles: tuple[Tensor, Tensor] | None, cache: KVCache, layer: int, plan: Plan
) -> Tensor:
    """[B, H · D] with the bits of a trainer's exact attention. `angles`: None if the heads are rotated already."""
    heads, group, dim = cache.kv_heads, cache.group, cache.head_dim
    together = heads_together(group)
    shape = shape_of(heads, group, dim, dim, paged_triton.ROWS, together=together, latent=False)
    sizes = {name: shape[name] for name in ("GROUP", "TOGETHER", "HEADS", "ROWS", "KEYS", "num_warps")}
    out = torch.empty((len(qkv), heads * group * dim), dtype=qkv.dtype, device=qkv.device)
    _attend_exactly[(len(qkv), heads * group // together)](
        qkv, *(angles or (qkv, qkv)), cache.keys[layer], cache.values[layer], plan.positions_N, plan.tables_SP, out,
        plan.tables_SP.stride(0), dim**-0.5 * LOG2_E, ROTATE=angles is not None, PAGE=cache.block_size, D=dim, **sizes,
        num_stages=5 if dim <= 64 else 2,  # measured on an H200
    )  # fmt: skip
    return out
