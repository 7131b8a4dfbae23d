"""From a candidate to a task, or the reason why it is none: which tests notice it, then what `tasks check` checks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from rollmill.environments.reward import Reward
from rollmill.environments.tasks.jsonl import TaskEntry
from rollmill.machines.machine import MachineHost
from rollmill.rollouts.check_task import check_task
from rollmill.rollouts.factory.edits import Candidate
from rollmill.rollouts.factory.install import Project
from rollmill.rollouts.factory.stable_tests import Suite, run_tests

_MOST_COVERING, _MOST_KEPT = 60, 20  # tests that are run, and PASS_TO_PASS
_MOST_FAILING, _MOST_IN_PROCESS = 10, 2  # FAIL_TO_PASS; a test in one process with a submission takes a command each
_SHOWN = 2000  # characters of a failing test's output
_LARGEST_HIDDEN = 1 << 18  # bytes of a file that is pinned; larger ones stay in the image
_INSTRUCTION = """\
The work directory holds the project {project}. {title}

These tests fail now and have to pass. They are not in the work directory. Others, which pass now, must not break.

{tests}

Output of the first one:

{output}
"""


@dataclass(frozen=True)
class Ground:
    """What candidates stand on: the project with every solution in it, and the image of their tasks."""

    project: Project
    suite: Suite
    image: str
    whole: Mapping[str, str] = field(repr=False)  # hidden files as text


def hidden_texts(project: Project, suite: Suite) -> dict[str, str]:
    """The hidden files that tasks pin: text, and not large. Others stay in the image."""
    texts = {}
    for path in sorted(suite.hidden):
        data = project.files[path]
        try:
            if len(data) <= _LARGEST_HIDDEN or path.endswith(".py"):
                texts[path] = data.decode("utf-8")
        except UnicodeDecodeError:
            continue
    return texts


async def admit(
    candidate: Candidate, ground: Ground, machines: MachineHost, grader: Reward, *, repeat: int
) -> TaskEntry | str:
    """The task; or why there is none, in words that are the same for all candidates of this fate."""
    suite = ground.suite
    covering = sorted(candidate.tests, key=lambda test: test not in suite.apart)[:_MOST_COVERING]
    near = {test.partition("::")[0] for test in covering}
    others = [test for test in suite.stable if test not in candidate.tests and test.partition("::")[0] in near]
    kept = [test for test in others if test in suite.apart][:_MOST_KEPT]
    broken = {path: data for path, data in ground.project.files.items() if path not in candidate.deleted}
    told = await run_tests(ground.project, machines, {**broken, **candidate.files}, [*covering, *kept], timeout_s=120.0)
    failing = [test for test in covering if told.verdicts.get(test) == "failed"]
    if not failing:
        return "no test notices" if "time" not in told.verdicts.values() else "a test hangs"
    if "time" in told.verdicts.values() or len(told.verdicts) < len(covering):
        return "a test hangs"
    apart = [test for test in failing if test in suite.apart]
    chosen = apart[:_MOST_FAILING] or failing[:_MOST_IN_PROCESS]
    passing = [test for test in [*covering, *kept] if told.verdicts.get(test) == "passed" and test in suite.apart]
    entry = _entry(candidate, ground, chosen, passing[:_MOST_KEPT], _failure(told.printed, chosen[0]))
    checked = await check_task(entry.task()[0], machines, grader, repeat)
    return entry if not checked.problems else _plain_reason(checked.problems[0])


def _entry(candidate: Candidate, ground: Ground, failing: list[str], passing: list[str], output: str) -> TaskEntry:
    modules = {test.partition("::")[0] for test in ground.suite.stable}
    needed = {test.partition("::")[0] for test in (*failing, *passing)} | _named_elsewhere(ground, modules)
    grading = {
        "kind": "pytest",
        "files": {path: text for path, text in ground.whole.items() if path in needed or path not in modules},
        "FAIL_TO_PASS": failing,
        "PASS_TO_PASS": passing,
        "framework": "pytest",
        "paths": ground.project.paths,
        "isolation": "apart" if {*failing, *passing} <= ground.suite.apart else "auto",
    }
    shown = "\n".join(f"    {test}" for test in failing)
    indented = "\n".join(f"    {line}" for line in output.splitlines())
    fields: dict[str, Any] = {
        "id": candidate.id,
        "instruction": _INSTRUCTION.format(
            project=ground.project.source.name, title=candidate.title, tests=shown, output=indented
        ),
        "files": {path: data.decode() for path, data in candidate.files.items()} if not candidate.commit else {},
        "submission": "diff",
        "grading": grading,
        "reference": {path: data.decode() for path, data in candidate.reference.items()},
        "family": candidate.kind,
        "tags": {"project": ground.project.source.name, "version": candidate.commit or ground.project.source.version},
        "image": ground.image,
    }
    return TaskEntry.model_validate(fields)


def _named_elsewhere(ground: Ground, modules: set[str]) -> set[str]:
    """Modules of tests that other files of the project name: tests import them, or they hold its tests' plugins."""
    files = ground.project.files.items()
    return {
        module
        for module in modules
        if any(PurePosixPath(module).stem.encode() in data for path, data in files if path != module)
    }


def _failure(printed: str, test: str) -> str:
    """What pytest printed about a test: the end of it, if it is long."""
    name = re.escape(test.rpartition("::")[2])
    head, end = rf"^_{{3,}} (?:\S*\.)?{name}(?:\[[^\n]*)? _{{3,}}$\n", r"(?=^_{3,} .* _{3,}$|^=+ |\Z)"
    found = re.search(f"{head}(.*?){end}", printed, re.M | re.S)
    text = (found[1] if found else printed).strip()  # a file that cannot be imported has no section for its tests
    return text if len(text) <= _SHOWN else f"…\n{text[-_SHOWN:]}"


def _plain_reason(problem: str) -> str:
    if problem.startswith("the verdict on"):
        return "its verdict changes"
    if " shows " in problem:
        return "the work directory shows hidden parts"
    known = ("the reference does not solve it", "doing nothing solves it")
    return next((each for each in known if problem.startswith(each)), f"cannot be graded: {problem[:80]}")
