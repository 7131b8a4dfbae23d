"""Tests run in one machine, the submission in another: what works across, and who decides where it does not."""

from __future__ import annotations

import ast
import collections
import re
from pathlib import Path
from typing import Any

import pytest

from rollmill.environments.episode import Episode
from rollmill.environments.rewards.apart import session
from rollmill.environments.rewards.pytest import Pytest, PytestConfig
from rollmill.environments.rewards.script import Script
from rollmill.environments.task import Task, WholeDiff
from rollmill.machines.namespace.client import NamespaceHost
from rollmill.types import Grade

pytestmark = pytest.mark.asyncio(loop_scope="module")

SHOP = b"""
import collections, dataclasses, datetime, enum

class Colour(enum.Enum):
    RED = 1
    BLUE = 2

@dataclasses.dataclass
class Box:
    width: int
    height: int = 2
    def area(self): return self.width * self.height

class Refused(ValueError): pass
Pair = collections.namedtuple("Pair", "first second")
LIMIT = 3

def add(x): return x + 1
def sort(items): items.sort()
def refuse(x): raise Refused("no", x)
def each(function, count): return [function(number) for number in range(count)]
def count(n): yield from range(n)
def red(): return Colour.RED
def pair(): return Pair(1, 2)
def grown(box): return Box(box.width + 1, box.height)
def day(): return datetime.date(2020, 2, 29)
async def later(x): return x * 2
def helper(): return 1
def helped(): return helper()
def speak(): print("hello")
def feed(client): return client.get("a") + 1
def spin():
    while True: pass
if __name__ == "__main__":
    print(add(int(input())))
"""
TESTS = """
import asyncio, datetime, subprocess, sys
from unittest import mock
import pytest
import shop
from shop import Box, Colour, Pair, Refused, add

def test_numbers(): assert add(3) == 4 and add(0.5) == 1.5 and add(10 ** 30) == 10 ** 30 + 1
def test_changed_in_place():
    items = [3, 1, 2]
    shop.sort(items)
    assert items == [1, 2, 3]
def test_exceptions():
    with pytest.raises(Refused) as caught: shop.refuse(7)
    assert caught.value.args == ("no", 7) and isinstance(caught.value, ValueError)
    with pytest.raises(TypeError): add("x")
def test_objects():
    box = Box(1)
    assert (box.width, box.area(), repr(box)) == (1, 2, "Box(width=1, height=2)")
    assert box == Box(1) and box != Box(2) and isinstance(shop.grown(box), Box) and shop.grown(box).width == 2
    box.width = 5
    assert box.area() == 10
def test_members():
    assert shop.red() == Colour.RED and shop.red() is Colour.RED and Colour(2) is Colour.BLUE
    assert [colour.name for colour in Colour] == ["RED", "BLUE"]
def test_named_tuples(): assert shop.pair() == (1, 2) and shop.pair().second == 2 and shop.pair() == Pair(1, 2)
def test_dates(): assert shop.day() == datetime.date(2020, 2, 29)
def test_functions_of_the_test(): assert shop.each(lambda number: number * 2, 3) == [0, 2, 4]
def test_generators(): assert list(shop.count(3)) == [0, 1, 2]
def test_coroutines(): assert asyncio.run(shop.later(3)) == 6
def test_patches(monkeypatch):
    monkeypatch.setattr(shop, "helper", lambda: 5)
    assert shop.helped() == 5
def test_mocks():
    with mock.patch("shop.helper", return_value=9): assert shop.helped() == 9
    assert shop.helped() == 1
def test_output(capsys):
    shop.speak()
    assert capsys.readouterr().out == "hello\\n"
class Client:
    def get(self, key): return 41
def test_objects_of_the_test(): assert shop.feed(Client()) == 42
def test_constants(): assert shop.LIMIT == 3 and "add" in vars(shop) and shop.__name__ == "shop"
def test_programs():
    done = subprocess.run([sys.executable, "shop.py"], input="3", capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "4\\n")
def test_endless(): shop.spin()
def test_after_an_endless_one(): assert add(1) == 2
@pytest.mark.parametrize("x", [1, 2])
def test_parameters(x): assert add(x) == x + 1
"""
NAMES = [f"tests/test_shop.py::{name}" for name in re.findall(r"^def (test_\w+)", TESTS, re.MULTILINE)]


def make_task(image: str, tests: str, names: list[str], **more: Any) -> Task:
    grading = {"kind": "pytest", "files": {"tests/test_shop.py": tests}, "FAIL_TO_PASS": names}
    extra = {key: more.pop(key) for key in ("isolation",) if key in more}
    return Task("t", "fix", image=image, submission=WholeDiff(), grading={**grading, **extra}, **more)


async def grade(host: NamespaceHost, task: Task, files: dict[str, bytes], suite: Pytest | None = None) -> Grade:
    return await (suite or Pytest(PytestConfig(test_timeout_s=3.0))).grade(Episode(task, files, host))


async def test_what_tests_do_with_a_submission_works_apart(host: NamespaceHost, image_with_pytest: str) -> None:
    task = make_task(image_with_pytest, TESTS, NAMES)
    reward = await grade(host, task, {"shop.py": SHOP})
    assert reward.evidence["fail_to_pass"] == {"tests/test_shop.py::test_endless": "time"}, reward.evidence
    assert reward.evidence["isolation"] == {"apart": len(NAMES)}


# A test that needs a class of the submission to derive from, and one whose object says what it equals.
CLOSE = """
import shop

class Mine(shop.Base):
    def name(self): return "mine"

def test_derived(): assert Mine().greet() == "hello mine"
"""
EQUALS = "import shop\ndef test_equals(): assert shop.Metres(3) == 3\n"
DERIVED = b"class Base:\n    def greet(self): return 'hello ' + self.name()\n"
METRES = b"""
class Metres:
    def __init__(self, n): self.n = n
    def __eq__(self, other): return self.n == other
"""
PATCHES = """
import builtins, shop
from unittest import mock

def test_patched():
    with mock.patch.object(builtins, "input", lambda: "7"): assert shop.ask() == 7
"""
SHARES = "import shop\ndef test_file():\n    shop.save('x.txt')\n    assert open('x.txt').read() == 'saved'\n"
ASKS = b"def ask(): return int(input())\n"
SAVES = b"def save(path): open(path, 'w').write('saved')\n"
LYING = b"class Metres:\n    def __init__(self, n): pass\n    def __eq__(self, other): return True\n"


@pytest.mark.parametrize(
    ("tests", "solution", "level"),
    [
        (CLOSE, DERIVED, "process"),
        (PATCHES, ASKS, "process"),
        (SHARES, SAVES, "process"),
        (EQUALS, METRES, "trusting"),
        ("import shop\ndef test_is(): pass\n", b"", "apart"),
    ],
)
async def test_the_reference_decides_how_a_test_runs(
    host: NamespaceHost, image_with_pytest: str, tests: str, solution: bytes, level: str
) -> None:
    names = [f"tests/test_shop.py::{name}" for name in re.findall(r"def (test_\w+)", tests)]
    task = make_task(image_with_pytest, tests, names, reference={"shop.py": solution})
    suite = Pytest()
    reward = await grade(host, task, {"shop.py": solution}, suite)
    assert (reward.value, reward.evidence["isolation"]) == (1.0, {level: 1}), reward.evidence
    told = await suite.weaknesses(Episode(task, {}, host))
    assert bool(told) == (level != "apart"), told
    alone = make_task(image_with_pytest, tests, names)
    unknown = await grade(host, alone, {"shop.py": solution})
    assert (unknown.value, unknown.evidence["isolation"]) == (float(level == "apart"), {"apart": 1})
    assert "without a reference" in await suite.weaknesses(Episode(alone, {}, host))
    near = make_task(image_with_pytest, tests, names, isolation="process")
    assert (await grade(host, near, {"shop.py": solution})).value == 1.0
    assert "can make them pass" in await suite.weaknesses(Episode(near, {}, host))


async def test_objects_that_lie_about_being_equal_fail_where_nothing_needs_them(
    host: NamespaceHost, image_with_pytest: str
) -> None:
    task = make_task(image_with_pytest, EQUALS, ["tests/test_shop.py::test_equals"])
    assert (await grade(host, task, {"shop.py": LYING})).value == 0.0


SPY = b"""
def feed(client):
    found = []
    for name in ("__class__", "__globals__", "_hidden", "get.__globals__"):
        value = client
        try:
            for part in name.split("."): value = getattr(value, part)
            if type(value).__name__ != "type" and not name.startswith("__class__"): found.append(name)
        except Exception: pass
    return found
def call(function):
    found = []
    for name in ("__globals__", "__code__", "__closure__", "func_globals"):
        try:
            getattr(function, name)
            found.append(name)
        except Exception: pass
    try:
        function.x = 1
        found.append("set")
    except Exception: pass
    return found
"""
SPIED = """
import shop
SECRET = 42
class Client:
    _hidden = SECRET
    def get(self): return SECRET
def test_objects(): assert shop.feed(Client()) == []
def test_functions(): assert shop.call(lambda: SECRET) == []
"""


async def test_a_submission_cannot_look_into_the_tester(host: NamespaceHost, image_with_pytest: str) -> None:
    names = ["tests/test_shop.py::test_objects", "tests/test_shop.py::test_functions"]
    reward = await grade(host, make_task(image_with_pytest, SPIED, names), {"shop.py": SPY})
    assert reward.value == 1.0, reward.evidence


EVIL = """
import pytest
@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    out = yield
    out.get_result().outcome, out.get_result().longrepr = "passed", None
"""


@pytest.mark.parametrize("isolation", ["apart", "process"])
async def test_submitted_configuration_and_plugins_are_not_used(
    host: NamespaceHost, image_with_pytest: str, isolation: str
) -> None:
    task = make_task(
        image_with_pytest, "def test_no(): assert False\n", ["tests/test_shop.py::test_no"], isolation=isolation
    )
    files = {
        "evil.py": EVIL,
        "conftest.py": EVIL,
        "pytest.py": "import os\nos._exit(0)\n",
        "setup.cfg": "[tool:pytest]\naddopts = -p evil\n",
        "tox.ini": "[pytest]\naddopts = -p evil\n",
        "pyproject.toml": "[tool.pytest.ini_options]\naddopts = '-p evil'\n",
        "evil-1.0.dist-info/entry_points.txt": "[pytest11]\nevil = evil\n",
        "evil-1.0.dist-info/METADATA": "Name: evil\nVersion: 1.0\n",
    }
    reward = await grade(host, task, {path: text.encode() for path, text in files.items()})
    assert (reward.value, reward.evidence["fail_to_pass"]) == (0.0, {"tests/test_shop.py::test_no": "failed"})
    assert "1 failed" in reward.evidence["output"], reward.evidence


async def test_statements_see_constants_and_the_variables_of_the_task(host: NamespaceHost) -> None:
    test = "import os, main\nglobals().update(vars(main))\nassert LIMIT == 3 and f() == 'here' == os.environ['PLACE']\n"
    grading = {"kind": "script", "verdict": "python", "test": test, "env": {"PLACE": "here"}}
    task = Task("t", "fix", submission=("main.py",), grading=grading)
    source = b"import os\nLIMIT = 3\ndef f(): return os.environ['PLACE']\n"
    reward = await Script().grade(Episode(task, {"main.py": source}, host))
    assert reward.value == 1.0, reward.evidence


@pytest.mark.parametrize("names", [("wire", "proxies", "tester"), ("wire", "worker")], ids=["tester", "worker"])
async def test_modules_of_one_program_define_no_name_twice(names: tuple[str, ...]) -> None:
    folder = Path(session.__file__).parent
    defined = collections.Counter[str]()
    for name in names:
        for node in ast.parse((folder / f"{name}.py").read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                defined[node.name] += node.name != "main"
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                defined.update(each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name))
    assert max(defined.values()) == 1, defined.most_common(3)


@pytest.mark.parametrize("magic", ["same", "other"])
async def test_a_program_is_compiled_where_another_python_reads_it(host: NamespaceHost, magic: str) -> None:
    program = session.Program.of("wire", "worker")
    start = program.start if magic == "same" else re.sub(r"== b'.*?' else", "== b'' else", program.start)
    assert magic == "same" or start != program.start
    machine = await host.create("host-python")
    try:
        asked = session.Program(
            start.replace("exec(", "__name__ = 'asked'; exec(") + "print(Worker.mro()[1])", program.text
        )
        result = await asked.run(machine, {}, timeout_s=10.0)
        assert result.output.decode().strip() == "<class 'asked.Link'>", result.output
    finally:
        await machine.close()
