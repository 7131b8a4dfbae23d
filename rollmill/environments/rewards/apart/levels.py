"""How far each test is kept from the submission, and the verdicts of all.

    apart      the test runs in another machine; what submitted code returns is compared there, as plain data
    trusting   the same, but submitted objects may say what they are equal to: the test needs that
    process    the test runs in one process with the submission: it needs real classes, patches or files of it

With `"isolation": "auto"`, a task's own reference decides, once per process and task: a test gets the first of these
levels at which the reference passes it. What an agent hands in decides nothing. Without a reference, every test runs
apart, and one that needs more fails whatever is handed in: `rollmill tasks check` names such tasks. `"apart"` and
`"process"` decide for all tests of a task.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from rollmill.environments.episode import Episode
from rollmill.environments.rewards.apart.session import Open, Order, TesterReport, run_apart, run_together
from rollmill.environments.rewards.clean import check_image, clean_machine, evidence_of
from rollmill.environments.task import Task
from rollmill.environments.task_machine import create_machine, write_over
from rollmill.errors import MachineError, TaskError
from rollmill.machines.machine import Machine

Isolation = Literal["auto", "apart", "process"]
_SOLVE_S = 300.0
_REMEMBERED = 4096  # tasks
_UNSHOWN = (
    "without a reference every test runs apart from the submission: one that patches builtins or modules, derives from "
    'submitted classes or shares files with it cannot pass. Give a reference, or "isolation": "process"'
)


@dataclass(frozen=True)
class Plan:
    """Tests of a task, and how they are to be run."""

    order: Order
    files: Mapping[str, bytes]  # the hidden ones
    isolation: Isolation = "auto"


@dataclass
class Verdicts:
    levels: Mapping[str, str]
    verdicts: dict[str, str] = field(default_factory=dict)
    printed: list[str] = field(default_factory=list)
    evidence: dict[str, Any] = field(default_factory=dict)

    def take(self, told: TesterReport) -> None:
        self.verdicts |= told.verdicts
        self.printed += [told.printed] if told.printed else []
        counts = {level: list(self.levels.values()).count(level) for level in ("apart", "trusting", "process")}
        kept = {level: count for level, count in counts.items() if count}
        shown = evidence_of(told.result, "\n".join(self.printed))
        self.evidence = {**shown, "framework": told.framework, "isolation": kept}


class Levels:
    """Remembers the levels of tasks."""

    def __init__(self) -> None:
        self._levels: OrderedDict[str, dict[str, str]] = OrderedDict()
        self._locks: dict[str, asyncio.Lock] = {}

    async def judge(self, episode: Episode, plan: Plan) -> Verdicts:
        """The verdicts on a submission. DoesNotFit, TaskError and MachineError as with `clean_machine`."""
        levels = await self._find_levels(episode, plan)
        together = partial(clean_machine, episode, plan.files, program=None, pinned=True)
        return await _run(episode, plan, levels, partial(clean_machine, episode, {}, program=None), together)

    async def weaknesses(self, episode: Episode, plan: Plan) -> str:
        """What the levels of a task's tests cannot protect, in words; empty if a reference shows that all run apart."""
        if plan.isolation == "auto" and not _has_reference(episode.task):
            return _UNSHOWN
        return counted(list((await self._find_levels(episode, plan)).values()))

    async def _find_levels(self, episode: Episode, plan: Plan) -> dict[str, str]:
        task, tests = episode.task, plan.order.tests
        if plan.isolation != "auto" or not _has_reference(task):
            return dict.fromkeys(tests, "process" if plan.isolation == "process" else "apart")
        key = task.digest
        async with self._locks.setdefault(key, asyncio.Lock()):
            if key not in self._levels:
                self._levels[key] = await _calibrate(episode, plan)
                while len(self._levels) > _REMEMBERED:
                    self._locks.pop(self._levels.popitem(last=False)[0], None)
        return self._levels[key]


def _has_reference(task: Task) -> bool:
    return bool(task.reference or task.reference_command)


async def _calibrate(episode: Episode, plan: Plan) -> dict[str, str]:
    """The first level of each test at which the reference passes it; `apart` if there is none."""
    levels = dict.fromkeys(plan.order.tests, "apart")
    left = list(plan.order.tests)
    for level in ("apart", "trusting", "process"):
        if not left:
            break
        tried = replace(plan, order=replace(plan.order, tests=left))
        solved = partial(_solved, episode, {})
        judged = await _run(episode, tried, dict.fromkeys(left, level), solved, partial(_solved, episode, plan.files))
        levels |= {test: level for test in left if judged.verdicts.get(test) == "passed"}
        left = [test for test in left if judged.verdicts.get(test) != "passed"]
    return levels


async def _run(episode: Episode, plan: Plan, levels: Mapping[str, str], worker: Open, together: Open) -> Verdicts:
    judged = Verdicts(levels)
    near = [test for test in plan.order.tests if levels[test] == "process"]
    far = [test for test in plan.order.tests if levels[test] != "process"]
    if far:
        trusting = frozenset(test for test in far if levels[test] == "trusting")
        order = replace(plan.order, tests=far, trusting=trusting)
        told = await run_apart(order, partial(_tester, episode, plan.files), worker)
        await _check_started(episode, told, order)
        judged.take(told)
    if near:
        async with together() as machine:
            for test in near:  # each in a command of its own: nothing of an earlier one is left running
                await write_over(machine, plan.files, ())
                told = await run_together(replace(plan.order, tests=[test]), machine)
                await _check_started(episode, told, plan.order)
                judged.take(told)
    return judged


@contextlib.asynccontextmanager
async def _tester(episode: Episode, files: Mapping[str, bytes]) -> AsyncIterator[Machine]:
    """A machine with the task's files and the hidden ones, and nothing of the submission."""
    machine = await create_machine(episode.machines, episode.task, files)
    try:
        if not machine.capabilities.listen:
            raise TaskError(
                f"task {episode.task.id}: tests cannot run apart from the submission in machines of this kind",
                hint='"isolation": "process" in its grading runs them in one process with it',
            )
        yield machine
    finally:
        await machine.close()


@contextlib.asynccontextmanager
async def _solved(episode: Episode, files: Mapping[str, bytes]) -> AsyncIterator[Machine]:
    """A machine with the task's reference in it."""
    task = episode.task
    machine = await create_machine(episode.machines, task)
    try:
        await solve(machine, task)
        await write_over(machine, files, task.links)
        yield machine
    finally:
        await machine.close()


async def solve(machine: Machine, task: Task) -> None:
    """Write the reference, and run its command. TaskError if it fails."""
    outside = sorted({os.path.dirname(path) for path in task.reference if path.startswith("/")})
    if outside:  # its files may lie where the user of an image cannot write
        make = ["sh", "-c", 'mkdir -p "$@" && chmod 777 "$@"', "-", *outside]
        await machine.exec(make, cwd="/", user="root" if "root" in machine.capabilities.users else None)
    for path, data in task.reference.items():
        await machine.write(path, data)
    if task.reference_command:
        limit_s = (task.timeout_s or _SOLVE_S) * machine.capabilities.slowdown
        result = await machine.exec(task.reference_command, timeout_s=limit_s)
        if result.exit_code != 0 or result.stopped is not None:
            printed = result.output[-300:].decode("utf-8", "replace")
            why = f"stopped by {result.stopped}" if result.stopped else f"exit code {result.exit_code}"
            raise TaskError(f"the reference command failed: {why}, {printed!r}", hint="run it in the machine by hand")


async def _check_started(episode: Episode, told: TesterReport, order: Order) -> None:
    """TaskError if the image lacks what the tests need, MachineError if the tester did not start."""
    if told.framework == "none":
        raise TaskError(
            f"task {episode.task.id}: its image {episode.task.image!r} has no pytest",
            hint='choose another image, or write tests for "framework": "unittest"',
        )
    if not told.framework:
        await check_image(episode, "python")
        if told.result.stopped is not None:
            raise MachineError(f"grading of {episode.task.id} did not start: limit {told.result.stopped!r}")
        raise TaskError(
            f"task {episode.task.id}: tests do not start in its image {episode.task.image!r}: {told.printed[-500:]!r}",
            hint="nothing submitted runs there: repair the image, its Python or its pytest",
        )


def counted(levels: Sequence[str]) -> str:
    """What the levels of a task's tests cannot protect, in words; empty if all run apart."""
    near, trusting = levels.count("process"), levels.count("trusting")
    texts = []
    if near:
        texts.append(f"{near} of {len(levels)} tests run in one process with the submission, which can make them pass")
    if trusting:
        texts.append(f"in {trusting} of {len(levels)} tests submitted objects say what they are equal to")
    return "; ".join(texts)
