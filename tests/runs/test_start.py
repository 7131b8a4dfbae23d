"""A run starts from a version of another run, which it needs only once."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path

import pytest

from rollmill.cli.target import start_settings
from rollmill.config import load_config
from rollmill.errors import ConfigError, RollmillError
from rollmill.launch.roles import trainer
from rollmill.models.adapters import trained
from rollmill.models.decoder import Decoder
from rollmill.models.host_tensors import load_host, to_host
from rollmill.models.merging import merged
from rollmill.models.quantize import dequantised
from rollmill.runs.import_checkpoint import TOKENIZER
from rollmill.runs.opening import describe_run
from rollmill.runs.preflight import check_here
from rollmill.runs.run import RunConfig, RunDirectory
from rollmill.storage.objects import Objects
from rollmill.training.lineage import trace_lineage
from rollmill.types import Version
from rollmill.weights.files.companions import companions_of, keep_companions
from rollmill.weights.format.manifest import describe, root_digest
from rollmill.weights.reading.channels import Channels
from rollmill.weights.reading.weight_store import WeightStore
from rollmill.weights.writing.publisher import Publisher
from tests.launch.served import published_run
from tests.runs.checkpoints import RL, TASKS
from tests.storage.serving import new_bucket, s3_environment, s3_server


def other_run(root: Path, form: str = "bf16", *overrides: str) -> RunDirectory:
    """A run with versions 0 to 2 whose model has a tokenizer and a config.json; channel `live` is version 1."""
    run = published_run(root, 0, f"form={form}", *overrides)
    objects = Objects.open(run.home_store)
    keep_companions(objects, "midtrain", {TOKENIZER: run.tokenizer.read_bytes(), "config.json": b"{}"})
    base, model = (Decoder(run.config.model_of(line), form=form) for line in ("midtrain", "rl"))
    publisher = Publisher(WeightStore(objects), "rl", form)
    base.initialise(9)
    Publisher(WeightStore(objects), "midtrain", form).publish(0, to_host(base.state_dict(), form))
    for number in range(3):
        model.initialise(number)
        publisher.publish(number, to_host(model.state_dict(), form), Version("midtrain", 0) if not number else None)
    Channels(objects).move("live", Version("rl", 1))
    return run


def next_run(root: Path, other: RunDirectory | str, version: str, *overrides: str) -> RunDirectory:
    name = Path(other) if isinstance(other, str) else other.path
    settings = ["name=next", RL, TASKS, "device=cpu", *overrides, *start_settings(name, version)]
    config = load_config(RunConfig, None, settings)
    check_here(config)
    return RunDirectory.create(root, config)


@pytest.mark.parametrize(("text", "number"), [("2", 2), ("rl@1", 1), ("live", 1)])
@pytest.mark.parametrize("form", ["bf16", "fp8"])
def test_a_version_of_another_run_is_imported_with_what_belongs_to_it(
    text: str, number: int, form: str, tmp_path: Path
) -> None:
    other = other_run(tmp_path, form)
    run = next_run(tmp_path, other, text, "model.max_context=128", f"form={form}")
    assert run.config.model == other.config.model.model_copy(update={"max_context": 128})
    trainer.main(run)
    shutil.rmtree(other.path)
    trainer.main(RunDirectory.open(run.path))  # the other run is not needed any more
    assert run.tokenizer.read_bytes()
    store = WeightStore(Objects.open(run.home_store))
    version = Version(f"{other.id}-rl", number)
    assert run.config.checkpoint_line == version.line and store.head(version.line) == number
    assert store.manifest(version).metadata["imported_from"]["run"] == other.id
    # exactly the weights of that version, in any form
    model, again = (Decoder(other.config.model, form=form) for _ in range(2))
    model.initialise(number)
    load_host(again, store.load(version))
    assert root_digest(describe(to_host(again.state_dict(), form))) == root_digest(
        describe(to_host(model.state_dict(), form))
    )
    # what is trained from it descends from it, and leaves with its tokenizer
    first = Publisher(store, "rl").publish(0, to_host(again.state_dict()), version)
    assert trace_lineage(store, "rl").position(version.line, number) == 0
    assert companions_of(store, first).keys() == {TOKENIZER, "config.json"}


@pytest.mark.parametrize("form", ["bf16", "fp8"])
def test_what_an_adapter_adds_is_in_the_weights_that_are_imported(form: str, tmp_path: Path) -> None:
    other = other_run(tmp_path, form, "stages.rl.training.adapter.rank=8")
    model, store = Decoder(other.config.model_of("rl"), form=form), WeightStore(Objects.open(other.home_store))
    model.initialise(5)
    for parameter in trained(model).values():
        parameter.data += 0.1
    tensors = to_host(model.state_dict(), form)
    Publisher(store, "rl", form).publish(3, tensors)
    run = next_run(tmp_path, other, "rl@3", f"form={form}")
    assert run.config.model == other.config.model and run.config.model.adapter is None
    trainer.main(run)
    imported = WeightStore(Objects.open(run.home_store))
    found = imported.load(Version(f"{other.id}-rl", 3))
    expected = merged(dequantised(tensors) if form == "fp8" else tensors)
    assert {name: each.data.tobytes() for name, each in found.items()} == {
        name: each.data.tobytes() for name, each in expected.items()
    }
    assert imported.manifest(Version(f"{other.id}-rl", 3)).metadata["imported_from"]["form"] == "bf16"


def test_a_run_of_another_host_is_named_by_the_url_of_its_objects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3_environment(s3_server()).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    other = other_run(tmp_path, "bf16", f"store={new_bucket()!r}")
    describe_run(other)
    monkeypatch.setattr(socket, "gethostname", lambda: "another-host")
    run = next_run(tmp_path, str(other.home_store), "live")
    assert run.config.start is not None and run.config.start.run == other.home_store
    trainer.main(run)
    version = Version(f"{other.id}-rl", 1)
    digest = WeightStore(Objects.open(run.home_store)).manifest(version).digest
    assert digest == WeightStore(Objects.open(other.home_store)).manifest(Version("rl", 1)).digest


def test_versions_that_a_run_cannot_start_from(tmp_path: Path) -> None:
    other = other_run(tmp_path / "other")
    for version, words in (("9", "rl@9"), ("nightly", "neither LINE@NUMBER nor a channel")):
        with pytest.raises(RollmillError, match=words):
            next_run(tmp_path, other, version)
    with pytest.raises(ConfigError, match=r"model\.width is set, but the run .* decides it"):
        next_run(tmp_path, other, "1", "model.width=64")
    with pytest.raises(ConfigError, match="supports at most"):
        next_run(tmp_path, other, "1", "model.max_context=100000")
    with pytest.raises(ConfigError, match="not from both"):
        next_run(tmp_path, other, "1", f"checkpoint={tmp_path}", "model.vocab_size=300")
    with pytest.raises(ConfigError, match="is not the model of"):  # a file that has all of [model]
        next_run(tmp_path, other, "1", *(f"model.{k}={v}" for k, v in {"vocab_size": 300, "layers": 7}.items()))
    shutil.rmtree(other.home_store / "companions")
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json"):
        next_run(tmp_path, other, "1")
    with pytest.raises(ConfigError, match="holds no run"):
        start_settings(tmp_path, "1")
    assert not (tmp_path / "next").exists()
