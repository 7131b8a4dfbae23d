"""Problems in the format of MBPP and HumanEval: what the agent is told, and what the hidden statements let pass."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rollmill.environments.episode import Episode
from rollmill.environments.rewards.script import Script, ScriptConfig
from rollmill.environments.task import Task
from rollmill.environments.tasks.humaneval import HumanEvalTasks
from rollmill.environments.tasks.listed import ListedTasks
from rollmill.environments.tasks.mbpp import MbppTasks
from rollmill.environments.tasks.task_splits import TaskFileConfig
from rollmill.errors import TaskError
from rollmill.machines.namespace.client import NamespaceHost

pytestmark = pytest.mark.asyncio(loop_scope="module")

TWICE: dict[str, Any] = {
    "task_id": 7,
    "text": "Write a function that doubles.",
    "code": "def help(x):\r\n    return x\r\ndef twice(x):\r\n    return help(x) * 2",
    "test_list": ["assert twice(2) == 4", "assert twice(-3) == -6", 'assert twice("a\\n") == "a\\na\\n"'],
    "test_setup_code": "import math",
    "challenge_test_list": ["assert math.isinf(twice(math.inf))"],
    "source_file": "ignored",
}
NEXT: dict[str, Any] = {
    "task_id": "HumanEval/1",
    "prompt": 'def one():\n    return 1\n\n\ndef following(x: int) -> int:\n    """ The next number.\n    """\n',
    "canonical_solution": "    return x + one()\n",
    "test": "def check(candidate):\n    assert candidate(1) == 2\n    assert one() == 1\n",
    "entry_point": "following",
}


def load(kind: type[Any], tmp_path: Path, *rows: dict[str, Any]) -> ListedTasks:
    path = tmp_path / "problems.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    made: ListedTasks = kind(TaskFileConfig(path=str(path)))
    return made


async def passes(host: NamespaceHost, task: Task, main: bytes) -> bool:
    return (await Script(ScriptConfig(timeout_s=30.0)).grade(Episode(task, {"main.py": main}, host))).solved


async def test_mbpp(host: NamespaceHost, tmp_path: Path) -> None:
    task = load(MbppTasks, tmp_path, TWICE).get("mbpp/7")
    assert "doubles" in task.instruction and "`twice`" in task.instruction and "main.py" in task.instruction
    assert TWICE["test_list"][0] in task.instruction and TWICE["test_list"][1] not in task.instruction
    assert task.files == {} and task.submission == ("main.py",)
    assert await passes(host, task, task.reference["main.py"])
    assert not await passes(host, task, b"def twice(x):\n    return 4\n")
    assert not await passes(host, task, b"")


async def test_humaneval(host: NamespaceHost, tmp_path: Path) -> None:
    task = load(HumanEvalTasks, tmp_path, NEXT).get("HumanEval/1")
    assert "`following`" in task.instruction and task.files["main.py"] == NEXT["prompt"].encode()
    assert await passes(host, task, task.reference["main.py"])
    assert not await passes(host, task, task.files["main.py"])


@pytest.mark.parametrize(
    "cheat",
    [
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "import builtins; builtins.AssertionError = None; raise SystemExit",
        "def twice(x):\n    raise SystemExit(0)",
        "import atexit, os; atexit.register(os._exit, 0)\ndef twice(x):\n    return 4",
        "import sys\nif len(sys.stdin.read()) == 0: twice = None",
    ],
)
async def test_a_simple_cheat_does_not_pass(host: NamespaceHost, tmp_path: Path, cheat: str) -> None:
    assert not await passes(host, load(MbppTasks, tmp_path, TWICE).get("mbpp/7"), cheat.encode())


@pytest.mark.parametrize(
    ("kind", "row", "told"),
    [
        (MbppTasks, {**TWICE, "text": " "}, "text: it is missing; the instruction is in `text` or `prompt`"),
        (MbppTasks, {**TWICE, "code": "def ("}, "code: it is no Python"),
        (MbppTasks, {**TWICE, "test_list": []}, "test_list"),
        (MbppTasks, {**TWICE, "test_list": ["assert"]}, "test_list.0: it is no Python"),
        (
            MbppTasks,
            {**TWICE, "test_list": ["assert other()"]},
            r"uses no function that `code` defines \(help, twice\)",
        ),
        (HumanEvalTasks, {**NEXT, "entry_point": "nothing"}, "defines no function 'nothing'"),
        (HumanEvalTasks, {**NEXT, "entry_point": "a; b"}, "entry_point"),
        (HumanEvalTasks, {**NEXT, "test": "check(1)"}, "test: defines no function 'check'"),
        (HumanEvalTasks, {**NEXT, "canonical_solution": "return ("}, "no Python"),
    ],
)
async def test_a_bad_problem_is_named(tmp_path: Path, kind: type[Any], row: dict[str, Any], told: str) -> None:
    with pytest.raises(TaskError, match=told):
        load(kind, tmp_path, row)


async def test_odd_escapes_in_a_problem_are_not_reported(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    odd = TWICE | {"code": TWICE["code"] + '\nPATTERN = "\\d"\n'}
    assert b"\\d" in load(MbppTasks, tmp_path, odd).get("mbpp/7").reference["main.py"]
    assert not recwarn.list
