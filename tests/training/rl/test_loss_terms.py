"""The terms that every loss may have: KL to a reference, sequence veto, entropy; and the divisor of the sum."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from rollmill.training.config import RLConfig
from rollmill.training.rl.policy_loss import PolicyTokens, kl_loss, policy_loss, step_divisor, veto
from tests.training.rl.test_policy_loss import log, near, setup

QUIET = {"loss": "policy_gradient", "ratio_penalty": 0.0}  # no mask and no penalty: w · A alone


def rl(**named: Any) -> RLConfig:
    return RLConfig(**{**QUIET, **named})


def distributions() -> tuple[Tensor, Tensor, Tensor]:
    """Logits of π, and the log-probs of μ and of the reference over five tokens."""
    generator = torch.Generator().manual_seed(5)
    pi, mu, reference = torch.randn(3, 5, generator=generator, dtype=torch.float64)
    return pi.requires_grad_(), torch.log_softmax(mu, 0), torch.log_softmax(reference, 0)


def kl_gradient(logits: Tensor, reference: Tensor) -> Tensor:
    """The gradient of KL(π ‖ reference), summed exactly over the vocabulary."""
    logprobs = torch.log_softmax(logits, 0)
    return torch.autograd.grad((logprobs.exp() * (logprobs - reference)).sum(), logits)[0]


@pytest.mark.parametrize("form", ["k2", "k3"])
@pytest.mark.parametrize("on_policy", [True, False])
def test_kl_losses_have_the_exact_gradient_in_expectation(form: Any, on_policy: bool):
    """The expectation over the engine's samples, written out: every token once, weighted by μ."""
    logits, mu, reference = distributions()
    logprobs = torch.log_softmax(logits, 0)
    engine = logprobs.detach() if on_policy else mu
    tokens = PolicyTokens(logprobs, engine, torch.zeros(5), reference_logprobs=reference)
    (gradient,) = torch.autograd.grad((engine.exp() * kl_loss(tokens, form)).sum(), logits)
    torch.testing.assert_close(gradient, kl_gradient(logits, reference))


def test_k1_in_the_reward_has_the_exact_gradient_in_expectation():
    """Advantages of −(log μ − log reference) minus a baseline, through the policy gradient."""
    logits, _, reference = distributions()
    logprobs = torch.log_softmax(logits, 0)
    engine = logprobs.detach()
    advantages = engine.exp() * (0.7 - (engine - reference))  # weighted by the probability of being sampled
    loss = policy_loss(PolicyTokens(logprobs, engine, advantages), rl(), 1.0).loss
    (gradient,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(gradient, kl_gradient(logits, reference))


def test_kl_computed_by_hand():
    # π .5, μ .25, reference .125:  w = 2, d = ln 4;   k2 = 2 · (ln 4)²/2,   k3 = 2 · (1/4 − 1 + ln 4)
    named = {"reference_logprobs": log(0.125)}
    values = {"k2": math.log(4) ** 2, "k3": 2 * (-0.75 + math.log(4))}
    for form, value in values.items():
        config = rl(kl_factor=0.1, kl_form=form, reference="main@0")
        result, gradient = setup([0.5], [0.25], [0.0], config, **named)
        assert result.loss.item() == pytest.approx(0.1 * value)
        assert gradient == near([0.1 * 2 * math.log(4)])  # w · d for both


def test_k1_in_the_reward_adds_nothing_to_the_loss():
    config = rl(kl_factor=0.1, reference="main@0")
    result, _ = setup([0.5], [0.25], [0.0], config, reference_logprobs=log(0.125))
    assert result.loss.item() == 0.0


def test_entropy_bonus_is_subtracted_from_the_loss():
    entropies = torch.tensor([0.5, 0.3], dtype=torch.float64, requires_grad=True)
    result, _ = setup([0.5, 0.5], [0.5, 0.5], [1, 1], rl(entropy_factor=0.1), entropies=entropies)
    assert result.loss.item() == pytest.approx(-2 - 0.1 * 0.8)
    assert entropies.grad is not None and entropies.grad.tolist() == near([-0.1, -0.1])
    with pytest.raises(AssertionError, match="needs its gradient"):
        setup([0.5, 0.5], [0.5, 0.5], [1, 1], rl(entropy_factor=0.1), entropies=entropies.detach())


def test_one_impossible_token_drops_its_sequence():
    # sequence 1 has a token of weight 1e-5; sequence 2 has one of 1e-3, which is rare but possible
    pi, mu = [0.5, 1e-5, 0.5, 1e-3], [0.5, 1.0, 0.5, 1.0]
    config = rl(veto_ratio=1e-4, ratio_penalty=0.1)
    result, gradient = setup(pi, mu, [1, 1, 1, 1], config, sequences=torch.tensor([0, 0, 1, 1]))
    assert result.vetoed_M.tolist() == [True, True, False, False]
    penalty = 0.1 * math.log(1e-3) ** 2
    assert result.loss.item() == pytest.approx(-1 - 1e-3 + penalty)
    assert gradient == near([0.0, 0.0, -1.0, -1e-3 + 0.2 * math.log(1e-3)]), "a dropped sequence contributes nothing"


def test_opsm_drops_failures_that_the_policy_has_moved_away_from():
    # mean(log μ − log π): (ln 4 + 0)/2 = .69 for sequences 1 and 2, of which only the failure is dropped; 3 moved less
    pi, mu = [0.1, 0.4, 0.1, 0.4, 0.3], [0.4] * 5
    tokens = PolicyTokens(
        log(*pi), log(*mu), torch.tensor([-1.0, -1, 1, 1, -1]), sequences=torch.tensor([0, 0, 1, 1, 2])
    )
    assert veto(tokens, rl(veto_drift=0.5)).tolist() == [True, True, False, False, False]
    assert not veto(tokens, rl(veto_drift=0.7)).any()


@pytest.mark.parametrize(
    ("aggregation", "loss", "gradient"),
    [
        # three tokens of weight 1 in sequence 1 (A = 1), one in sequence 2 (A = −1); a step of 2 trajectories
        ("constant", (-3 + 1) / (2 * 5), [-0.1, -0.1, -0.1, 0.1]),
        ("token_mean", (-3 + 1) / 4, [-0.25, -0.25, -0.25, 0.25]),
        ("sequence_mean", (-3 / 3 + 1 / 1) / 2, [-1 / 6, -1 / 6, -1 / 6, 0.5]),
    ],
)
def test_aggregations_computed_by_hand(aggregation: Any, loss: float, gradient: list[float]):
    config = rl(aggregation=aggregation)
    pi = log(0.5, 0.5, 0.5, 0.5).requires_grad_()
    advantages = torch.tensor([1.0, 1, 1, -1], dtype=torch.float64)
    tokens = PolicyTokens(pi, pi.detach(), advantages, torch.tensor([0, 0, 0, 1]))
    result = policy_loss(tokens, config, step_divisor(config, expected=10.0, tokens=4, samples=2))
    result.loss.backward()
    assert result.loss.item() == pytest.approx(loss)
    assert pi.grad is not None and pi.grad.tolist() == near(gradient)
