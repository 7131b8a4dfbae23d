"""Promise 5: kill the trainer at any moment, start it again, and the digests are those of an uninterrupted run."""

import random
import shutil
import signal
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from rollmill import telemetry
from rollmill.models.adapters import is_adapter
from rollmill.models.config import Adapter, with_adapter
from rollmill.models.decoder import Decoder
from rollmill.models.host_tensors import to_host
from rollmill.training.optimizers.learning_rate import learning_rate
from rollmill.types import LedgerState, Version
from rollmill.weights.writing.publisher import Publisher
from tests.processes import SERVER
from tests.training.worker import run_trainer
from tests.training.world import MODEL, PACE, STEPS, TRAINING, World

# Each start dies after the next effect. Checkpoints are written every second step, two objects each. A version is
# committed by `create` of its manifest.
DEATHS = [
    "put:1:00000000/state-00000.safetensors",  # half of checkpoint 0
    "put:1:00000000/checkpoint.json",  # checkpoint 0 without version 0
    "write_step:1",  # step 1 recorded, not run
    "create:1:packs/0000000001",  # version 1 half written
    "create:1:0000000001.manifest",  # version 1 published, not committed
    "put:1:00000002/checkpoint.json",  # checkpoint 2 written, step 2 not committed
    "commit_step:2",  # step 3 committed; the restart committed step 2
    "put:1:00000004/state-00000.safetensors",  # half of checkpoint 4: steps 3 and 4 run again
    "create:1:0000000005.manifest",
]


def start(directory: Path, effect: str, *given: Any) -> BaseProcess:
    process = SERVER.Process(target=run_trainer, args=(directory, effect, *given))
    process.start()
    return process


def finish(directory: Path, effect: str = "none", *given: Any) -> int | None:
    process = start(directory, effect, *given)
    process.join()
    return process.exitcode


@pytest.fixture(scope="module")
def uninterrupted(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> World:
    path = tmp_path_factory.mktemp("uninterrupted") / "world"
    shutil.copytree(prepared, path)
    assert finish(path) == 0
    return World(path)


def assert_same_run(world: World, expected: World) -> None:
    assert world.chain() == expected.chain()
    assert world.weights.lines() == ["main"]
    assert world.ledger.counts() == expected.ledger.counts()
    assert world.ledger.counts()[LedgerState.trained] == STEPS * PACE.groups_per_step * PACE.group_size
    steps = world.ledger.steps()
    assert [step.number for step in steps] == list(range(1, STEPS + 1))
    trained = [id for step in steps for id in step.trajectories]
    assert len(trained) == len(set(trained)), "no trajectory is trained twice"
    assert world.ledger.committed() == STEPS


def test_killed_after_every_kind_of_effect(prepared: Path, uninterrupted: World, tmp_path: Path):
    path = tmp_path / "world"
    shutil.copytree(prepared, path)
    for effect in DEATHS:
        assert finish(path, effect) == -signal.SIGKILL, effect
    assert finish(path) == 0
    assert_same_run(World(path), uninterrupted)


def test_killed_between_the_record_of_a_step_and_the_commit_of_the_one_before(
    prepared: Path, uninterrupted: World, tmp_path: Path
):
    path = tmp_path / "world"
    shutil.copytree(prepared, path)
    assert finish(path, "late:write_step:4") == -signal.SIGKILL
    world = World(path)
    assert (len(world.ledger.steps()), world.ledger.committed()) == (4, 2), "step 3 was being written"
    assert finish(path, "late:none") == 0
    assert_same_run(World(path), uninterrupted)


def test_an_extended_run_repeats_its_recorded_steps_with_their_learning_rates(
    prepared: Path, uninterrupted: World, tmp_path: Path
):
    """Step 5 was recorded with a schedule over fewer steps, and no checkpoint covers it."""
    path = tmp_path / "world"
    shutil.copytree(prepared, path)
    assert finish(path, "write_step:5") == -signal.SIGKILL
    world = World(path)
    world.trainer(steps=2 * STEPS).run(STEPS)
    assert world.weights.lines() == ["main"], "every repeated step gave its published weights"
    assert world.chain()[:-1] == uninterrupted.chain()[:-1]
    schedules = [learning_rate(TRAINING.optimizer, STEPS, steps) for steps in (STEPS, 2 * STEPS)]
    lrs = [record.lr for record in world.ledger.steps()]
    assert lrs[:-1] == [record.lr for record in uninterrupted.ledger.steps()][:-1]
    assert [uninterrupted.ledger.steps()[-1].lr, lrs[-1]] == schedules and schedules[0] < schedules[1]


def test_a_finished_run_is_extended(uninterrupted: World, tmp_path: Path):
    path = tmp_path / "world"
    shutil.copytree(uninterrupted.path, path)
    world = World(path)
    world.add_steps(2, after=STEPS)
    assert world.trainer(steps=STEPS + 2).run(STEPS + 2) == Version("main", STEPS + 2)
    assert world.chain()[: STEPS + 1] == uninterrupted.chain() and world.weights.lines() == ["main"]
    assert world.ledger.committed() == STEPS + 2


def test_a_gates_bias_survives_a_kill(prepared: Path, tmp_path: Path):
    """It is not a parameter, so the optimizer does not keep it. A version without it would choose other experts."""
    biased = MODEL.model_copy(update={"gate": "sigmoid", "gate_bias": True})
    model = Decoder(biased)
    model.initialise(0)
    names = [name for name, _ in model.named_buffers() if name.endswith("router.bias")]
    for name in names:
        model.get_buffer(name).copy_(torch.linspace(-0.3, 0.3, biased.experts) + 1e-7)  # bf16 would round it
    worlds = []
    for name, deaths in (("straight", []), ("killed", ["create:1:0000000003.manifest", "commit_step:2"])):
        path = tmp_path / name
        shutil.copytree(prepared, path)
        world = World(path, biased)
        Publisher(world.weights, "base", "bf16").publish(0, to_host(model.state_dict()))
        for effect in deaths:
            assert finish(path, effect, biased, Version("base", 0)) == -signal.SIGKILL, effect
        assert finish(path, "none", biased, Version("base", 0)) == 0
        worlds.append(world)
    straight, killed = worlds
    assert killed.chain() == straight.chain() and killed.weights.lines() == ["base", "main"]
    served, own = killed.weights.load(Version("main", STEPS)), to_host(model.state_dict())
    assert len(names) == MODEL.moe_layers
    assert all(served[name].data.tobytes() == own[name].data.tobytes() for name in names)


@pytest.mark.parametrize("parent", [Version("base", 0), None], ids=["of a checkpoint", "of random weights"])
def test_an_adapter_survives_kills(parent: Version | None, prepared: Path, tmp_path: Path):
    """No checkpoint holds what it is beside, which no step changes."""
    adapted = with_adapter(MODEL, Adapter(rank=8, targets=("attention", "experts")))
    base = Decoder(MODEL)
    base.initialise(0)
    worlds = []
    for name, deaths in (("straight", []), ("killed", DEATHS)):
        path = tmp_path / name
        shutil.copytree(prepared, path)
        world = World(path, adapted)
        if parent is not None:
            Publisher(world.weights, "base", "bf16").publish(0, to_host(base.state_dict()))
        for effect in deaths:
            assert finish(path, effect, adapted, parent) == -signal.SIGKILL, effect
        assert finish(path, "none", adapted, parent) == 0
        worlds.append(world)
    straight, killed = worlds
    assert killed.chain() == straight.chain() and len(set(dict(straight.chain()).values())) == STEPS + 1
    first, last = (straight.weights.load(Version("main", number)) for number in (0, STEPS))
    changed = {name for name in last if last[name].data.tobytes() != first[name].data.tobytes()}
    assert changed == {name for name in last if is_adapter(name)}
    if parent is not None:
        served = to_host(base.state_dict())
        assert all(first[name].data.tobytes() == each.data.tobytes() for name, each in served.items())
    adapters = sum(last[name].elements for name in changed)
    manifests = [straight.weights.manifest(Version("main", number)) for number in range(1, STEPS + 1)]
    assert all(each.delta and each.delta.changed_elements <= adapters for each in manifests)
    state = straight.objects.get(f"checkpoints/main/{STEPS:08d}/state-00000.safetensors")
    masters = {name.removeprefix("master.") for name in safetensors.torch.load(state) if name.startswith("master.")}
    assert masters == changed


def test_killed_at_a_random_moment(prepared: Path, uninterrupted: World, tmp_path: Path):
    path = tmp_path / "world"
    shutil.copytree(prepared, path)
    process = start(path, "none")
    while not World(path).weights.numbers("main"):
        time.sleep(0.02)
    time.sleep(random.uniform(0, 0.3))
    process.kill()
    process.join()
    assert finish(path) == 0
    assert_same_run(World(path), uninterrupted)


def test_sigterm_leaves_a_checkpoint_and_exit_code_0(prepared: Path, tmp_path: Path):
    path = tmp_path / "world"
    shutil.copytree(prepared, path)
    process = start(path, "wait")
    while not (path / "waiting").exists():
        time.sleep(0.02)
    process.terminate()
    process.join()
    assert process.exitcode == 0
    assert f"checkpoints/main/{STEPS:08d}/checkpoint.json" in World(path).objects.list("checkpoints")


def test_other_bits_start_a_new_line(prepared: Path, tmp_path: Path):
    """A payload is deleted after its step was committed: the step cannot give the same weights again."""
    path = tmp_path / "world"
    shutil.copytree(prepared, path)
    assert finish(path, "commit_step:5") == -signal.SIGKILL  # checkpoint 4, version 5
    world = World(path)
    before = world.chain()
    world.trajectories.delete(next(iter(world.ledger.steps()[4].trajectories)))
    assert finish(path) == 0
    assert world.chain()[: len(before)] == before, "nothing published is overwritten"
    first = world.weights.manifest(Version("main.2", 4))
    assert first.parent == Version("main", 4) and first.digest == dict(before)[4]
    assert first.metadata["abandons"] == ["main@5"]
    assert [number for number, _ in world.chain("main.2")] == [4, 5, 6]
    assert dict(world.chain("main.2"))[5] != dict(before)[5]
    assert world.ledger.committed() == STEPS and world.ledger.counts()[LedgerState.leased] == 0
    events = [event for event in telemetry.read_events(path / "events") if event["kind"] == "new_line"]
    assert [event["abandons"] for event in events] == [["main@5"]]


def test_a_new_line_is_resumed_like_any_other(prepared: Path, tmp_path: Path):
    path = tmp_path / "world"
    shutil.copytree(prepared, path)
    assert finish(path, "commit_step:5") == -signal.SIGKILL
    world = World(path)
    world.trajectories.delete(next(iter(world.ledger.steps()[4].trajectories)))
    for effect in ("put:1:main.2/00000004/checkpoint.json", "create:1:main.2/bf16/manifests/0000000005"):
        assert finish(path, effect) == -signal.SIGKILL, effect
    assert finish(path) == 0
    assert world.weights.lines() == ["main", "main.2"]
    assert [number for number, _ in world.chain("main.2")] == [4, 5, 6]
    assert world.ledger.committed() == STEPS
