"""The suite of a project: tests with the same verdict in every run, what each of them calls, and which run apart."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath

from rollmill.environments.rewards.apart.session import Order, TesterReport, run_apart, run_together
from rollmill.errors import TaskError
from rollmill.machines.machine import WORK, Machine, MachineHost
from rollmill.rollouts.factory.install import Project

TEST_S = 3.0  # that one test may take: less than the 10 s of the reward, so that a busy host changes no verdict
_APART_S = 1.0  # in another machine than the project: each call goes there and back, and takes longer on a busy host
_FOLDERS = frozenset({"test", "tests", "testing"})
_MAX_OUTPUT = 1 << 26
_NEEDED = (
    "the factory needs a suite that pytest runs in a machine, which has no network and no GPU; in its work directory "
    "is only the project. `--requirements` names a file with packages that tests need"
)
_TRACE = "/tmp/rollmill-trace.json"  # noqa: S108  of a machine


@dataclass(frozen=True)
class Suite:
    stable: list[str]
    apart: frozenset[str]  # of `stable`, those that need not run in one process with the project
    calls: dict[str, list[tuple[str, int]]] = field(repr=False)  # test → files, and first lines of functions
    dropped: dict[str, int]  # why other tests are not used, and how many of them
    hidden: frozenset[str] = field(repr=False)  # files that an agent must not see or change

    def calls_into(self, test: str, files: Collection[str]) -> bool:
        return any(path in files for path, _ in self.calls.get(test, ()))

    def covering(self, path: str, line: int) -> list[str]:
        return [test for test in self.stable if (path, line) in self.calls.get(test, ())]


async def find_suite(
    project: Project, machines: MachineHost, *, runs: int, timeout_s: float, modules: Collection[str] | None = None
) -> Suite:
    """Only of these test modules, if they are given; then without what they call. TaskError if the project has no test
    that passes in every run."""
    everything = list(await _trace(project, machines, None, timeout_s))
    named = [test for test in everything if modules is None or test.partition("::")[0] in modules]
    if not named:
        raise TaskError(f"{project.source.name}: `pytest` finds no tests in {', '.join(modules or ())}", hint=_NEEDED)
    verdicts: dict[str, list[str]] = {test: [] for test in named}
    printed = ""
    for _ in range(runs):
        told = await run_tests(project, machines, project.files, named, timeout_s=timeout_s)
        printed = told.printed or printed
        for test in named:
            verdicts[test].append(told.verdicts.get(test, "no verdict"))
    stable = [test for test in named if set(verdicts[test]) == {"passed"}]
    if not stable:
        counts = ", ".join(f"{count} {why}" for why, count in Counter(each[0] for each in verdicts.values()).items())
        raise TaskError(
            f"{project.source.name}: of {len(named)} tests none passes {runs} times when `pytest` runs in a machine: "
            f"{counts}; {printed[-1000:].strip()}",
            hint=_NEEDED,
        )
    dropped = Counter(_why(each) for each in verdicts.values() if set(each) != {"passed"})
    calls = await _trace(project, machines, stable, timeout_s) if modules is None else {}
    hidden = frozenset(files_of_tests(project.files, everything))
    apart = await _find_apart(project, machines, hidden, stable, timeout_s)
    return Suite(stable, apart, calls, dict(dropped), hidden)


def _why(verdicts: list[str]) -> str:
    names = {"failed": "fails in a machine", "time": f"takes more than {TEST_S:g} s, or its suite too long"}
    return names.get(verdicts[0], verdicts[0]) if len(set(verdicts)) == 1 else "its verdict changes"


async def run_tests(
    project: Project,
    machines: MachineHost,
    files: Mapping[str, bytes],
    tests: list[str],
    *,
    timeout_s: float,
) -> TesterReport:
    """The verdicts of tests on a tree of files, in one process with it."""
    async with _machine(project, machines, files) as machine:
        return await run_together(_order(project, tests, timeout_s), machine)


async def _find_apart(
    project: Project, machines: MachineHost, hidden: Collection[str], tests: list[str], timeout_s: float
) -> frozenset[str]:
    """The tests that pass while the project lies in another machine."""
    without = {path: data for path, data in project.files.items() if path not in hidden}
    told = await run_apart(
        replace(_order(project, tests, timeout_s, hidden=sorted(hidden)), test_timeout_s=_APART_S),
        lambda: _machine(project, machines, project.files),
        lambda: _machine(project, machines, without),
    )
    return frozenset(test for test in tests if told.verdicts.get(test) == "passed")


def files_of_tests(files: Iterable[str], tests: Iterable[str]) -> set[str]:
    """The modules of tests, and everything in their folders: what an agent must not see or change."""
    modules = {test.partition("::")[0] for test in tests}
    tops = set()
    for module in modules:
        parts = PurePosixPath(module).parts
        depth = next((number for number, part in enumerate(parts[:-1], 1) if part in _FOLDERS), None)
        tops |= {"/".join(parts[:depth]) + "/"} if depth else set()
    return {path for path in files if path in modules or path.startswith(tuple(tops))}


def _order(project: Project, tests: list[str], timeout_s: float, hidden: list[str] | None = None) -> Order:
    return Order(
        tests=tests,
        hidden=hidden or [],
        paths=project.paths,
        pytest=True,
        timeout_s=timeout_s,
        test_timeout_s=TEST_S,
        max_output=_MAX_OUTPUT,
    )


@contextlib.asynccontextmanager
async def _machine(project: Project, machines: MachineHost, files: Mapping[str, bytes]) -> AsyncIterator[Machine]:
    machine = await machines.create(project.image, files)
    try:
        yield machine
    finally:
        await machine.close()


async def _trace(
    project: Project, machines: MachineHost, only: list[str] | None, timeout_s: float
) -> dict[str, list[tuple[str, int]]]:
    """The tests, and what each of `only` calls."""
    work = {
        "directory": WORK,
        "paths": [WORK if path == "." else f"{WORK}/{path}" for path in project.paths],
        "only": only,
        "output": _TRACE,
    }
    text = Path(__file__).with_name("traced.py").read_text(encoding="utf-8")
    async with _machine(project, machines, project.files) as machine:
        limit_s = timeout_s * machine.capabilities.slowdown
        result = await machine.exec(["python", "-c", text], stdin=json.dumps(work).encode(), timeout_s=limit_s)
        printed = result.output[-1000:].decode("utf-8", "replace").strip()
        command = "pytest" if only else "pytest --collect-only"
        try:
            found = json.loads(await machine.read(_TRACE, max_bytes=_MAX_OUTPUT))
            called = {str(test): [(str(path), int(line)) for path, line in calls] for test, calls in found.items()}
        except (OSError, ValueError, TypeError, AttributeError):
            why = (
                f"the limit {result.stopped!r} stopped it after {limit_s:g} s" if result.stopped else "it says nothing"
            )
            raise TaskError(
                f"{project.source.name}: `{command}` did not run to its end in a machine: {why}; {printed}",
                hint="does a test or a file of tests hang? `--suite-timeout` gives the suite more seconds",
            ) from None
    if not called:
        raise TaskError(f"{project.source.name}: `{command}` finds no tests; it prints: {printed}", hint=_NEEDED)
    return called
