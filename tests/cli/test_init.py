"""`rollmill init` and the guide that begins with it, executed as a newcomer would."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rollmill.cli.init_command import templates
from tests.cli.conftest import Told
from tests.test_repo import ROOT

GUIDE = ROOT / "docs" / "guides" / "your-first-task.md"
LESS = " stages.sft.steps=20 stages.rl.steps=1 evals.tasks=1 evals.attempts=1"


def shortened(block: str) -> str:
    """Trains as the guide does, but less: the test of the first guide sees the whole curve."""
    assert "rollmill train run.toml\n" in block
    return block.replace("rollmill train run.toml\n", f"rollmill train run.toml{LESS}\n")


def shell(script: str, directory: Path, *, on_path: bool = True) -> str:
    path = os.environ["PATH"] if not on_path else f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=directory,
        env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def own_modules() -> Iterator[None]:
    """Modules that a command of the test loads are gone afterwards: an example has one of the same name."""
    path = list(sys.path)
    yield
    sys.path[:] = path
    for name in ("my_reward", "my_tasks"):
        sys.modules.pop(name, None)


@pytest.mark.usefixtures("own_modules")
def test_the_directory_of_init_is_no_run_and_its_file_is_named(rollmill: Callable[..., Told], tmp_path: Path) -> None:
    assert rollmill("init", tmp_path / "own").code == 0
    told = rollmill("tasks", "list", tmp_path / "own")
    assert told.code == 1 and f"hint: did you mean {tmp_path / 'own' / 'run.toml'}? " in told.err
    told = rollmill("train", tmp_path / "own" / "run.toml", "sed=1", "--dry-run")
    assert told.code == 1 and "did you mean 'seed'?\nhint: `rollmill config` explains" in told.err


def test_init_does_not_write_where_a_run_is(rollmill: Callable[..., Told], tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    told = rollmill("init", tmp_path)
    assert told.code == 1 and f"{tmp_path} holds a run" in told.err and len(list(tmp_path.iterdir())) == 1
    told = rollmill("init", tmp_path / "run.json")
    assert told.code == 1 and "cannot be written" in told.err and "hint: name another directory" in told.err


@pytest.mark.slow
def test_the_files_of_init_pass_their_own_test(rollmill: Callable[..., Told], tmp_path: Path) -> None:
    assert rollmill("init", tmp_path / "own").code == 0
    names = {"my_tasks.py", "my_reward.py", "run.toml", "test_own.py", "README.md", "demonstrations.jsonl"}
    assert {path.name for path in (tmp_path / "own").iterdir()} == names
    test = f"{sys.executable} -m pytest -q -p no:cacheprovider"  # the command need not be on PATH
    assert "3 passed" in shell(test, tmp_path / "own", on_path=False)
    again = rollmill("init", tmp_path / "own")
    assert again.code == 1 and "exists already" in again.err and "Traceback" not in again.err


@pytest.mark.slow
def test_the_guide_to_a_first_task_works_word_by_word(tmp_path: Path) -> None:
    blocks = re.findall(r"```bash\n(.*?)```", GUIDE.read_text(), re.S)
    assert len(blocks) == 4
    printed = shell("\n".join(blocks), tmp_path)
    assert "32 of 32 tasks are all right" in printed and "2 of 2 tasks are all right" in printed
    assert "user: Write main.py with greet(name)" in printed and 'path = "' in printed
    before, after = (float(rate) for rate in re.findall(r"held-out solve rate ([\d.]+)% → ([\d.]+)%", printed)[0])
    assert before < 70 and after > before + 20, printed[-3000:]


def test_the_demonstrations_of_init_are_half_right_and_show_nothing_held_out() -> None:
    files = templates()
    names: dict[str, Any] = {}
    exec(files["my_tasks.py"], names)
    tasks = {task.instruction: task for task in names["Arithmetic"]().tasks.values()}
    right = []
    for line in files["demonstrations.jsonl"].splitlines():
        question, answer = json.loads(line)["messages"]
        task = tasks[question["content"]]
        assert task.split == "train"
        right.append(task.reference["main.py"].decode() == answer["content"])
    assert 0.4 < sum(right) / len(right) < 0.6
    assert {task.split for task in tasks.values()} == {"train", "heldout"} and len(tasks) == 32


def test_the_format_of_task_files_is_explained(rollmill: Callable[..., Told]) -> None:
    told = rollmill("config", "task-files")
    fields = ("`instruction` | needed", "`submission`", "`timeout_s`", '"FAIL_TO_PASS"', "task.toml", '"kind": "calls"')
    assert told.code == 0 and all(field in told.out for field in (*fields, '"kind": "script"', "heldout_share"))
    assert "`rollmill config task-files`" in rollmill("config", "tasks").out
    assert "task-files" in rollmill("config").out
