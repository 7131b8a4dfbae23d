"""Ranks that come late, and ranks that never come."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rollmill.errors import TrainingError
from rollmill.training.parallel.hangs import late_ranks
from rollmill.training.parallel.world import World, join
from tests.processes import SERVER, free_port
from tests.training.parallel.ranks import be_rank

TIMEOUT_S = 4.0


def _rank(path: Path, rank: int, port: int) -> None:
    """Rank 0 takes longer than the patience to have something. Then rank 1 hangs in the middle of a step, and rank 0
    waits for rank 2, which waits for rank 1."""
    be_rank(rank, 3, port)
    os.dup2(os.open(path / f"{rank}.log", os.O_CREAT | os.O_WRONLY), 2)
    world: World = join("test", torch.device("cpu"), hang_minutes=TIMEOUT_S / 60)
    pair = dist.new_group([0, 2])
    world.groups += [pair] if rank != 1 else []

    def slow() -> str:
        time.sleep(1.5 * TIMEOUT_S)
        return "groups"

    def refuse() -> None:
        raise TrainingError("no group is left", hint="choose others")

    with pytest.raises(TrainingError, match="no group is left\nhint: choose others"):
        world.from_first_slowly(refuse)
    with world.watched():
        (path / f"{rank}.got").write_text(world.from_first_slowly(slow))
        if rank == 1:
            signal.pause()
        if rank == 2:
            dist.all_reduce(torch.ones(1))
        dist.all_reduce(torch.ones(1), group=pair)


@pytest.mark.slow
def test_a_rank_that_hangs_is_named_and_one_that_waits_for_work_is_not(tmp_path: Path) -> None:
    port = free_port()
    processes = [SERVER.Process(target=_rank, args=(tmp_path, rank, port)) for rank in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [1, 1, 1], "also the one that hangs; all may start again"
    assert [(tmp_path / f"{rank}.got").read_text() for rank in range(3)] == ["groups"] * 3, "that was no hang"
    logs = [(tmp_path / f"{rank}.log").read_text() for rank in range(3)]
    assert any("did not come" in log for log in logs)
    for log in logs:
        assert "did not come" not in log or "for the other ranks: rank 1 did not come\nhint: " in log
    assert "signal.pause()" in logs[1] or "in _rank" in logs[1], "where it hangs"


def test_who_waits_is_not_late() -> None:
    assert late_ranks([{"all": 7, "pair": 4}, {"all": 6}, {"all": 7, "pair": 3}]) == [1]
    assert late_ranks([{"all": 7}, {"all": 7}]) == []
    assert late_ranks([{"a": 2, "b": 1}, {"a": 1, "b": 2}]) == [0, 1], "each waits for the other"
