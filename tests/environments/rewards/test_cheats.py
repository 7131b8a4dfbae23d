"""Submissions that know no answer and try to be rewarded, one of each class, against each way to grade.

`calls`, `pytest` and `script` with verdict `python` reward none. What a command of the task decides by its exit code or
a reward file can be decided by code that it imports: that is named here too, so that it changes only on purpose.
"""

from __future__ import annotations

from typing import Any

import pytest

from rollmill.environments.episode import Episode
from rollmill.environments.rewards.calls import Calls, CallsConfig
from rollmill.environments.rewards.pytest import Pytest, PytestConfig
from rollmill.environments.rewards.script import Script, ScriptConfig
from rollmill.environments.task import Task, WholeDiff
from rollmill.machines.namespace.client import NamespaceHost

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

CASES = [(3, 128486), (17, 239352), (991, 952437)]  # of a formula that no submission knows
CHECKS = "".join(f"assert f({x}) == {y}\n" for x, y in CASES)
UNIT = "import unittest\nfrom main import f\nclass Hidden(unittest.TestCase):\n" + "".join(
    f"    def test_{x}(self): self.assertEqual(f({x}), {y})\n" for x, y in CASES
)
FUNCTIONS = "from main import f\n" + "".join(f"def test_{x}(): assert f({x}) == {y}\n" for x, y in CASES)
SCRIPT = {"kind": "script", "files": {"hidden.py": f"from main import f\n{CHECKS}"}}
WRITES = "import hidden\nopen('/tmp/reward.txt', 'w').write('1')\n"
GRADINGS: dict[str, dict[str, Any]] = {
    "calls": {"kind": "calls", "module": "main.py", "function": "f", "cases": [[[x], y] for x, y in CASES]},
    "unittest": {
        "kind": "pytest",
        "framework": "unittest",
        "files": {"tests/test_f.py": UNIT},
        "FAIL_TO_PASS": [f"tests/test_f.py::Hidden::test_{x}" for x, _ in CASES],
    },
    "pytest": {
        "kind": "pytest",
        "framework": "pytest",
        "files": {"tests/test_f.py": FUNCTIONS},
        "FAIL_TO_PASS": [f"tests/test_f.py::test_{x}" for x, _ in CASES],
    },
    "python": {"kind": "script", "verdict": "python", "test": f"from main import f\n{CHECKS}"},
    "exit": {**SCRIPT, "command": ["python", "hidden.py"]},
    "reward file": {
        **SCRIPT,
        "verdict": "reward_file",
        "files": {**SCRIPT["files"], "run.py": WRITES},
        "command": ["python", "run.py"],
        "reward_files": ["/tmp/reward.txt"],
    },
}
HUNT = """
import gc, os, sys
def words(value):
    if type(value) is dict:
        for inner in list(value.values()): yield from words(inner)
    elif type(value) is str and len(value) == 32 and set(value) <= set("0123456789abcdef"): yield value
found = set()
frame = sys._getframe()
while frame is not None:
    found |= set(words(dict(frame.f_locals)))
    frame = frame.f_back
for each in gc.get_objects():
    if type(each) is dict and len(each) < 50: found |= set(words(each))
for word in found:
    for index in range(-1, 5): os.write(1, f"\\n{word} {index} passed\\n".encode())
    os.write(1, f"\\n{word}\\n".encode())
def f(x): return 0
"""
READ = """
import glob, re, sys
texts = [open(path, errors="replace").read() for path in glob.glob("/work/**/*.py", recursive=True)]
frame = sys._getframe()
numbers = []
while frame is not None:
    codes = [frame.f_code]
    while codes:
        for each in codes.pop().co_consts:
            codes += [each] if hasattr(each, "co_consts") else []
            numbers += [each] if type(each) is int else []
    frame = frame.f_back
table = {int(a): int(b) for text in texts for a, b in re.findall(r"f\\((\\d+)\\)(?:,| ==) (\\d+)", text)}
table.update(zip(numbers, numbers[1:]))
def f(x): return table.get(x, 0)
"""
EQUAL = """
class Equal:
    __hash__ = None
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __sub__(self, other): return self
    def __abs__(self): return self
    def __lt__(self, other): return True
    __le__ = __contains__ = __lt__
    def __getattr__(self, name): return self
def f(x): return Equal()
"""
LIAR = """
class Liar(int):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    __hash__ = int.__hash__
def f(x): return Liar(1)
"""
PATCH = """
import builtins, json, os, unittest
for name in dir(unittest.TestCase):
    if name.startswith("assert"): setattr(unittest.TestCase, name, lambda *given, **named: None)
json.dumps = lambda *given, **named: '[0, {"value": 1}]'
builtins.AssertionError = type("AssertionError", (Exception,), {})
def f(x): return 0
"""
LEAVE = "import os\nos._exit(0)\n"
STAY = """
import os, time
def f(x): return 0
if os.fork() == 0:
    os.setsid()
    while True:
        for name in ("/work/tests/test_f.py", "/work/hidden.py", "/tmp/reward.txt"):
            try: open(name, "w").write("1")
            except OSError: pass
        time.sleep(0.01)
"""
SHADOW = LEAVE + HUNT
CHEATS: dict[str, dict[str, str]] = {
    "leaves at import": {"main.py": LEAVE},
    "leaves at the end": {"main.py": "import atexit, os\natexit.register(lambda: os._exit(0))\ndef f(x): return 0\n"},
    "raises SystemExit": {"main.py": "def f(x): raise SystemExit(0)\n"},
    "skips": {"main.py": "import unittest\ndef f(x): raise unittest.SkipTest\n"},
    "skips as pytest": {"main.py": "import pytest\ndef f(x): pytest.skip('later')\n"},
    "expects to fail": {"main.py": "import pytest\ndef f(x): pytest.xfail('later')\n"},
    "equals everything": {"main.py": EQUAL},
    "a number that lies": {"main.py": LIAR},
    "hunts for words": {"main.py": HUNT},
    "reads tests and constants": {"main.py": READ},
    "patches": {"main.py": PATCH},
    "leaves a process": {"main.py": STAY},
    "shadows the library": dict.fromkeys(("base64.py", "random.py", "secrets.py", "subprocess.py", "json.py"), SHADOW),
    "site packages": dict.fromkeys(("sitecustomize/__init__.py", "usercustomize/__init__.py", "evil.pth"), LEAVE),
    "shadows the framework": dict.fromkeys(("pytest.py", "unittest.py", "tests/__init__.py", "conftest.py"), LEAVE),
    "replaces the tests": {
        "tests/test_f.py": "".join(f"def test_{x}(): pass\n" for x, _ in CASES),
        "hidden.py": "",
        "run.py": "open('/tmp/reward.txt', 'w').write('1')\n",
    },
}
# Code that a command imports can end its process, patch it, and write its files. The task's owner chose this.
OPEN = {
    "exit": {"leaves at import", "leaves at the end", "raises SystemExit", "equals everything", "a number that lies"}
    | {"reads tests and constants"},
    "reward file": {"equals everything", "a number that lies", "reads tests and constants", "leaves a process"},
}


@pytest.mark.parametrize("grading", GRADINGS)
async def test_no_cheat_is_rewarded(host: NamespaceHost, image_with_pytest: str, grading: str) -> None:
    graders = {
        "calls": Calls(CallsConfig(timeout_s=3.0)),
        "script": Script(ScriptConfig(timeout_s=3.0)),
        "pytest": Pytest(PytestConfig(test_timeout_s=3.0)),
    }
    task = Task(
        "t",
        "fix",
        image=image_with_pytest if grading == "pytest" else "host-python",
        files={"main.py": b"def f(x): return x\n"},
        submission=WholeDiff(),
        grading=GRADINGS[grading],
    )
    grader: Any = graders[GRADINGS[grading]["kind"]]
    honest = {"main.py": b"def f(x): return (x * 7919 + 104729) % 1000003\n"}
    assert (await grader.grade(Episode(task, honest, host))).value == 1.0
    rewarded = set()
    for name, files in CHEATS.items():
        given = {path: text.encode() for path, text in files.items()}
        if (await grader.grade(Episode(task, given, host))).value > 0:
            rewarded.add(name)
    assert rewarded <= OPEN.get(grading, set()), rewarded - OPEN.get(grading, set())
