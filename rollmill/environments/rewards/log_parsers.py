"""What the output of a test command says about each test: of pytest, unittest, jest, go, or a function of your own.

A parser takes the whole output and gives names of tests with "passed", "failed" or "skipped". Names are those that the
tool prints. jest and go print a test below its file or before its package: such a test is also named with it, as in
`src/shop.test.js › total › adds` and `example.com/shop.TestTotal/small`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator

LogParser = Callable[[str], Iterable[tuple[str, str]]]

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_WORST = ("passed", "skipped", "failed")
_PYTEST = {"PASSED": "passed", "XFAIL": "passed", "XPASS": "passed", "SKIPPED": "skipped"}  # all others: failed
_PYTEST_WORD = "(PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)"
_PYTEST_NAME = r"([^\s\[][^\[]*?(?:\[.*?\])?)"
_PYTEST_SUMMARY = re.compile(rf"(?:\[gw\d+\] (?:\[ *\d+%\] )?)?{_PYTEST_WORD} {_PYTEST_NAME}(?: - .*)?")
_PYTEST_VERBOSE = re.compile(rf"{_PYTEST_NAME} {_PYTEST_WORD}(?: \(.*\))?(?: +\[ *\d+%\])?")
_UNITTEST_NAME = re.compile(r"(?:(?:FAIL|ERROR): )?(\w+ \([\w.<>]+\))")
_UNITTEST = {"ok": "passed", "expected failure": "passed"} | dict.fromkeys(
    ("FAIL", "ERROR", "unexpected success"), "failed"
)
_JEST_FILE = re.compile(r"(?:PASS|FAIL) (\S+)(?: \([\d.]+ m?s\))?")
_JEST_TEST = re.compile(r"([✓✕○✎]) (?:(?<=○ )skipped |(?<=✎ )todo )?(.*?)(?: \([\d.]+ m?s\))?")
_JEST = {"✓": "passed", "✕": "failed", "○": "skipped", "✎": "skipped"}
_GO_TEST = re.compile(r"--- (PASS|FAIL|SKIP): (\S+) \([\d.]+s\)$")  # a test that prints half a line stands before it
_GO_PACKAGE = re.compile(r"(?:ok  |FAIL)\t(\S+)")
_GO = {"PASS": "passed", "FAIL": "failed", "SKIP": "skipped"}


def read_log(parser: LogParser, log: str) -> dict[str, str]:
    """The verdict on each test. Of several on one name the worst counts: a line that submitted code prints does not
    undo a failure."""
    verdicts: dict[str, str] = {}
    for name, verdict in parser(_COLOUR.sub("", log)):
        verdicts[name] = max(verdicts.get(name, "passed"), verdict, key=_WORST.index)
    return verdicts


def pytest(log: str) -> Iterator[tuple[str, str]]:
    """The lines of `pytest -rA` and of `pytest -v`."""
    for line in map(str.rstrip, log.splitlines()):  # xdist ends its lines with a space
        if found := _PYTEST_SUMMARY.fullmatch(line):
            yield found[2], _PYTEST.get(found[1], "failed")
        elif found := _PYTEST_VERBOSE.fullmatch(line):
            yield found[1], _PYTEST.get(found[2], "failed")


def unittest(log: str) -> Iterator[tuple[str, str]]:
    """The lines of `python -m unittest -v`, and of programs on it. The first line of a docstring is also a name."""
    names: list[str] = []
    described = False
    for line in log.splitlines():
        if found := _UNITTEST_NAME.match(line):
            names, described = [found[1]], line == found[1]
            if line.startswith(("FAIL: ", "ERROR: ")):
                yield found[1], "failed"
        head, dots, end = line.rpartition(" ... ")
        if dots and described and head != names[0]:
            names, described = [*names, head], False
        verdict = "skipped" if end.startswith("skipped") else _UNITTEST.get(end)
        if verdict is not None:
            yield from ((name, verdict) for name in names)
            names = []


def jest(log: str) -> Iterator[tuple[str, str]]:
    """The trees of `jest --verbose`, each from the line of its file to an empty line."""
    file, groups = "", list[str]()
    for line in log.splitlines():
        text = line.strip()
        if found := _JEST_FILE.fullmatch(line):
            file, groups = found[1], []
        elif not text:
            file = ""
        elif file:
            del groups[max(0, (len(line) - len(line.lstrip())) // 2 - 1) :]
            if found := _JEST_TEST.fullmatch(text):
                for first in range(len(groups) + 1):
                    yield " › ".join([*groups[first:], found[2]]), _JEST[found[1]]
                yield " › ".join([file, *groups, found[2]]), _JEST[found[1]]
            else:
                groups.append(text)


def go(log: str) -> Iterator[tuple[str, str]]:
    """The lines of `go test -v`. A package that does not compile, or panics, leaves tests without a verdict."""
    of_package: list[tuple[str, str]] = []
    for line in log.splitlines():
        if found := _GO_TEST.search(line):
            of_package.append((found[2], _GO[found[1]]))
            yield of_package[-1]
        elif found := _GO_PACKAGE.match(line):
            yield from ((f"{found[1]}.{name}", verdict) for name, verdict in of_package)
            of_package = []


PARSERS: dict[str, LogParser] = {"pytest": pytest, "unittest": unittest, "jest": jest, "go": go}
