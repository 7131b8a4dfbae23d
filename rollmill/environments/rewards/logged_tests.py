"""Any test command: what it prints says which tests passed.

    task.grading = {"kind": "logged_tests", "command": ["sh", "-c", "go test -v ./..."], "log_parser": "go",
                    "files": {"total_test.go": "…"},
                    "FAIL_TO_PASS": ["TestTotal"],      must pass now
                    "PASS_TO_PASS": ["TestKept"]}       must not break

A clean machine gets the task's files and the submission over them. `files` are written last, and what `patch` (in git's
form) makes of the files that the task starts with. Then the command runs, and a function of log_parsers.py reads its
output: "pytest", "unittest", "jest", "go", or a name of `log_parsers`. A test without a verdict has not passed.

What this cannot protect: the tests run in one process with submitted code, or start it. It can print lines that look
like verdicts, end the tests before they print theirs, read the hidden files, and change what configures the tool. Where
tests run with pytest, the reward `pytest` reads verdicts where submitted code cannot write.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from rollmill.environments.episode import Episode
from rollmill.environments.reward import Reward, TimedConfig
from rollmill.environments.rewards.clean import DoesNotFit, clean_machine, evidence_of, read_grading
from rollmill.environments.rewards.log_parsers import PARSERS, LogParser, read_log
from rollmill.environments.task import Task
from rollmill.environments.task_machine import create_machine
from rollmill.environments.tasks.git_files import patched, paths_of
from rollmill.environments.tasks.jsonl import Base64, contents
from rollmill.errors import TaskError
from rollmill.kinds import load_object
from rollmill.strict import StrictModel
from rollmill.types import Grade

_MAX_LOG = 1 << 24  # bytes; the middle of a longer one is lost
_MAX_FILE = 1 << 24  # bytes of a file that is patched
_MAX_NAMED = 20  # failed tests that the evidence names


class LoggedTestsConfig(TimedConfig):
    timeout_s: float = Field(
        300.0, gt=0, description="Seconds that the command may take; a task's own `timeout_s` goes before it."
    )
    partial: bool = Field(False, description="Partial credit, as with the reward `pytest`.")
    log_parsers: dict[str, str] = Field(
        {},
        description="Parsers of your own, by the name that tasks give: `module:function`, which takes the output and "
        'returns pairs of a test and "passed", "failed" or "skipped".',
    )


class _Grading(StrictModel):
    kind: Literal["logged_tests"]
    command: list[str] = Field(min_length=1)
    log_parser: str
    files: dict[str, str | Base64] = Field(default_factory=dict)
    patch: str = ""
    FAIL_TO_PASS: list[str] = Field(min_length=1)
    PASS_TO_PASS: list[str] = Field(default_factory=list)
    timeout_s: float | None = Field(None, gt=0)


class LoggedTests(Reward):
    """`parts` has the share of passed tests of each list."""

    name = "logged_tests"
    kind = "logged_tests"
    cannot_protect = (
        "Verdicts are lines that a command prints while submitted code runs in it. Submitted code can print such lines "
        "itself, end the tests early, read the hidden tests, and change the configuration of the tool; no grader can "
        "tell. Of two verdicts on one test the worse counts. The reward `pytest` is not like this."
    )

    def __init__(self, config: LoggedTestsConfig | None = None) -> None:
        self.config = config or LoggedTestsConfig()
        own = self.config.log_parsers.items()
        self._parsers = PARSERS | {
            name: load_object(f"log_parsers of a reward: {name}", target) for name, target in own
        }

    async def grade(self, episode: Episode) -> Grade:
        grading = read_grading(episode.task, _Grading, hint='it needs "command", "log_parser" and "FAIL_TO_PASS"')
        parser = self._parser(episode.task, grading)
        files = contents(grading.files) | await self._patched(episode, grading.patch)
        pinned = grading.log_parser == "pytest"
        try:
            async with clean_machine(episode, files, program=grading.command[0], pinned=pinned) as machine:
                seconds = (grading.timeout_s or self.config.timeout_s) * machine.capabilities.slowdown
                result = await machine.exec(grading.command, timeout_s=seconds, max_output=_MAX_LOG)
        except DoesNotFit as error:
            return Grade(0.0, evidence={"unwritable": str(error)}, grader=self.name)
        verdicts = read_log(parser, result.output.decode("utf-8", "replace"))
        lists = {"fail_to_pass": grading.FAIL_TO_PASS, "pass_to_pass": grading.PASS_TO_PASS}
        return grade_lists(self.name, lists, verdicts, evidence_of(result), partial=self.config.partial)

    async def weaknesses(self, episode: Episode) -> str:
        return f"its tests are what {episode.task.grading.get('command')} prints: submitted code can print the same"

    def _parser(self, task: Task, grading: _Grading) -> LogParser:
        """By name alone: a task may come from elsewhere, and must not say which code runs on this host."""
        parser = self._parsers.get(grading.log_parser)
        if parser is None:
            raise TaskError(
                f"task {task.id}: no log parser is called {grading.log_parser[:100]!r}",
                hint=f"one of {', '.join(self._parsers)}; `log_parsers` of the reward names functions of your own",
            )
        return parser

    async def _patched(self, episode: Episode, patch: str) -> dict[str, bytes]:
        """What a patch makes of the files that the task starts with."""
        if not patch:
            return {}
        before = {}
        machine = await create_machine(episode.machines, episode.task)
        try:
            for path in paths_of(patch, "grading.patch"):
                try:
                    before[path] = await machine.read(path, max_bytes=_MAX_FILE)
                except FileNotFoundError:
                    continue
                except OSError as error:
                    raise TaskError(f"task {episode.task.id}: {path} cannot be patched: {error}") from None
        finally:
            await machine.close()
        return patched(before, patch, "grading.patch").files


def grade_lists(
    name: str, lists: Mapping[str, Sequence[str]], verdicts: Mapping[str, str], evidence: dict[str, Any], partial: bool
) -> Grade:
    """1 if every test of every list passed, else 0; with `partial` the product of the shares that passed."""
    parts, share = {}, 1.0
    for each, tests in lists.items():
        failed = [test for test in tests if verdicts.get(test) != "passed"]
        parts[each] = 1.0 - len(failed) / len(tests) if tests else 1.0
        share *= parts[each]
        evidence[each] = {test[:200]: verdicts.get(test, "no verdict") for test in failed[:_MAX_NAMED]}
    return Grade(share if partial else float(share == 1.0), parts, evidence, name)
