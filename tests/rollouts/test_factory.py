"""The factory: its steps on text, and whole runs on a small repository in machines, with pip."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from rollmill.errors import HarnessError, TaskError
from rollmill.rollouts.factory.admit import Ground, _entry, _failure, hidden_texts
from rollmill.rollouts.factory.edits import Candidate, find_edits
from rollmill.rollouts.factory.install import Project, _plugins, _pyproject
from rollmill.rollouts.factory.instruct import TAG, Writer
from rollmill.rollouts.factory.make import _lines
from rollmill.rollouts.factory.overlap import overlapping
from rollmill.rollouts.factory.sources import Source, get_source
from rollmill.rollouts.factory.stable_tests import Suite, files_of_tests
from tests.cli.conftest import Told, rollmill  # noqa: F401
from tests.cli.test_own_agent import Endpoint, endpoint  # noqa: F401

SHOP = '''"""Prices."""  # a comment that stays


class Till:
    @staticmethod
    def total(prices: list[int], discount: int = 0) -> int:
        """The sum."""
        if not 0 <= discount < 100:
            raise ValueError(f"{discount + 1} and ä")
        whole = sum(prices)  # ä
        return whole - whole * discount // 100


def untested(a: int) -> int:
    b = a + 1
    c = b + 2
    return c
'''


def project_of(text: str) -> tuple[Project, Suite]:
    files = {"shop.py": text.encode(), "tests/test_shop.py": b"def test_a(): ...\n"}
    calls = {"tests/test_shop.py::test_a": [("shop.py", 5)]}
    suite = Suite(list(calls), frozenset(calls), calls, {}, frozenset({"tests/test_shop.py"}))
    return Project(Source("shop", files), files, ["."], "shop.packages"), suite


def test_edits_change_one_place_of_a_function_that_tests_run() -> None:
    project, suite = project_of(SHOP)
    found = find_edits(project, suite, ("removal", "bug"), seed=3)
    assert {each.kind for each in found} == {"removal", "bug"} and len({each.id for each in found}) == len(found) == 4
    assert all(each.tests == ("tests/test_shop.py::test_a",) and "total" in each.id for each in found)
    removed = next(each for each in found if each.kind == "removal")
    lines = removed.files["shop.py"].decode().splitlines()
    assert lines[6:8] == ['        """The sum."""', "        raise NotImplementedError"] and "def untested" in lines[10]
    for bug in (each for each in found if each.kind == "bug"):
        text = bug.files["shop.py"].decode()
        changed = [(old, new) for old, new in zip(SHOP.splitlines(), text.splitlines(), strict=False) if old != new]
        assert changed and "# a comment that stays" in text and ast.parse(text)
        assert "{discount + 1}" in text or "pass" in text, "no part of an f-string is changed"
    assert [each.id for each in find_edits(project, suite, ("removal", "bug"), seed=3)] == [each.id for each in found]


def test_what_cannot_be_parsed_or_is_too_short_gives_no_candidate() -> None:
    for text in ("def f(:\n", "def f(): return 1\n", "x = 1\r\n\r\n\r\n\r\ndef f():\r\n    return 1\r\n"):
        project, suite = project_of(text)
        assert find_edits(project, suite, ("removal", "bug"), seed=0) == []


def test_files_of_tests_are_the_modules_and_their_folders() -> None:
    files = ["pkg/a.py", "pkg/tests/test_a.py", "pkg/tests/data/x.json", "pkg/testing.py", "test_top.py", "other.py"]
    tests = ["pkg/tests/test_a.py::test", "test_top.py::test"]
    assert files_of_tests(files, tests) == {"pkg/tests/test_a.py", "pkg/tests/data/x.json", "test_top.py"}


def test_a_solution_in_a_source_is_found_whatever_its_spaces(tmp_path: Path) -> None:
    long = "def f(a, b):\n    left = a * 2 + b\n    for each in range(left):\n        a -= each\n    return a\n"
    other = long.replace("left", "rest").replace("each", "one").replace("a", "z")
    (tmp_path / "train.jsonl").write_text(json.dumps({"messages": [{"content": "x " + long.replace("    ", "\t")}]}))
    assert overlapping([long, other], [tmp_path]) == {long}
    (tmp_path / "train.jsonl").write_text("")
    (tmp_path / "evals.txt").write_text(f"{other}\nreturn x")
    assert overlapping([long, other, "return x", "return y"], [tmp_path / "evals.txt"]) == {other, "return x"}
    with pytest.raises(TaskError, match="does not exist"):
        overlapping([long], [tmp_path / "gone"])


def test_sources_that_cannot_be_had_say_why(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "readme.txt").write_text("no code")
    with pytest.raises(TaskError, match="has no Python files"):
        get_source(str(tmp_path / "empty"), tmp_path)
    for given in ("ext::sh -c true", "--upload-pack=x", "../gone/away"):
        with pytest.raises(TaskError, match="is no repository"):
            get_source(given, tmp_path)
    with pytest.raises(TaskError, match="git clone failed"):
        get_source((tmp_path / "gone.git").as_uri(), tmp_path)


def test_builds_caches_and_history_are_no_part_of_a_source(tmp_path: Path) -> None:
    for path in ("a.py", ".git/x", "build/lib/a.py", "a.egg-info/SOURCES.txt", "__pycache__/a.pyc", "b/build/c.py"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("x")
    (tmp_path / ".git" / "x").unlink()
    (tmp_path / ".git").rmdir()
    assert sorted(get_source(str(tmp_path), tmp_path).files) == ["a.py", "b/build/c.py"]


def test_plugins_that_the_settings_of_pytest_name_are_installed() -> None:
    files = {"setup.cfg": b"[tool:pytest]\naddopts = --cov=shop\nasyncio_mode = auto\n"}
    assert _plugins(_pyproject(files), files) == ["pytest-cov", "pytest-asyncio"]
    assert _plugins(_pyproject({}), {"setup.cfg": b"[metadata]\n"}) == []


def test_half_a_line_of_a_killed_run_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "decided.jsonl"
    path.write_text('{"id": "a"}\n{"id": "b')
    assert _lines(path) == [{"id": "a"}] and path.read_text() == '{"id": "a"}\n'
    path.write_text("not ours\n")
    with pytest.raises(TaskError, match="no file of the factory"):
        _lines(path)


def test_the_output_of_one_test_is_found() -> None:
    printed = "noise\n_____ TestA.test_x[1] _____\nE  one\n_____ test_xy _____\nE  two\n=== short ===\nend"
    assert _failure(printed, "t.py::TestA::test_x") == "E  one" and _failure(printed, "t.py::test_xy") == "E  two"
    assert _failure("E  ImportError", "t.py::test_x") == "E  ImportError"


def test_a_task_pins_the_test_modules_that_others_import_or_name() -> None:
    files = {
        "tests/test_a.py": b"from tests import test_base",
        "tests/test_base.py": b"",
        "tests/test_plugin.py": b"",
        "tests/test_other.py": b"# not test_a",
        "setup.cfg": b"x = tests.test_plugin:Plugin",
    }
    tests = [f"{path}::test" for path in files if path.startswith("tests/")]
    project = Project(Source("shop", files), files, ["."], "shop.packages")
    suite = Suite(tests, frozenset(tests), {}, {}, frozenset(path for path in files if path != "setup.cfg"))
    ground = Ground(project, suite, "shop", hidden_texts(project, suite))
    entry = _entry(Candidate("c", "bug", "t", {}, {"a.py": b""}, "", ()), ground, [tests[0]], [], "")
    assert set(entry.grading["files"]) == {"tests/test_a.py", "tests/test_base.py", "tests/test_plugin.py"}


GOOD = "A total with a discount has to be the sum of the prices, less that many percent of it."
LEAKING = "Please repair the total of a till. It is enough to write: whole = sum( prices ) and so on."


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (GOOD, "written by the model"),
        (LEAKING, "plain: the model's text has a line of the solution"),
        (f"{GOOD} test_total of test_shop.py fails.", "plain: the model's text names a hidden test"),
        (GOOD * 40, "plain: the model's text has less than 40 or more than 3000 characters"),
        ("No.", "plain: the model's text has less than 40 or more than 3000 characters"),
        (f"{GOOD} \x1b[2J", "plain: the model's text has control characters"),
    ],
    ids=["good", "solution", "test", "long", "short", "control"],
)
@pytest.mark.asyncio
async def test_the_instruction_of_a_scripted_model_is_used_unless_it_tells_too_much(
    endpoint: str,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    said: str,
    why: str,
) -> None:
    project, suite = project_of(SHOP)
    removed = next(each for each in find_edits(project, suite, ("removal",), seed=3))
    test = "tests/test_shop.py::test_total"
    entry = _entry(removed, Ground(project, suite, "shop", hidden_texts(project, suite)), [test], [], "E assert 1 == 2")
    monkeypatch.setattr(Endpoint, "answer", said)
    writer = Writer(endpoint, "scripted", "")
    try:
        written = await writer.write(entry, removed)
    finally:
        await writer.close()
    assert written.tags[TAG] == why
    assert (GOOD in str(written.instruction) and "test_total" not in str(written.instruction)) == (said == GOOD)
    assert written.instruction == entry.instruction or said == GOOD


@pytest.mark.asyncio
async def test_a_model_that_cannot_be_asked_ends_the_run() -> None:
    project, suite = project_of(SHOP)
    removed = next(each for each in find_edits(project, suite, ("removal",), seed=3))
    entry = _entry(removed, Ground(project, suite, "shop", {}), [], [], "")
    writer = Writer("http://127.0.0.1:9/v1", "scripted", "", deadline_s=0.1)
    with pytest.raises(HarnessError, match="cannot be reached") as raised:
        await writer.write(entry, removed)
    await writer.close()
    assert "--instructions" in str(raised.value.hint)


HARD = """\
import pathlib, socket, time

from shop import total


def test_total():
    assert total([100, 250]) == 350 and total([200], 25) == 150


def test_hangs():
    time.sleep(600)


def test_network():
    socket.create_connection(("192.0.2.1", 80), timeout=1)


def test_device():
    assert pathlib.Path("/dev/nvidia0").exists()

"""


@pytest.mark.slow
def test_a_repository_becomes_tasks_and_a_second_run_continues(
    rollmill: Callable[..., Told],  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    endpoint: str,  # noqa: F811
) -> None:
    monkeypatch.setenv("ROLLMILL_IMAGES", str(tmp_path / "images"))
    shop, out = tmp_path / "shop", tmp_path / "out"
    (shop / "tests").mkdir(parents=True)
    (shop / "shop.py").write_text(SHOP.split("class Till")[0] + TOTAL)
    (shop / "tests" / "test_shop.py").write_text(HARD)
    command = ("tasks", "make", str(shop), "--out", str(out), "--runs", "2", "--repeat", "2", "--json")
    monkeypatch.setattr(Endpoint, "answer", GOOD)
    first = json.loads(rollmill(*command, "--kind", "removal", "--instructions", endpoint).out)
    assert first["decided"] == {"removal": {"": 1}} and first["stable"] == 1
    assert first["instructions"] == {"written by the model": 1}
    assert first["dropped_tests"].pop("fails in a machine") == 2, "the network and the device"
    assert [why.partition(" than")[0] for why in first["dropped_tests"]] == ["takes more"]
    with (out / "made.jsonl").open("a") as file:
        file.write('{"id": "half')
    second = json.loads(rollmill(*command).out)
    assert second["decided"]["removal"] == {"": 1} and second["decided"]["bug"][""] >= 1
    tasks = [json.loads(line) for line in (out / "made.jsonl").read_text().splitlines()]
    assert len({task["id"] for task in tasks}) == len(tasks) and tasks[0]["family"] == "removal"
    assert GOOD in tasks[0]["instruction"] and "test_total" in tasks[1]["instruction"]
    assert rollmill("tasks", "check", str(out / "run.toml")).code == 0
    (tmp_path / "seen.txt").write_text((shop / "shop.py").read_text())
    options = ("--kind", "removal", "--not-in", str(tmp_path / "seen.txt"))
    known = rollmill(*command, *options)
    assert set(json.loads(known.out)["decided"]["removal"]) == {"its solution is in a source that `--not-in` names"}
    left = [json.loads(line)["family"] for line in (out / "made.jsonl").read_text().splitlines()]
    assert left == ["bug"] * (len(tasks) - 1), "a task that an earlier run made is dropped too"


TOTAL = '''def total(prices, discount=0):
    """The sum of prices, less a discount in percent."""
    if not 0 <= discount <= 100:
        raise ValueError("a discount is between 0 and 100")
    whole = sum(prices)
    return whole - whole * discount // 100
'''


@pytest.mark.slow
def test_a_project_without_tests_is_an_error_with_a_remedy(
    rollmill: Callable[..., Told],  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ROLLMILL_IMAGES", str(tmp_path / "images"))
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "shop.py").write_text(TOTAL)
    told = rollmill("tasks", "make", str(tmp_path / "shop"), "--out", str(tmp_path / "out"))
    assert told.code != 0 and "shop: `pytest --collect-only` finds no tests" in told.err and "hint:" in told.err
    assert not (tmp_path / "out" / "made.jsonl").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tests", "options", "says"),
    [
        ("import time\n\ntime.sleep(600)\n", ("--suite-timeout", 2), "`pytest --collect-only` did not run to its end"),
        (HARD[: HARD.index("def test_total")] + HARD[HARD.index("def test_device") :], (), "none passes 2 times"),
        ("import gpu_library\n\n\ndef test(): ...\n", (), "No module named 'gpu_library'"),
    ],
    ids=["hangs", "gpu", "library"],
)
def test_a_suite_that_hangs_or_needs_a_gpu_is_an_error_with_a_remedy(
    rollmill: Callable[..., Told],  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tests: str,
    options: tuple[object, ...],
    says: str,
) -> None:
    monkeypatch.setenv("ROLLMILL_IMAGES", str(tmp_path / "images"))
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "shop.py").write_text(TOTAL)
    (tmp_path / "shop" / "test_shop.py").write_text(tests)
    told = rollmill("tasks", "make", tmp_path / "shop", "--out", tmp_path / "out", "--runs", 2, *options)
    assert told.code != 0 and "shop: " in told.err and says in told.err and "`pytest" in told.err, told
    assert "--suite-timeout" in told.err if "sleep" in tests else "no GPU" in told.err
    assert not (tmp_path / "out" / "made.jsonl").exists()
