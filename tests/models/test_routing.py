"""What a router does with its logits: each of its Triton passes against torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rollmill.models.kernels.grouped import sort_by_expert
from rollmill.models.kernels.routing import choose_experts, gate_weights
from tests.kernels import DEVICE, without_kernels

pytestmark = pytest.mark.kernels
SIZES = [(70, 5, 2), (333, 32, 4), (50, 300, 8), (1, 2, 1), (0, 4, 2)]  # tokens, experts, k


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def routes(tokens: int, experts: int, k: int) -> Tensor:
    return torch.rand((tokens, experts), generator=torch.Generator().manual_seed(9)).argsort(-1)[:, :k].contiguous()


@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize("softmax", [True, False], ids=["softmax", "sigmoid"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_scores_and_choice(size: tuple[int, int, int], softmax: bool, biased: bool):
    from rollmill.models.kernels.routing_triton import choose, logit_slopes

    tokens, experts, k = size
    logits, bias, grad = (
        drawn(tokens, experts),
        drawn(experts, seed=1) if biased else None,
        drawn(tokens, experts, seed=2),
    )
    expected = logits.clone().requires_grad_()
    with without_kernels():
        scores, live = choose_experts(expected, bias, k, softmax=softmax)
    ours, our_live = choose(logits.to(DEVICE), None if bias is None else bias.to(DEVICE), k, softmax=softmax)
    torch.testing.assert_close(ours.cpu(), scores.detach(), atol=1e-6, rtol=1e-5)
    assert torch.equal(our_live.cpu(), live)
    (slopes,) = torch.autograd.grad(scores, expected, grad)
    torch.testing.assert_close(logit_slopes(ours, grad.to(DEVICE), softmax=softmax).cpu(), slopes, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("normalised", [True, False], ids=["shares", "scores"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_weights_of_the_gate(size: tuple[int, int, int], normalised: bool):
    from rollmill.models.kernels.routing_triton import score_slopes, weigh

    tokens, experts, k = size
    chosen, grad = routes(*size), drawn(tokens, k, seed=3)
    scores = drawn(tokens, experts).softmax(-1).requires_grad_()
    with without_kernels():
        expected = gate_weights(scores, chosen, 2.5, normalised=normalised)
    given = (scores.detach().to(DEVICE), chosen.to(DEVICE))
    torch.testing.assert_close(weigh(*given, 2.5, normalised=normalised).cpu(), expected.detach())
    (slopes,) = torch.autograd.grad(expected, scores, grad)
    ours = score_slopes(*given, grad.to(DEVICE), 2.5, normalised=normalised)
    torch.testing.assert_close(ours.cpu(), slopes, atol=1e-4, rtol=1e-4)


def test_experts_are_in_range_whatever_the_logits():
    """Kernels use expert numbers as addresses: a step with NaN must be reported, and must not crash the device."""
    from rollmill.models.kernels.routing_triton import choose

    logits = torch.tensor(
        [[torch.nan] * 3, [torch.inf, 0.0, torch.nan], [-torch.inf] * 3, [torch.nan, 1.0, -torch.inf]]
    )
    for softmax in (True, False):
        _, live = choose(logits.to(DEVICE), None, 2, softmax=softmax)
        assert ((live >= 0) & (live < 3)).all() and (live[:, 0] != live[:, 1]).all()


@pytest.mark.parametrize("size", [(50, 4, 3), (700, 32, 4), (40, 300, 8), (1, 3, 2)], ids=str)
def test_rows_in_order_of_expert(size: tuple[int, int, int]):
    from rollmill.models.kernels.routing_triton import sort_pairs

    chosen = routes(*size)
    chosen[chosen == 2] = 1  # expert 2 has no rows, and some tokens choose expert 1 twice
    with without_kernels():
        expected = sort_by_expert(chosen, size[1])
    for ours, theirs in zip(sort_pairs(chosen.to(DEVICE), size[1]), expected, strict=True):
        assert ours.dtype == theirs.dtype and torch.equal(ours.cpu(), theirs)
