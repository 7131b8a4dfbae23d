"""A finished run is given more steps, and another run starts from one of its versions, with every process real."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollmill.cli.target import start_settings
from rollmill.cli.train import run_to_report
from rollmill.config import load_config
from rollmill.launch.extend import extend
from rollmill.runs.run import RunConfig, RunDirectory
from rollmill.runs.status import is_finished
from rollmill.storage.database import open_database
from rollmill.storage.objects import Objects
from rollmill.trajectories.ledger import Ledger
from rollmill.types import Version
from rollmill.weights.reading.weight_store import WeightStore
from tests.e2e.test_checkpoint import NO_MIDTRAIN, check_start
from tests.runs.checkpoints import make_chat_checkpoint


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_finished_run_is_extended_and_continued_by_another(tmp_path: Path) -> None:
    make_chat_checkpoint(tmp_path / "model")
    settings = ["name=first", f"checkpoint={tmp_path / 'model'}", *NO_MIDTRAIN, "stages.rl.steps=1"]
    run = RunDirectory.create(tmp_path / "runs", load_config(RunConfig, None, settings))
    run_to_report(run)
    assert is_finished(run)
    check_start(run, "bf16", tmp_path / "export")
    weights = WeightStore(Objects.open(run.home_store))
    digests = [manifest.digest for manifest in weights.versions("rl")]

    run = extend(run, ["steps=2"])
    assert not is_finished(run)
    run_to_report(run)
    assert is_finished(RunDirectory.open(run.path))
    assert [manifest.digest for manifest in weights.versions("rl")][:2] == digests and weights.head("rl") == 2
    assert weights.lines() == ["rl", "rl-checkpoint"]
    ledger = Ledger(open_database(run.database_url), run.stage_key(run.config.stages[-1]))
    assert ledger.committed() == 2 and all(step.lr for step in ledger.steps())
    evaluated = {
        result["label"]: result["version"] for result in json.loads((run.path / "report.json").read_text())["evals"]
    }
    assert evaluated == {"before": 0, "after": 2}

    settings = ["name=second", *NO_MIDTRAIN, "stages.rl.steps=1", *start_settings(run.path, "2")]
    config = load_config(RunConfig, None, settings)
    second = RunDirectory.create(tmp_path / "runs", config)
    run_to_report(second)
    assert is_finished(second)
    store = WeightStore(Objects.open(second.home_store))
    parent = Version(f"{run.id}-rl", 2)
    assert store.manifest(Version("rl", 1)).origin == parent
    assert store.manifest(Version("rl", 0)).digest == weights.manifest(Version("rl", 2)).digest
    assert second.tokenizer.read_bytes() == run.tokenizer.read_bytes()
