"""The step guard: what an update may do to the policy, and that a step that runs again decides the same."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollmill.errors import TrainingError
from rollmill.models.decoder import Decoder
from rollmill.training.config import OptimizerConfig, RLConfig, lr_by_size
from rollmill.training.optimizers.master_optimizer import MasterOptimizer
from rollmill.training.update_guard import Move, TokenSample, measure_move
from rollmill.trajectories.staleness import Pace
from rollmill.types import Version
from tests.training.world import MODEL, STEPS, TRAINING, World, honest_segment

PACE = Pace(1, 2, max_staleness=100)


def test_the_bounds_of_a_move() -> None:
    fine = Move(0.01, 0.98, 0.15, 0.16)
    assert fine.too_far(0.05) is None
    assert "KL divergence of 0.38" in str(replace_move(fine, drift=0.38).too_far(0.05))
    assert "KL divergence" in str(replace_move(fine, drift=float("nan")).too_far(0.05))
    assert "sample size" in str(replace_move(fine, ess=0.3).too_far(0.05))
    assert "entropy from 0.16 to 0.52" in str(replace_move(fine, entropy=0.52).too_far(0.05))
    assert "entropy from 1 to 0.3" in str(replace_move(fine, entropy=0.3, entropy_before=1.0).too_far(0.05))


def replace_move(move: Move, **named: float) -> Move:
    return move._replace(**named)


def test_a_move_is_measured_on_the_same_tokens() -> None:
    before = TokenSample(torch.tensor([0.5, 0.25]).log(), torch.tensor([0.6, 0.8]))
    after = TokenSample(torch.tensor([0.25, 0.5]).log(), torch.tensor([0.5, 0.5]))
    move = measure_move(before, after)
    weights, delta = np.array([0.5, 2.0]), np.log([0.5, 2.0])
    assert move.drift == pytest.approx((weights - 1 - delta).mean())
    assert move.ess == pytest.approx(weights.sum() ** 2 / (2 * (weights**2).sum()))
    assert (move.entropy, move.entropy_before) == pytest.approx((0.5, 0.7))


def test_a_single_token_that_was_nearly_impossible_does_not_decide() -> None:
    before = TokenSample(torch.full((1000,), -0.1), torch.full((1000,), 0.1))
    one = before.logprobs_M.clone()
    one[0] += 8.0  # its ratio alone would be a KL divergence of 3 and a sample size of 0.002
    assert measure_move(before, before._replace(logprobs_M=one)).too_far(0.2) is None
    assert measure_move(before, before._replace(logprobs_M=before.logprobs_M - 2.0)).too_far(0.2) is not None
    many = before.logprobs_M.clone()
    many[::20] += 8.0
    assert measure_move(before, before._replace(logprobs_M=many)).too_far(0.2) is not None


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_part_of_an_update_is_taken_back(kind: Any) -> None:
    """Half of it gives what half the learning rate gives; all of it, the weights of before."""
    found = {}
    for lr, keep in ((1e-3, 1.0), (2e-3, 0.5), (2e-3, 0.0), (0.0, 1.0)):
        model = Decoder(MODEL)
        model.initialise(0)
        optimizer = MasterOptimizer(model, OptimizerConfig(kind=kind), "bf16")
        draw = torch.Generator().manual_seed(1)
        for step in range(2):
            for parameter in model.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=draw).to(parameter)
            optimizer.update(lr if step else 1e-3, revocable=True)
        if keep < 1:
            optimizer.take_back(lr, 1.0, keep)
        found[lr, keep] = {name: master.clone() for name, master in optimizer._masters.items()}
    for half, whole in (((2e-3, 0.5), (1e-3, 1.0)), ((2e-3, 0.0), (0.0, 1.0))):
        for name, master in found[whole].items():
            torch.testing.assert_close(found[half][name], master, rtol=1e-4, atol=1e-6)


def trainer_of(world: World, lr: float, **named: Any) -> Any:
    training = TRAINING.model_copy(update={"optimizer": OptimizerConfig(lr=lr, warmup_steps=0, decay="constant")})
    return world.trainer(training, PACE, config=RLConfig(max_step_drift=0.05, **named))


def add_honest_steps(world: World, model: Decoder, steps: int) -> None:
    for step in range(steps):
        segments = [honest_segment(model, 2 * step + index) for index in range(2)]
        world.add_group(f"group-{step}", segments, [1.0, 0.0])


def test_a_learning_rate_that_is_far_too_large_never_publishes_a_collapsed_policy(tmp_path: Path) -> None:
    """Each published version is within the bound of the one before; after three steps in a row the run stops, and the
    same steps run again decide the same."""
    world = World(tmp_path)
    trainer = trainer_of(world, lr=0.2)
    trainer.run(0)
    add_honest_steps(world, trainer._model, STEPS)
    with pytest.raises(TrainingError, match="up to step 3, updates went too far"):
        trainer.run(STEPS)
    chain = world.chain()
    assert len(chain) == 4 and world.ledger.committed() == 3
    kept = trainer_of(World(tmp_path), lr=0.2)
    with pytest.raises(TrainingError, match="up to step 4"):  # it goes on, so other settings can help
        kept.run(STEPS)
    assert world.chain()[:4] == chain, "run again, the guard decides the same"
    models = [world.version(number)[0] for number in range(4)]
    for old, new in itertools.pairwise(models):
        moves = [honest_segment(model, 0).logprobs[4:] for model in (old, new)]
        assert np.abs(moves[1] - moves[0]).max() < 1
    calm = trainer_of(World(tmp_path), lr=1e-4)
    assert calm.run(STEPS) == Version("main", STEPS)


def test_without_a_bound_nothing_is_taken_back(tmp_path: Path) -> None:
    world = World(tmp_path)
    free = world.trainer(TRAINING, PACE, config=RLConfig(max_step_drift=0))
    free.run(0)
    add_honest_steps(world, free._model, 2)
    assert free.run(2) == Version("main", 2)


def test_the_usual_learning_rate_follows_from_the_size() -> None:
    assert lr_by_size(135_000_000, rollouts=True) == 1e-5 and lr_by_size(7_000_000_000, rollouts=True) == 1e-6
    assert lr_by_size(135_000_000, rollouts=False) == 2e-4 and lr_by_size(7_000_000_000, rollouts=False) == 2e-5
    assert lr_by_size(100_000, rollouts=True) == 5e-4, "never more than for a new model"
