"""Suites of hidden tests in real machines, one verdict per test. The machines here have no pytest, so unittest runs."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rollmill.environments.episode import Episode
from rollmill.environments.rewards.pytest import Pytest, PytestConfig
from rollmill.environments.task import Task
from rollmill.errors import TaskError
from rollmill.machines.namespace.client import NamespaceHost
from rollmill.types import Grade

pytestmark = pytest.mark.asyncio(loop_scope="module")

HIDDEN = """
import unittest
from main import f, g

class New(unittest.TestCase):
    def test_small(self):
        self.assertEqual(f(3), 4)
    def test_large(self):
        self.assertEqual(f(1000), 1001)

class Plain:
    def test_text(self):
        assert g() == "kept"

def test_kept():
    assert g() == "kept"
"""
NEW = ["tests/test_f.py::New::test_small", "tests/test_f.py::New::test_large"]
KEPT = ["tests/test_f.py::test_kept", "tests/test_f.py::Plain::test_text"]
GRADING = {"kind": "pytest", "files": {"tests/test_f.py": HIDDEN}, "FAIL_TO_PASS": NEW, "PASS_TO_PASS": KEPT}
RIGHT = "def f(x): return x + 1\ndef g(): return 'kept'\n"
PRISTINE = "def f(x): return x\ndef g(): return 'kept'\n"


async def grade(host: NamespaceHost, source: str, grading: Any = GRADING, **settings: Any) -> Grade:
    files = {"main.py": PRISTINE.encode()}
    task = Task("t", "fix", files=files, submission=("main.py", "tests/test_f.py"), grading=grading)
    submission = {"main.py": source.encode(), "tests/test_f.py": b"def test_kept(): pass\n"}
    reward = await Pytest(PytestConfig(**{"test_timeout_s": 5.0, **settings})).grade(Episode(task, submission, host))
    assert len(json.dumps(reward.evidence, allow_nan=False)) < 10_000
    return reward


async def test_all_or_nothing(host: NamespaceHost) -> None:
    right = await grade(host, RIGHT)
    assert (right.value, right.parts) == (1.0, {"fail_to_pass": 1.0, "pass_to_pass": 1.0}), right.evidence
    assert right.evidence["framework"] == "unittest"
    half = await grade(host, "def f(x): return 4\ndef g(): return 'kept'\n")
    assert (half.value, half.parts) == (0.0, {"fail_to_pass": 0.5, "pass_to_pass": 1.0})
    assert half.evidence["fail_to_pass"] == {NEW[1]: "failed"} and "AssertionError" in half.evidence["output"]


async def test_suites_have_longer_in_a_slow_machine(host: NamespaceHost, slow_commands: list[dict[str, Any]]) -> None:
    for grading, seconds in ((GRADING, 600.0), ({**GRADING, "timeout_s": 7.0}, 140.0)):
        assert (await grade(host, RIGHT, grading, timeout_s=30.0)).value == 1.0
        ran = next(each for each in reversed(slow_commands) if b'"tests"' in each.get("stdin", b""))
        order = json.loads(ran["stdin"].rpartition(b"\n")[2])
        assert (order["timeout_s"], order["test_timeout_s"]) == (seconds, 100.0)
        assert ran["timeout_s"] > seconds


async def test_partial_credit_gives_nothing_for_doing_nothing(host: NamespaceHost) -> None:
    assert (await grade(host, PRISTINE, partial=True)).value == 0.0
    assert (await grade(host, "def f(x): return 4\ndef g(): return 'kept'\n", partial=True)).value == 0.5
    broken = await grade(host, "def f(x): return x + 1\ndef g(): return 'new'\n", partial=True)
    assert broken.value == 0.0 and set(broken.evidence["pass_to_pass"]) == set(KEPT)


CHEATS = {
    "exits on import": "import os; os._exit(0)\n",
    "exits when called": "import os\ndef f(x): os._exit(0)\ng = lambda: os._exit(0)\n",
    "raises SystemExit": "import sys; sys.exit(0)\n",
    "answers on every descriptor": (
        "import os\n"
        "for number in range(1, 64):\n"
        "    try: os.write(number, b'passed')\n"
        "    except OSError: pass\n"
        "os._exit(0)\n"
    ),
    "reads its parent": (
        "import os, re\n"
        "parent = os.getppid()\n"
        "try:\n"
        "    os.lseek(0, 0, 0)\n"
        "    for line in open(f'/proc/{parent}/maps'):\n"
        "        first, last = (int(end, 16) for end in line.split()[0].split('-'))\n"
        "        memory = os.open(f'/proc/{parent}/mem', os.O_RDONLY)\n"
        '        for word in set(re.findall(rb\'"word": "([0-9a-f]{32})"\', os.pread(memory, last - first, first))):\n'
        "            out = open(f'/proc/{parent}/fd/1', 'w')\n"
        "            for i in range(4): out.write(f'\\n{word.decode()} {i} passed\\n')\n"
        "            out.close()\n"
        "except OSError as error: print(error)\n"
        "def f(x): return 0\n"
        "def g(): return ''\n"
    ),
    "skips": "import unittest\ndef f(x): raise unittest.SkipTest('no')\ng = f\n",
    "never ends": "while True: pass\n",
    "leaves a process": "import os, time\nif os.fork() == 0: time.sleep(600)\ndef f(x): return 0\ndef g(): return ''\n",
    "a flood": "print('x' * 10_000_000)\ndef f(x): return 0\ndef g(): return ''\n",
}


@pytest.mark.parametrize("source", CHEATS.values(), ids=CHEATS)
async def test_cheats_and_broken_code_fail_every_test(host: NamespaceHost, source: str) -> None:
    reward = await grade(host, source, test_timeout_s=1.0)
    assert (reward.value, reward.parts) == (0.0, {"fail_to_pass": 0.0, "pass_to_pass": 0.0}), reward.evidence


async def test_a_suite_that_runs_out_of_time_keeps_the_verdicts_it_has(host: NamespaceHost) -> None:
    source = RIGHT + "import time\ndef g(): time.sleep(60)\n"
    reward = await grade(host, source, timeout_s=4.0)
    assert (reward.value, reward.parts) == (0.0, {"fail_to_pass": 1.0, "pass_to_pass": 0.0}), reward.evidence
    assert set(reward.evidence["pass_to_pass"].values()) == {"time"}


@pytest.mark.parametrize(
    ("grading", "told"),
    [
        ({**GRADING, "FAIL_TO_PASS": []}, "FAIL_TO_PASS: List should have at least 1 item"),
        ({**GRADING, "PASS_TO_PASS": ["test_f"]}, "'test_f' names no test"),
        ({**GRADING, "framework": "pytest"}, "has no pytest"),
        ({**GRADING, "kind": "script"}, "kind: Input should be 'pytest'"),
    ],
)
async def test_a_suite_that_cannot_run_is_an_error_and_never_a_reward(
    host: NamespaceHost, grading: Any, told: str
) -> None:
    with pytest.raises(TaskError, match=told):
        await grade(host, RIGHT, grading)


PYTEST = """
import pytest
from main import f

@pytest.fixture
def three(): return 3

@pytest.mark.parametrize("x", [1, 2])
def test_parameters(x): assert f(x) == 2
def test_fixture(three): assert f(three) == 4
@pytest.mark.xfail
def test_expected_failure(): assert False
@pytest.mark.skip
def test_skipped(): pass
"""


@pytest.mark.parametrize(
    ("test", "passes"),
    [
        ("test_parameters[1]", True),
        ("test_parameters[2]", False),
        ("test_parameters", False),
        ("test_fixture", True),
        ("test_expected_failure", True),
        ("test_skipped", False),
        ("test_absent", False),
    ],
)
@pytest.mark.parametrize("isolation", ["apart", "process"])
async def test_pytest_of_an_image(
    host: NamespaceHost, image_with_pytest: str, isolation: str, test: str, passes: bool
) -> None:
    grading = {"kind": "pytest", "files": {"test_f.py": PYTEST}, "FAIL_TO_PASS": [f"test_f.py::{test}"]}
    task = Task(
        "t", "fix", image=image_with_pytest, submission=("main.py",), grading={**grading, "isolation": isolation}
    )
    reward = await Pytest().grade(Episode(task, {"main.py": RIGHT.encode()}, host))
    assert (reward.value, reward.evidence["framework"]) == (float(passes), "pytest"), reward.evidence
