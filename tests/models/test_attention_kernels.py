"""Attention over packed sequences in tiles, against all scores in FP32: any lengths, grouped queries, packed rows."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from rollmill.models.attention import PackedAttention
from tests.kernels import DEVICE, INTERPRETED, hopper, without_kernels

pytest.importorskip("triton")
from rollmill.models.kernels.attention import packed_triton as attention_triton
from rollmill.models.kernels.attention.packed_triton import (
    Tiles,
    attend,
    attention_backward,
    attention_forward,
    fits,
)

pytestmark = [pytest.mark.kernels, hopper]
Shape = tuple[int, int, int]  # heads, kv_heads, D
SMALL = {"ROWS": 16, "KEYS": 16, "num_warps": 4, "num_stages": 2}  # the interpreter takes a step at a time
# several tiles per sequence, a short sequence, grouped queries; the interpreter's time is proportional to heads · tiles
LENGTHS, SHAPE = ([3, 49], (4, 2, 32)) if INTERPRETED else ([20, 45], (6, 2, 64))


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:
        for name, sizes in (("_FORWARD", (32, 16)), ("_GRAD_Q", (32, 32)), ("_GRAD_KV", (16, 32))):
            dials = {**SMALL, "ROWS": sizes[0], "KEYS": sizes[1]}
            monkeypatch.setattr(attention_triton, name, dict.fromkeys((32, 64, 128), dials))


def packed(lengths: Sequence[int], shape: Shape, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    """(rows of q|k|v, a gradient of the output)."""
    heads, kv_heads, dim = shape
    generator = torch.Generator().manual_seed(sum(lengths))
    rows = torch.randn(sum(lengths), heads + 2 * kv_heads, dim, generator=generator)
    grad = torch.randn(sum(lengths), heads, dim, generator=generator)
    return rows.to(DEVICE, dtype).requires_grad_(), grad.to(DEVICE, dtype)


def heads_of(rows: Tensor, shape: Shape) -> tuple[Tensor, ...]:
    heads, kv_heads, _ = shape
    return rows.split((heads, kv_heads, kv_heads), 1)


def plain(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int]) -> Tensor:
    """Attention with the whole matrix of scores."""
    with without_kernels():
        return PackedAttention(lengths, DEVICE)(0, q, k, v).view(q.shape)


def both(lengths: Sequence[int], shape: Shape, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """Returns (output, gradient of the packed rows), from the kernels and in FP32."""
    rows, grad = packed(lengths, shape, dtype)
    found = []
    for each, compute in (
        (rows, lambda *qkv: attend(*qkv, Tiles(lengths, DEVICE))),
        (rows.detach().float().requires_grad_(), lambda *qkv: plain(*qkv, lengths)),
    ):
        out = compute(*heads_of(each, shape))
        found.append([out.detach(), *torch.autograd.grad(out, each, grad.to(out.dtype))])
    return found[0], found[1]


def error(mine: Tensor, expected: Tensor) -> float:
    return float((mine.float() - expected).norm() / (expected.norm() + 1e-3))


PAIRS: list[tuple[list[int], Shape]] = [
    ([1], (2, 2, 32)),
    ([1, 1, 1], (6, 2, 64)),
    ([5, 1, 70], (3, 1, 64)),
    ([32, 64, 16], (2, 2, 32)),
    ([31, 33, 15, 17], (4, 2, 32)),
    ([129], (2, 1, 128)),
    ([7] * (2 if INTERPRETED else 5), (8, 2, 32)),
]
LONG = [[128, 127, 129, 1], [64] * 7, [300, 299, 1, 1, 640], [1500], [17] * 40]
EVERY = list(itertools.product([*(each for each, _ in PAIRS), *LONG], dict.fromkeys(shape for _, shape in PAIRS)))


@pytest.mark.parametrize(("lengths", "shape"), PAIRS if INTERPRETED else EVERY, ids=str)
def test_values_and_gradients(lengths: Sequence[int], shape: Shape):
    mine, expected = both(lengths, shape, torch.bfloat16)
    assert error(mine[0], expected[0]) < 4e-3
    for ours, theirs in zip(heads_of(mine[1], shape), heads_of(expected[1], shape), strict=True):
        # for a single token neither q nor k has a gradient
        assert error(ours, theirs) < 1e-2 if max(lengths) > 1 or theirs.norm() > 1 else ours.norm() < 0.1


def test_half_precision():
    mine, expected = both([20, 45], (3, 1, 64), torch.float16)
    assert max(error(*pair) for pair in zip(mine, expected, strict=True)) < 2e-3


@pytest.mark.parametrize("sizes", [(16, 32), (32, 16), (16, 16), (64, 16), (16, 64)], ids=str)
@pytest.mark.skipif(not INTERPRETED, reason="sizes that products of Hopper do not have")
def test_tiles_of_any_shape(sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch):
    rows, keys = sizes
    for name in ("_FORWARD", "_GRAD_Q", "_GRAD_KV"):
        monkeypatch.setattr(attention_triton, name, {32: {**SMALL, "ROWS": rows, "KEYS": keys}})
    mine, expected = both([65, 3, 48], (2, 1, 32), torch.bfloat16)
    assert max(error(*pair) for pair in zip(mine, expected, strict=True)) < 6e-3


def test_it_may_be_the_first_cuda_call_of_a_thread():
    """Autograd's threads have no CUDA context at first."""
    rows, grad = packed(LENGTHS, SHAPE)
    qkv, tiles = heads_of(rows.detach(), SHAPE), Tiles(LENGTHS, DEVICE)
    out, sums = attention_forward(*qkv, tiles)
    expected = attention_backward(*qkv, out, sums, grad, tiles).clone()
    with ThreadPoolExecutor(1) as threads:
        found = threads.submit(attention_backward, *qkv, out, sums, grad, tiles).result()
    assert torch.equal(found, expected)


def test_separate_tensors():
    rows, grad = packed(LENGTHS, SHAPE)
    apart = [each.detach().clone().requires_grad_() for each in heads_of(rows, SHAPE)]
    tiles = Tiles(LENGTHS, DEVICE)
    expected = torch.autograd.grad(attend(*heads_of(rows, SHAPE), tiles), rows, grad)[0]
    found = torch.autograd.grad(attend(*apart, tiles), apart, grad)
    assert torch.equal(torch.cat(found, 1), expected)


def test_gradients_are_packed():
    heads, kv_heads, dim = SHAPE
    lengths = [5] if INTERPRETED else LENGTHS
    rows, grad = packed(lengths, SHAPE)
    q, k, v = (each.detach().requires_grad_() for each in heads_of(rows, SHAPE))
    found = torch.autograd.grad(attend(q, k, v, Tiles(lengths, DEVICE)), (q, k, v), grad)
    starts = [(each.data_ptr() - found[0].data_ptr()) // (2 * dim) for each in found]
    assert starts == [0, heads, heads + kv_heads]
    assert {each.stride() for each in found} == {((heads + 2 * kv_heads) * dim, dim, 1)}


def test_nan_stays_in_its_sequence():
    # a first sequence of 36, a multiple of 4: sums of the second begin right after its own
    lengths, shape = ([36, 20, 18], (2, 1, 32)) if INTERPRETED else ([37, 20, 45], (3, 1, 32))
    start, end = lengths[0], sum(lengths[:2])
    rows, grad = packed(lengths, shape)
    tiles = Tiles(lengths, DEVICE)
    clean_out = attend(*heads_of(rows, shape), tiles)
    clean = [clean_out.detach(), *torch.autograd.grad(clean_out, rows, grad)]
    with torch.no_grad():
        rows[start:end], grad[start:end] = float("nan"), float("nan")
    out = attend(*heads_of(rows, shape), tiles)
    for mine, expected in zip((out.detach(), *torch.autograd.grad(out, rows, grad)), clean, strict=True):
        assert torch.equal(mine[:start], expected[:start]) and torch.equal(mine[end:], expected[end:])
        assert mine[start:end].isnan().all()


def test_a_nan_key_reaches_only_later_tokens():
    rows, _ = packed([50], (1, 1, 32))
    with torch.no_grad():
        rows[33, 1] = float("nan")
        out = attend(*heads_of(rows, (1, 1, 32)), Tiles([50], DEVICE))
    assert not out[:33].isnan().any() and out[33:].isnan().all()


def test_bits_repeat_and_do_not_depend_on_neighbours():
    lengths = [9, 33, 5] if INTERPRETED else [40, 33, 50]
    middle = slice(lengths[0], lengths[0] + 33)
    rows, grad = packed(lengths, SHAPE)
    tiles = Tiles(lengths, DEVICE)
    first, again = (torch.autograd.grad(attend(*heads_of(rows, SHAPE), tiles), rows, grad)[0] for _ in range(2))
    assert torch.equal(first, again)
    alone = rows[middle].detach().requires_grad_()
    found = torch.autograd.grad(attend(*heads_of(alone, SHAPE), Tiles([33], DEVICE)), alone, grad[middle])[0]
    assert torch.equal(found, first[middle])


def test_large_scores():
    """One key has all the weight, or scores differ by more than an exponential can hold."""
    rows, grad = packed([60], (2, 1, 32))
    with torch.no_grad():
        rows *= 60
    expected = plain(*heads_of(rows.detach().float(), (2, 1, 32)), [60])
    out = attend(*heads_of(rows, (2, 1, 32)), Tiles([60], DEVICE))
    assert error(out.detach(), expected) < 4e-3
    assert torch.autograd.grad(out, rows, grad)[0].isfinite().all()


def test_sums_are_logarithms():
    rows, _ = packed([20, 9], (2, 1, 32))
    q, k, v = heads_of(rows.detach(), (2, 1, 32))
    _, sums_HL = attention_forward(q, k, v, Tiles([20, 9], DEVICE))
    scores = q[20:, 0].float() @ k[20:, 0].float().T * 32**-0.5
    above = torch.ones(9, 9, dtype=torch.bool, device=DEVICE).triu_(1)
    expected = scores.masked_fill(above, float("-inf")).logsumexp(-1)
    torch.testing.assert_close(sums_HL[0, 20:29] * 0.6931471805599453, expected, rtol=1e-4, atol=1e-4)


def test_tables():
    tiles = Tiles([5, 40], "cpu")
    assert tiles.width == 48
    assert tiles.queries(16).tolist() == [[5, 8, 40, 32], [5, 8, 40, 16], [5, 8, 40, 0], [0, 0, 5, 0]]
    assert tiles.keys(16).tolist() == [[5, 8, 40, 0], [5, 8, 40, 16], [5, 8, 40, 32], [0, 0, 5, 0]]
    assert tiles.queries(16) is tiles.queries(16) and tiles.queries(16).dtype == torch.int32


@pytest.mark.parametrize("dim", [32, 64, 128])
def test_all_tables_are_there_before_the_first_call(dim: int):
    """While a graph is recorded, nothing can be copied from the host."""
    lengths = [5] if INTERPRETED else [20, 45]
    rows, grad = packed(lengths, (2, 1, dim))
    tiles = Tiles(lengths, DEVICE)
    made = dict(tiles._made)
    torch.autograd.grad(attend(*heads_of(rows, (2, 1, dim)), tiles), rows, grad)
    assert tiles._made.keys() == made.keys()


def test_tokens_are_those_of_the_sequences():
    rows, _ = packed([20], (2, 1, 32))
    with pytest.raises(AssertionError, match="20 tokens, and sequences of 21"):
        attend(*heads_of(rows, (2, 1, 32)), Tiles([21], DEVICE))


def test_which_tensors_the_kernels_take():
    rows, _ = packed([20], (6, 2, 64))
    q, k, v = heads_of(rows.detach(), (6, 2, 64))
    assert fits(q, k, v) and fits(q, k.clone(), v.clone())
    assert not fits(q, k, v.clone())  # strides of k and v differ
    assert not fits(q[..., :48], k[..., :48], v[..., :48])
    assert not fits(q.float(), k.float(), v.float())
    assert not fits(q.transpose(0, 1), k, v)


def test_backward_takes_what_forward_gave():
    rows, grad = packed([20], (2, 1, 32))
    qkv, tiles = heads_of(rows.detach(), (2, 1, 32)), Tiles([20], DEVICE)
    out, sums = attention_forward(*qkv, tiles)
    into = attention_backward(*qkv, out, sums, grad, tiles)
    assert into.shape == (20, 4, 32) and into.is_contiguous()
