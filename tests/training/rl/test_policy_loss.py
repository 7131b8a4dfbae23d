"""Every loss, compared with values computed by hand, its closed-form gradient, and finite differences."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from rollmill.training.config import RLConfig
from rollmill.training.packed_pass import next_token_loss, target_logprobs
from rollmill.training.rl.policy_loss import PolicyLoss, PolicyTokens, policy_loss

PLAIN = RLConfig(ratio_penalty=0.0)


def log(*values: float) -> Tensor:
    return torch.tensor([math.log(value) for value in values], dtype=torch.float64)


def setup(
    pi: list[float], mu: list[float], advantages: list[float], config: RLConfig, **named: Any
) -> tuple[PolicyLoss, list[float]]:
    """The loss with divisor 1, and its gradient with respect to log π."""
    logprobs = log(*pi).requires_grad_()
    tokens = PolicyTokens(logprobs, log(*mu), torch.tensor(advantages, dtype=torch.float64), **named)
    result = policy_loss(tokens, config, 1.0)
    result.loss.backward()
    assert logprobs.grad is not None
    return result, logprobs.grad.tolist()


def near(values: list[float]) -> Any:
    return pytest.approx(values, abs=1e-12)


# policy gradient and DPPO


def test_policy_gradient_has_no_mask():
    # w = .7/.4 = 1.75 and .2/.4 = .5, however far the tokens have moved:  −1.75 · 1 − .5 · (−1) = −1.25
    result, gradient = setup([0.7, 0.2], [0.4, 0.4], [1, -1], RLConfig(loss="policy_gradient"))
    assert result.loss.item() == pytest.approx(-1.25) and result.kept_M.all()
    assert gradient == near([-1.75, 0.5])  # −A · w


def test_dppo_computed_by_hand():
    # token 1: π .5, μ .4, A +1 → w 1.25 → −1.25;  token 2: π .2, μ .4, A −1 → w .5 → +.5 (moved by −.2, not more)
    tokens = PolicyTokens(log(0.5, 0.2), log(0.4, 0.4), torch.tensor([1.0, -1.0]))
    result = policy_loss(tokens, PLAIN, 4.0)
    assert result.loss.item() == pytest.approx((-1.25 + 0.5) / 4)
    assert result.kept_M.tolist() == [True, True] and not result.clipped_M.any() and not result.vetoed_M.any()
    assert result.log_weights_M.tolist() == pytest.approx([math.log(1.25), math.log(0.5)])


def test_dppo_masks_by_probability_and_by_sign():
    # up by .3: further up is masked, back down is not; down by .3 likewise; a tenfold ratio of small numbers is kept
    result, gradient = setup([0.7, 0.7, 0.1, 0.1, 0.001], [0.4, 0.4, 0.4, 0.4, 0.0001], [1, -1, -1, 1, 1], PLAIN)
    assert result.kept_M.tolist() == [False, True, False, True, True]
    assert gradient == near([0.0, 1.75, 0.0, -0.25, -10.0])


def test_penalty_pulls_towards_the_engine():
    result, gradient = setup([0.5], [0.25], [0.0], RLConfig(ratio_penalty=0.1))
    assert result.loss.item() == pytest.approx(0.1 * math.log(2) ** 2)
    assert gradient == near([0.2 * math.log(2)])


def test_weight_is_capped_in_the_gradient_not_cut_off():
    result, gradient = setup([0.1], [0.001], [1.0], RLConfig(mask_delta=1.0, ratio_penalty=0.0))
    assert gradient == near([-20.0]) and result.clipped_M.all()  # the ratio is 100


def test_the_default_loss_keeps_its_bits():
    """The formula of the first runs, written out. A change of one bit would start new lines."""
    generator = torch.Generator().manual_seed(3)
    engine = -torch.rand(500, generator=generator) * 4
    advantages = torch.randn(500, generator=generator)
    start = engine + torch.randn(500, generator=generator)
    new, old = start.clone().requires_grad_(), start.clone().requires_grad_()
    policy_loss(
        PolicyTokens(new, engine, advantages), RLConfig(weight_cap=2.0, ratio_penalty=1e-2), 24.0
    ).loss.backward()
    delta = old - engine
    with torch.no_grad():
        kept = (old.exp() - engine.exp()) * advantages.sign() <= 0.2
    surrogate = delta.clamp(max=math.log(2.0)).exp() + 2.0 * (delta - math.log(2.0)).relu()
    ((1e-2 * delta.square() - kept * advantages * surrogate).sum() / 24.0).backward()
    assert new.grad is not None and old.grad is not None and torch.equal(new.grad, old.grad)


# clipped ratios


def test_ppo_clips_only_in_the_direction_of_the_advantage():
    # w = 1.25 up:   min(1.25, 1.2)           = 1.2,  clipped        loss −1.2
    # w = .5 down:   min(−.5, −.8)            = −.8,  clipped        loss  +.8
    # w = .75 up:    min(.75, .8)             = .75                  loss −.75
    # w = 1.25 down: min(−1.25, −1.2)         = −1.25                loss 1.25       sum .1
    result, gradient = setup([0.5, 0.2, 0.3, 0.5], [0.4] * 4, [1, -1, 1, -1], RLConfig(loss="ppo"))
    assert result.loss.item() == pytest.approx(0.1)
    assert result.clipped_M.tolist() == [True, True, False, False]
    assert gradient == near([0.0, 0.0, -0.75, 1.25])


def test_cispo_bounds_the_weight_and_keeps_every_gradient():
    # w = 1.25, 2 → 1.5, .5:  −(1.25 · ln .5 + 1.5 · ln .8 − .5 · ln .2)
    config = RLConfig(loss="cispo", clip_high=0.5)
    result, gradient = setup([0.5, 0.8, 0.2], [0.4] * 3, [1, 1, -1], config)
    assert result.loss.item() == pytest.approx(-(1.25 * math.log(0.5) + 1.5 * math.log(0.8) - 0.5 * math.log(0.2)))
    assert result.clipped_M.tolist() == [False, True, False]
    assert gradient == near([-1.25, -1.5, 0.5])  # −A · clip(w)


def test_gspo_has_one_ratio_per_sequence():
    # sequence 1: s = √(1.25 · .5) = √.625 on both tokens; sequence 2: s = 1.5 → clipped at 1.3
    config = RLConfig(loss="gspo", clip_low=0.3, clip_high=0.3)
    result, gradient = setup([0.5, 0.2, 0.6], [0.4] * 3, [1, 1, 1], config, sequences=torch.tensor([0, 0, 1]))
    s = math.sqrt(0.625)
    assert result.loss.item() == pytest.approx(-2 * s - 1.3)
    assert result.clipped_M.tolist() == [False, False, True]
    assert gradient == near([-s, -s, 0.0])


def test_gspo_keeps_the_advantage_of_each_token():
    """Its form per token: a good, a neutral and a bad turn of one sequence do not cancel out."""
    config = RLConfig(loss="gspo", clip_low=0.9, clip_high=0.9)
    _, gradient = setup([0.5, 0.2, 0.6], [0.4] * 3, [1, 0, -1], config, sequences=torch.tensor([0, 0, 0]))
    s = (1.25 * 0.5 * 1.5) ** (1 / 3)
    assert gradient == near([-s, 0.0, s])


@pytest.mark.parametrize("loss_name", ["ppo", "gspo"])
def test_a_bad_token_that_became_far_likelier_does_not_outweigh_the_step(loss_name: Any):
    config = RLConfig(loss=loss_name, dual_clip=3.0)
    result, gradient = setup([0.8, 0.5], [0.001, 0.2], [-1, -1], config, sequences=torch.tensor([0, 1]))
    assert gradient == near([0.0, 2.5]) and result.clipped_M.tolist() == [True, False]
    assert result.loss.item() == pytest.approx(3.0 + 2.5)


def test_the_kl_in_the_loss_has_a_bounded_weight():
    config = RLConfig(kl_factor=1.0, kl_form="k2", reference="main@0", ratio_penalty=0.0)
    _, gradient = setup([0.9], [1e-9], [0.0], config, reference_logprobs=torch.tensor([math.log(0.5)]))
    assert gradient == pytest.approx([20 * math.log(0.9 / 0.5)])


# importance weights beside the ratio


@pytest.mark.parametrize(
    ("loss_name", "weights", "kept", "clipped"),
    [
        # w = .4/.1 = 4, .5/.4 = 1.25, .1/.4 = .25, .6/.1 = 6
        ("tis", [2, 1.25, 0.25, 2], [1, 1, 1, 1], [1, 0, 0, 1]),  # at most 2
        ("mis", [0, 1.25, 0.25, 0], [0, 1, 1, 0], [0, 0, 0, 0]),  # none above 2
        ("icepop", [4, 1.25, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0]),  # none outside [.5, 5]
    ],
)
def test_weights_at_the_version_trained_from(loss_name: Any, weights: list[float], kept: list[int], clipped: list[int]):
    """The ratio is 1, the loss is −Σ weight · A, and its gradient is −weight · A."""
    pi, advantages = [0.4, 0.5, 0.1, 0.6], [1, -1, 2, 1]
    config = RLConfig(loss=loss_name)
    result, gradient = setup(pi, [0.1, 0.4, 0.4, 0.1], advantages, config)
    expected = [-weight * advantage for weight, advantage in zip(weights, advantages, strict=True)]
    assert gradient == near(expected)
    assert result.loss.item() == pytest.approx(sum(expected))
    assert result.kept_M.tolist() == [bool(each) for each in kept]
    assert result.clipped_M.tolist() == [bool(each) for each in clipped]


def test_sequence_weights_are_products():
    # sequence 1: 1.25 · .5 = .625 on both tokens; sequence 2: 1.5 · 2 = 3, over the cap of 2
    pi, mu, sequences = [0.5, 0.2, 0.6, 0.8], [0.4] * 4, torch.tensor([0, 0, 1, 1])
    for loss_name, last in (("tis", 2.0), ("mis", 0.0)):
        config = RLConfig(loss=loss_name, weight_level="sequence")  # type: ignore[arg-type]
        _, gradient = setup(pi, mu, [1, 1, 1, 1], config, sequences=sequences)
        assert gradient == near([-0.625, -0.625, -last, -last])


@pytest.mark.parametrize(
    ("config", "needs"),
    [
        (RLConfig(loss="gspo"), "gspo needs to know which sequence"),
        (RLConfig(veto_ratio=1e-4), "veto_ratio needs to know which sequence"),
        (RLConfig(kl_factor=0.1, kl_form="k2", reference="main@0"), "needs a reference"),
        (RLConfig(entropy_factor=0.1), "entropy_factor needs entropies"),
    ],
)
def test_missing_inputs_are_named(config: RLConfig, needs: str):
    with pytest.raises(ValueError, match=needs):
        setup([0.5], [0.4], [1], config)


# all of them


@pytest.mark.parametrize(
    "config",
    [
        RLConfig(loss="policy_gradient", weight_cap=1.5, ratio_penalty=0.05),  # the cap is in play
        RLConfig(mask_delta=0.3, weight_cap=1.5, ratio_penalty=0.05, aggregation="sequence_mean"),
        RLConfig(loss="ppo", entropy_factor=0.1),
        RLConfig(loss="ppo", clip_high=0.4, kl_factor=0.1, kl_form="k3", reference="main@0"),
        RLConfig(veto_ratio=0.2, mask_delta=0.3),
        RLConfig(veto_drift=0.1, mask_delta=0.3),
    ],
    ids=lambda config: config.loss,
)
def test_gradients_agree_with_finite_differences(config: RLConfig):
    """From logits to loss. The losses that hold weights constant on purpose have closed forms."""
    generator = torch.Generator().manual_seed(1)

    def draw() -> Tensor:
        return torch.randn(6, 5, generator=generator, dtype=torch.float64)

    targets = torch.tensor([0, 1, 2, 3, 4, 0])
    temperatures = torch.tensor([1.0, 0.7, 1.0, 1.3, 1.0, 1.0], dtype=torch.float64)
    logits = draw().requires_grad_()
    engine, reference = (torch.log_softmax(draw(), -1)[range(6), targets] for _ in range(2))
    advantages = torch.tensor([1.0, -0.5, 0.25, -1.0, 0.5, 0.75], dtype=torch.float64)
    sequences = torch.tensor([0, 0, 1, 1, 1, 2])

    def loss(logits: Tensor) -> Tensor:
        logprobs, entropies = target_logprobs(logits, targets, temperatures)
        tokens = PolicyTokens(logprobs, engine, advantages, sequences, reference, entropies)
        return policy_loss(tokens, config, 3.0).loss

    assert torch.autograd.gradcheck(loss, logits)


@pytest.mark.parametrize("loss_name", ["policy_gradient", "dppo", "ppo", "cispo", "gspo", "tis", "mis", "icepop"])
def test_on_policy_all_losses_have_the_same_gradient(loss_name: Any):
    """Where π = μ every ratio is 1 and nothing is bounded: −A · ∇log π."""
    pi, advantages = [0.4, 0.5, 0.1], [1.0, -1.0, 2.0]
    config = RLConfig(loss=loss_name)
    sequences = torch.tensor([0, 1, 2])
    result, gradient = setup(pi, pi, advantages, config, sequences=sequences)
    assert gradient == near([-1.0, 1.0, -2.0]) and result.kept_M.all() and not result.clipped_M.any()


@pytest.mark.parametrize("loss_name", ["policy_gradient", "dppo", "ppo", "cispo", "gspo", "tis", "mis", "icepop"])
def test_huge_ratios_stay_finite(loss_name: Any):
    pi = torch.tensor([0.0, -500.0]).requires_grad_()
    tokens = PolicyTokens(
        pi,
        torch.tensor([-500.0, 0.0]),
        torch.tensor([1.0, -1.0]),
        torch.tensor([0, 1]),
        reference_logprobs=torch.tensor([-500.0, 0.0]),
    )
    config = RLConfig(loss=loss_name, kl_factor=0.1, kl_form="k3", reference="main@0")
    result = policy_loss(tokens, config, 1.0)
    result.loss.backward()
    assert torch.isfinite(result.loss) and pi.grad is not None and torch.isfinite(pi.grad).all()


# log-probs


def test_target_logprobs_agree_with_torch_under_temperature():
    logits = torch.randn(4, 7, generator=torch.Generator().manual_seed(2))
    targets, temperatures = torch.tensor([0, 3, 6, 2]), torch.tensor([0.5, 1.0, 2.0, 0.9])
    logprobs, entropies = target_logprobs(logits, targets, temperatures)
    full = torch.distributions.Categorical(logits=logits / temperatures[:, None])
    torch.testing.assert_close(logprobs, full.log_prob(targets))
    torch.testing.assert_close(entropies, full.entropy())


def test_entropy_of_impossible_tokens_has_a_gradient():
    """Tokens masked with −inf have no effect and cause no NaN."""
    logits = torch.tensor([[0.3, -0.2, -math.inf, 1.0]], dtype=torch.float64, requires_grad=True)
    _, entropies = target_logprobs(logits, torch.tensor([0]))
    entropies.sum().backward()
    few = torch.tensor([[0.3, -0.2, 1.0]], dtype=torch.float64, requires_grad=True)
    torch.distributions.Categorical(logits=few).entropy().sum().backward()
    assert logits.grad is not None and few.grad is not None
    torch.testing.assert_close(logits.grad[:, [0, 1, 3]], few.grad)
    assert logits.grad[0, 2] == 0


def test_next_token_loss_is_the_cross_entropy_of_the_targets():
    # two targets of probability .5 and .25, of a batch with four:  (ln 2 + ln 4) / 4
    assert next_token_loss(log(0.5, 0.25), 4).item() == pytest.approx(math.log(8) / 4)
    logits = torch.randn(5, 7, generator=torch.Generator().manual_seed(4), dtype=torch.float64).requires_grad_()
    targets, learn = torch.tensor([0, 3, 6, 2, 1]), torch.tensor([0, 2, 3])  # the mask picks the rows
    next_token_loss(target_logprobs(logits[learn], targets[learn])[0], 3).backward()
    plain = logits.detach().clone().requires_grad_()
    ignored = targets.clone()
    ignored[[1, 4]] = -100
    torch.nn.functional.cross_entropy(plain, ignored).backward()
    torch.testing.assert_close(logits.grad, plain.grad)
