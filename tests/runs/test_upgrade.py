"""Runs that began before there were stages: their run.json still opens, with the lines and keys it was made with."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollmill.config import validate_config
from rollmill.runs.run import RunConfig, RunDirectory
from rollmill.runs.stages import evaluations, phases
from rollmill.runs.upgrade import bring_up_to_date
from rollmill.training.stage import RolloutSettings

# what such a run.json holds, without settings that are the same as now
MODEL = {"vocab_size": 512, "max_context": 192}
OLD: dict[str, Any] = {
    "name": "old",
    "line": "main",
    "steps": 32,
    "groups_per_step": 12,
    "group_size": 4,
    "max_staleness": 1,
    "model": MODEL,
    "midtrain": {
        "documents_per_step": 16,
        "publish_every": 100,
        "balance": 0.01,
        "steps": 300,
        "training": {"threads": 2, "optimizer": {"lr": 2e-3, "betas": [0.9, 0.99]}},
    },
    "training": {"checkpoint_every": 3, "optimizer": {"lr": 6.5e-4, "betas": [0.9, 0.99]}},
    "rl": {"loss": "dppo", "weight_cap": 2.0, "clip_low": None, "solved_at": 1.0},
    "tasks": {"kind": "rollmill.demo.micro_repos:MicroRepos"},
}


def upgraded(**change: Any) -> RunConfig:
    tree = {name: value for name, value in {**OLD, **change}.items() if value != "absent"}
    return validate_config(RunConfig, bring_up_to_date(tree), "run.json")


def test_midtraining_and_rl_become_stages_with_the_names_of_their_lines() -> None:
    config = upgraded()
    base, rl = config.stages
    assert (base.name, base.kind, base.steps) == ("main-base", "midtrain", 300)
    assert (rl.name, rl.kind, rl.steps) == ("main", "rl", 32)
    assert isinstance(rl, RolloutSettings) and (rl.groups_per_step, rl.group_size, rl.max_staleness) == (12, 4, 1)
    assert (base.training.threads, base.training.optimizer.lr) == (2, 2e-3)
    assert (rl.training.checkpoint_every, rl.training.optimizer.betas) == (3, (0.9, 0.99))
    assert rl.model_dump()["weight_cap"] == 2.0 and base.model_dump()["documents_per_step"] == 16
    assert (config.line, config.checkpoint_line) == ("main", "main-checkpoint")
    assert config.tokenizer == "rollmill.demo.tokenizer:demo_tokenizer"
    assert [(each.label, each.stage.name) for each in evaluations(config)] == [("before", "main"), ("after", "main")]
    assert phases(config) == ["main-base", "evaluate before", "main", "evaluate after"]


def test_a_run_from_a_checkpoint_has_one_stage() -> None:
    config = upgraded(midtrain=None, checkpoint="/gone", line="other", rl={"objective": "tis"})
    [rl] = config.stages
    assert (rl.name, rl.model_dump()["loss"], config.tokenizer) == ("other", "tis", None)
    assert config.checkpoint_line == "other-checkpoint"


def test_a_run_that_only_serves_has_no_stages() -> None:
    config = upgraded(midtrain=None, checkpoint="/gone", steps=0, tasks=None)
    assert config.stages == () and config.line == config.checkpoint_line == "main-checkpoint"


def test_the_first_release_had_tasks_without_a_kind() -> None:
    config = upgraded(tasks="absent")
    assert config.tasks is not None and config.tasks.kind == "rollmill.demo.micro_repos:MicroRepos"


def test_an_old_run_opens_and_is_keyed_by_its_id(run: RunDirectory, make_run: Callable[..., RunDirectory]) -> None:
    saved = json.loads((run.path / "run.json").read_text())
    saved["config"] = {**OLD, "name": "small"}
    (run.path / "run.json").write_text(json.dumps(saved))
    old = RunDirectory.open(run.path)
    assert old.stage_key(old.config.stage("main")) == run.id
    assert RunDirectory.open(old.rewrite(old.config).path) == old  # as `--resume RUN steps=N` writes it
    assert run.stage_key(run.config.stage("rl")) == f"{run.id}/rl"


@pytest.mark.parametrize("name", ["steps", "midtrain", "training", "rl", "max_staleness"])
def test_an_old_file_is_told_where_its_settings_are_now(name: str, tmp_path: Path) -> None:
    from rollmill.config import load_config
    from rollmill.errors import ConfigError

    file = tmp_path / "old.toml"
    file.write_text(f'name = "old"\n{name} = {{}}\n')
    with pytest.raises(ConfigError, match=rf"'{name}' is a setting of a stage\nhint: .*stages.*CHANGELOG"):
        load_config(RunConfig, file)


def test_a_region_becomes_a_table_of_engines() -> None:
    config = upgraded(regions=["home", "away"])
    assert [spec.role for spec in config.engine_specs] == ["engine-home", "engine-away"]
    assert config.regions == ["home", "away"] and upgraded().regions == ["home"]
