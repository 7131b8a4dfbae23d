"""Exact products and attention in kernels: right in the interpreter, and on Hopper with bits that no tile changes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rollmill.models.attention import PackedAttention
from rollmill.models.packed_attention import packed_attention
from tests.kernels import DEVICE, INTERPRETED, cuda, hopper, without_kernels

pytest.importorskip("triton")
from rollmill.inference.embedded.kernels.paged_triton import heads_together
from rollmill.models.kernels import exact_triton
from rollmill.models.kernels.attention import fixed_order_triton
from rollmill.models.kernels.attention.packed_triton import Tiles
from rollmill.models.kernels.fused_triton import swiglu_forward
from rollmill.models.kernels.swiglu_triton import swiglu_product

pytestmark = [pytest.mark.kernels, hopper]
SHAPES = [(5, 72, 40), (70, 30, 9)] if INTERPRETED else [(5, 72, 40), (70, 30, 9), (300, 3000, 700), (1, 4096, 4096)]


def drawn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE, dtype)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_agree_with_torch(shape: tuple[int, int, int]) -> None:
    rows, inputs, outputs = shape
    x, weight, skip = drawn(rows, inputs), drawn(outputs, inputs), drawn(rows, outputs)
    expected = x.double() @ weight.double().t()
    for given in (weight.t(), weight.t().contiguous()):  # both ways in which weights are stored
        torch.testing.assert_close(exact_triton.product(x, given), expected.bfloat16(), atol=0.02, rtol=0.02)
        wide = exact_triton.product(x, given, dtype=torch.float32)
        torch.testing.assert_close(wide, expected.float(), atol=1e-3, rtol=1e-5)
        added = exact_triton.product(x, given, skip.clone(), add=True)
        torch.testing.assert_close(added, (expected + skip).bfloat16(), atol=0.02, rtol=0.02)
    assert exact_triton.product(x[:0], weight.t()).shape == (0, outputs)


@cuda
@pytest.mark.parametrize(("inputs", "outputs"), [(576, 960), (1536, 576), (8192, 2048), (4096, 4096), (200, 72)])
def test_no_tile_and_no_batch_changes_a_bit(inputs: int, outputs: int) -> None:
    x, weight = drawn(1024, inputs), drawn(outputs, inputs)
    for given in (weight.t(), weight.t().contiguous()):
        expected = exact_triton.product(x, given, dtype=torch.float32)
        for rows in (1, 3, 16, 64, 65, 127, 300, 1024):
            for tile in exact_triton.TILES:
                if not exact_triton.fits(tile, expected):
                    continue
                found = exact_triton.product(x[-rows:], given, dtype=torch.float32, tile=tile)
                assert torch.equal(found, expected[-rows:]), (rows, tile)


@cuda
def test_experts_and_joined_products_have_the_bits_of_plain_ones() -> None:
    for inputs, outputs in ((576, 3072), (2048, 1536)):
        x, weight = drawn(4096 + 40, inputs), drawn(outputs, inputs)
        gate, up = exact_triton.product(x, weight.t()).float().chunk(2, 1)
        joined = swiglu_product(x, weight, exact=True)
        for rows in (1, 7, 256, 1000):
            assert torch.equal(joined[-rows:], swiglu_product(x[-rows:], weight, exact=True)), rows
            apart = swiglu_forward(exact_triton.product(x[-rows:], weight.t()))
            assert torch.equal(joined[-rows:], apart), rows
        torch.testing.assert_close(joined.float(), gate * gate.sigmoid() * up, atol=0.05, rtol=0.02)
        experts = drawn(8, inputs, outputs)
        for counts in ([1, 0, 3, 8, 256, 64, 65, 3739], [517] * 8, [1] * 8, [0, 0, 0, 0, 0, 0, 0, 4136]):
            ends = torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32).to(DEVICE)
            rows = x[: sum(counts)]
            found = torch._grouped_mm(rows, experts, offs=ends)
            single = [exact_triton.product(part, one) for part, one in zip(rows.split(counts), experts, strict=True)]
            assert torch.equal(found, torch.cat(single)), counts


@pytest.mark.parametrize(("dim", "value_dim"), [(32, 32), (24, 12)])
def test_attention_and_its_gradients_agree_with_torch(
    dim: int, value_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if INTERPRETED:
        monkeypatch.setattr(fixed_order_triton, "ROWS", 32)
        monkeypatch.setattr(fixed_order_triton, "KEYS", 16)
    dtype = torch.float32 if INTERPRETED else torch.bfloat16
    lengths = [3, 70] if INTERPRETED else [3, 70, 300, 129]
    tokens = sum(lengths)
    given = [drawn(tokens, heads, width, dtype=dtype).requires_grad_() for heads, width in
             ((4, dim), (2, dim), (2, value_dim))]  # fmt: skip
    grad = drawn(tokens, 4 * value_dim, dtype=dtype)
    attend = packed_attention(lengths, DEVICE, dtype, exact=True)
    out = attend(0, *given)
    found = torch.autograd.grad(out, given, grad)
    with without_kernels():
        wide = [each.detach().float().requires_grad_() for each in given]
        expected = PackedAttention(lengths, DEVICE)(0, *wide)
        gradients = torch.autograd.grad(expected, wide, grad.float())
    close = {"atol": 1e-4, "rtol": 1e-4} if INTERPRETED else {"atol": 0.05, "rtol": 0.05}
    torch.testing.assert_close(out.float(), expected, **close)
    for one, other in zip(found, gradients, strict=True):
        torch.testing.assert_close(one.float(), other, **close)


def test_latents_give_what_keys_and_values_apart_give(monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:
        monkeypatch.setattr(fixed_order_triton, "ROWS", 32)
        monkeypatch.setattr(fixed_order_triton, "KEYS", 16)
    dtype, lengths = (torch.float32, [3, 40]) if INTERPRETED else (torch.bfloat16, [3, 70, 300])
    q, k = drawn(sum(lengths), 6, 40, dtype=dtype), drawn(sum(lengths), 1, 40, dtype=dtype)
    found, _ = fixed_order_triton.attend_packed(q, k, k[..., :24], Tiles(lengths, DEVICE))
    expected = PackedAttention(lengths, DEVICE)(0, q.float(), k.float(), k[..., :24].float())
    torch.testing.assert_close(found.flatten(1).float(), expected, atol=1e-4 if INTERPRETED else 0.05, rtol=1e-2)


@cuda
@pytest.mark.parametrize(
    ("heads", "dim", "value_dim"),
    [((9, 3), 64, 64), ((32, 8), 128, 128), ((4, 4), 192, 128), ((16, 1), 576, 512), ((128, 1), 576, 512)],
)
def test_pages_and_packed_rows_give_the_same_bits(heads: tuple[int, int], dim: int, value_dim: int) -> None:
    """Single tokens and chunks of a prompt, over pages, against packed sequences of which it is the second."""
    (q_heads, kv_heads), page, length, before = heads, 16, 1500, 77
    group, dtype = q_heads // kv_heads, torch.bfloat16
    shapes = ((q_heads, dim), (kv_heads, dim), (kv_heads, value_dim))
    q, k, v = (drawn(before + length, *shape, dtype=dtype) for shape in shapes)
    latent = value_dim == 512
    v = k[..., :value_dim] if latent else v
    packed, _ = fixed_order_triton.attend_packed(q, k, v, Tiles([before, length], DEVICE))
    expected = packed[before:].flatten(1)
    pages = torch.randperm(-(-length // page), device=DEVICE)
    order = torch.arange(length, device=DEVICE)
    slots = pages[order // page, None] * kv_heads + torch.arange(kv_heads, device=DEVICE)
    rows = (slots * page + (order % page)[:, None]).flatten()
    room = len(pages) * kv_heads * page
    keys, values = (torch.zeros(room, size, dtype=dtype, device=DEVICE) for size in (dim, value_dim))
    keys[rows], values[rows] = k[before:].flatten(0, 1), v[before:].flatten(0, 1)
    values = keys[:, :value_dim] if latent else values
    together = heads_together(group)
    shape = fixed_order_triton.shape_of(kv_heads, group, dim, value_dim, 64, together=together, latent=latent)
    table = pages.int()[None].contiguous()
    for each in {1, max(1, 64 // group), min(7, 64 // together)}:
        starts = list(range(0, length, each))
        tiles = torch.tensor([(at, min(each, length - at), at, 0) for at in starts], dtype=torch.int32, device=DEVICE)
        found = fixed_order_triton.attend_pages(q[before:], keys, values, tiles, table, page, shape)
        assert torch.equal(found, expected), each
