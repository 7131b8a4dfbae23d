"""The ranks of a trainer: started here, or from outside, by torchrun on one machine or several.

Either way a rank learns who it is from RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. Started from outside,
each rank runs `rollmill train`: the first drives the run, the others follow with their part of the training, and when
one dies all end, for whoever started them to start them again. docs/ranks.md has the command.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from rollmill.cluster.run import RunConfig, RunDirectory, free_ports

PATIENCE_S = 60.0  # for the first rank to create the run


def outside_world() -> bool:
    """Whether this process was started as one of several ranks."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def outside_rank() -> int:
    return int(os.environ.get("RANK", "0")) if outside_world() else 0


def begin_run(root: Path, config: RunConfig) -> RunDirectory:
    """The run's directory: created, or of ranks that were started from outside created by the first of them. When those
    are started again, it is there already."""
    if outside_rank() == 0 and int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) == 0:
        return RunDirectory.create(root, config)
    deadline = time.monotonic() + PATIENCE_S
    while not (root / config.name / "run.json").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    return RunDirectory.open(root / config.name)


def places(ranks: int) -> list[dict[str, str]]:
    """What torchrun would tell each of the ranks. Nothing for a single one: it is alone, or was told from outside."""
    if ranks == 1:
        return [{}]
    [port] = free_ports(1)
    world = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [{**world, **meeting, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


def rank_name(role: str, rank: int) -> str:
    """What a rank of a role calls its log."""
    return f"{role}-rank{rank}" if rank else role
