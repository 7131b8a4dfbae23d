import numpy as np

from rollmill.training.advantage import group_advantages, has_signal


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
