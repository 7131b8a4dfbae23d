"""Reinforcement learning on groups of rollouts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from pydantic import model_validator

from rollmill.training.config import RLConfig
from rollmill.training.stage import RolloutSettings, StageContext

if TYPE_CHECKING:
    from rollmill.training.rl.rl_objective import RLObjective


class RLSettings(RolloutSettings, RLConfig):
    """How much experience a step takes, and the RL objective: loss, clipping, KL, router replay."""

    @model_validator(mode="after")
    def _groups_have_a_baseline(self) -> Self:
        self.check_group_size(self.group_size)
        return self


class Reinforce:
    def __init__(self, config: RLSettings) -> None:
        self._config = config

    def objective(self, context: StageContext) -> RLObjective:
        from rollmill.training.rl.rl_objective import RLObjective  # torch

        config = self._config
        return RLObjective(
            config,
            context.ledger,
            context.trajectories,
            context.weights,
            pace=config.pace(context.steps),
            model_config=context.model,
            tokens_per_microbatch=context.tokens_per_microbatch,
            format=context.format,
        )
