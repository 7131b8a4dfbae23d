import math

import pytest
import torch

from rollmill.training.loss import policy_loss, target_logprobs

PLAIN = {"mask_delta": 0.2, "ratio_penalty": 0.0, "weight_cap": 20.0, "divisor": 1.0}


def log(*values: float) -> torch.Tensor:
    return torch.tensor([math.log(value) for value in values], dtype=torch.float64)


def test_loss_worked_out_by_hand():
    # token 1: π .5, μ .4, A +1 → w 1.25 → −1.25;  token 2: π .2, μ .4, A −1 → w .5 → +.5 (moved by −.2, not more)
    result = policy_loss(log(0.5, 0.2), log(0.4, 0.4), torch.tensor([1.0, -1.0]), **{**PLAIN, "divisor": 4.0})
    assert result.loss.item() == pytest.approx((-1.25 + 0.5) / 4)
    assert result.kept_M.tolist() == [True, True]
    assert result.log_weights_M.tolist() == pytest.approx([math.log(1.25), math.log(0.5)])


def test_mask_is_about_probability_and_looks_at_the_sign():
    pi, mu = log(0.7, 0.7, 0.1, 0.1, 0.001), log(0.4, 0.4, 0.4, 0.4, 0.0001)
    advantages = torch.tensor([1.0, -1.0, -1.0, 1.0, 1.0])
    # up by .3: further up is masked, back down is not; down by .3 likewise; a tenfold ratio of small numbers is kept
    assert policy_loss(pi, mu, advantages, **PLAIN).kept_M.tolist() == [False, True, False, True, True]


def test_masked_tokens_have_no_gradient():
    pi = log(0.7, 0.5).requires_grad_()
    policy_loss(pi, log(0.4, 0.4), torch.tensor([1.0, 1.0]), **PLAIN).loss.backward()
    assert pi.grad is not None
    assert pi.grad.tolist() == pytest.approx([0.0, -1.25])


def test_penalty_pulls_towards_the_engine():
    pi = log(0.5).requires_grad_()
    result = policy_loss(pi, log(0.25), torch.tensor([0.0]), **{**PLAIN, "ratio_penalty": 0.1})
    result.loss.backward()
    assert result.loss.item() == pytest.approx(0.1 * math.log(2) ** 2)
    assert pi.grad is not None and pi.grad.item() == pytest.approx(0.2 * math.log(2))


def test_weight_is_capped_in_the_gradient_not_cut_off():
    pi = log(0.1).requires_grad_()
    policy_loss(pi, log(0.001), torch.tensor([1.0]), **{**PLAIN, "mask_delta": 1.0}).loss.backward()
    assert pi.grad is not None and pi.grad.item() == pytest.approx(-20.0)  # the ratio is 100


def test_huge_ratios_stay_finite():
    pi = torch.tensor([0.0, -500.0]).requires_grad_()
    result = policy_loss(pi, torch.tensor([-500.0, 0.0]), torch.tensor([1.0, -1.0]), **{**PLAIN, "mask_delta": 1.0})
    result.loss.backward()
    assert torch.isfinite(result.loss) and pi.grad is not None and torch.isfinite(pi.grad).all()


def test_gradient_of_the_whole_loss_agrees_with_finite_differences():
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(6, 5, generator=generator, dtype=torch.float64).requires_grad_()
    targets = torch.tensor([0, 1, 2, 3, 4, 0])
    temperatures = torch.tensor([1.0, 0.7, 1.0, 1.3, 1.0, 1.0], dtype=torch.float64)
    engine = torch.log_softmax(torch.randn(6, 5, generator=generator, dtype=torch.float64), -1)[range(6), targets]
    advantages = torch.tensor([1.0, -0.5, 0.25, -1.0, 0.5, 0.75], dtype=torch.float64)
    settings = {"mask_delta": 0.9, "ratio_penalty": 0.05, "weight_cap": 1.5, "divisor": 3.0}  # the cap is in play

    def loss(logits: torch.Tensor) -> torch.Tensor:
        logprobs, _ = target_logprobs(logits, targets, temperatures)
        return policy_loss(logprobs, engine, advantages, **settings).loss

    assert torch.autograd.gradcheck(loss, logits)


def test_target_logprobs_agree_with_torch_under_temperature():
    logits = torch.randn(4, 7, generator=torch.Generator().manual_seed(2))
    targets, temperatures = torch.tensor([0, 3, 6, 2]), torch.tensor([0.5, 1.0, 2.0, 0.9])
    logprobs, entropies = target_logprobs(logits, targets, temperatures)
    full = torch.distributions.Categorical(logits=logits / temperatures[:, None])
    torch.testing.assert_close(logprobs, full.log_prob(targets))
    torch.testing.assert_close(entropies, full.entropy())
