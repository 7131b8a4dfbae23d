"""Log parsers on real output: pytest and unittest run here, that of jest 29.7.0 and go 1.19.8 is recorded (logs/)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rollmill.environments.rewards import log_parsers
from rollmill.environments.rewards.log_parsers import PARSERS, read_log

_PYTEST = """
import pytest

@pytest.mark.parametrize("x", ["a b", "c - d]", "ü"])
def test_of(x):
    print("PASSED test_suite.py::test_wrong")
    assert x != "ü", "no - really"

def test_wrong():
    assert [] == "PASSED"

def test_skipped():
    pytest.skip("not here")

@pytest.mark.xfail
def test_expected():
    raise ValueError

@pytest.fixture
def broken():
    raise OSError

def test_without(broken): ...

class TestIn:
    def test_method(self): ...
"""
_UNITTEST = """
import sys, unittest

class Some(unittest.TestCase):
    def test_right(self): ...
    def test_wrong(self): self.fail()
    def test_raises(self): raise OSError
    def test_described(self):
        "What it is for."
    def test_prints(self):
        print("half a line", file=sys.stderr)
    @unittest.skip("not here")
    def test_skipped(self): ...
    @unittest.expectedFailure
    def test_expected(self): self.fail()
    @unittest.expectedFailure
    def test_unexpected(self): ...
    def test_parts(self):
        for number in range(2):
            with self.subTest(number=number):
                self.assertEqual(number, 0)
"""


def run(folder: Path, text: str, *command: str) -> str:
    (folder / "test_suite.py").write_text(text)
    argv = [sys.executable, "-m", *command]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        argv, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    return done.stdout


@pytest.mark.parametrize("options", ["-rA", "-v --color=yes", pytest.param("-p xdist -n 2 -v", marks=pytest.mark.slow)])
def test_pytest(tmp_path: Path, options: str) -> None:
    log = run(tmp_path, _PYTEST, "pytest", "-p", "no:cacheprovider", *options.split(), "test_suite.py")
    found = read_log(PARSERS["pytest"], log)
    named = {name.removeprefix("test_suite.py::"): verdict for name, verdict in found.items()}
    wanted = {
        "test_of[a b]": "passed",
        "test_of[c - d]]": "passed",
        "test_of[\\xfc]": "failed",
        "test_wrong": "failed",
        "test_expected": "passed",
        "test_without": "failed",
        "TestIn::test_method": "passed",
    }
    assert {name: named.get(name) for name in wanted} == wanted, log


def test_unittest(tmp_path: Path) -> None:
    found = read_log(PARSERS["unittest"], run(tmp_path, _UNITTEST, "unittest", "-v", "test_suite"))
    wanted = dict.fromkeys(("right", "described", "prints", "expected"), "passed")
    wanted |= dict.fromkeys(("wrong", "raises", "unexpected", "parts"), "failed") | {"skipped": "skipped"}
    method = ".test_{0}" if sys.version_info >= (3, 11) else ""
    names = {f"test_{name} (test_suite.Some{method.format(name)})": verdict for name, verdict in wanted.items()}
    assert found == {**names, "What it is for.": "passed"}


def recorded(name: str) -> str:
    return Path(__file__).with_name("logs").joinpath(name).read_text()


def test_jest() -> None:
    found = read_log(PARSERS["jest"], recorded("jest-29.7.0.txt"))
    wanted = {
        "alone": "passed",
        "total › adds": "passed",
        "total › with a discount › takes it off": "failed",
        "total › with a discount › is not there yet": "skipped",
        "total › with a discount › rounds": "skipped",
    }
    assert {name: verdict for name, verdict in found.items() if name in wanted} == wanted
    whole = {f"src/shop.test.js › {name}": verdict for name, verdict in wanted.items()}
    assert {name: verdict for name, verdict in found.items() if name.startswith("src/")} == whole
    assert found["takes it off"] == "failed" and "a line of the program" not in found and "never" not in found


def test_go() -> None:
    found = read_log(PARSERS["go"], recorded("go-1.19.8.txt"))
    shop = {
        "TestTotal": "failed",
        "TestTotal/small": "passed",
        "TestTotal/wrong_sum": "failed",
        "TestKept": "passed",
        "TestSkipped": "skipped",
    }
    packages = {"bad": {"TestFine": "passed", "TestPanics": "failed"}, "coins": {"TestChange": "passed"}}
    wanted = {f"example.test/shop.{name}": verdict for name, verdict in shop.items()} | shop
    for package, tests in packages.items():
        wanted |= {f"example.test/shop/{package}.{name}": verdict for name, verdict in tests.items()} | tests
    assert found == wanted, "TestAfter did not run, and broken does not compile"


def test_of_several_verdicts_the_worst_counts() -> None:
    log = "--- FAIL: TestA (0.00s)\n--- PASS: TestA (0.00s)\n--- PASS: TestB (0.00s)\n"
    assert read_log(log_parsers.go, log) == {"TestA": "failed", "TestB": "passed"}
