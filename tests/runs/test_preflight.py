"""What `rollmill train` and its --dry-run find before anything starts."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from rollmill.config import validate_config
from rollmill.errors import ConfigError
from rollmill.runs.preflight import check_here, check_parts
from rollmill.runs.run import RunConfig
from tests.runs.checkpoints import make_chat_checkpoint
from tests.runs.conftest import make_config

JUDGE = '{kind="judge", base_url="http://127.0.0.1:1/v1", model="m", dimension="d", rubric="r", key_variable="NO_KEY"}'
REMOTE = '{kind="remote", url="http://127.0.0.1:1", token_variable="NO_KEY", model_url="http://127.0.0.1:1/v1"}'
BACKEND = '[{url="http://127.0.0.1:1", model="m", key_variable="NO_KEY"}]'


@pytest.mark.parametrize(
    "setting",
    [
        f'rewards=[{{kind="calls"}}, {JUDGE}]',
        f"harness={REMOTE}",
        f"gateway.backends={BACKEND}",
        'machine={kind="remote", hosts=["http://127.0.0.1:1"], key_env="NO_KEY"}',
    ],
)
def test_a_key_that_is_not_set(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="NO_KEY") as raised:
        check_here(make_config(setting), dry_run=True)
    assert raised.value.hint
    monkeypatch.setitem(os.environ, "NO_KEY", "secret")
    check_here(make_config(setting), dry_run=True)


def test_a_package_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match="wandb cannot be imported") as raised:
        check_here(make_config('sinks=[{kind="wandb"}]'), dry_run=True)
    assert raised.value.hint == "pip install wandb"


def test_what_another_host_needs_is_not_looked_for_here() -> None:
    check_parts(make_config(f"rewards=[{JUDGE}]", 'cluster={kind="ray"}', "store='s3://bucket/runs'"))


def test_prompts_that_do_not_fit_into_the_context(tmp_path: Path) -> None:
    make_chat_checkpoint(tmp_path, max_position_embeddings=4096)

    def config(context: int, **more: Any) -> RunConfig:
        model = {"checkpoint": str(tmp_path), "model": {"max_context": context}}
        tasks = {"kind": "rollmill.demo.micro_repos:MicroRepos"}
        model["harness"] = {"kind": "rollmill.demo.coding:CodingHarness"}
        return validate_config(
            RunConfig,
            {"name": "small", "stages": [{"kind": "rl", "steps": 1}], "tasks": tasks, **model, **more},
            "test",
        )

    with pytest.raises(ConfigError, match=r"have \d+ to \d+ tokens .* only 100 \(max_context\)") as raised:
        check_here(config(100), dry_run=True)
    assert "max_context" in str(raised.value.hint)
    longest = int(str(raised.value.message).split(" tokens")[0].split()[-1])
    assert longest > 200  # the tools are counted
    short = {"rollouts": {"max_answer_tokens": 64}}
    (warning,) = check_here(config(longest + 10, **short), dry_run=True)
    assert "max_answer_tokens (64) does not fit" in warning
    assert check_here(config(longest + 64, **short), dry_run=True) == []
    assert check_here(config(100, tools_in_prompt=False), dry_run=True) == []
    assert check_here(config(100, harness={"kind": "command", "argv": ["agent"]}), dry_run=True) == []
