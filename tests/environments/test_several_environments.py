"""Several environments in one run: their settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollmill.config import load_config, validate_config
from rollmill.environments.environment import each_environment
from rollmill.errors import ConfigError
from rollmill.reference import to_toml
from rollmill.runs.configuration.settings import RunConfig

RUN = """
name = "two"
checkpoint = "checkpoint"
model = {vocab_size = 128}
evals = {family_tasks = 0}
stages = [{kind = "rl", steps = 2}]
"""
TWO = f"""{RUN}
[[environments]]
name = "repairs"
weight = 3
timeout_s = 60.0
tasks = {{kind = "jsonl", path = "repairs.jsonl"}}
rewards = [{{kind = "script"}}]

[[environments]]
name = "functions"
tasks = {{kind = "jsonl", path = "functions.jsonl"}}
harness = {{kind = "chat"}}
"""


def read(toml: str, directory: Path, *overrides: str) -> RunConfig:
    path = directory / "run.toml"
    path.write_text(toml)
    return load_config(RunConfig, path, overrides)


def test_each_environment_has_settings_of_its_own(tmp_path: Path) -> None:
    config = read(TWO, tmp_path, "environments.functions.weight=2.0")
    repairs, functions = each_environment(config)
    assert (repairs.weight, functions.weight) == (3, 2)
    assert repairs.harness.kind == "shell" and functions.harness.kind == "chat"
    assert [each.kind for each in repairs.rewards] == ["script"]
    assert functions.tasks.path == str(tmp_path / "functions.jsonl")  # type: ignore[attr-defined]


def test_a_run_with_several_is_the_same_when_it_is_read_again(tmp_path: Path) -> None:
    config = read(TWO, tmp_path)
    assert validate_config(RunConfig, config.model_dump(mode="json"), "run.json") == config
    assert read(to_toml(config), tmp_path) == config


def test_the_sections_of_a_run_are_one_environment_without_a_name(tmp_path: Path) -> None:
    tasks = '[tasks]\nkind = "jsonl"\npath = "tasks.jsonl"\n'
    (one,) = each_environment(read(f"{RUN}{tasks}", tmp_path))
    assert one.name == "" and one.harness.kind == "shell" and [each.kind for each in one.rewards] == ["calls"]


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ('[harness]\nkind = "chat"\n', "environments.NAME.harness"),
        ('[[environments]]\nname = "repairs"\ntasks = {kind = "jsonl", path = "t"}\n', "are called 'repairs'"),
        ('[[environments]]\nname = "Two words"\ntasks = {kind = "jsonl", path = "t"}\n', "environments.2.name"),
        ('[[environments]]\nname = "third"\n', "environments.2.tasks"),
        ('[[environments]]\nname = "third"\ntask = 1\n', "did you mean 'environments.2.tasks'"),
    ],
)
def test_what_is_refused_names_the_place_and_the_remedy(more: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        read(TWO + more, tmp_path)
    assert says in f"{raised.value.message} {raised.value.hint}"
