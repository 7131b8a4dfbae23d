"""The guide to one's own data, executed as a newcomer would; and examples/sft, run small."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from rollmill.config import load_config
from rollmill.launch.roles import trainer
from rollmill.runs.run import RunConfig, RunDirectory
from rollmill.storage.objects import Objects
from rollmill.telemetry import open_events, read_events
from rollmill.weights.reading.weight_store import WeightStore
from tests.cli.test_init import shell
from tests.processes import SERVER
from tests.test_repo import ROOT

GUIDE = ROOT / "docs" / "guides" / "your-own-data.md"
SMALL = ["stages.midtrain.steps=2", "stages.sft.steps=2", "device=cpu"]


@pytest.mark.slow
def test_the_guide_to_your_own_data_works_word_by_word(tmp_path: Path) -> None:
    blocks = re.findall(r"```bash\n(.*?)```", GUIDE.read_text(), re.S)
    assert len(blocks) == 4
    printed = shell("\n".join(blocks), tmp_path)
    assert "source 'code': records are not used: 1 binary; the first: " in printed
    assert re.search(r"source 'notes': records are not used: 1 broken line; the first: \S+/notes.jsonl:3: ", printed)
    assert "held-out loss of code after step 12: " in printed
    events = read_events(tmp_path / "my-data" / "runs" / "first" / "events")
    code = next(event for event in events if event["kind"] == "source" and event["source"] == "code")
    assert code["duplicates"] == 1 and code["training"] + code["heldout"] == 8
    assert "sft" in printed and "midtrain" in printed


def train(run: Path) -> None:
    opened = RunDirectory.open(run)
    open_events(opened.events, "trainer")
    for stage in opened.config.stages:
        trainer.main(opened, stage.name)


@pytest.mark.slow
def test_the_example_for_sft_runs(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples" / "sft", tmp_path / "sft")
    config = load_config(RunConfig, tmp_path / "sft" / "run.toml", SMALL)
    run = RunDirectory.create(tmp_path, config)
    assert str(run.code()["stages.sft.sources.0"]["class"]).endswith(":Conversations"), "the run keeps what it used"
    process = SERVER.Process(target=train, args=(run.path,))
    process.start()
    process.join()
    assert process.exitcode == 0
    weights = WeightStore(Objects.open(run.home_store))
    parent = weights.versions("sft")[0].parent
    assert parent is not None and parent.line == "midtrain", "SFT continues what mid-training made"
    events = read_events(run.events)
    sources = {event["source"]: event for event in events if event["kind"] == "source"}
    assert sources["1 conversations"]["documents"] == 48 and sources["1 conversations"]["heldout"] > 0
    assert not any(event["skipped"] for event in sources.values())
    losses = [event for event in events if event["kind"] == "heldout_loss"]
    assert [event["step"] for event in losses] == [0, 2] and losses[1]["loss"] < losses[0]["loss"]
