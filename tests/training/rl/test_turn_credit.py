"""Turn-level credit: the gradient is that of the expected reward, by enumeration; and it reaches the right tokens."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from rollmill.environments.reward import Reward
from rollmill.environments.rewards.weighted import WeightedRewards
from rollmill.training.batching import TokenRule
from rollmill.training.config import RLConfig
from rollmill.training.lineage import Lineage
from rollmill.training.rl.turn_credit import group_token_advantages, turn_advantages, turn_returns, turns_of
from rollmill.types import Grade
from tests.environments.rewards.test_transcript import episode
from tests.training.rl.test_credit import segment
from tests.training.world import World


def test_the_example_of_the_module() -> None:
    rewards = [(Grade(0.9, {"turn.0": -0.1}), 2), (Grade(0.0), 3), (Grade(1.0), 3)]
    returns = [turn_returns(*each) for each in rewards]
    assert [each.tolist() for each in returns] == [[0.9, 1.0], [0.0, 0.0, 0.0], [1.0, 1.0, 1.0]]
    found = turn_advantages(returns)
    np.testing.assert_allclose(found[2], [1 - 0.45, 1 - 0.5, 1.0])
    np.testing.assert_allclose(found[0], [0.9 - 0.5, 1.0 - 0.5])
    np.testing.assert_allclose(turn_advantages([np.array([1.0, 1.0]), np.array([0.5])])[0], [0.5, 0.5], err_msg="alone")


# An episode of one to three turns: at each turn the policy takes 0 or 1; 0 at turn 0 or 1 ends the episode.
EARNED = {(0, 0): 0.3, (0, 1): -0.2, (1, 0): 0.5, (1, 1): 0.1, (2, 0): -0.4, (2, 1): 0.9}  # (turn, action) → reward


def episodes() -> list[tuple[int, ...]]:
    return [(0,), (1, 0), (1, 1, 0), (1, 1, 1)]


def probabilities(logits_S: torch.Tensor) -> torch.Tensor:
    """Of each episode. `logits_S`: of action 1 at each turn."""
    ones = torch.sigmoid(logits_S)
    return torch.stack(
        [torch.stack([ones[t] if a else 1 - ones[t] for t, a in enumerate(e)]).prod() for e in episodes()]
    )


@pytest.mark.parametrize("process", [True, False])
def test_the_expected_gradient_is_that_of_the_expected_reward(process: bool) -> None:
    """Enumerates every group of three episodes."""
    logits = torch.tensor([0.4, -0.3, 0.7], dtype=torch.float64, requires_grad=True)
    rewards = [sum(EARNED[t, a] for t, a in enumerate(e)) for e in episodes()]
    (truth,) = torch.autograd.grad((probabilities(logits) * torch.tensor(rewards, dtype=torch.float64)).sum(), logits)
    chances, ones = probabilities(logits.detach()), torch.sigmoid(logits.detach())
    expected = torch.zeros(3, dtype=torch.float64)
    for group in itertools.product(range(4), repeat=3):
        returns = []
        for e in group:
            parts = {f"turn.{t}": EARNED[t, a] for t, a in enumerate(episodes()[e])} if process else {}
            returns.append(turn_returns(Grade(rewards[e], parts), len(episodes()[e])))
        chance = torch.stack([chances[e] for e in group]).prod()
        for e, advantages in zip(group, turn_advantages(returns), strict=True):
            for t, action in enumerate(episodes()[e]):
                expected[t] += chance * float(advantages[t]) * (action - ones[t]) / 3  # ∇ log π of a logit
    torch.testing.assert_close(expected, truth)


def test_each_answer_gets_the_advantage_of_its_turn() -> None:
    """A chain of summaries against a trajectory with an abandoned answer, which is no turn."""
    a = segment("a", [0, 1, 1, 0, 1], at=[1, 2])
    b = segment("b", [0, 0, 1], at=[3], parent=(a, 1), cause="summary")
    c = segment("c", [0, 1, 0, 1], at=[1, 2])
    d = segment("d", [0, 0, 0, 1, 1], at=[3], parent=(c, 3), cause="retry")
    assert turns_of([a, b]) == [(0, 1, 3), (0, 4, 5), (1, 2, 3)] and turns_of([c, d]) == [(0, 1, 2), (1, 3, 5)]
    found = group_token_advantages([([a, b], Grade(1.0, {"turn.1": 0.5})), ([c, d], Grade(0.25))])
    assert [each.tolist() for each in found[0]] == [[0, 0.75, 0.75, 0, 0.75], [0, 0, 0.25]]
    assert [each.tolist() for each in found[1]] == [[0, -0.75, 0, 0], [0, 0, 0, -0.75, -0.75]]


def test_a_step_trains_with_turn_advantages_and_repeats_them(tmp_path: Path) -> None:
    world = World(tmp_path)
    config = RLConfig(credit="turns")
    objective = world.objective(config)
    world.add_steps(1)
    rule = TokenRule(Lineage("main", {"main": 0}), base=0, max_staleness=100)
    first = objective.next_batch(1, 1e-3, rule.lineage, lambda: False)
    again = world.objective(config).next_batch(1, 1e-3, rule.lineage, lambda: False)
    assert first is not None and again is not None
    for one, two in zip(first.microbatches, again.microbatches, strict=True):
        assert one.facts is not None and two.facts is not None
        np.testing.assert_array_equal(one.facts.advantages, two.facts.advantages)
    # as many answers each and no process rewards: the mean of the others is the baseline
    entries = list(first.record.trajectories.values())
    facts = [part.facts for part in first.microbatches if part.facts is not None]
    got = {int(t): float(a) for each in facts for t, a in zip(each.trajectory, each.advantages, strict=True)}
    assert got == {index: pytest.approx(1.5 * advantage) for index, (_, _, advantage) in enumerate(entries)}


async def test_process_rewards_add_up_by_weight() -> None:
    class Gives(Reward):
        def __init__(self, name: str, reward: Grade) -> None:
            self.name, self._reward = name, reward

        async def grade(self, episode: object) -> Grade:
            return self._reward

    graders = [
        (1.0, Gives("a", Grade(1.0, {"turn.0": 0.5}))),
        (0.5, Gives("b", Grade(-2.0, {"turn.0": -1.0, "turn.2": 1.0}))),
    ]
    reward = await WeightedRewards(graders).grade(episode())
    assert reward.value == 0.0 and reward.parts["turn.0"] == 0.0 and reward.parts["turn.2"] == 0.5
    assert reward.parts["b.turn.2"] == 1.0
