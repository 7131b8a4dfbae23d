"""Chooses where a model's tensors are (ranks.py)."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

from rollmill.errors import TrainingError
from rollmill.training.config import TrainingConfig
from rollmill.training.ranks import Placement
from rollmill.training.single import WHOLE


def place(
    name: str, device: torch.device, config: TrainingConfig, environment: Mapping[str, str] = os.environ
) -> Placement:
    """The placement a configuration asks for: whole, or over the `config.ranks` ranks that the environment describes.

    `name`: what the ranks meet for. Groups of ranks may meet at the same address one after the other. Collective.
    """
    size = int(environment.get("WORLD_SIZE", "1"))
    if size != config.ranks:
        raise TrainingError(
            f"training.ranks is {config.ranks}, but the environment describes {size} ranks (WORLD_SIZE)",
            hint="start as many ranks as the configuration says, or unset WORLD_SIZE and rollmill starts them",
        )
    if size == 1:
        return WHOLE
    from rollmill.training.parallel.sharded_ranks import join_ranks

    return join_ranks(name, device, config, environment)
