"""Groups with equal rewards that have something else to learn from: process rewards, KL in the reward."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollmill.training.config import RLConfig
from rollmill.training.lineage import Lineage
from rollmill.trajectories.staleness import Pace
from rollmill.types import Grade, Segment
from tests.training.world import World, make_segment

MAIN = Lineage("main", {"main": 0})
PACE = Pace(1, 2, max_staleness=3)


def two_answers(seed: int) -> Segment:
    made = make_segment([0, 0, 1, 1, 0, 1, 1], seed=seed)
    return replace(made, spans=[replace(span, started_at=float(place)) for place, span in enumerate(made.spans)])


def add(world: World, name: str, grades: list[Grade]) -> None:
    ids = world.add_group(name, [two_answers(seed) for seed in range(len(grades))], [0.0] * len(grades))
    for id, grade in zip(ids, grades, strict=True):
        world.trajectories.grade(id, grade)


def test_equal_totals_with_other_process_rewards_are_signal_for_credit_by_turns(tmp_path: Path) -> None:
    world = World(tmp_path)
    add(world, "same", [Grade(0.9, {"turn.1": -0.1}), Grade(0.9, {"turn.1": -0.1})])
    add(world, "other", [Grade(0.9, {"turn.0": -0.1}), Grade(0.9, {"turn.1": -0.1})])
    batch = world.objective(RLConfig(credit="turns"), PACE).next_batch(1, 1e-3, MAIN, lambda: False)
    assert batch is not None and batch.record.groups == ("other",) and batch.closed == ("same",)
    facts: Any = batch.microbatches[0].facts
    assert np.abs(facts.advantages).max() == pytest.approx(0.1), "the second answers differ by what the first earned"


@pytest.mark.parametrize("form", ["k1_reward", "k3"])
def test_a_kl_in_the_reward_is_signal(tmp_path: Path, form: str) -> None:
    world = World(tmp_path)
    world.trainer().run(0)
    add(world, "equal", [Grade(1.0), Grade(1.0)])
    add(world, "different", [Grade(1.0), Grade(0.0)])
    config = RLConfig(kl_factor=0.1, kl_form=form, reference="main@0")  # type: ignore[arg-type]
    batch = world.objective(config, PACE).next_batch(1, 1e-3, MAIN, lambda: False)
    assert batch is not None and batch.record.groups == (("equal",) if form == "k1_reward" else ("different",))
