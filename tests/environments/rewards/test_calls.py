"""The grader with right, wrong and cheating submissions. A cheat that scores is a bug."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rollmill.environments.episode import Episode
from rollmill.environments.rewards.calls import Calls, CallsConfig
from rollmill.environments.task import Task
from rollmill.errors import MachineError, TaskError
from rollmill.machines.images.image import BUILT_IN
from rollmill.machines.machine import ExecResult, Machine, MachineWrapper
from rollmill.machines.namespace.client import NamespaceConfig, NamespaceHost
from rollmill.types import Grade
from tests.machines.stand_ins import StandInHost

pytestmark = pytest.mark.asyncio(loop_scope="module")

OFFSET = 7290183645  # a number that does not occur by chance
CASES = [[[x], x + OFFSET] for x in (3, 10, 0)]


def make_task(cases: Any = CASES, **grading: Any) -> Task:
    grading = {"kind": "calls", "module": "main.py", "function": "f", "cases": cases, **grading}
    files = {"main.py": b"def f(x):\n    return x\n", "helper.py": f"offset = {OFFSET}\n".encode()}
    return Task("t", "fix", image=BUILT_IN, files=files, submission=("main.py",), grading=grading)


async def grade(host: NamespaceHost, source: str, task: Task | None = None, **more: str) -> Grade:
    submission = {"main.py": source.encode(), **{name: text.encode() for name, text in more.items()}}
    return await Calls(CallsConfig(timeout_s=2.0)).grade(Episode(task or make_task(), submission, host))


async def test_right_and_wrong(host: NamespaceHost) -> None:
    right = await grade(host, "from helper import offset\ndef f(x):\n    print('noise')\n    return x + offset\n")
    assert (right.value, right.parts, right.grader) == (1.0, {"cases": 1.0}, "calls")
    assert "noise" in right.evidence["output"] and "first_wrong" not in right.evidence
    wrong = await grade(host, f"def f(x):\n    return {OFFSET + 3} if x < 5 else x + {OFFSET}\n")
    assert wrong.value == 0.0 and wrong.parts["cases"] == pytest.approx(2 / 3)
    assert wrong.evidence["first_wrong"] == {
        "arguments": "[0]",
        "expected": str(OFFSET),
        "outcome": f'{{"value": {OFFSET + 3}}}',
    }


async def test_cases_have_longer_in_a_slow_machine(host: NamespaceHost, slow_commands: list[dict[str, Any]]) -> None:
    assert (await grade(host, f"def f(x):\n    return x + {OFFSET}\n")).value == 1.0
    assert slow_commands[-1]["timeout_s"] == 40.0


async def test_plain_data_of_every_kind_is_compared(host: NamespaceHost) -> None:
    values = [None, True, 1.5, "text\n\u2028", [1, [2]], {"a": [None]}, 10**40, (1, 2)]
    task = make_task([[[index], value] for index, value in enumerate(values)])
    reward = await grade(host, f"def f(i):\n    return {values!r}[i]\n", task)
    assert reward.value == 1.0, reward.evidence


@pytest.mark.parametrize(
    ("expected", "wrong"),
    [
        (1, "True"),
        (1, "1.0"),
        (True, "1"),
        (0, "False"),
        (2.0, "2"),
        (None, "0"),
        ([1, [0]], "[1, [False]]"),
        ({"a": [1]}, "{'a': [1.0]}"),
        ([1, 2], "[1]"),
        ([1], "[1, 2]"),
        ({"a": 1}, "{'a': 1, 'b': 1}"),
        ({"a": 1}, "{}"),
        ("1", "1"),
    ],
)
async def test_a_value_of_another_type_is_wrong(host: NamespaceHost, expected: Any, wrong: str) -> None:
    task = make_task([[[0], expected]])
    assert (await grade(host, f"def f(x):\n    return {wrong}\n", task)).value == 0.0
    assert (await grade(host, f"def f(x):\n    return {expected!r}\n", task)).value == 1.0


UNSTORABLE = {
    "infinity": "float('inf')",
    "minus infinity": "1e999 * -1",
    "not a number": "float('nan')",
    "nested": "{'a': [1, {'b': float('inf')}]}",
    "a huge integer": "10 ** 100_000",
    "half a surrogate pair": "{'\\ud800': ['\\udfff']}",
    "NUL": "'\\0'",
    "a long text": "'x' * 100_000",
    "a long list": "list(range(20_000))",
    "a cycle": "cycle",
    "a deep list": "deep",
    "a set": "{1}",
    "bytes": "b'x'",
    "a number of its own": "type('N', (float,), {})('inf')",
    "raises infinity": "raise_(float('inf'))",
    "raises surrogates": "raise_('\\ud800' * 9999)",
}
_UNSTORABLE = """
cycle = []
cycle.append(cycle)
deep = []
for _ in range(900): deep = [deep]
def raise_(value): raise ValueError(value)
def f(x): return {value}
"""


@pytest.mark.parametrize("value", UNSTORABLE.values(), ids=UNSTORABLE)
async def test_evidence_is_bounded_text_whatever_is_returned(host: NamespaceHost, value: str) -> None:
    reward = await grade(host, _UNSTORABLE.replace("{value}", value))
    check_storable(reward)


FORGED = {
    "infinity": "Infinity",
    "a large exponent": "1e999",
    "not a number": "[NaN]",
    "digits": "9" * 5000,
    "depth": "[" * 5000 + "]" * 5000,
    "surrogates": '"\\ud800"',
    "no JSON": "{",
}


@pytest.mark.parametrize("value", FORGED.values(), ids=FORGED)
async def test_forged_results_are_read_strictly(host: NamespaceHost, value: str) -> None:
    """Submitted code knows the driver's marker, and can write anything after it."""
    source = (
        "import sys, os\n"
        "frame = sys._getframe()\n"
        "while 'work' not in frame.f_globals: frame = frame.f_back\n"
        f"value = {value!r}\n"
        "word = frame.f_globals['work']['word']\n"
        "for i in range(3): os.write(1, f'\\n{word} [{i}, {{\"value\": {value}}}]\\n'.encode())\n"
        "os.write(1, f'\\n{word} {value}\\n{word} [1e999, {{}}]\\n{word} [-1, {{}}]\\n'.encode())\n"
        "os._exit(0)\n"
    )
    check_storable(await grade(host, source))


def check_storable(reward: Grade) -> None:
    assert reward.value == 0.0
    stored = json.dumps(reward.evidence, ensure_ascii=False, allow_nan=False)
    assert len(stored.encode()) < 10_000 and "\\u0000" not in stored.replace("\\\\u0000", "")


async def test_a_submission_that_does_not_fit_scores_zero(host: NamespaceHost) -> None:
    reward = await Calls().grade(Episode(make_task(), {"main.py": b"#" * (17 << 20)}, host))
    assert reward.value == 0.0 and "No space left" in reward.evidence["unwritable"]


BROKEN = {
    "syntax error": "def f(x:\n",
    "no function": "g = 1\n",
    "raises on import": "raise RuntimeError('no')\n",
    "raises": "def f(x):\n    raise ValueError('no')\n",
    "exits": "import sys\ndef f(x):\n    sys.exit(0)\n",
    "never ends": "def f(x):\n    while True: pass\n",
    "not UTF-8": "def f(x): return '\udcff'\n",
    "recursive data": "def f(x):\n    a = []\n    a.append(a)\n    return a\n",
    "a flood": "def f(x):\n    print('x' * 10_000_000)\n",
    "a memory bomb": "held = []\nwhile True: held.append(bytearray(1 << 20))\n",
    "a fork bomb": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass\n",
}


@pytest.mark.parametrize("source", BROKEN.values(), ids=BROKEN)
async def test_broken_submissions_score_zero_and_break_nothing(host: NamespaceHost, source: str) -> None:
    task = make_task()
    submission = {"main.py": source.encode("utf-8", "surrogateescape")}
    reward = await Calls(CallsConfig(timeout_s=2.0)).grade(Episode(task, submission, host))
    assert reward.value == 0.0 and "first_wrong" in reward.evidence


CHEATS = {
    "an object equal to everything": (
        "class Any(int):\n"
        "    __eq__ = lambda self, other: True\n"
        "    __hash__ = int.__hash__\n"
        "    __repr__ = lambda self: '7290183648'\n"
        "def f(x): return Any(0)\n"
    ),
    "a string that prints as JSON": "class S(str):\n    pass\ndef f(x): return S('7290183648')\n",
    "exits with success": "import os\nos._exit(0)\n",
    "prints a verdict": (
        "print('{\"value\": 1.0}')\nprint('ok')\nprint('all tests passed')\ndef f(x): return 0\n"
        "import sys; sys.stdout.flush(); print('0 [0, {\"value\": 7290183648}]')\n"
    ),
    "patches the tools of the driver": (
        "import json, os, sys, time, builtins\n"
        "json.dumps = lambda *a, **k: '[0, {\"value\": true}]'\n"
        "time.time = time.monotonic = lambda: 0\n"
        "builtins.isinstance = lambda *a: True\n"
        "builtins.type = lambda *a: int\n"
        "def f(x): return 0\n"
    ),
    "searches memory for expected values": (
        "import gc, sys\n"
        "def f(x):\n"
        "    frame = sys._getframe()\n"
        "    found = []\n"
        "    while frame:\n"
        "        found.append(repr(frame.f_locals) + repr(frame.f_globals))\n"
        "        frame = frame.f_back\n"
        "    found += [repr(item) for item in gc.get_objects()]\n"
        "    for end in ('83648', '83655', '83645'):\n"
        "        number = ''.join(['72901', end])\n"
        "        if any(number in text for text in found): return int(number)\n"
        "    return 0\n"
    ),
    "searches the file system": (
        "import os\n"
        "def f(x):\n"
        "    number = ''.join(['72901', '83648'])\n"
        "    files = [os.path.join(d, n) for top in ('/work', '/tmp') for d, _, ns in os.walk(top) for n in ns]\n"
        "    for path in [*files, '/proc/self/cmdline', '/proc/self/environ', '/proc/1/cmdline']:\n"
        "        if os.path.isfile(path) and number in open(path, errors='replace').read(): return int(number)\n"
        "    return 0\n"
    ),
    "leaves a process that answers": (
        "import os, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    while True:\n"
        "        os.write(1, b'\\n0 [0, {\"value\": 7290183648}]\\n'); time.sleep(0.01)\n"
        "def f(x): return 0\n"
    ),
    "answers on the channel with its word": (
        "import sys, os\n"
        "frame = sys._getframe()\n"
        "while 'work' not in frame.f_globals: frame = frame.f_back\n"
        "word = frame.f_globals['work']['word']\n"
        'for i in range(3): os.write(1, f\'\\n{word} [{i}, {{"value": {{"right": true}}}}]\\n\'.encode())\n'
        "os._exit(0)\n"
    ),
}


@pytest.mark.parametrize("source", CHEATS.values(), ids=CHEATS)
async def test_cheats_gain_nothing(host: NamespaceHost, source: str) -> None:
    reward = await grade(host, source)
    assert (reward.value, reward.parts["cases"]) == (0.0, 0.0)


async def test_only_declared_files_are_graded(host: NamespaceHost) -> None:
    """A sitecustomize, a conftest or a module that shadows the driver's own is not part of the answer."""
    trick = "import builtins, sys\nsys.modules['main'] = type('M', (), {'f': staticmethod(lambda x: x + 7290183645)})\n"
    for name in ("sitecustomize.py", "conftest.py", "json.py", "importlib/util.py", "test.py"):
        reward = await grade(host, "def f(x):\n    return x\n", **{name: trick})
        assert reward.value == 0.0


async def test_shadowing_modules_beside_the_answer_do_not_reach_the_driver(host: NamespaceHost) -> None:
    task = make_task()
    task = Task(**{**task.__dict__, "submission": ("main.py", "json.py", "sitecustomize.py")})
    trick = "import os; os.write(1, b'verdict'); os._exit(0)\n"
    source = f"def f(x):\n    return x + {OFFSET}\n"
    reward = await grade(host, source, task, **{"json.py": trick, "sitecustomize.py": trick})
    assert reward.value == 1.0


async def test_no_submission(host: NamespaceHost) -> None:
    reward = await Calls().grade(Episode(make_task(), {}, host))
    assert reward.value == 0.0 and reward.evidence["missing"] == "main.py"


class _DeafMachine(MachineWrapper):
    """A machine whose Python does not start, or that has none."""

    def __init__(self, machine: Machine, python: list[str]) -> None:
        super().__init__(machine)
        self._python = python

    async def exec(self, argv: Any, **options: Any) -> ExecResult:
        return await super().exec([*self._python, *argv[1:]], **options)


class _DeafHost(StandInHost):
    def __init__(self, host: NamespaceHost, *python: str) -> None:
        self.host = host
        self._python = list(python)

    async def create(self, *arguments: Any, **options: Any) -> Machine:
        return _DeafMachine(await super().create(*arguments, **options), self._python)


async def test_a_failure_of_the_infrastructure_is_never_a_reward(host: NamespaceHost, tmp_path: Any) -> None:
    submission = {"main.py": b"def f(x):\n    return x + 7290183645\n"}
    with pytest.raises(MachineError, match="did not start"):
        await Calls().grade(Episode(make_task(), submission, _DeafHost(host, "sh", "-c", "exit 3")))
    with pytest.raises(TaskError, match="has no program 'python'"):
        await Calls().grade(Episode(make_task(), submission, _DeafHost(host, "no-such-python")))
    with pytest.raises(TaskError, match="image"):
        task = Task(**{**make_task().__dict__, "image": "absent"})
        await Calls().grade(Episode(task, submission, NamespaceHost(NamespaceConfig())))


@pytest.mark.parametrize(
    "grading",
    [
        {"kind": "magic"},
        {"cases": []},
        {"cases": [[1]]},
        {"cases": None},
        {"cases": [[[object()], 1]]},
        {"cases": [[[1], float("nan")]]},
        {"cases": [[[float("inf")], 1]]},
        {"cases": [[[1], 10**5000]]},
    ],
)
async def test_grading_that_cannot_run_is_the_tasks_fault(host: NamespaceHost, grading: dict[str, Any]) -> None:
    with pytest.raises(TaskError):
        await grade(host, "def f(x): return x\n", make_task(**grading))
