"""A file with a setting that was moved or removed is told what to write instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollmill.config import load_config
from rollmill.errors import ConfigError
from rollmill.runs.run import RunConfig


@pytest.mark.parametrize("name", ["steps", "midtrain", "training", "rl", "max_staleness"])
def test_a_file_is_told_where_its_settings_are_now(name: str, tmp_path: Path) -> None:
    file = tmp_path / "old.toml"
    file.write_text(f'name = "old"\n{name} = {{}}\n')
    with pytest.raises(ConfigError, match=rf"'{name}' is a setting of a stage\nhint: .*stages.*CHANGELOG"):
        load_config(RunConfig, file)


def test_a_file_with_simulated_tool_times_is_told_that_runs_have_none(tmp_path: Path) -> None:
    file = tmp_path / "slow.toml"
    file.write_text('name = "slow"\nrollouts.simulated_tool_seconds = [0.1]\n')
    with pytest.raises(ConfigError, match=r"simulated_tool_seconds' of .* was removed[\s\S]*hint: .*harness\.kind"):
        load_config(RunConfig, file)
