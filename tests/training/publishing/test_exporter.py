"""A line in several forms: every version in each of them, whatever is killed in between."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from rollmill import telemetry
from rollmill.errors import TrainingError
from rollmill.models.decoder import Decoder
from rollmill.models.host_tensors import load_host, to_host
from rollmill.types import Version
from rollmill.weights.format.manifest import describe, root_digest
from rollmill.weights.format.object_keys import manifest_key
from tests.processes import SERVER
from tests.training.worker import run_trainer
from tests.training.world import MODEL, STEPS, World

FORMS = ("bf16", "fp8", "nvfp4")
# each start dies after the next effect
DEATHS = [
    "create:1:bf16/manifests/0000000000",  # version 0 in the trainer's own form alone
    "create:1:fp8/manifests/0000000001",  # version 1 in two forms of three
    "create:1:nvfp4/packs/0000000002",  # version 2 half written in the third
    "create:1:nvfp4/manifests/0000000003",  # version 3 in all forms, not committed
    "create:1:bf16/manifests/0000000006",  # the last version in the trainer's own form alone
]


def made_from_own(world: World, form: str) -> list[tuple[int, str]]:
    """What a form must be: made from the published bytes of the trainer's own form."""
    found = []
    for number, _ in world.chain():
        model = Decoder(MODEL)
        load_host(model, world.weights.load(Version("main", number)))
        found.append((number, root_digest(describe(to_host(model.state_dict(), form)))))
    return found


@pytest.fixture(scope="module")
def alone(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, str]]:
    """The versions of a trainer with one form."""
    path = tmp_path_factory.mktemp("alone") / "world"
    shutil.copytree(prepared, path)
    World(path).trainer().run(STEPS)
    return World(path).chain()


@pytest.mark.slow
def test_killed_between_two_forms(prepared: Path, tmp_path: Path, alone: list[tuple[int, str]]) -> None:
    shutil.copytree(prepared, tmp_path / "world")
    for effect in (*DEATHS, "none"):
        process = SERVER.Process(target=run_trainer, args=(tmp_path / "world", effect, MODEL, None, FORMS))
        process.start()
        process.join()
        assert process.exitcode == (0 if effect == "none" else -9), effect
    world = World(tmp_path / "world")
    assert world.chain() == alone  # the other forms change nothing in the trainer's own
    for form in FORMS[1:]:
        assert world.chain(form=form) == made_from_own(world, form)
        manifests = world.weights.versions("main", form)
        assert {manifest.kind for manifest in manifests} == {"snapshot", "delta"}
        assert [manifest.step for manifest in manifests] == list(range(STEPS + 1))
    assert world.ledger.committed() == STEPS and world.ledger.counts()["leased"] == 0
    told = [event for event in telemetry.read_events(world.path / "events") if event["kind"] == "publish_form"]
    assert {(event["form"], event["version"]) for event in told} >= {("fp8", 4), ("nvfp4", 4)}


def test_a_form_is_added_dropped_and_added_again(prepared: Path, tmp_path: Path, alone: list[tuple[int, str]]) -> None:
    shutil.copytree(prepared, tmp_path / "world")

    def train(steps: int, *others: str) -> World:
        world = World(tmp_path / "world", forms=("bf16", *others))
        world.trainer().run(steps)
        return world

    train(2)
    world = train(3, "fp8")
    assert world.chain(form="fp8") == made_from_own(world, "fp8")[2:]  # it begins with the newest
    train(5)
    world = train(6, "fp8")
    assert world.chain() == alone and world.chain(form="fp8") == made_from_own(world, "fp8")[2:]
    # what was collected cannot be made
    for number in (4, 5, 6):
        world.objects.delete(manifest_key(Version("main", number), "fp8"))
    world.objects.delete(manifest_key(Version("main", 4), "bf16"))
    with pytest.raises(
        TrainingError, match="main@4 is missing in the form 'fp8', and was collected in the form 'bf16'"
    ):
        train(6, "fp8")


def test_a_quantised_trainer_publishes_bf16_too(prepared: Path, tmp_path: Path) -> None:
    shutil.copytree(prepared, tmp_path / "world")
    world = World(tmp_path / "world", forms=("fp8", "bf16"))
    world.trainer().run(2)
    for number in range(3):
        coded, plain = Decoder(MODEL, form="fp8"), Decoder(MODEL)
        load_host(coded, world.weights.load(Version("main", number), "fp8"))
        load_host(plain, world.weights.load(Version("main", number), "bf16"))
        assert all(one.equal(other) for one, other in zip(coded.parameters(), plain.parameters(), strict=True))
