import numpy as np

from rollmill.training.rl.advantage import group_advantages, has_signal, kl_advantages


def test_advantage_is_reward_minus_group_mean():
    np.testing.assert_array_equal(group_advantages(np.array([1.0, 0.0, 0.0, 1.0])), [0.5, -0.5, -0.5, 0.5])
    np.testing.assert_allclose(group_advantages(np.array([1.0, 0.0, 0.0])), [2 / 3, -1 / 3, -1 / 3])


def test_advantage_is_not_divided_by_the_standard_deviation():
    rare = group_advantages(np.array([1.0] + [0.0] * 9))
    assert rare[0] == 0.9  # would be 3.0 with division


def test_signal_needs_two_different_rewards():
    assert has_signal(np.array([0.0, 1.0]))
    assert not has_signal(np.array([1.0, 1.0, 1.0]))
    assert not has_signal(np.array([1.0]))
    assert not has_signal(np.array([]))
    assert not has_signal(np.array([0.1 + 0.2, 0.3]))  # a rounding error is not a difference


def test_kl_in_the_reward_goes_through_the_group_baseline():
    # group 0 has KL 1 and 3 (mean 2), group 1 has 5 alone:  −.1 · (−1, +1, 0)
    found = kl_advantages(np.array([1.0, 5.0, 3.0]), np.array([0, 1, 0]), 0.1)
    np.testing.assert_allclose(found, [0.1, 0.0, -0.1])
    # the same as subtracting it from the rewards before taking the mean
    rewards, kl = np.array([1.0, 0.0]), np.array([1.0, 3.0])
    np.testing.assert_allclose(
        group_advantages(rewards - 0.1 * kl), group_advantages(rewards) + kl_advantages(kl, np.array([0, 0]), 0.1)
    )
