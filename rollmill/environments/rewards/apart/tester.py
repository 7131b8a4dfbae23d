"""The tester: runs hidden tests in a machine where nothing submitted is. Its text runs in a machine.

One process per test file, all files after another. A line with a word drawn for this run tells each verdict.
Without a port (`"port": null`) the submission lies in the same machine, and its code runs in the same process.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rollmill.environments.rewards.apart.proxies import Finder, Tester

Tell = Callable[[str, str], Any]
_write, _leave = os.write, os._exit


class TimeIsOver(BaseException):
    """A test has used up its seconds."""


@contextmanager
def limit(work: Any) -> Iterator[None]:
    """Ends what takes longer than a test may, or than is left for all tests."""

    def ring(number: Any, frame: Any) -> None:
        raise TimeIsOver

    seconds = min(work["test_timeout_s"], work["ends"] - time.monotonic())
    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.001), 1.0)  # again, where it was swallowed
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


class Watch:
    """Whether a test has used up its time, also where something has swallowed `TimeIsOver`."""

    def __init__(self, work: Any) -> None:
        self._ends = min(time.monotonic() + work["test_timeout_s"], work["ends"])

    def is_over(self) -> bool:
        return time.monotonic() >= self._ends


def is_broken() -> bool:
    return Tester._now is not None and Tester._now.broken


class Recorder:
    """A plugin of pytest: chooses the named tests, limits each of them, and keeps what became of it."""

    def __init__(self, work: Any, tests: list[str]) -> None:
        self._work = work
        self._tests = tests
        self._chosen: list[str] = []
        self._reports: dict[str, list[bool]] = {}
        self._slow: set[str] = set()

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items[:] = [item for item in items if any(_covers(test, item.nodeid) for test in self._tests)]
        self._chosen = [item.nodeid for item in items]

    def pytest_make_collect_report(self, collector: Any) -> Iterator[None]:
        with limit(self._work):
            yield

    def pytest_runtest_protocol(self, item: Any, nextitem: Any) -> bool:
        from _pytest.runner import runtestprotocol

        watch = Watch(self._work)
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        try:
            with limit(self._work):
                runtestprotocol(item, nextitem=nextitem)
        except TimeIsOver:
            self._reports.setdefault(item.nodeid, []).append(False)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        if watch.is_over():
            self._slow.add(item.nodeid)
        if is_broken():
            item.session.shouldstop = "the worker has ended"
        return True

    def pytest_runtest_logreport(self, report: Any) -> None:
        expected = report.outcome == "skipped" and hasattr(report, "wasxfail")
        self._reports.setdefault(report.nodeid, []).append(report.outcome == "passed" or expected)

    def verdict(self, test: str) -> str | None:
        """None: it was not run to its end."""
        named = [name for name in self._chosen if _covers(test, name)]
        reports = [self._reports.get(name, []) for name in named]
        if any(name in self._slow for name in named):
            return "time"
        if not named or any(False in each for each in reports):
            return "failed"
        return "passed" if all(len(each) >= 3 for each in reports) else None


def _covers(test: str, name: str) -> bool:
    return name == test or name.startswith((test + "[", test + "::"))


def by_pytest(work: Any, tests: list[str], tell: Tell) -> None:
    import pytest

    pytest.hookimpl(hookwrapper=True)(Recorder.pytest_make_collect_report)
    recorder = Recorder(work, tests)
    arguments = [tests[0].split("::")[0], "-q", "--continue-on-collection-errors", "--rootdir=" + work["directory"]]
    pytest.main([*arguments, "-p", "no:cacheprovider", *_pinned(work)], plugins=[recorder])
    for test in tests:
        verdict = recorder.verdict(test)
        if verdict is not None:
            tell(test, verdict)


def _pinned(work: Any) -> list[str]:
    """In one process with a submission: only plugins that lie outside of the work directory."""
    if work["port"] is not None:
        return []
    from importlib.metadata import distributions

    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    elsewhere = [path for path in sys.path if path and not path.startswith(work["directory"])]
    found = [entry for each in distributions(path=elsewhere) for entry in each.entry_points]
    named = [argument for entry in found if entry.group == "pytest11" for argument in ("-p", entry.name)]
    return named


def by_unittest(work: Any, tests: list[str], tell: Tell) -> None:
    path = tests[0].split("::")[0]
    with limit(work):
        sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
        name = os.path.splitext(path)[0].replace("/", ".")
        spec: Any = importlib.util.spec_from_file_location(name, path)
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    for test in tests:
        verdict, watch = "failed", Watch(work)
        try:
            with limit(work):
                verdict = "passed" if _run_one(module, test.split("::")[1:]) is True else "failed"
        except BaseException as error:
            sys.stdout.write(f"{test}: {type(error).__name__}: {str(error)[:500]}\n")
        tell(test, "time" if watch.is_over() else verdict)
        if is_broken():
            return


def _run_one(module: Any, names: list[str]) -> bool:
    import unittest

    owner = module
    for name in names[:-1]:
        owner = getattr(owner, name)
    if isinstance(owner, type) and issubclass(owner, unittest.TestCase):
        case = owner(names[-1])
    else:
        owner = owner() if isinstance(owner, type) else owner
        case = unittest.FunctionTestCase(getattr(owner, names[-1]))
    result = unittest.TextTestRunner(stream=sys.stdout).run(unittest.TestSuite([case]))
    return result.wasSuccessful() and result.testsRun == 1 and not result.skipped


def statements(work: Any, tests: list[str], tell: Tell) -> None:
    program = compile(work["statements"], "<hidden test>", "exec")
    with limit(work):
        exec(program, {"__name__": "__main__"})  # noqa: S102
    tell(tests[0], "passed")


def _programs() -> None:
    """What tests start runs where the submission is."""
    import subprocess

    class Popen(subprocess.Popen[Any]):
        _kept: Any

        def __init__(self, args: Any, *_: Any, **named: Any) -> None:
            given: Any = {"args": args, "returncode": None, "pid": 0, "stdin": None, "stdout": None, "stderr": None}
            self.__dict__.update(given)
            text = any(named.get(key) for key in ("text", "universal_newlines", "encoding", "errors"))
            self._text, self._kept, self._env = text, None, named.get("env")
            self._streams = named.get("stdout"), named.get("stderr")
            self._directory, self._shell = named.get("cwd") or os.getcwd(), bool(named.get("shell"))

        def communicate(self, input: Any = None, timeout: Any = None) -> Any:
            if self._kept is None:
                before = dict(os.environ)
                if self._env is not None:
                    os.environ.clear()
                    os.environ.update(self._env)
                given = input.encode() if isinstance(input, str) else input
                joined = self._streams[1] == subprocess.STDOUT
                try:
                    self._kept = Tester.now().request(
                        "program", self.args, self._directory, given, joined, self._shell, timeout
                    )
                except BaseException:
                    self._kept = -9, b"", b""
                    raise
                finally:
                    os.environ.clear()
                    os.environ.update(before)
            printed = self._kept[1:]
            self.returncode = self._kept[0]
            wanted = [kind == subprocess.PIPE for kind in self._streams]
            texts = [each.decode("utf-8", "replace") if self._text and each is not None else each for each in printed]
            return tuple(text if asked else None for text, asked in zip(texts, wanted))  # noqa: B905

        def wait(self, timeout: Any = None) -> Any:
            self.communicate(timeout=timeout)
            return self.returncode

        def poll(self) -> Any:
            return self.returncode

        def kill(self) -> None: ...

        terminate = kill

        def __exit__(self, *_: Any) -> None:
            self.wait()

        def __del__(self, *_: Any) -> None: ...

    subprocess.Popen = Popen  # type: ignore[misc]


def run_file(work: Any, tests: list[str], tell: Tell) -> None:
    if work["port"] is not None:
        tester = Tester(work["port"], work["directory"], work["hidden"])
        tester.trusting = tests[0] in work["trusting"]
        sys.meta_path.insert(0, Finder(tester, {"subprocess": _programs}))
        if "subprocess" in sys.modules:
            _programs()
    run = statements if work["statements"] is not None else by_pytest if work["pytest"] else by_unittest
    run(work, tests, tell)


def _in_process(work: Any, tests: list[str]) -> dict[str, str]:
    """The verdicts of tests of one file, in a process of their own. Some are missing if the worker ended before."""
    verdicts: dict[str, str] = {}
    reading, writing = os.pipe()
    sys.stdout.flush()
    process = os.fork()
    if process == 0:
        os.close(reading)
        try:
            run_file(work, tests, lambda test, verdict: _write(writing, json.dumps([test, verdict]).encode() + b"\n"))
        except BaseException as error:
            why = "time" if isinstance(error, TimeIsOver) else "failed"
            sys.stdout.write(f"{tests[0]}: {type(error).__name__}: {str(error)[:1000]}\n")
            _write(writing, json.dumps([tests[0], why]).encode() + b"\n")
        finally:
            sys.stdout.flush()
            _leave(0)
    os.close(writing)
    with open(reading, "rb") as told:
        for line in told:
            verdicts.setdefault(*json.loads(line))
    os.waitpid(process, 0)
    return verdicts


def main() -> None:
    work = json.load(sys.stdin)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    passed, word, tests = 0, work.pop("word"), work["tests"]
    ends = work["ends"] = time.monotonic() + work["timeout_s"]
    sys.path[:] = [path for path in sys.path if path]  # without the current directory
    there = importlib.util.find_spec("pytest") is not None
    named = "none" if work["pytest"] and not there else None
    if work["pytest"] is None:
        work["pytest"] = there
    if work["pytest"] and there:
        import pytest  # noqa: F401  before anything of the work directory can be taken for it

    def say(index: int, verdict: str) -> None:
        sys.stdout.flush()
        _write(1, f"\n{word} {index} {verdict}\n".encode())

    say(-1, named or ("pytest" if work["pytest"] else "unittest"))
    if named:
        _leave(1)
    os.chdir(work["directory"])
    sys.path[:0] = work["paths"]
    for key in dict.fromkeys((test.split("::")[0], test in work["trusting"]) for test in tests):
        left = [test for test in tests if (test.split("::")[0], test in work["trusting"]) == key]
        while left and time.monotonic() < ends:
            verdicts = _in_process(work, left) or {left[0]: "failed"}
            for test, verdict in verdicts.items():
                say(tests.index(test), verdict)
            left = [test for test in left if test not in verdicts]
            passed += list(verdicts.values()).count("passed")
        for test in left:
            say(tests.index(test), "time")
    _leave(0 if passed == len(tests) else 1)


if __name__ == "__main__":
    main()
