"""A suite of hidden tests, each with a verdict of its own: pytest, or unittest where the image has no pytest.

    task.grading = {"kind": "pytest", "files": {"tests/test_f.py": "…"},
                    "FAIL_TO_PASS": ["tests/test_f.py::test_new"],         must pass now
                    "PASS_TO_PASS": ["tests/test_f.py::Old::test_kept"]}   must not break

The tests run in a clean machine that has the task's own files and the hidden ones, and nothing that was handed in.
The submission lies in a second machine. What a test imports of it is a stand-in: calls travel there as plain data, and
so do their results, which the test compares in its own process (apart/). So code that exits, hangs, patches the test
framework, looks for hidden files or returns an object that equals everything fails the test it is called by.

Some tests cannot run like this: they patch builtins or modules, derive from submitted classes, or share files with the
submission. Such a test needs a reference or `"isolation": "process"`. With `"isolation": "auto"` (the default) a test
runs in one process with the submission only if the task's own reference passes it there and not apart
(apart/levels.py); without a reference every test runs apart, and such a test fails whatever is handed in. `"apart"` and
`"process"` decide for all tests of a task.

In one process, submitted code can reach the verdict: it can find its secret word, patch the test framework and read the
hidden files. Configuration and plugins then are those of the task and the image, never submitted ones. `rollmill tasks
check` names the tasks whose tests run like this, and those for which only a reference would tell.

Without pytest, `file.py::function` and `file.py::Class::method` run as unittest runs them: no fixtures, no parameters.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rollmill.environments.episode import Episode
from rollmill.environments.reward import Reward, TimedConfig
from rollmill.environments.rewards.apart.levels import Isolation, Levels, Plan
from rollmill.environments.rewards.apart.session import Order
from rollmill.environments.rewards.clean import DoesNotFit, read_grading
from rollmill.environments.rewards.logged_tests import grade_lists
from rollmill.environments.task import Task
from rollmill.errors import TaskError
from rollmill.strict import StrictModel
from rollmill.types import Grade


class PytestConfig(TimedConfig):
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
    isolation: Isolation = "auto"


class Pytest(Reward):
    """`parts` has the share of passed tests of each list."""

    name = "pytest"
    kind = "pytest"
    cannot_protect = (
        "Objects of submitted classes say themselves what they are equal to among each other. A test that cannot run "
        "apart from the submission runs in one process with it, which can then make it pass: named for each task."
    )

    def __init__(self, config: PytestConfig | None = None) -> None:
        self.config = config or PytestConfig()
        self._levels = Levels()

    async def grade(self, episode: Episode) -> Grade:
        grading = _parse(episode.task)
        try:
            judged = await self._levels.judge(episode, self._plan(grading))
        except DoesNotFit as error:
            return Grade(0.0, evidence={"unwritable": str(error)}, grader=self.name)
        lists = {"fail_to_pass": grading.FAIL_TO_PASS, "pass_to_pass": grading.PASS_TO_PASS}
        return grade_lists(self.name, lists, judged.verdicts, judged.evidence, partial=self.config.partial)

    async def weaknesses(self, episode: Episode) -> str:
        """What this reward cannot protect in a task; empty if it is no more than with any."""
        return await self._levels.weaknesses(episode, self._plan(_parse(episode.task)))

    def _plan(self, grading: _Grading) -> Plan:
        order = Order(
            tests=list(dict.fromkeys([*grading.FAIL_TO_PASS, *grading.PASS_TO_PASS])),
            hidden=list(grading.files),
            paths=grading.paths,
            pytest={"auto": None, "pytest": True, "unittest": False}[grading.framework],
            timeout_s=grading.timeout_s or self.config.timeout_s,
            test_timeout_s=self.config.test_timeout_s,
            max_output=self.config.max_output,
        )
        return Plan(order, {path: text.encode() for path, text in grading.files.items()}, grading.isolation)


def _parse(task: Task) -> _Grading:
    hint = 'it needs {"kind": "pytest", "files": {path: text}, "FAIL_TO_PASS": [test], "PASS_TO_PASS": [test]}'
    grading = read_grading(task, _Grading, hint=hint)
    for test in (*grading.FAIL_TO_PASS, *grading.PASS_TO_PASS):
        if "::" not in test:
            raise TaskError(
                f"task {task.id}: {test[:200]!r} names no test", hint="file.py::test or file.py::Class::test"
            )
    return grading
