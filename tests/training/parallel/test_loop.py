"""Promise 5 on ranks: kill any of them at any moment, start all again, and no digest is another."""

import os
import shutil
import signal
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch

from rollmill import telemetry
from rollmill.models.decoder import Decoder
from rollmill.models.host_tensors import load_host
from rollmill.training.config import RLConfig
from rollmill.training.loop import Trainer
from rollmill.training.single import choose_parallelism
from rollmill.types import LedgerState, Version
from tests.processes import SERVER
from tests.training.parallel.ranks import be_rank, free_port
from tests.training.worker import die_after
from tests.training.world import MODEL, PACE, STEPS, TRAINING, World

RANKS = 2
# which rank dies, after what
DEATHS = [
    (1, "put:1:00000000/state-00001"),  # half of checkpoint 0
    (0, "put:1:00000000/checkpoint.json"),
    (0, "write_step:1"),
    (1, "create:1:packs/0000000001"),  # version 1 half written
    (0, "create:1:0000000001.manifest"),  # version 1 published, not committed
    (1, "put:1:00000002/state-00001"),
]


def train_rank(
    directory: Path, rank: int, ranks: int, port: int, effect: str, config: RLConfig, cut: tuple[int, int] = (2, 1)
) -> None:
    """`cut`: of experts, of context."""
    be_rank(rank, ranks, port)
    training = TRAINING.model_copy(update={"ranks": ranks, "expert_parallel": cut[0], "context_parallel": cut[1]})
    parallel = choose_parallelism("train", torch.device("cpu"), training)
    if parallel.ranks.first:
        telemetry.open_events(directory / "events", "trainer")
    if effect != "none":
        die_after(effect)
    world = World(directory)
    stores = (world.weights, world.objects)
    trainer = Trainer(training, MODEL, world.objective(config), *stores, "main", steps=STEPS, seed=3, parallel=parallel)
    trainer.run(STEPS)
    parallel.ranks.leave()


def start(
    directory: Path, deaths: dict[int, str], config: RLConfig | None = None, ranks: int = RANKS
) -> list[BaseProcess]:
    port = free_port()
    arguments = [
        (directory, rank, ranks, port, deaths.get(rank, "none"), config or RLConfig(max_step_drift=0))
        for rank in range(ranks)
    ]
    processes: list[BaseProcess] = [SERVER.Process(target=train_rank, args=each) for each in arguments]
    for process in processes:
        process.start()
    return processes


def finish(processes: list[BaseProcess]) -> list[int | None]:
    """Exit codes. When one rank has failed the others are ended, as the supervisor does."""
    while all(process.exitcode in (None, 0) for process in processes) and any(map(BaseProcess.is_alive, processes)):
        time.sleep(0.02)
    for process in processes:
        if any(each.exitcode not in (None, 0) for each in processes):
            process.kill()
        process.join()
    return [process.exitcode for process in processes]


@pytest.fixture(scope="module")
def undisturbed(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> World:
    path = tmp_path_factory.mktemp("undisturbed") / "world"
    shutil.copytree(prepared, path)
    assert finish(start(path, {})) == [0] * RANKS
    return World(path)


def test_ranks_train_as_one_process_does(prepared: Path, undisturbed: World, tmp_path: Path) -> None:
    path = tmp_path / "world"
    shutil.copytree(prepared, path)
    telemetry.open_events(path / "events", "trainer")
    alone = World(path)
    alone.trainer().run(STEPS)
    assert [number for number, _ in undisturbed.chain()] == [number for number, _ in alone.chain()]
    assert undisturbed.chain()[0] == alone.chain()[0], "the same weights to begin with, the same digest"
    models = []
    for world in (alone, undisturbed):
        model = Decoder(MODEL)
        load_host(model, world.weights.load(Version("main", STEPS)))
        models.append(model.state_dict())
    for name, tensor in models[0].items():
        torch.testing.assert_close(models[1][name], tensor, rtol=0.05, atol=0.02, msg=name)
    steps = [[e for e in telemetry.read_events(w.path / "events") if e["kind"] == "step"] for w in (alone, undisturbed)]
    for one, many in zip(*steps, strict=True):
        assert many.keys() == one.keys()
        for figure in ("loss", "grad_norm", "entropy", "ess", "drift_k3"):
            assert many[figure] == pytest.approx(one[figure], rel=0.02, abs=1e-3), figure
        for figure in ("tokens", "trained_tokens", "trajectories", "router_live_rows", "mismatch_tokens"):
            assert many[figure] == pytest.approx(one[figure]), figure
        assert many["router_flip_rate"] == pytest.approx(one["router_flip_rate"], abs=0.05)


@pytest.mark.slow
def test_killed_ranks_lose_nothing(prepared: Path, undisturbed: World, tmp_path: Path) -> None:
    path = tmp_path / "world"
    shutil.copytree(prepared, path)
    for rank, effect in DEATHS:
        codes = finish(start(path, {rank: effect}))
        assert codes[rank] == -signal.SIGKILL, (effect, codes)
    assert finish(start(path, {})) == [0] * RANKS
    world = World(path)
    assert world.chain() == undisturbed.chain()
    assert world.weights.lines() == ["main"]
    assert world.ledger.counts() == undisturbed.ledger.counts()
    assert world.ledger.counts()[LedgerState.trained] == STEPS * PACE.groups_per_step * PACE.group_size
    assert world.ledger.committed() == STEPS


def test_one_rank_goes_on_where_two_stopped(prepared: Path, undisturbed: World, tmp_path: Path) -> None:
    """SIGTERM to one rank stops all, after a step and with a checkpoint; one process then goes on by itself."""
    path = tmp_path / "world"
    shutil.copytree(prepared, path)
    processes = start(path, {})
    while World(path).weights.head("main") is None:
        time.sleep(0.02)
    assert processes[1].pid is not None
    os.kill(processes[1].pid, signal.SIGTERM)
    assert finish(processes) == [0] * RANKS
    world = World(path)
    head = world.weights.head("main")
    assert head is not None
    assert f"checkpoints/main/{head:08d}/checkpoint.json" in world.objects.list("checkpoints")
    world.trainer().run(STEPS)
    assert world.chain()[: head + 1] == undisturbed.chain()[: head + 1]
    assert world.ledger.committed() == STEPS and world.weights.lines() == ["main"]


def test_two_ranks_go_on_where_one_stopped(prepared: Path, undisturbed: World, tmp_path: Path) -> None:
    """More ranks than wrote the checkpoint: the versions so far keep their digests, and the rest is trained as ever."""
    path = tmp_path / "world"
    shutil.copytree(prepared, path)
    alone = World(path)
    alone.trainer().run(3)  # a checkpoint after step 2; step 3 is run again
    before = alone.chain()
    assert finish(start(path, {})) == [0] * RANKS
    world = World(path)
    assert world.ledger.committed() == STEPS and world.ledger.counts() == undisturbed.ledger.counts()
    assert world.chain()[: len(before)] == before, "what is published stays"
    lines = world.weights.lines()
    assert lines in (["main"], ["main", "main.2"]), "the same line, or a named new one where bits differ"


def test_a_reference_over_ranks(prepared: Path, tmp_path: Path) -> None:
    config = RLConfig(kl_factor=0.1, kl_form="k3", reference="main@0", max_step_drift=0)
    found = []
    for ranks in (1, 2):
        path = tmp_path / str(ranks)
        shutil.copytree(prepared, path)
        if ranks == 1:
            telemetry.open_events(path / "events", "trainer")
            World(path).trainer(config=config).run(2)
        else:
            processes = start(path, {0: "commit_step:2"}, config)
            finish(processes)
        found.append([e["reference_k3"] for e in telemetry.read_events(path / "events") if e["kind"] == "step"][:1])
    assert found[1] == [pytest.approx(value, abs=1e-5) for value in found[0]]
