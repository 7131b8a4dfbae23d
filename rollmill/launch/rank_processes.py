"""The ranks of a trainer: started by the supervisor, or by torchrun on one machine or several.

Either way a rank reads RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. Under torchrun each rank runs
`rollmill train`: rank 0 drives the run, the others do their part of the training. When one dies, all exit, and torchrun
restarts them. docs/ranks.md has the command.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from rollmill.runs.free_ports import free_ports
from rollmill.runs.opening import describe_run
from rollmill.runs.run import RunConfig, RunDirectory

PATIENCE_S = 60.0  # for rank 0 to create the run


def outside_world() -> bool:
    """Whether torchrun started this process as one of several ranks."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def outside_rank() -> int:
    return int(os.environ.get("RANK", "0")) if outside_world() else 0


def begin_run(root: Path, config: RunConfig) -> RunDirectory:
    """Create the run directory. Under torchrun rank 0 creates it, the others wait; after a restart it exists."""
    if outside_rank() == 0 and int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) == 0:
        run = RunDirectory.create(root, config)
        describe_run(run)
        return run
    deadline = time.monotonic() + PATIENCE_S
    while not (root / config.name / "run.json").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    return RunDirectory.open(root / config.name)


def places(ranks: int, host: str = "127.0.0.1", port: int | None = None) -> list[dict[str, str]]:
    """The environment variables of each rank, as torchrun sets them; they meet at `host`. None for a single rank: it is
    alone, or torchrun has set them."""
    if ranks == 1:
        return [{}]
    port = port or free_ports(1)[0]
    world = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    meeting = {"MASTER_ADDR": host, "MASTER_PORT": str(port)}
    return [{**world, **meeting, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


def rank_name(role: str, rank: int) -> str:
    """The name of a rank's log."""
    return f"{role}-rank{rank}" if rank else role
