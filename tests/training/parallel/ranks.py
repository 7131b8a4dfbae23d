"""Real ranks for tests: processes forked from one that has imported torch, joined over gloo."""

from __future__ import annotations

import faulthandler
import os
import pickle
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from rollmill.training.parallel.world import World, join
from tests.processes import SERVER, free_port


def run_ranks(path: Path, ranks: int, work: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What `work(world, *arguments)` returns on each rank. Fails with the first rank's story if one of them fails."""
    path.mkdir(parents=True, exist_ok=True)
    port = free_port()
    processes = [
        SERVER.Process(target=_rank, args=(path / f"{rank}.pickle", rank, ranks, port, work, arguments))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    codes = [process.exitcode for process in processes]
    assert not any(codes), f"ranks ended with {codes}: their last words are on stderr"
    found = [pickle.loads((path / f"{rank}.pickle").read_bytes()) for rank in range(ranks)]
    for rank, (good, value) in enumerate(found):
        assert good, f"rank {rank}: {value}"
    return [value for _, value in found]


def _rank(file: Path, rank: int, ranks: int, port: int, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    be_rank(rank, ranks, port)
    faulthandler.enable()
    try:
        torch.set_deterministic_debug_mode("error")
        world: World = join("test", torch.device("cpu"))
        result = True, work(world, *arguments)
        world.leave()
    except BaseException:
        result = False, traceback.format_exc()
    file.write_bytes(pickle.dumps(result))
    os._exit(0)  # on its way out a rank that failed would wait for the others


def be_rank(rank: int, ranks: int, port: int) -> None:
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
        CUBLAS_WORKSPACE_CONFIG=":4096:8",
    )  # fmt: skip
