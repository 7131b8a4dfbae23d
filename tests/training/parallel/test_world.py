"""Ranks that come late, and ranks that never come."""

from __future__ import annotations

import pickle
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rollmill.errors import TrainingError
from rollmill.training.parallel.world import World, join
from tests.processes import SERVER, free_port
from tests.training.parallel.ranks import be_rank

TIMEOUT_S = 4.0


def _rank(path: Path, rank: int, port: int) -> None:
    """Rank 0 takes longer than a time-out to have something. Then rank 1 hangs in the middle of a step."""
    be_rank(rank, 3, port)
    world: World = join("test", torch.device("cpu"), hang_minutes=TIMEOUT_S / 60)

    def slow() -> str:
        time.sleep(1.5 * TIMEOUT_S)
        return "groups"

    got, error = world.from_first_slowly(slow), ""
    try:
        with world.watched():
            if rank == 1:
                signal.pause()
            dist.all_reduce(torch.ones(1))
    except TrainingError as raised:
        error = str(raised)
    (path / f"{rank}.pickle").write_bytes(pickle.dumps((got, error)))


@pytest.mark.slow
def test_a_rank_that_hangs_is_named_and_one_that_waits_for_work_is_not(tmp_path: Path) -> None:
    port = free_port()
    processes = [SERVER.Process(target=_rank, args=(tmp_path, rank, port)) for rank in range(3)]
    for process in processes:
        process.start()
    for rank in (0, 2):
        processes[rank].join()
    assert processes[1].is_alive()
    processes[1].kill()
    for rank in (0, 2):
        got, error = pickle.loads((tmp_path / f"{rank}.pickle").read_bytes())
        assert got == "groups", "waiting for work is no hang"
        assert f"rank {rank} waited" in error and "rank 1 did not come" in error and "hang_minutes" in error
