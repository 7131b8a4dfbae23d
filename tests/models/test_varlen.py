"""Packed attention on CUDA against the padded one in FP32: any lengths, grouped queries, narrow values."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from rollmill.models.attention import PackedAttention
from rollmill.models.kernels.varlen import VarlenAttention, packed_attention
from tests.kernels import cuda

Shape = tuple[int, int, int, int]  # heads, kv_heads, D, E


def test_strategy_by_device():
    assert isinstance(packed_attention([3], "cpu", torch.float32), PackedAttention)
    assert isinstance(packed_attention([3], "cpu", torch.bfloat16), PackedAttention)


@cuda
def test_strategy_by_type():
    assert isinstance(packed_attention([3], "cuda", torch.bfloat16), VarlenAttention)
    assert isinstance(packed_attention([3], "cuda", torch.float32), PackedAttention)


def problem(lengths: Sequence[int], shape: Shape) -> list[Tensor]:
    heads, kv_heads, dim, value_dim = shape
    generator = torch.Generator().manual_seed(len(lengths))
    sizes = ((heads, dim), (kv_heads, dim), (kv_heads, value_dim), (1, heads * value_dim))
    drawn = [torch.randn(sum(lengths), *size, generator=generator).cuda().bfloat16() for size in sizes]
    return [*(tensor.requires_grad_() for tensor in drawn[:3]), drawn[3].squeeze(1)]


@cuda
@pytest.mark.parametrize("lengths", [[1], [5, 1, 130], [128, 128, 128], [64] * 7, [300, 299, 1, 1]], ids=str)
@pytest.mark.parametrize("shape", [(4, 4, 64, 64), (9, 3, 64, 64), (4, 4, 48, 32), (8, 2, 128, 128)], ids=str)
@pytest.mark.parametrize("deterministic", [False, True])
def test_values_and_gradients(lengths: Sequence[int], shape: Shape, deterministic: bool):
    q, k, v, grad = problem(lengths, shape)
    wide = [tensor.detach().float().requires_grad_() for tensor in (q, k, v)]
    reference = PackedAttention(lengths, "cuda")(0, *wide)
    torch.use_deterministic_algorithms(deterministic)
    try:
        out = VarlenAttention(lengths, "cuda")(0, q, k, v)
        ours = torch.autograd.grad(out, (q, k, v), grad)
    finally:
        torch.use_deterministic_algorithms(False)
    theirs = torch.autograd.grad(reference, wide, grad.float())
    for mine, expected in zip((out, *ours), (reference, *theirs), strict=True):
        error = float(((mine.float() - expected).norm() / (expected.norm() + 1e-3)).detach())
        assert error < 1e-2, error


@cuda
def test_deterministic_mode_repeats_its_bits():
    q, k, v, grad = problem([700, 41, 512], (9, 3, 64, 64))
    torch.use_deterministic_algorithms(True)
    try:
        attend = VarlenAttention([700, 41, 512], "cuda")
        first, *others = [torch.autograd.grad(attend(0, q, k, v), (q, k, v), grad) for _ in range(4)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))
