"""Rewards grade in an OCI image, with the image's own Python and packages."""

from __future__ import annotations

from typing import Any

import pytest

from rollmill.environments.episode import Episode
from rollmill.environments.rewards.pytest import Pytest, PytestConfig
from rollmill.environments.rewards.script import Script, ScriptConfig
from rollmill.environments.task import Task
from rollmill.machines.namespace.client import NamespaceHost
from rollmill.types import Grade

pytestmark = pytest.mark.asyncio(loop_scope="module")
_TESTS = """
import pytest
from main import f

@pytest.fixture
def three():
    return 3

@pytest.mark.parametrize("add", [0, 1])
def test_new(three, add):
    assert f(three + add) == 4 + add

def test_of_the_image():
    assert pytest.__file__.startswith("/usr/lib/python3/dist-packages/")
"""


async def grade(reward: Pytest | Script, host: NamespaceHost, image: str, source: str, grading: Any) -> Grade:
    task = Task("t", "fix", image=image, files={"main.py": b""}, submission=("main.py",), grading=grading)
    return await reward.grade(Episode(task, {"main.py": source.encode()}, host))


async def test_pytest_is_that_of_the_image(host: NamespaceHost, debian: str) -> None:
    names = ["tests/test_f.py::test_new[0]", "tests/test_f.py::test_new[1]", "tests/test_f.py::test_of_the_image"]
    grading = {"kind": "pytest", "files": {"tests/test_f.py": _TESTS}, "FAIL_TO_PASS": names, "PASS_TO_PASS": []}
    reward = Pytest(PytestConfig(timeout_s=60.0))
    right = await grade(reward, host, debian, "def f(x): return x + 1\n", grading)
    assert right.value == 1.0, right.evidence
    assert (await grade(reward, host, debian, "def f(x): return 4\n", grading)).value == 0.0


async def test_a_script_runs_on_the_programs_of_the_image(host: NamespaceHost, debian: str, busybox: str) -> None:
    reward = Script(ScriptConfig(timeout_s=20.0))
    check = "import sys; from main import f; sys.exit(0 if f(1) == 2 and sys.prefix == '/usr' else 1)"
    grading = {"kind": "script", "command": ["python3", "check.py"], "files": {"check.py": check}}
    right = await grade(reward, host, debian, "def f(x): return x + 1\n", grading)
    assert right.value == 1.0, right.evidence
    assert (await grade(reward, host, debian, "def f(x): return x\n", grading)).value == 0.0
    shell = {
        "kind": "script",
        "command": ["sh", "-c", "grep -q yes main.py && readlink -f $(which sh) | grep -q busybox"],
    }
    assert (await grade(reward, host, busybox, "yes\n", shell)).value == 1.0
    assert (await grade(reward, host, busybox, "no\n", shell)).value == 0.0
