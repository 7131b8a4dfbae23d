"""How lines begin: from random weights, from a version of another line, and without a usable checkpoint."""

from pathlib import Path

import pytest
import torch

from rollmill.errors import TrainingError, WeightsError
from rollmill.models.config import Adapter, with_adapter
from rollmill.models.decoder import Decoder
from rollmill.models.host_tensors import load_host
from rollmill.models.merging import merged
from rollmill.models.quantize import dequantised, quantises
from rollmill.training import state
from rollmill.training.config import OptimizerConfig, TrainingConfig
from rollmill.training.lineage import next_line, trace_lineage
from rollmill.training.loop import Trainer
from rollmill.training.objective import StepOutcome
from rollmill.training.rl.rl_objective import RolloutBatch
from rollmill.training.training_checkpoint import Checkpoints
from rollmill.types import Version
from rollmill.weights.reading.leases import Leases
from rollmill.weights.reading.weight_store import newest_line
from rollmill.weights.regions.collection import collect
from rollmill.weights.writing.publisher import Publisher
from tests.training.world import MODEL, PACE, STEPS, TRAINING, World
from tests.weights.build import make_tensors


def test_version_0_depends_on_the_seed_alone(tmp_path: Path):
    chains = []
    for name in ("a", "b"):
        world = World(tmp_path / name)
        assert world.trainer().run(0) == Version("main", 0)
        chains.append(world.chain())
    assert chains[0] == chains[1]


def test_a_line_starts_from_a_version_of_another_one(tmp_path: Path):
    world = World(tmp_path)
    world.trainer().run(0)
    tensors = world.weights.load(Version("main", 0))
    base = Publisher(world.weights, "base")
    for number in range(3):
        base.publish(number, tensors, metadata={"step": 10 * number})
    other = World(tmp_path / "other")
    Publisher(other.weights, "base").publish(2, tensors)
    other.add_steps()
    other.trainer(parent=Version("base", 2)).run(1)
    first = other.weights.manifest(Version("main", 0))
    assert first.parent == Version("base", 2) and first.digest == world.chain()[0][1]
    lineage = trace_lineage(other.weights, "main")
    assert lineage.position("main", 1) == 1
    assert lineage.position("base", 2) == 0 and lineage.position("base", 1) == -1
    assert lineage.position("stranger", 1) is None
    # on a restart the parent is not needed: the line has its own checkpoint
    assert other.trainer(parent=None).run(2) == Version("main", 2)


def second_line(world: World, parent: Version, training: TrainingConfig = TRAINING, line: str = "second") -> Trainer:
    return Trainer(
        training, world.model, world.objective(), world.weights, world.objects, line, parent,
        steps=STEPS, seed=4, form=world.forms[0],
    )  # fmt: skip


def saved(world: World, line: str, step: int) -> dict[str, torch.Tensor]:
    checkpoint = Checkpoints(world.objects, 9).at(line, step)
    assert checkpoint is not None
    return dict(checkpoint.tensors)


@pytest.mark.parametrize("form", ["bf16", "fp8", "nvfp4"])
def test_a_line_starts_from_the_masters_of_its_parent(tmp_path: Path, form: str):
    """Published versions are rounded: from these, small updates would be lost with every stage and every cycle."""
    world = World(tmp_path, forms=(form,))
    world.add_steps()
    parent = world.trainer().run(2)
    second_line(world, parent).run(0)
    before, after = saved(world, "main", 2), saved(world, "second", 0)
    masters = [name for name in before if name.startswith("master.")]
    assert masters and all(torch.equal(before[name], after[name]) for name in masters)
    assert not any(name.startswith("mean.") for name in after) and after["updates"] == 0
    assert world.weights.manifest(Version("second", 0), form).digest == world.weights.manifest(parent, form).digest


def test_a_line_takes_over_the_moments_of_its_parent_by_choice(tmp_path: Path):
    world = World(tmp_path)
    world.add_steps()
    parent = world.trainer().run(2)
    kept = TRAINING.model_copy(update={"optimizer": OptimizerConfig(lr=0.02, keep_moments=True)})
    second_line(world, parent, kept).run(0)
    before, after = saved(world, "main", 2), saved(world, "second", 0)
    assert after["updates"] == 2 and all(torch.equal(before[name], after[name]) for name in before if name != "rng")
    # those of another optimizer do not fit: it starts with the masters alone
    muon = TRAINING.model_copy(update={"optimizer": OptimizerConfig(lr=0.02, keep_moments=True, kind="muon")})
    second_line(world, parent, muon, "third").run(0)
    after = saved(world, "third", 0)
    assert after["updates"] == 0 and torch.equal(after["master.embedding"], before["master.embedding"])


@pytest.mark.parametrize("form", ["bf16", "fp8", "nvfp4"])
def test_without_a_checkpoint_masters_are_spread_over_their_quantum(tmp_path: Path, form: str):
    world = World(tmp_path, forms=(form,))
    world.add_steps()
    parent = world.trainer().run(1)
    for key in world.objects.list("checkpoints/main"):
        world.objects.delete(key)
    second_line(world, parent).run(0)
    assert world.weights.manifest(Version("second", 0), form).digest == world.weights.manifest(parent, form).digest
    model, masters = Decoder(world.model), saved(world, "second", 0)
    load_host(model, world.weights.load(parent, form))
    for name, value in model.named_parameters():
        assert (masters[f"master.{name}"] != value).float().mean() > 0.7, name


def test_lines_without_masters_of_their_parents_move_other_values_each_time(tmp_path: Path):
    """Each time the same places: the same few values would take every step of all lines, and the others none."""
    world = World(tmp_path)
    world.trainer().run(0)
    parent, moved, served = Version("main", 0), [], {name: dict[str, torch.Tensor]() for name in ("second", "third")}
    for line, found in served.items():
        for key in world.objects.list("checkpoints"):
            world.objects.delete(key)
        parent = second_line(world, parent, line=line).run(0)
        found.update(saved(world, line, 0))
        model = Decoder(world.model)
        load_host(model, world.weights.load(parent))
        moved.append(found["master.head"] - model.state_dict()["head"])
    assert world.weights.manifest(parent).digest == world.chain()[0][1], "what is served is the same in all lines"
    assert abs(float(torch.corrcoef(torch.stack([each.flatten().sign() for each in moved]))[0, 1])) < 0.1


@pytest.mark.parametrize("form", ["fp8", "nvfp4"])
@pytest.mark.parametrize("rounded", [True, False])
def test_imported_weights_are_spread_over_the_quantum_that_they_were_rounded_to(
    tmp_path: Path, form: str, rounded: bool
):
    """Layers of a version of another run are still codes after its import as bf16; a bf16 checkpoint has finer ones."""
    world = World(tmp_path / "other", forms=(form,) if rounded else ("bf16",))
    own = world.trainer().run(0)
    tensors = world.weights.load(own, world.forms[0])
    plain = dict(dequantised(tensors)) if rounded else tensors
    other = World(tmp_path, forms=(form,))
    origin = {"run": "r", "version": str(own), "form": world.forms[0], "digest": ""}
    Publisher(other.weights, "base").publish(0, plain, None, {"imported_from": origin})
    second_line(other, Version("base", 0)).run(0)
    model, masters = Decoder(world.model), saved(other, "second", 0)
    load_host(model, plain)
    for name, value in model.named_parameters():
        moves = rounded or not quantises(name, value)
        assert (masters[f"master.{name}"] != value).float().mean() == pytest.approx(0.85 * moves, abs=0.15), name
    if rounded:
        first = other.weights.manifest(Version("second", 0), form)
        assert first.digest == world.weights.manifest(own, form).digest


def test_a_checkpoint_with_other_weights_than_were_published_is_not_used(tmp_path: Path):
    world = World(tmp_path)
    world.add_steps()
    parent = world.trainer().run(2)
    checkpoints = Checkpoints(world.objects, 9)
    found = checkpoints.at("main", 2)
    assert found is not None
    found.tensors["master.embedding"].add_(1)
    checkpoints.save(found)
    second_line(world, parent).run(0)
    assert world.weights.manifest(Version("second", 0)).digest == world.weights.manifest(parent).digest


def test_names_of_successor_lines(tmp_path: Path):
    world = World(tmp_path)
    assert newest_line(world.weights, "main") == "main" and next_line(world.weights, "main") == "main.2"
    world.trainer().run(0)
    tensors = world.weights.load(Version("main", 0))
    for line in ("main.2", "main.10", "main.x", "main-base", "other.3"):
        Publisher(world.weights, line).publish(0, tensors, parent=Version("main", 0))
    assert newest_line(world.weights, "main") == "main.10" and next_line(world.weights, "main") == "main.11"


def test_versions_without_any_checkpoint_are_not_overwritten(tmp_path: Path):
    world = World(tmp_path)
    world.trainer().run(0)
    for key in world.objects.list("checkpoints"):
        world.objects.delete(key)
    with pytest.raises(TrainingError, match="no checkpoint"):
        world.trainer().run(1)


def test_a_damaged_checkpoint_falls_back_to_the_one_before(tmp_path: Path):
    world = World(tmp_path)
    world.add_steps()
    world.trainer().run(STEPS)
    before = world.chain()
    assert world.trainer()._checkpoints.steps("main") == [STEPS - 2, STEPS], "older ones are removed"
    world.objects.put(f"checkpoints/main/{STEPS:08d}/state-00000.safetensors", b"damaged")
    trainer = world.trainer()
    trainer.run(STEPS)
    assert world.chain() == before and world.ledger.committed() == STEPS
    world.objects.put(f"checkpoints/main/{STEPS:08d}/checkpoint.json", b'{"bad_steps": 0, "objects": ["state"]}')
    world.trainer().run(STEPS)
    assert world.chain() == before
    for step in (STEPS - 2, STEPS):
        world.objects.put(f"checkpoints/main/{step:08d}/state-00000.safetensors", b"damaged")
    with pytest.raises(TrainingError, match="can be read"):
        world.trainer().run(STEPS)


def test_another_seed_does_not_change_a_line_that_exists(tmp_path: Path):
    world = World(tmp_path)
    world.add_steps()
    world.trainer().run(2)
    trainer = world.trainer()
    trainer._seed = 99
    trainer.run(3)
    assert world.weights.lines() == ["main"] and len(world.chain()) == 4
    assert world.ledger.open_groups() == (STEPS - 3) * PACE.groups_per_step


def test_a_late_version_of_an_earlier_trainer_ends_in_a_new_line(tmp_path: Path):
    """An earlier trainer was paused after its last check and commits its version 2 when another one owns the line."""
    world = World(tmp_path)
    world.add_steps()
    world.trainer().run(1)
    late = Publisher(world.weights, "main")
    late.resume()
    owner = world.trainer()
    owner.run(1)
    late._writer.check = lambda: None  # type: ignore[method-assign]  # it was paused after the check
    late.publish(2, world.weights.load(Version("main", 0)), metadata={"step": 2})
    with pytest.raises(WeightsError, match=r"main@2 .* has diverged") as refused:
        owner.run(2)
    assert str(refused.value.hint).startswith("start this trainer again")
    assert world.trainer().run(3).line == "main.2"
    assert world.ledger.committed() == 3


def test_lineage_and_run_survive_collected_versions(tmp_path: Path):
    world = World(tmp_path)
    world.trainer().run(0)
    tensors = world.weights.load(Version("main", 0))
    publisher = Publisher(world.weights, "main.2", snapshot_every=8)
    publisher.publish(7, tensors, parent=Version("main", 0))
    for number in (8, 9):
        publisher.publish(number, tensors)
    before = trace_lineage(world.weights, "main.2")
    assert before.offsets == {"main.2": 0, "main": 7}
    assert collect(world.weights, "main.2", keep=1).removed == (7,)
    assert trace_lineage(world.weights, "main.2") == before

    other = World(tmp_path / "other")
    other.add_steps()
    other.trainer().run(STEPS)
    before = other.chain()
    assert collect(other.weights, "main", keep=1).kept == (4, 5, 6)
    assert other.trainer().run(STEPS) == Version("main", STEPS)
    assert other.chain() == before[4:]


def test_versions_are_held_for_a_stopped_trainer_and_released_by_a_finished_one(tmp_path: Path):
    """A stopped trainer compares the steps it repeats with their versions. A finished one repeats none."""
    world = World(tmp_path)
    world.add_steps()
    training = TRAINING.model_copy(update={"snapshot_every": 1})
    trainer = world.trainer(training)
    report = trainer._objective.report

    def stop_after_step_5(batch: RolloutBatch, outcome: StepOutcome) -> None:
        report(batch, outcome)
        if trainer.step == 5:
            trainer.stop()

    trainer._objective.report = stop_after_step_5  # type: ignore[method-assign]
    assert trainer.run(STEPS) == Version("main", 5)
    (lease,) = Leases(world.objects, "main").held()
    assert (lease.holder, lease.number) == ("trainer", 4) and trainer._checkpoints.steps("main") == [4, 5]
    assert collect(world.weights, "main", keep=1).kept == (4, 5)
    assert world.trainer(training).run(STEPS) == Version("main", STEPS)
    assert Leases(world.objects, "main").held() == []
    assert collect(world.weights, "main", keep=1).kept == (STEPS,)


def test_the_next_trainer_releases_a_lease_of_one_that_died_after_its_last_step(tmp_path: Path):
    world = World(tmp_path)
    world.add_steps()
    world.trainer().run(STEPS)
    Leases(world.objects, "main").hold("trainer", 0, 1000)
    world.trainer().run(STEPS)
    assert Leases(world.objects, "main").held() == []


def test_a_run_whose_versions_since_the_checkpoint_were_collected_raises(tmp_path: Path):
    """Repeated steps could not be compared with the published versions, and must not be published twice."""
    world = World(tmp_path)
    world.add_steps()
    world.trainer(TRAINING.model_copy(update={"snapshot_every": 1})).run(STEPS)
    world.objects.put(f"checkpoints/main/{STEPS:08d}/state-00000.safetensors", b"damaged")
    assert collect(world.weights, "main", keep=1).kept == (STEPS,)
    with pytest.raises(TrainingError, match=f"checkpoint of line 'main' is of step {STEPS - 2}.*collected") as caught:
        world.trainer().run(STEPS)
    assert caught.value.hint and "keep" in caught.value.hint.replace("kept", "keep")
    assert [number for number, _ in world.chain()] == [STEPS]


def test_a_run_in_another_form_knows_the_checkpoint_it_began_with(tmp_path: Path):
    """The imported checkpoint is bf16, whatever the form of the line."""
    world = World(tmp_path)
    tensors = make_tensors()
    Publisher(world.weights, "base").publish(4, tensors)
    Publisher(world.weights, "main", form="fp8").publish(0, tensors, parent=Version("base", 4))
    assert trace_lineage(world.weights, "main", "fp8").position("base", 4) == 0
    assert trace_lineage(world.weights, "main").position("base", 4) is None


def test_a_large_state_is_written_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The first checkpoint has no moments yet."""
    monkeypatch.setattr(state, "OBJECT_BYTES", 8_000)
    world = World(tmp_path)
    world.add_steps()
    world.trainer().run(1)
    sizes = {
        step: [world.objects.head(key) for key in world.objects.list(f"checkpoints/main/{step:08d}") if "state" in key]
        for step in (0, 1)
    }
    assert len(sizes[0]) > 2 and sum(map(int, sizes[1])) > 2 * sum(map(int, sizes[0]))
    straight = World(tmp_path / "straight")
    straight.add_steps()
    straight.trainer().run(2)
    world.trainer().run(2)
    assert world.chain() == straight.chain()


@pytest.mark.parametrize("then", [None, Adapter(rank=8), Adapter(rank=16)], ids=["none", "the same", "another"])
def test_what_follows_an_adapter(then: Adapter | None, tmp_path: Path):
    """The same adapter goes on from its masters. Others begin with weights that hold what it added."""
    world = World(tmp_path, with_adapter(MODEL, Adapter(rank=8)))
    world.add_steps()
    world.trainer().run(2)
    last = Version("main", 2)
    world.model = with_adapter(MODEL, then)
    second = second_line(world, last)
    second.run(0)
    first, before = world.weights.load(Version("second", 0)), world.weights.load(last)
    same = then == Adapter(rank=8)
    assert (world.weights.manifest(Version("second", 0)).digest == world.weights.manifest(last).digest) == same
    for name, tensor in (before if same else merged(before)).items():
        assert first[name].data.tobytes() == tensor.data.tobytes(), name
    if then is not None:
        masters = second._optimizer.state()
        began = [masters[name].any() for name in masters if name.endswith("_adapter.b") and name.startswith("master.")]
        assert len(began) == 8 and all(bool(each) == same for each in began), "a new adapter adds nothing yet"
