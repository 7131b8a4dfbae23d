"""`rollmill tasks` with files, machines and rewards of a run."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollmill.demo import CONFIG as DEMO
from tests.cli.conftest import Told

TEST = "from main import f\nassert f(20) == 21, 'a long line that must stay hidden'\n"


def entry(id: str, **more: Any) -> dict[str, Any]:
    grading = {"kind": "script", "files": {"t.py": TEST}, "command": ["python3", "t.py"]}
    reference = {"main.py": "def f(x):\n    return x + 1\n"}
    given = {"id": id, "instruction": f"do {id}", "submission": ["main.py"], "grading": grading, "reference": reference}
    return {**given, **more}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    text = DEMO.read_text().replace('kind = "rollmill.demo.micro_repos:MicroRepos"', 'kind = "jsonl"\npath = "t.jsonl"')
    (tmp_path / "run.toml").write_text(text + '\n[[rewards]]\nkind = "script"\n')
    return tmp_path / "run.toml"


def write(source: Path, *rows: dict[str, Any]) -> None:
    source.with_name("t.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def test_list_and_show(rollmill: Callable[..., Told], source: Path) -> None:
    write(source, entry("a", family="x", tags={"area": "web"}), entry("b\u202e", split="heldout"))
    told = rollmill("tasks", "list", source)
    assert told.code == 0 and "area=web" in told.out and "heldout" in told.out and "\u202e" not in told.out
    rows = [
        json.loads(line) for line in rollmill("tasks", "list", source, "--json", "--split", "train").out.splitlines()
    ]
    assert rows == [{"id": "a", "split": "train", "family": "x", "tags": {"area": "web"}}]
    shown = rollmill("tasks", "show", source, "a").out
    assert "user: do a" in shown and "handed in: main.py" in shown and "graded by: script" in shown
    assert "must stay hidden" not in shown and "return x + 1" not in shown
    hidden = rollmill("tasks", "show", source, "a", "--grading").out
    assert "must stay hidden" in hidden and "return x + 1" in hidden
    assert "no task 'c'" in rollmill("tasks", "show", source, "c").err


def test_check_finds_each_kind_of_bad_task(rollmill: Callable[..., Told], source: Path) -> None:
    right = "def f(x):\n    return x + 1\n"
    drawn = "import random, time\nrandom.seed(time.time_ns())\nassert False\n"
    rows = [
        entry("good"),
        entry("wrong", reference={"main.py": "def f(x):\n    return x\n"}),
        entry("solved", files={"main.py": right + "# done\n"}, reference={}),
        entry("leak", files={"tests/old.py": TEST}),
        entry("gone", image="no-such-image"),
        entry("never", grading={"kind": "script", "files": {"t.py": drawn}, "command": ["python3", "t.py"]}),
    ]
    write(source, *rows)
    with source.with_name("t.jsonl").open("a") as file:
        file.write("{broken\n")
    told = rollmill("tasks", "check", source)
    lines = {row["id"]: next(line for line in told.out.splitlines() if f" {row['id']} " in line) for row in rows}
    assert told.code == 1 and " ok " in lines["good"], told
    assert "the reference does not solve it" in lines["wrong"] and "the reference does not" in lines["never"]
    assert "doing nothing solves it" in lines["solved"] and "tests/old.py shows grading.files.t.py" in lines["leak"]
    assert "machine image 'no-such-image'" in lines["gone"]
    assert "t.jsonl:7: not valid JSON" in told.err and "1 of 6 tasks are all right, 1 problems" in told.out
    assert "reward script cannot protect: By exit code or reward file" in told.out
    assert "5 tasks (" in told.out and "code that the command imports or starts can decide it" in told.out
    assert told.err.count("not valid JSON") == 1
    good = rollmill("tasks", "check", source, "--task", "good", "--repeat", 3)
    assert good.code == 0 and "1 of 1 tasks" in good.out


def test_check_shows_each_result_as_it_comes_and_keeps_them_at_an_interrupt(source: Path) -> None:
    waits = entry("waits", grading={"kind": "script", "command": ["sleep", "60"], "timeout_s": 60}, reference={})
    write(source, entry("good"), entry("bare", reference={}), waits)
    command = [sys.executable, "-c", "from rollmill.cli.main import main; main()", "tasks", "check", str(source)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(3)]
        process.send_signal(signal.SIGINT)
        rest, told = process.communicate(timeout=60)
    assert any(" good " in line and " ok " in line for line in lines), lines
    assert any("without a reference" in line for line in lines), lines
    assert process.returncode == 130 and "2 of 2 tasks are all right" in rest and "1 of 3 tasks were not" in told


def test_a_verdict_that_changes_and_a_reward_that_raises(rollmill: Callable[..., Told], source: Path) -> None:
    write(source, entry("a"))
    source.with_name("own_verdicts.py").write_text(
        "from rollmill import Grade, Reward\n"
        "class Fickle(Reward):\n    name = 'fickle'\n    count = 0\n    async def grade(self, episode):\n"
        "        Fickle.count += 1\n        return Grade(1.0 if Fickle.count == 1 else 0.5)\n"
        "class Raises(Reward):\n    name = 'raises'\n    async def grade(self, episode):\n        raise KeyError('x')\n"
        "class Nonsense(Reward):\n    name = 'nonsense'\n    async def grade(self, episode):\n        return 3\n"
    )
    text = source.read_text()
    for name, problem in (("Fickle", "changes: 1, 0.5"), ("Raises", "KeyError: 'x'"), ("Nonsense", "returned int")):
        source.write_text(text.replace('"script"', f'"own_verdicts:{name}"'))
        told = rollmill("tasks", "check", source)
        assert told.code == 1 and problem in told.out, told
        assert f"reward {name.lower()} cannot protect: it does not say" in told.out


def test_tasks_that_are_made_up_are_drawn(rollmill: Callable[..., Told]) -> None:
    told = rollmill("tasks", "check", DEMO, "--count", 2, "--repeat", 1)
    assert told.code == 0 and "4 of 4 tasks are all right" in told.out, told


def test_a_checkpoint_that_is_not_there_stops_no_look_at_tasks(rollmill: Callable[..., Told], tmp_path: Path) -> None:
    source = tmp_path / "run.toml"
    text = 'name = "r"\ncheckpoint = "absent"\n[[stages]]\nkind = "rl"\nsteps = 1\n'
    text += '[tasks]\nkind = "jsonl"\npath = "t.jsonl"\n'
    source.write_text(text + '[[rewards]]\nkind = "script"\n')
    write(source, entry("a"))
    assert rollmill("tasks", "list", source).code == 0
    assert "1 of 1 tasks are all right" in rollmill("tasks", "check", source, "--repeat", 1).out
    told = rollmill("rollout", source)
    assert "--model is missing" in told.err, told
    source.write_text(text + "[rolouts]\n")
    assert "did you mean 'rollouts'" in rollmill("tasks", "list", source).err
    source.write_text(text.replace("path", "pth"))
    assert "pth" in rollmill("tasks", "list", source).err
