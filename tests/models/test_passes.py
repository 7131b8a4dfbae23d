"""Each Triton pass of the decoder, compared with the plain one in FP32."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rollmill.models.kernels import elementwise
from rollmill.models.kernels.quantised import fp8
from tests.kernels import DEVICE, INTERPRETED

pytestmark = pytest.mark.kernels


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def close(ours: Tensor, theirs: Tensor) -> None:
    """Kernels round to bf16 at other places: the relative error is at most 2⁻⁸."""
    ours, theirs = ours.detach().float(), theirs.detach().float()
    assert float((ours - theirs).norm()) <= 6e-3 * float(theirs.norm())


@pytest.mark.parametrize("width", [16, 48, 64, 576, 1000])
def test_norm(width: int):
    from rollmill.models.kernels.fused_triton import norm_backward, norm_forward

    rows = 5 if INTERPRETED and width > 100 else 37  # a program takes 2 rows of this width
    x, grad, skip = (drawn(rows, width, seed=seed) for seed in (0, 2, 3))
    weight = drawn(width, seed=1)
    x32, weight32 = x.float().requires_grad_(), weight.float().requires_grad_()
    expected = elementwise.rms_norm(x32, weight32, 1e-5)
    grad_x, grad_weight = torch.autograd.grad(expected, (x32, weight32), grad.float())
    normal, scale = norm_forward(x, weight, 1e-5)
    close(normal, expected)
    for given in (skip, None):
        ours, our_weight, again = norm_backward(x, weight, scale, grad, given, normal=True)
        close(ours, grad_x if given is None else grad_x + given.float())
        close(our_weight, grad_weight)
        assert again is not None
        assert torch.equal(again, normal)
        assert norm_backward(x, weight, scale, grad, given, normal=False)[2] is None


@pytest.mark.parametrize("heads", [(9, 3, 64), (4, 2, 16), (5, 1, 24)])
@pytest.mark.parametrize("normed", [False, True])
def test_rotation(heads: tuple[int, int, int], normed: bool):
    from rollmill.models.kernels.attention.rotate_triton import rotate_heads, unrotate_heads

    (q, k, dim), tokens = heads, 33 if INTERPRETED else 45
    qkv = drawn(tokens, (q + 2 * k) * dim)
    angles = drawn(tokens, 1, dim // 2, seed=1, dtype=torch.float32)
    cos, sin = angles.cos(), angles.sin()
    norms = (drawn(dim, seed=2), drawn(dim, seed=3)) if normed else None
    leaves = [tensor.float().requires_grad_() for tensor in (qkv, *(norms or ()))]
    parts = leaves[0].view(tokens, -1, dim).split((q, k, k), 1)
    plain = list(parts)
    for index, norm in enumerate(leaves[1:]):
        plain[index] = elementwise.rms_norm(parts[index].reshape(-1, dim), norm, 1e-5).view(parts[index].shape)
    expected = torch.cat([elementwise.rotate(plain[0], cos, sin), elementwise.rotate(plain[1], cos, sin), plain[2]], 1)
    grads = drawn(tokens, q + 2 * k, dim, seed=4).split((q, k, k), 1)
    theirs = torch.autograd.grad(expected, leaves, torch.cat(grads, 1).float())
    close(rotate_heads(qkv.clone(), cos, sin, heads, norms, 1e-5), expected.flatten(1))
    ours = unrotate_heads(tuple(grads), qkv if normed else None, cos, sin, norms, 1e-5)
    for mine, other in zip(ours, theirs, strict=False):
        assert mine is not None
        close(mine, other)


@pytest.mark.parametrize("rows", [1, 255, 300])
def test_sum_of_rows(rows: int):
    from rollmill.models.kernels.fused_triton import sum_rows

    x = drawn(rows, 21, dtype=torch.float32)
    torch.testing.assert_close(sum_rows(x, torch.float32), x.sum(0), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("vocabulary", [300, 8192, 20_000])
def test_next_token(vocabulary: int):
    from rollmill.models.kernels.heads.head_triton import next_token_slopes

    rows = 7
    logits = 4 * drawn(rows, vocabulary, dtype=torch.float32)
    logits[2, 5:] = -torch.inf  # as a mask leaves them
    logits[3, vocabulary - 1] = 200.0
    targets = torch.tensor([0, 1, 2, 3, vocabulary - 1, 5, 6], device=DEVICE)
    weights, logprobs = drawn(rows, seed=1, dtype=torch.float32), torch.empty(rows, device=DEVICE)
    slopes = torch.empty(rows, vocabulary, dtype=torch.bfloat16, device=DEVICE)
    next_token_slopes(logits, targets, weights, logprobs, slopes)
    logits.requires_grad_()
    expected = logits.log_softmax(-1).gather(1, targets[:, None]).squeeze(1)
    torch.testing.assert_close(logprobs, expected.detach(), rtol=1e-5, atol=1e-5)
    (theirs,) = torch.autograd.grad(-(expected * weights).sum(), logits)
    close(slopes, theirs)


def test_gradients_of_several_passes_are_summed():
    from rollmill.training.optimizers.fused_adamw import GradientSums

    shapes = [(3,), (40, 50), (1024,), (2, 1025)]
    sums: dict[str, Tensor] = {}
    adder = GradientSums()
    expected = {str(index): torch.zeros(shape, device=DEVICE) for index, shape in enumerate(shapes)}
    for number in range(4):
        gradients = {}
        for index, (name, total) in enumerate(expected.items()):
            if number > 1 or index != 2:  # one parameter has no gradient at first
                gradients[name] = drawn(*total.shape, seed=10 * number + index)
                total += gradients[name].float()
        adder.add(sums, gradients)
    assert sums.keys() == expected.keys()
    assert all(torch.equal(sums[name], total) for name, total in expected.items())


@pytest.mark.parametrize("width", [128, 512])
def test_a_norm_writes_the_codes_of_its_rows(width: int):
    from rollmill.models.kernels.fused_triton import norm_codes, norm_forward, writes_codes

    x = drawn(20, width) * torch.exp2(drawn(20, 1, seed=1) * 3)
    weight, copy = drawn(width, seed=2), torch.empty_like(x)
    x[3] = 0
    assert writes_codes(x) and not writes_codes(x[:, :96])
    (codes, scales), norms = norm_codes(x, weight, 1e-6, copy)
    plain, expected = norm_forward(x, weight, 1e-6)
    theirs = fp8.token_codes(plain)
    assert torch.equal(codes.view(torch.uint8), theirs.codes.view(torch.uint8)) and torch.equal(copy, x)
    assert torch.equal(scales, theirs.scales) and scales.t().is_contiguous() and torch.equal(norms, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_norm_of_all_gradients(dtype: torch.dtype):
    from rollmill.training.optimizers.fused_adamw import GradientNorm

    norm = GradientNorm()
    for seed, shapes in ((0, [(3,), (40, 50)]), (1, [(3,), (40, 50)]), (2, [(16384,), (2, 16385), (7,)])):
        gradients = [drawn(*shape, seed=seed, dtype=dtype) for shape in shapes]
        expected = torch.cat([each.flatten() for each in gradients]).double().norm()
        torch.testing.assert_close(norm(gradients).double(), expected, rtol=1e-6, atol=0)
    gradients[1][1, 16384] = float("inf")
    assert norm(gradients).isinf()
    gradients[2][3] = float("nan")
    assert norm(gradients).isnan()


@pytest.mark.parametrize("width", [48, 1500])
def test_rows_are_spread_and_summed_again(width: int):
    from rollmill.models.kernels.fused_triton import gather_sum, spread
    from rollmill.models.kernels.grouped import sort_by_expert

    chosen = torch.rand(11, 6, generator=torch.Generator().manual_seed(0)).argsort(-1)[:, :3].to(DEVICE)
    rows, x = sort_by_expert(chosen, 6), drawn(11, width)
    spread_RW = spread(x, rows.place_Nk)
    assert torch.equal(spread_RW, x[rows.token_R])
    weights, skip = drawn(11, 3, seed=1, dtype=torch.float32), drawn(11, width, seed=2)
    close(gather_sum(spread_RW, rows.place_Nk), 3 * x.float())
    summed = weights.sum(1, keepdim=True) * x.float() + skip.float()
    close(gather_sum(spread_RW, rows.place_Nk, weights, skip), summed)
