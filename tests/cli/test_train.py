from __future__ import annotations

import sys
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from rollmill.config import load_config
from rollmill.runs.lock import exclusive
from rollmill.runs.run import RunConfig, RunDirectory
from tests.cli.conftest import Told
from tests.runs.checkpoints import make_chat_checkpoint

MICRO = Path(__file__).parents[2] / "examples" / "micro.toml"


def refused(told: Told, error: str, hint: str) -> bool:
    """Whether it is an error of ours: what was wrong, what to do, no traceback."""
    first, *rest = told.err.strip().splitlines()
    assert told.code == 1 and "Traceback" not in told.err, told
    assert first.startswith("error: ") and error in first, told
    assert not hint or (rest and rest[-1].startswith("hint: ") and hint in rest[-1]), told
    return True


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_dry_run_prints_the_resolved_tree_and_leaves_nothing(rollmill: Callable[..., Told], tmp_path: Path) -> None:
    told = rollmill("train", MICRO, "stages.rl.steps=7", "rollouts.timeout_s=2.5", "--dry-run")
    tree = tomllib.loads(told.out)
    assert told.code == 0 and (tree["stages"][1]["steps"], tree["rollouts"]["timeout_s"]) == (7, 2.5)
    assert tree["gateway"]["engine_wait_s"] == 30.0  # defaults included
    assert list(tmp_path.iterdir()) == []


def test_the_demo_as_a_dry_run(rollmill: Callable[..., Told], tmp_path: Path) -> None:
    tree = tomllib.loads(rollmill("demo", "--dry-run", "--seed", 5).out)
    assert (tree["name"], tree["seed"]) == ("demo", 5)
    assert [(each["kind"], each["region"]) for each in tree["engines"]] == [("embedded", "home"), ("embedded", "away")]
    (tmp_path / "runs" / "demo").mkdir(parents=True)
    assert tomllib.loads(rollmill("demo", "--dry-run").out)["name"] == "demo-2"
    assert tomllib.loads(rollmill("demo", "--dry-run", "--name", "mine").out)["name"] == "mine"
    assert refused(rollmill("demo", "--dry-run", "--name", 'a"b'), "name: ", "")


def test_wrong_settings(rollmill: Callable[..., Told], tmp_path: Path) -> None:
    assert refused(rollmill("train", MICRO, "stages.rl.stepps=3"), "unknown key 'stepps'; did you mean 'steps'?", "")
    told = rollmill("train", MICRO, "steps")
    assert refused(told, "'steps' is not of the form key.path=value", "for example ")
    example = told.err.rpartition("for example ")[2].strip()  # a setting that exists
    assert rollmill("train", MICRO, example, "--dry-run").code == 0
    assert refused(rollmill("train", MICRO, "stages.rl.steps=few"), "steps: Input should be a valid integer", "")
    (tmp_path / "broken.toml").write_text("steps = [")
    assert refused(rollmill("train", "broken.toml"), "not valid TOML", "")
    assert not (tmp_path / "runs").exists()


def test_parts_that_do_not_fit_each_other(rollmill: Callable[..., Told]) -> None:
    for command in (("train", MICRO, "--dry-run"), ("train", MICRO)):
        told = rollmill(*command, "sampler.kind=frontier")
        assert refused(told, '[sampler] kind = "frontier" needs a finite task set', "train_ids")
        told = rollmill(*command, "rewards=[{kind='calls', timeout_s=400}]")
        assert refused(told, "rewards.0.timeout_s is 400, but grading may take only 300 s", "rollouts.grading_timeout")
    assert rollmill("train", MICRO, "--dry-run", "rewards=[{kind='calls', timeout_s=299}]").code == 0
    assert not Path("runs").exists()
    with MICRO.open() as file:
        Path("slow.toml").write_text(f"{file.read()}\n[[rewards]]\nkind = 'calls'\ntimeout_s = 400\n")
    assert refused(rollmill("tasks", "list", "slow.toml"), "rewards.0.timeout_s is 400", "rollouts.grading_timeout_s")


def test_a_device_that_is_not_there(rollmill: Callable[..., Told], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for arguments in ((), ("--dry-run",)):
        assert refused(rollmill("train", MICRO, "device=cuda", *arguments), "finds no CUDA device", "rollmill doctor")
    assert not Path("runs").exists()


def test_a_name_that_is_taken(rollmill: Callable[..., Told], tmp_path: Path) -> None:
    RunDirectory.create(Path("runs"), load_config(RunConfig, MICRO))
    assert refused(rollmill("train", MICRO), "runs/micro already holds a run", "`rollmill train --resume runs/micro`")
    assert refused(rollmill("demo", "--name", "micro"), "already holds a run", "--resume runs/micro")


def test_resuming_is_refused_with_a_reason(rollmill: Callable[..., Told], tmp_path: Path) -> None:
    assert refused(rollmill("train", "--resume", "runs/absent"), "runs/absent holds no run", "`rollmill runs`")
    assert refused(rollmill("train", "--resume", MICRO), "holds no run", f"`rollmill train {MICRO}`")
    assert refused(rollmill("train", "--resume", tmp_path, "--dry-run"), "no --dry-run", "start a new run")
    assert refused(rollmill("train", "--resume", tmp_path, "--from", "runs/a", 1), "no --from", "start a new run")


@pytest.mark.slow
def test_only_steps_may_change_and_only_grow(rollmill: Callable[..., Told]) -> None:
    run = RunDirectory.create(Path("runs"), load_config(RunConfig, MICRO, ["stages.rl.steps=5"]))
    before = (run.path / "run.json").read_text()
    told = rollmill("train", "--resume", run.path, "steps=9", "seed=3")
    why = "can change `steps` and `replacement` of the last stage only, and `ranks`, not `seed`"
    assert refused(told, why, f"--from {run.path} VERSION")
    told = rollmill("train", "--resume", run.path, "stages.midtrain.steps=900")
    assert refused(told, "not `stages.midtrain.steps`", "--from")
    assert refused(rollmill("train", "--resume", run.path, "stages.rl.steps=4"), "can only add steps", "up to step 5")
    assert refused(rollmill("train", "--resume", run.path, "stages.rl.steps=many"), "valid integer", "")
    with exclusive(run.path, "supervisor"):
        assert refused(rollmill("train", "--resume", run.path, "stages.rl.steps=9"), "supervisor", "")
    assert (run.path / "run.json").read_text() == before


def test_a_run_is_extended_in_its_file(rollmill: Callable[..., Told], monkeypatch: pytest.MonkeyPatch) -> None:
    from rollmill.launch import supervise as drive

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(drive, "drive", interrupted)
    run = RunDirectory.create(Path("runs"), load_config(RunConfig, MICRO, ["stages.rl.steps=5"]))
    assert rollmill("train", "--resume", run.path, "steps=9", "replacement=3").code == 130
    extended = RunDirectory.open(run.path)
    changed = ["stages.rl.steps=9", "stages.rl.replacement=3"]
    assert extended == replace(run, config=load_config(RunConfig, MICRO, changed))
    assert (run.path / "run.json").stat().st_mode & 0o777 == 0o600
    assert not list(run.path.glob(".run.json-*"))
    # it goes on on other ranks, in every stage
    assert rollmill("train", "--resume", run.path, "ranks=4", "expert_parallel=2").code == 130
    trainings = [stage.training for stage in RunDirectory.open(run.path).config.stages]
    assert {(each.ranks, each.expert_parallel) for each in trainings} == {(4, 2)} and len(trainings) > 1
    assert refused(rollmill("train", "--resume", run.path, "ranks=3"), "must divide ranks (3)", "")


def test_a_resumed_run_says_that_code_of_its_own_has_changed(
    rollmill: Callable[..., Told], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from rollmill.launch import supervise as drive

    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(drive, "drive", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
    own = tmp_path / "own_tasks.py"
    own.write_text("from rollmill.demo.micro_repos import MicroRepos\nclass Own(MicroRepos): pass\n")
    (tmp_path / "own.toml").write_text(
        MICRO.read_text().replace("rollmill.demo.micro_repos:MicroRepos", "own_tasks:Own")
    )
    run = RunDirectory.create(Path("runs"), load_config(RunConfig, tmp_path / "own.toml"))
    assert "note:" not in rollmill("train", "--resume", run.path).err
    own.write_text(own.read_text() + "# changed\n")
    assert "note: the code of [tasks] is not what the run began with" in rollmill("train", "--resume", run.path).err


def test_a_directory_is_not_a_configuration(rollmill: Callable[..., Told], tmp_path: Path) -> None:
    assert refused(rollmill("train", tmp_path), "is a directory", "rollmill init")
    (tmp_path / "run.toml").touch()
    assert refused(rollmill("train", tmp_path), "is a directory", f"did you mean {tmp_path}/run.toml?")
    (tmp_path / "run.json").touch()
    assert refused(rollmill("train", tmp_path), "is a directory", f"--resume {tmp_path}")


def test_ctrl_c_prints_how_to_continue(rollmill: Callable[..., Told], monkeypatch: pytest.MonkeyPatch) -> None:
    from rollmill.launch import supervise as drive

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(drive, "drive", interrupted)
    told = rollmill("train", MICRO)
    assert told.code == 130 and "`rollmill train --resume runs/micro` continues the run" in told.err
    assert "Traceback" not in told.err


def test_a_bad_checkpoint_is_refused_before_anything_is_made(rollmill: Callable[..., Told], tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(
        'name = "mine"\ncheckpoint = "model"\n[tasks]\nkind = "rollmill.demo.micro_repos:MicroRepos"\n'
        '[[stages]]\nkind = "rl"\nsteps = 1\n'
    )
    assert refused(rollmill("train", "mine.toml"), "there is no directory", "`rollmill model get`")
    make_chat_checkpoint(Path("model"), max_position_embeddings=2048)
    tree = tomllib.loads(rollmill("train", "mine.toml", "--dry-run").out)
    assert (tree["model"]["layers"], tree["model"]["vocab_size"]) == (2, 300)
    Path("model/tokenizer.json").unlink()
    for arguments in ((), ("--dry-run",)):  # a dry run checks the same
        assert refused(rollmill("train", "mine.toml", *arguments), "has no tokenizer.json", "save_pretrained")
    Path("model/model.safetensors").unlink()
    for arguments in ((), ("--dry-run",)):
        assert refused(rollmill("train", "mine.toml", *arguments), "no safetensors files", "")
    assert not (tmp_path / "runs").exists()
