"""Baselines: what a reward is compared with, and whether there is signal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from rollmill.errors import TrainingError
from rollmill.training.config import RLConfig
from rollmill.training.lineage import Lineage
from rollmill.training.rl.baseline import FEWEST, GroupBaseline, PopulationBaseline
from rollmill.training.rl.rl_objective import RolloutBatch
from rollmill.training.stages.rl import RLSettings
from rollmill.trajectories.staleness import Pace
from rollmill.types import Segment, Version
from tests.training.world import World, make_segment

MAIN = Lineage("main", {"main": 0})


def segments(count: int) -> list[Segment]:
    return [make_segment([0, 0, 1, 1], seed=index) for index in range(count)]


def test_leave_one_out_compares_with_the_others() -> None:
    rewards = np.array([1.0, 0.0, 0.0, 0.5])
    others = [(rewards.sum() - reward) / 3 for reward in rewards]
    np.testing.assert_allclose(GroupBaseline(leave_one_out=True).advantages("", rewards), rewards - others)


def test_the_group_mean_scales_the_advantage_of_small_groups_down() -> None:
    """The expected advantage of a success at solve rate ½ is ½. A mean that includes it takes a share of 1 / G away."""
    draw = np.random.default_rng(0)
    for size in (2, 8):
        groups = (draw.random((20_000, size)) < 0.5).astype(np.float64)
        found: dict[bool, list[float]] = {True: [], False: []}
        for leave_one_out, values in found.items():
            baseline = GroupBaseline(leave_one_out=leave_one_out)
            for group in groups[:4000]:
                advantages = baseline.advantages("", group)
                zeros = np.zeros(size) if isinstance(advantages, str) else advantages
                values += (zeros * (group - 0.5)).tolist()  # REINFORCE: ∇ of the log-odds is action − ½
        assert np.mean(found[True]) == pytest.approx(0.25, abs=0.01)
        assert np.mean(found[False]) == pytest.approx(0.25 * (1 - 1 / size), abs=0.01)


@pytest.mark.parametrize("leave_one_out", [True, False])
def test_groups_with_equal_rewards_or_one_trajectory_have_no_signal(leave_one_out: bool) -> None:
    baseline = GroupBaseline(leave_one_out=leave_one_out)
    assert "all 3 graded rewards" in baseline.advantages("", np.ones(3))
    assert "no other trajectory" in baseline.advantages("", np.ones(1))


def step(world: World, config: RLConfig, number: int, pace: Pace) -> RolloutBatch:
    batch = world.objective(config, pace).next_batch(number, 0.0, MAIN, lambda: False)
    assert batch is not None
    world.ledger.commit_step(number, Version("main", number), f"digest-{number}")
    return batch


def test_groups_of_one_learn_from_the_population_of_committed_steps(tmp_path: Path) -> None:
    """The first eight have nothing to compare with: they are closed and counted, and step 1 compares with them. Step 2
    compares with all of step 1, and nothing else: not with what was graded since."""
    world, config, pace = World(tmp_path), RLConfig(baseline="population"), Pace(2, 1, max_staleness=2)
    rewards = [1.0, 0.0] * (FEWEST // 2 + 1)
    for index, reward in enumerate(rewards):
        world.add_group(f"a{index:02d}", segments(1), [reward])
    first = step(world, config, 1, pace)
    assert first.record.groups == ("a08", "a09") and len(first.closed) == FEWEST
    assert [entry[2] for entry in first.record.trajectories.values()] == [0.5, -0.5]
    for name, reward in {"b0": 1.0, "b1": 0.5, "b2": 0.0}.items():
        world.add_group(name, segments(1), [reward])
    second = step(world, config, 2, pace)
    assert {id: entry[2] for id, entry in second.record.trajectories.items()} == {"b0-0": 0.5, "b2-0": -0.5}
    assert second.closed == ("b1",), "its reward is the mean: nothing to learn"
    # the next step compares with these too, in any process
    again = PopulationBaseline(world.ledger, 256)
    again.read(2)
    mean = (sum(rewards) + 1.5) / (len(rewards) + 3)
    np.testing.assert_allclose(again.advantages("", np.array([1.0])), [1.0 - mean])
    assert "only 0" in again.advantages("other", np.array([1.0])), "another family is another population"
    recent = PopulationBaseline(world.ledger, FEWEST)
    recent.read(2)
    np.testing.assert_allclose(recent.advantages("", np.array([1.0])), [1.0 - (2 + 1.5) / FEWEST])


def test_without_a_population_groups_of_one_teach_nothing(tmp_path: Path) -> None:
    world, pace = World(tmp_path), Pace(2, 1, max_staleness=2)
    for index in range(pace.most_started(0)):
        world.add_group(f"a{index}", segments(1), [float(index % 2)])
    with pytest.raises(TrainingError, match="step 1 has no group"):
        step(world, RLConfig(), 1, pace)


@pytest.mark.parametrize("settings", [{}, {"baseline": "leave_one_out"}])
def test_groups_of_one_need_the_population(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="population"):
        RLSettings(group_size=1, **settings)
    assert RLSettings(group_size=1, baseline="population").group_size == 1
