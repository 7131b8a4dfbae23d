"""The head in chunks, compared with all logits at once: values and gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rollmill.models.kernels.heads import head
from rollmill.models.kernels.heads.head import head_logprobs, head_next_token
from tests.kernels import DEVICE, INTERPRETED

ROWS, VOCABULARY, WIDTH = 70 if INTERPRETED else 150, 203, 32


@pytest.fixture(
    params=[
        pytest.param(("cpu", torch.float32), id="cpu"),
        pytest.param((DEVICE, torch.float32), marks=pytest.mark.kernels, id="kernels"),
        pytest.param((DEVICE, torch.bfloat16), marks=pytest.mark.kernels, id="kernels bf16"),
    ]
)
def place(request: pytest.FixtureRequest) -> tuple[str, torch.dtype]:
    return request.param


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks, the last one shorter."""
    monkeypatch.setattr(head, "PIECE_ELEMENTS", 64 * VOCABULARY)
    monkeypatch.setattr(head, "FEWEST_ROWS", 1)


def problem(place: tuple[str, torch.dtype]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns hidden rows, head, targets, temperatures. Some logits are far from the others."""
    device, dtype = place
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS, WIDTH, generator=generator) * torch.linspace(0.1, 4, ROWS)[:, None]
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator)
    targets = torch.randint(0, VOCABULARY, (ROWS,), generator=generator)
    temperatures = torch.rand(ROWS, generator=generator) + 0.5
    hidden, weight = (tensor.to(device, dtype).requires_grad_() for tensor in (hidden, weight))
    return hidden, weight, targets.to(device), temperatures.to(device)


def straightforward(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperatures: Tensor | None
) -> tuple[Tensor, Tensor]:
    logits = hidden.double() @ weight.double().t()
    if temperatures is not None:
        logits = logits / temperatures[:, None]
    logprobs = torch.log_softmax(logits, -1)
    entropies = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(1, targets[:, None]).squeeze(1), entropies


def gradients(loss: Tensor, *tensors: Tensor) -> list[Tensor]:
    return [grad.double() for grad in torch.autograd.grad(loss, tensors)]


def assert_near(ours: Tensor, theirs: Tensor, dtype: torch.dtype) -> None:
    """Values are always FP32. Gradients of a bf16 model are rounded once per chunk."""
    error = float((ours.double() - theirs.double()).norm() / theirs.double().norm())
    assert error < (5e-3 if dtype == torch.bfloat16 else 2e-5), error


@pytest.mark.parametrize("tempered", [False, True])
@pytest.mark.parametrize(
    "loss_of",
    [
        lambda logprobs, entropies, weights: (logprobs * weights).sum(),
        lambda logprobs, entropies, weights: (entropies * weights).sum(),
        lambda logprobs, entropies, weights: (logprobs.exp() * weights - 0.1 * entropies).sum(),
    ],
    ids=["log-probs", "entropies", "both"],
)
def test_logprobs_and_entropies(
    place: tuple[str, torch.dtype], loss_of: Callable[[Tensor, Tensor, Tensor], Tensor], tempered: bool
):
    hidden, weight, targets, temperatures = problem(place)
    used = temperatures if tempered else None
    ours, theirs = (f(hidden, weight, targets, used) for f in (head_logprobs, straightforward))
    for mine, reference in zip(ours, theirs, strict=True):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine.double(), reference, rtol=1e-5, atol=2e-5)
    for mine, reference in zip(
        gradients(loss_of(*ours, temperatures), hidden, weight),
        gradients(loss_of(*theirs, temperatures), hidden, weight),
        strict=True,
    ):
        assert_near(mine, reference, place[1])


def test_next_token(place: tuple[str, torch.dtype]):
    hidden, weight, targets, weights = problem(place)
    mine = head_next_token(hidden, weight, targets, weights)
    reference = -(straightforward(hidden, weight, targets, None)[0] * weights).sum()
    torch.testing.assert_close(mine.double(), reference, rtol=1e-6, atol=1e-4)
    # scaled, as if the loss had another factor
    for ours, theirs in zip(
        gradients(0.25 * mine, hidden, weight), gradients(0.25 * reference, hidden, weight), strict=True
    ):
        assert_near(ours, theirs, place[1])
    with torch.no_grad():
        again = head_next_token(hidden, weight, targets, weights)
        torch.testing.assert_close(again.double(), reference.detach(), rtol=1e-6, atol=1e-4)


def powers_problem(scale: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A vocabulary of several tiles, the last one not full."""
    generator = torch.Generator().manual_seed(1)
    hidden = scale * torch.randn(ROWS, WIDTH, generator=generator)
    weight = torch.randn(208, WIDTH, generator=generator)
    targets = torch.randint(0, 208, (ROWS,), generator=generator)
    hidden, weight = (tensor.to(DEVICE, torch.bfloat16).requires_grad_() for tensor in (hidden, weight))
    return hidden, weight, targets.to(DEVICE), (torch.rand(ROWS, generator=generator) + 0.5).to(DEVICE)


@pytest.mark.kernels
@pytest.mark.parametrize("scale", [0.0, 0.3, 2.0])
@pytest.mark.parametrize(("confident", "wide"), [(False, False), (True, False), (True, True)])
def test_next_token_by_powers(scale: float, confident: bool, wide: bool, monkeypatch: pytest.MonkeyPatch):
    """Confident: the targets have the largest logits, so gradients are small differences. Wide: with larger tiles."""
    from rollmill.models.kernels.heads import exp_logits_triton

    monkeypatch.setattr(exp_logits_triton, "_WIDE", 1 if wide else 2048)
    hidden, weight, targets, weights = powers_problem(scale)
    if confident:
        targets = (hidden.float() @ weight.float().t()).argmax(-1)
    assert head._makes_powers(hidden, weight)
    mine = head_next_token(hidden, weight, targets, weights)
    reference = -(straightforward(hidden, weight, targets, None)[0] * weights).sum()
    torch.testing.assert_close(mine.double(), reference, rtol=1e-6, atol=1e-4)
    for ours, theirs in zip(gradients(mine, hidden, weight), gradients(reference, hidden, weight), strict=True):
        error = float((ours - theirs).norm() / theirs.norm().clamp(min=1e-3))
        assert error < 5e-3, error


@pytest.mark.kernels
def test_powers_beyond_the_range_of_numbers_are_cut():
    hidden, weight, targets, weights = powers_problem(0.1)
    with torch.no_grad():
        hidden[0] *= 4000  # a surprise of several thousand nats
        targets[0] = (weight.float() @ hidden[0].float()).argmin()
    loss = head_next_token(hidden, weight, targets, weights)
    rest = -(straightforward(hidden, weight, targets, None)[0] * weights)[1:].sum()
    assert 104 < float((loss - rest).detach() / weights[0]) < 112
    ours, theirs = (gradients(each, hidden, weight) for each in (loss, rest))
    assert all(bool(each.isfinite().all()) for each in ours)
    torch.testing.assert_close(ours[0][1:], theirs[0][1:], rtol=2e-2, atol=1e-3)
    assert float(ours[0][0] @ weight[targets[0]].detach().double()) < 0, "towards the target still"


@pytest.mark.kernels
@pytest.mark.parametrize("where", ["hidden", "weight"])
def test_powers_pass_nan_on(where: str):
    hidden, weight, targets, weights = powers_problem(0.3)
    with torch.no_grad():
        (hidden if where == "hidden" else weight)[7, 3] = float("nan")
    assert bool(head_next_token(hidden, weight, targets, weights).isnan())


def test_values_without_gradient_are_the_same(place: tuple[str, torch.dtype]):
    hidden, weight, targets, temperatures = problem(place)
    with torch.no_grad():
        plain = head_logprobs(hidden, weight, targets, temperatures)
    assert all(
        torch.equal(a, b) for a, b in zip(plain, head_logprobs(hidden, weight, targets, temperatures), strict=True)
    )
