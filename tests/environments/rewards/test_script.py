"""The script reward against right, wrong and cheating submissions, in real machines."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rollmill.environments.episode import Episode
from rollmill.environments.rewards.script import Script, ScriptConfig
from rollmill.environments.task import Task, WholeDiff
from rollmill.errors import TaskError
from rollmill.machines.namespace.client import NamespaceHost
from rollmill.types import Grade

pytestmark = pytest.mark.asyncio(loop_scope="module")

TEST = "from main import f\nfor x in (3, 10):\n    assert f(x) == x + 1, x\n"
EXIT = {"kind": "script", "files": {"hidden_test.py": TEST}, "command": ["python", "hidden_test.py"]}
PYTHON = {"kind": "script", "verdict": "python", "test": TEST}
RIGHT = "def f(x):\n    return x + 1\n"


def make_task(grading: Any, submission: tuple[str, ...] = ("main.py",)) -> Task:
    return Task("t", "fix", files={"main.py": b"def f(x):\n    return x\n"}, submission=submission, grading=grading)


async def grade(host: NamespaceHost, grading: Any, source: str, **more: Any) -> Grade:
    submission = {"main.py": source.encode(), "hidden_test.py": b"pass", "conftest.py": b"raise SystemExit(0)"}
    reward = await Script(ScriptConfig(timeout_s=2.0)).grade(Episode(make_task(grading, **more), submission, host))
    assert len(json.dumps(reward.evidence, allow_nan=False)) < 10_000
    return reward


@pytest.mark.parametrize("grading", [EXIT, PYTHON], ids=["exit", "python"])
async def test_right_and_wrong(host: NamespaceHost, grading: Any) -> None:
    right = await grade(host, grading, "print('noise')\n" + RIGHT)
    assert (right.value, right.grader, right.evidence["output"]) == (1.0, "script", "noise")
    wrong = await grade(host, grading, "def f(x):\n    return 4\n")
    assert wrong.value == 0.0 and wrong.evidence["output"].endswith("AssertionError: 10")
    assert (wrong.evidence["exit_code"], wrong.evidence["stopped"]) == (1, None)


@pytest.mark.parametrize("grading", [EXIT, PYTHON], ids=["exit", "python"])
@pytest.mark.parametrize(
    "source",
    [
        "def f(x:\n",
        "raise RuntimeError('no')\n",
        "while True: pass\n",
        "def f(x):\n    print('x' * 10_000_000)\n",
        "held = []\nwhile True: held.append(bytearray(1 << 20))\n",
        "print('\\0\\ud800')\n",
    ],
    ids=["syntax", "raises", "never ends", "a flood", "memory", "odd output"],
)
async def test_broken_submissions_are_worth_nothing(host: NamespaceHost, grading: Any, source: str) -> None:
    assert (await grade(host, grading, source)).value == 0.0


async def test_a_submission_cannot_replace_the_grading_files(host: NamespaceHost) -> None:
    reward = await grade(host, EXIT, "def f(x): return 0\n", submission=("main.py", "hidden_test.py"))
    assert reward.value == 0.0


CHEATS = {
    "exits": "import sys; sys.exit(0)\n",
    "exits at once": "import os; os._exit(0)\n",
    "exits when called": "import os\ndef f(x): os._exit(0)\n",
    "reads standard input again": (
        "import os, sys\n"
        "try: os.lseek(0, 0, 0)\n"
        "except OSError: pass\n"
        "os.write(1, os.read(0, 10000)); print(sys.argv, open('/proc/self/cmdline').read())\n"
        "text = os.read(0, 10000).decode()\n"
        "if 'word' in text: import json; print(json.loads(text)['word'])\n"
        "os._exit(0)\n"
    ),
    "patches the driver's tools": "import os\nos.write = print\nos._exit = lambda code: None\ndef f(x): return 0\n",
    "prints at the end": "import atexit\natexit.register(print, 'passed')\ndef f(x): return 0\n",
}


@pytest.mark.parametrize("source", CHEATS.values(), ids=CHEATS)
async def test_leaving_early_does_not_pass_a_python_test(host: NamespaceHost, source: str) -> None:
    assert (await grade(host, PYTHON, source)).value == 0.0


async def test_honest_code_may_print_a_lot_and_leave_threads(host: NamespaceHost) -> None:
    noise = "import threading, time\nprint('x' * 1_000_000)\nthreading.Thread(target=time.sleep, args=(60,)).start()\n"
    assert (await grade(host, PYTHON, noise + RIGHT)).value == 1.0


async def test_nothing_handed_in_and_too_much_handed_in(host: NamespaceHost) -> None:
    nothing = await Script().grade(Episode(make_task(EXIT), {}, host))
    assert (nothing.value, nothing.evidence["missing"]) == (0.0, ["main.py"])
    large = await Script().grade(Episode(make_task(EXIT), {"main.py": b"#" * (17 << 20)}, host))
    assert large.value == 0.0 and "No space left" in large.evidence["unwritable"]


async def test_a_task_set_may_write_tuples(host: NamespaceHost) -> None:
    assert (await grade(host, {**EXIT, "command": ("python", "hidden_test.py")}, RIGHT)).value == 1.0


async def test_a_tasks_own_time_limit(host: NamespaceHost) -> None:
    grading = {**EXIT, "timeout_s": 0.3}
    reward = await Script(ScriptConfig(timeout_s=600.0)).grade(
        Episode(make_task(grading), {"main.py": b"while True: pass\n"}, host)
    )
    assert (reward.value, reward.evidence["stopped"]) == (0.0, "time")


@pytest.mark.parametrize(
    ("grading", "told"),
    [
        ({}, "kind: Field required"),
        ({"kind": "calls", "command": ["true"]}, "kind: Input should be 'script'"),
        ({"kind": "script", "command": []}, "command: List should have at least 1 item"),
        ({"kind": "script", "command": "python x.py"}, "command: Input should be a valid array"),
        ({"kind": "script", "command": ["true"], "timeout": 3}, "unknown field 'timeout'"),
        ({**PYTHON, "test": "assert ("}, "test: Value error, '\\(' was never closed"),
        ({"kind": "script", "command": ["no-such-program"]}, "has no program 'no-such-program'"),
        ({**EXIT, "files": {"../x": ""}}, "x"),
        ({**EXIT, "files": {"x": b"bytes"}}, "bytes is not JSON serializable"),
        ({**EXIT, "files": {"x": "\ud800"}}, "cannot be read"),
    ],
)
async def test_a_grading_that_cannot_run_is_an_error_and_never_a_reward(
    host: NamespaceHost, grading: Any, told: str
) -> None:
    with pytest.raises(TaskError, match=told):
        await Script().grade(Episode(make_task(grading), {"main.py": RIGHT.encode()}, host))


# the task's command apart from the submission

CHECK = "assert open('out.txt').read().split() == ['4', '11'], 'wrong'\n"
APART = {
    "kind": "script",
    "inputs": {"in.txt": "3 10\n"},
    "run": ["sh", "-c", "python main.py < in.txt > out.txt"],
    "outputs": ["out.txt"],
    "files": {"check.py": CHECK},
    "command": ["python", "check.py"],
}
PRINTS = "for x in input().split(): print(int(x) + 1)\n"
PROGRAMS = {
    "leaves with success": "raise SystemExit(0)\n",
    "reads the check": "import glob\nfor path in glob.glob('/work/*.py'): print(open(path).read())\n",
    "writes what the command runs": "open('check.py', 'w').write(''); open('/tmp/reward.txt', 'w').write('1')\n",
    "stays": (
        "import os, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    while True:\n"
        "        for path in ('check.py', 'out.txt', '/tmp/reward.txt'):\n"
        "            try: open(path, 'w').write('1')\n"
        "            except OSError: pass\n"
        "        time.sleep(0.01)\n"
    ),
    "a link": "import os; os.remove('out.txt'); os.symlink('/etc/hostname', 'out.txt')\n",
    "a directory": "import os; os.remove('out.txt'); os.makedirs('out.txt/check.py')\n",
    "a pipe": "import os; os.remove('out.txt'); os.mkfifo('out.txt')\n",
    "too much": "while True: print('4 11' * 10000)\n",
    "fails": PRINTS + "raise SystemExit(1)\n",
    "never ends": PRINTS + "while True: pass\n",
}


@pytest.mark.parametrize("verdict", ["exit", "reward_file"])
async def test_a_command_sees_nothing_but_the_outputs_of_a_submission(host: NamespaceHost, verdict: str) -> None:
    grading: dict[str, Any] = {**APART, "verdict": verdict}
    if verdict == "reward_file":
        writes = CHECK + "open('/tmp/reward.txt', 'w').write('1')\n"
        grading |= {"files": {"check.py": writes}, "reward_files": ["/tmp/reward.txt"]}
    assert (await grade(host, grading, PRINTS)).value == 1.0
    earned = {name: (await grade(host, grading, source)).value for name, source in PROGRAMS.items()}
    assert earned == dict.fromkeys(PROGRAMS, 0.0)
    grader = Script()
    assert await grader.weaknesses(Episode(make_task(grading), {}, host)) == ""
    assert "`outputs` would keep it apart" in await grader.weaknesses(Episode(make_task(EXIT), {}, host))


async def test_a_hand_in_that_is_data_needs_no_run(host: NamespaceHost) -> None:
    check = "import csv\nassert next(csv.reader(open('answer.csv'))) == ['42']\n"
    grading = {"kind": "script", "outputs": ["answer.csv"], "files": {"c.py": check}, "command": ["python", "c.py"]}
    task = Task("t", "answer", files={"answer.csv": b"0"}, submission=WholeDiff(), grading=grading)
    given = {"csv.py": b"import os; os._exit(0)", "answer.csv": b"41"}
    assert (await Script().grade(Episode(task, given, host))).value == 0.0
    assert (await Script().grade(Episode(task, {**given, "answer.csv": b"42"}, host))).value == 1.0
    deleted = await Script().grade(Episode(task, {}, host, deleted=["answer.csv"]))
    assert deleted.value == 0.0 and "FileNotFoundError" in str(deleted.evidence["output"])


async def test_an_output_is_named_once_and_needed_by_run(host: NamespaceHost) -> None:
    with pytest.raises(TaskError, match="`run` and `inputs` need `outputs`"):
        await grade(host, {**APART, "outputs": []}, PRINTS)
    with pytest.raises(TaskError, match=r"\['check.py'\] are in `files` and in `outputs`"):
        await grade(host, {**APART, "outputs": ["check.py"]}, PRINTS)


EVIL = """
import pytest
@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    out = yield
    out.get_result().outcome, out.get_result().longrepr = "passed", None
"""


@pytest.mark.parametrize("given", ["files", "links"])
@pytest.mark.parametrize("command", [["python", "-m", "pytest", "-q"], ["sh", "check.sh"]], ids=["command", "file"])
async def test_submitted_configuration_of_pytest_is_not_used(
    host: NamespaceHost, image_with_pytest: str, command: list[str], given: str
) -> None:
    tests = {"tests/test_hidden.py": "from main import f\ndef test_f(): assert f(3) == 4\n"}
    files = {**tests, "check.sh": "exec python -m pytest -q\n"} if command[0] == "sh" else tests
    grading = {"kind": "script", "files": files, "command": command}
    kept = {"main.py": b"def f(x): return x\n", "pyproject.toml": b"[tool.pytest.ini_options]\n"}
    task = Task("t", "fix", image=image_with_pytest, files=kept, submission=WholeDiff(), grading=grading)
    evil = {
        "setup.cfg": b"[tool:pytest]\naddopts = -p evil\n",
        "tox.ini": b"[pytest]\naddopts = -p evil\n",
        "pyproject.toml": b"[tool.pytest.ini_options]\naddopts = '-p evil'\n",
    }
    links: dict[str, str] = {}
    if given == "links":
        links, evil = {path: f"my-{path}" for path in evil}, {f"my-{path}": text for path, text in evil.items()}
    wrong = {**evil, "evil.py": EVIL.encode()}
    script = Script(ScriptConfig(timeout_s=30.0))
    reward = await script.grade(Episode(task, wrong, host, links=links, deleted=["pyproject.toml"] if links else []))
    assert reward.value == 0.0 and "1 failed" in str(reward.evidence["output"]), reward.evidence
    reward = await script.grade(Episode(task, {**wrong, "main.py": RIGHT.encode()}, host, links=links))
    assert reward.value == 1.0, reward.evidence
    assert "can decide it" in await script.weaknesses(Episode(task, {}, host))
