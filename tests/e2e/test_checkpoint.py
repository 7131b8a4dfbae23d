"""From checkpoint to checkpoint: import, mid-training, RL and export with real processes."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from rollmill.cli.train import run_to_report
from rollmill.cli.weights.weights_commands import app
from rollmill.config import load_config
from rollmill.launch.supervise import drive
from rollmill.models.decoder import Decoder
from rollmill.models.host_tensors import load_host
from rollmill.runs.run import RunConfig, RunDirectory
from rollmill.storage.database import open_database
from rollmill.storage.objects import Objects
from rollmill.telemetry import read_events
from rollmill.trajectories.ledger import Ledger
from rollmill.trajectories.trajectory_store import TrajectoryStore
from rollmill.types import TrajectoryState, Version
from rollmill.weights.reading.weight_store import WeightStore
from tests.e2e.test_kill import start, wait_for
from tests.later import Later
from tests.launch.chance import ANY_SIGNAL
from tests.models.checkpoints import our_logits, their_logits
from tests.runs.checkpoints import MIDTRAIN_AND_RL, RL, TASKS, make_chat_checkpoint

transformers = Later("transformers")

pytestmark = pytest.mark.slow
SETTINGS = (
    MIDTRAIN_AND_RL,
    TASKS,
    *ANY_SIGNAL,
    "stages.rl.steps=2",
    "stages.rl.groups_per_step=2",
    "stages.rl.group_size=2",
    "tools_in_prompt=false",
    "device=cpu",
    "model.max_context=256",
    "stages.midtrain.steps=3",
    "stages.midtrain.documents_per_step=4",
    "rollouts.max_answer_tokens=8",
    "harness.kind=rollmill.demo.coding:CodingHarness",
    "harness.max_turns=2",
    "evals.tasks=2",
    "evals.attempts=1",
    "evals.family_tasks=0",
    "evals.greedy=false",
)


NO_MIDTRAIN = (RL, *(setting for setting in SETTINGS[1:] if not setting.startswith("stages.midtrain")))


def export(run: RunDirectory, version: str, directory: Path) -> None:
    result = CliRunner().invoke(app, ["export", str(run.path), version, str(directory)])
    assert result.exit_code == 0, result.output


@pytest.mark.timeout(900)
def test_from_checkpoint_to_checkpoint(tmp_path: Path) -> None:
    checkpoint = tmp_path / "model"
    make_chat_checkpoint(checkpoint)
    settings = ["name=mine", f"checkpoint={checkpoint}", *SETTINGS]
    run = RunDirectory.create(tmp_path / "runs", load_config(RunConfig, None, settings))
    run_to_report(run)
    assert json.loads((run.path / "report.json").read_text())["solve_rate_after"] is not None

    # the gateway used ChatML with the checkpoint's own tokenizer, and every rollout ended
    objects = Objects.open(run.home_store)
    trajectories = TrajectoryStore(open_database(run.database_url), objects)
    rows = trajectories.list()
    assert rows and {row.state for row in rows} == {TrajectoryState.graded}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(checkpoint / "tokenizer.json"))
    text = tokenizer.decode(trajectories.load(rows[0].id).segments[0].tokens)
    assert text.startswith("<|im_start|>user\n") and "<|im_end|>\n<|im_start|>assistant\n" in text
    assert len(Ledger(open_database(run.database_url), run.stage_key(run.config.stages[-1])).steps()) == 2

    # the checkpoint is no longer needed: the run is resumed without it, and everything is done already
    moved = Path(shutil.move(checkpoint, tmp_path / "moved"))
    weights = WeightStore(objects)
    drive(RunDirectory.open(run.path))
    assert weights.head("rl") == 2 and len(trajectories.list()) == len(rows)

    # versions before and after training are exported as complete directories
    tokens = torch.arange(3, 60)
    for version in ("rl-checkpoint@0", "rl@2"):
        out = tmp_path / version.replace("@", "-")
        export(run, version, out)
        for kept in ("config.json", "tokenizer.json", "generation_config.json"):
            assert (out / kept).read_bytes() == (moved / kept).read_bytes()
        ours = Decoder(run.config.model)
        line, _, number = version.partition("@")
        load_host(ours, weights.load(Version(line, int(number))))
        theirs = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
        with torch.no_grad():
            torch.testing.assert_close(our_logits(ours, tokens), their_logits(theirs, tokens), atol=1e-4, rtol=1e-4)
    before, after = (tmp_path / name / "model.safetensors" for name in ("rl-checkpoint-0", "rl-2"))
    assert before.read_bytes() != after.read_bytes() and before.stat().st_size == after.stat().st_size


@pytest.mark.timeout(900)
def test_stopping_in_the_middle_of_rl_leaves_no_tracebacks(tmp_path: Path) -> None:
    """Ctrl-C while every role works: the terminal ends with the hint, and no log has a traceback."""
    make_chat_checkpoint(tmp_path / "model")
    settings = ["name=mine", f"checkpoint={tmp_path / 'model'}", *NO_MIDTRAIN, "stages.rl.steps=1000"]
    run = RunDirectory.create(tmp_path / "runs", load_config(RunConfig, None, settings))
    process = start(run)
    try:
        wait_for(lambda: "rl: started" in (run.path / "train.out").read_text(), process, run)
        wait_for(lambda: any(event["kind"] == "rollout" for event in read_events(run.events)), process, run)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait() == 130
    finally:
        process.kill()
        process.wait()
    told = (run.path / "train.out").read_text()
    assert told.endswith(f"stopped; `rollmill train --resume {run.path}` continues the run\n")
    logs = {path.name: path.read_text() for path in run.logs.glob("*.log")}
    assert {"trainer.log", "dispatcher.log", "gateway.log", "engine-home.log", "store.log"} <= logs.keys()
    for name, text in logs.items():
        assert "Traceback" not in text, f"{name}: {text[-2000:]}"


@pytest.mark.timeout(900)
def test_without_mid_training_rl_starts_from_the_checkpoint_in_another_form(tmp_path: Path) -> None:
    """tests/e2e/test_extend.py does the same in the form of the checkpoint."""
    make_chat_checkpoint(tmp_path / "model")
    settings = ["name=mine", f"checkpoint={tmp_path / 'model'}", *NO_MIDTRAIN, "stages.rl.steps=1", "form=fp8"]
    run = RunDirectory.create(tmp_path / "runs", load_config(RunConfig, None, settings))
    run_to_report(run)
    check_start(run, "fp8", tmp_path / "export")


def check_start(run: RunDirectory, form: str, exported: Path) -> None:
    """After one step: the line begins with the imported version, and its export can be the start of another run."""
    weights = WeightStore(Objects.open(run.home_store))
    first, imported = weights.manifest(Version("rl", 0), form), weights.manifest(Version("rl-checkpoint", 0))
    assert first.origin == imported.version and weights.head("rl", form) == 1
    assert (first.digest == imported.digest) == (form == "bf16")

    # an export is a checkpoint like any other: the next run starts from it
    export(run, "rl@1", exported)
    again = load_config(RunConfig, None, ["name=again", f"checkpoint={exported}", *NO_MIDTRAIN])
    assert again.model == run.config.model
