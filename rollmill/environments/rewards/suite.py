"""A suite of hidden tests, each with a verdict of its own: pytest, or unittest where the image has no pytest.

    task.grading = {"kind": "pytest", "files": {"tests/test_f.py": "…"},
                    "FAIL_TO_PASS": ["tests/test_f.py::test_new"],         must pass now
                    "PASS_TO_PASS": ["tests/test_f.py::Old::test_kept"]}   must not break

A clean machine gets the task's files, the declared submission over them, and the hidden files last. Our driver starts
one process per test and never imports submitted code itself:

    driver ──(the test, a token drawn for it)──► process: import, run the test ──(the token, if it passed)──► driver
       └──(a word drawn for this run, the verdicts)──► grader

A test's process does not know the word, and cannot read the driver's memory where the kernel protects it. So a test
that exits, crashes, hangs or prints whatever it likes decides its own verdict at most, and the verdict is "failed".

What this cannot protect: submitted code runs in one process with the test that imports it. Code that searches the
frames of its process finds that test's token. Code that patches the test framework, or whose values equal everything,
passes. Submitted code can read the hidden files. Use the reward `calls` where the expected values can be written as
data.

Without pytest, `file.py::function` and `file.py::Class::method` run as unittest runs them: no fixtures, no parameters.
"""

from __future__ import annotations

import json
import secrets
from typing import Any, Literal

from pydantic import Field

from rollmill.config import Config
from rollmill.environments.episode import Episode
from rollmill.environments.machine import WORK, Machine
from rollmill.environments.rewards.clean import DoesNotFit, clean_machine, evidence_of, read_grading
from rollmill.environments.task import Task
from rollmill.environments.task_machine import create_machine
from rollmill.errors import MachineError, TaskError
from rollmill.strict import StrictModel
from rollmill.types import Reward

_START_S = 20.0
_MAX_NAMED = 20  # failed tests that the evidence names

# Runs in the machine, once per test. It writes the token only after the test has passed.
_TEST = """
def main():
    import importlib.util, json, os, sys, unittest
    write = os.write
    work = json.load(sys.stdin)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.path[:0] = work["paths"]
    def by_pytest():
        import pytest
        reports = []
        class Recorder:
            def pytest_runtest_logreport(self, report):
                expected = report.outcome == "skipped" and hasattr(report, "wasxfail")
                reports.append(report.outcome == "passed" or expected)
        code = pytest.main([work["test"], "-q", "-p", "no:cacheprovider"], plugins=[Recorder()])
        return code == 0 and len(reports) >= 3 and all(reports)
    def by_unittest():
        path, *names = work["test"].split("::")
        spec = importlib.util.spec_from_file_location(os.path.splitext(path)[0].replace("/", "."), path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        sys.path.insert(1, os.path.dirname(os.path.abspath(path)))
        spec.loader.exec_module(module)
        owner = module
        for name in names[:-1]:
            owner = getattr(owner, name)
        if isinstance(owner, type) and issubclass(owner, unittest.TestCase):
            case = owner(names[-1])
        else:
            owner = owner() if isinstance(owner, type) else owner
            case = unittest.FunctionTestCase(getattr(owner, names[-1]))
        result = unittest.TextTestRunner(stream=sys.stderr).run(unittest.TestSuite([case]))
        return result.wasSuccessful() and result.testsRun == 1 and not result.skipped
    if (by_pytest if work["pytest"] else by_unittest)() is True:
        write(work["answer"], work["token"].encode())
    os._exit(0)
main()
"""

# Runs in the machine, once. It is made unreadable for the other processes of its user before the first test starts.
_DRIVER = """
import ctypes, json, os, secrets, signal, subprocess, sys, time
try:
    ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)
except Exception:
    pass
work = json.load(sys.stdin)
ends = time.monotonic() + work["timeout_s"]
for index, test in enumerate(work["tests"]):
    token = secrets.token_hex(16)
    reading, writing = os.pipe()
    order = {"test": test, "token": token, "answer": writing, "paths": work["paths"], "pytest": work["pytest"]}
    process = subprocess.Popen(
        [sys.executable, "-I", "-c", work["program"]], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, pass_fds=[writing], start_new_session=True)
    os.close(writing)
    seconds = min(work["test_timeout_s"], ends - time.monotonic())
    try:
        printed, _ = process.communicate(json.dumps(order).encode(), timeout=max(seconds, 0.01))
        why = "failed"
    except subprocess.TimeoutExpired as error:
        printed, why = error.output or b"", "time"
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except OSError:
        pass
    process.kill()
    process.wait()
    os.set_blocking(reading, False)
    try:
        answer = os.read(reading, 100)
    except OSError:
        answer = b""
    os.close(reading)
    verdict = "passed" if answer == token.encode() else why
    if verdict != "passed":
        sys.stdout.write(printed[-2000:].decode("utf-8", "replace") + "\\n")
    sys.stdout.write("\\n" + work["word"] + " " + str(index) + " " + verdict + "\\n")
    sys.stdout.flush()
"""


class SuiteConfig(Config):
    partial: bool = Field(
        False,
        description="Partial credit: the share of FAIL_TO_PASS tests that pass times the share of PASS_TO_PASS tests "
        "that pass. Off: 1 if every test passes, else 0.",
    )
    timeout_s: float = Field(
        40.0,
        gt=0,
        description="Seconds that all tests of one submission may take; a task's own `timeout_s` goes first.",
    )
    test_timeout_s: float = Field(10.0, gt=0, description="Seconds that one test may take.")
    max_output: int = Field(1 << 20, ge=1000, description="Most bytes of output that the grader reads.")


class _Grading(StrictModel):
    kind: Literal["pytest"]
    files: dict[str, str] = Field(default_factory=dict)
    FAIL_TO_PASS: list[str] = Field(min_length=1)
    PASS_TO_PASS: list[str] = Field(default_factory=list)
    framework: Literal["auto", "pytest", "unittest"] = "auto"
    paths: list[str] = Field(default_factory=lambda: ["."])  # where modules are found, relative to the work directory
    timeout_s: float | None = Field(None, gt=0)


class Suite:
    """`parts` has the share of passed tests of each list."""

    name = "pytest"
    cannot_protect = (
        "Each test runs in one process with the submitted code that it imports. That code can find the test's token, "
        "patch the test framework, return values that equal everything, and read the hidden test files."
    )

    def __init__(self, config: SuiteConfig | None = None) -> None:
        self.config = config or SuiteConfig()

    async def grade(self, episode: Episode) -> Reward:
        grading = _parse(episode.task)
        tests = list(dict.fromkeys([*grading.FAIL_TO_PASS, *grading.PASS_TO_PASS]))
        framework = await _framework(episode, grading)
        word = secrets.token_hex(16)
        files = {path: text.encode() for path, text in grading.files.items()}
        try:
            async with clean_machine(episode, files, program="python") as machine:
                timeout_s = (grading.timeout_s or self.config.timeout_s) * machine.capabilities.slowdown
                order = {
                    "word": word,
                    "tests": tests,
                    "program": _TEST,
                    "pytest": framework == "pytest",
                    "paths": [f"{WORK}/{path}" for path in grading.paths],
                    "timeout_s": timeout_s,
                    "test_timeout_s": self.config.test_timeout_s * machine.capabilities.slowdown,
                }
                result = await machine.exec(
                    ["python", "-c", _DRIVER],
                    stdin=json.dumps(order).encode(),
                    timeout_s=timeout_s + _START_S,
                    max_output=self.config.max_output,
                )
        except DoesNotFit as error:
            return Reward(0.0, evidence={"unwritable": str(error)}, grader=self.name)
        verdicts, printed = _verdicts(result.output, word, tests)
        evidence = {**evidence_of(result, printed), "framework": framework}
        return self._reward(grading, verdicts, evidence)

    def _reward(self, grading: _Grading, verdicts: dict[str, str], evidence: dict[str, Any]) -> Reward:
        parts = {}
        for name, tests in (("fail_to_pass", grading.FAIL_TO_PASS), ("pass_to_pass", grading.PASS_TO_PASS)):
            failed = [test for test in tests if verdicts.get(test) != "passed"]
            parts[name] = 1.0 - len(failed) / len(tests) if tests else 1.0
            evidence[name] = {test[:200]: verdicts.get(test, "no verdict") for test in failed[:_MAX_NAMED]}
        share = parts["fail_to_pass"] * parts["pass_to_pass"]
        return Reward(share if self.config.partial else float(share == 1.0), parts, evidence, self.name)


async def _framework(episode: Episode, grading: _Grading) -> str:
    """pytest if a machine without the submission can import it, else unittest. TaskError if the task needs pytest."""
    if grading.framework == "unittest":
        return "unittest"
    machine = await create_machine(episode.machines, episode.task)
    try:
        found = await _has_pytest(machine, episode.task)
    finally:
        await machine.close()
    if not found and grading.framework == "pytest":
        raise TaskError(
            f"task {episode.task.id}: its image {episode.task.image!r} has no pytest",
            hint='choose another image, or write tests for "framework": "unittest"',
        )
    return "pytest" if found else "unittest"


async def _has_pytest(machine: Machine, task: Task) -> bool:
    program = "import importlib.util as util; print(util.find_spec('pytest') is not None)"
    result = await machine.exec(["python", "-I", "-c", program], timeout_s=_START_S)
    answer = result.output.decode("utf-8", "replace").strip()
    if answer not in ("True", "False"):
        raise MachineError(f"grading of {task.id} did not start (exit {result.exit_code}): {answer[-500:]}")
    return answer == "True"


def _verdicts(output: bytes, word: str, tests: list[str]) -> tuple[dict[str, str], str]:
    """The verdict of each test, and what else was printed."""
    verdicts, printed = {}, []
    for line in output.decode("utf-8", "replace").splitlines():
        if not line.startswith(word):
            printed.append(line)
            continue
        index, _, verdict = line[len(word) :].strip().partition(" ")
        verdicts[tests[int(index)]] = verdict
    return verdicts, "\n".join(line for line in printed if line)


def _parse(task: Task) -> _Grading:
    hint = 'it needs {"kind": "pytest", "files": {path: text}, "FAIL_TO_PASS": [test], "PASS_TO_PASS": [test]}'
    grading = read_grading(task, _Grading, hint=hint)
    for test in (*grading.FAIL_TO_PASS, *grading.PASS_TO_PASS):
        if "::" not in test:
            raise TaskError(
                f"task {task.id}: {test[:200]!r} names no test", hint="file.py::test or file.py::Class::test"
            )
    return grading
