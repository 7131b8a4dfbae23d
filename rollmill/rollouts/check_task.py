"""Check a task on real machines: its reference solves it, doing nothing does not, verdicts repeat, nothing leaks."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rollmill.environments.episode import Episode
from rollmill.environments.reward import Reward, grade_episode
from rollmill.environments.rewards.apart.levels import solve as write_reference
from rollmill.environments.task import Task
from rollmill.environments.task_machine import create_machine
from rollmill.errors import RollmillError, TaskError
from rollmill.machines.machine import WORK, Machine, MachineHost, release
from rollmill.rollouts.hand_in import take_hand_in
from rollmill.types import Grade

_SHORTEST = 24  # characters; shorter hidden texts turn up by chance


@dataclass(frozen=True)
class TaskCheck:
    """What was found out about one task."""

    task: str
    reference: float | None  # its reward; None: the task has no reference
    nothing: float | None  # reward for handing in what is there at the start
    weak: str  # what its rewards cannot protect in this task, and not in others
    problems: tuple[str, ...]  # empty: the task is all right


async def check_task(task: Task, machines: MachineHost, grader: Reward, repeat: int = 2) -> TaskCheck:
    """Grade the reference and the untouched work directory `repeat` times each. Every failure becomes a problem."""
    problems: list[str] = []
    weak = ""
    rewards: dict[str, list[Grade]] = {"reference": [], "nothing": []}
    try:
        problems += await _leaks(task, machines)  # its first machine may have to wait until its image is built
        async with asyncio.timeout(600.0):
            if task.reference or task.reference_command:
                rewards["reference"] = await _grade(task, machines, grader, repeat, solve=True)
            rewards["nothing"] = await _grade(task, machines, grader, repeat)
            weak = await grader.weaknesses(Episode(task, {}, machines))
    except RollmillError as error:
        problems.append(error.message if error.hint is None else f"{error.message}; {error.hint}")
    except Exception as error:  # code of the user
        problems.append(f"{type(error).__name__}: {error}")
    if any(not reward.solved for reward in rewards["reference"]):
        problems.append(f"the reference does not solve it: {_evidence(rewards['reference'])}")
    if any(reward.solved for reward in rewards["nothing"]):
        problems.append("doing nothing solves it")
    for name, graded in rewards.items():
        if len({reward.value for reward in graded}) > 1:
            values = ", ".join(f"{reward.value:g}" for reward in graded)
            problems.append(f"the verdict on {name} changes: {values}")
    first = {name: graded[0].value if graded else None for name, graded in rewards.items()}
    return TaskCheck(task.id, first["reference"], first["nothing"], weak, tuple(problems))


async def _grade(task: Task, machines: MachineHost, grader: Reward, repeat: int, solve: bool = False) -> list[Grade]:
    machine = await create_machine(machines, task)
    try:
        if solve:
            await write_reference(machine, task)
        handed_in = await take_hand_in(machine, task, machines, keep_state=grader.wants_final_state)
    finally:
        await machine.close()
    try:
        if handed_in.refused is not None:
            raise TaskError(f"the hand-in is refused: {handed_in.refused}", hint="see `WholeDiff`")
        return [await grade_episode(grader, handed_in.episode(task, machines)) for _ in range(repeat)]
    finally:
        await release(machines, handed_in.final_state)


def _evidence(rewards: list[Grade]) -> str:
    wrong = next(reward for reward in rewards if not reward.solved)
    return f"reward {wrong.value:g}, {dict(wrong.evidence)!r}"[:300]


async def _leaks(task: Task, machines: MachineHost) -> list[str]:
    """Hidden texts that the agent could read in the work directory."""
    hidden = [*_texts(task.grading, "grading")]
    hidden += [(data.strip(), f"reference {path}") for path, data in task.reference.items()]
    machine = await create_machine(machines, task)
    try:
        found = []
        for path in await _paths(machine):
            data = await machine.read(f"{WORK}/{path}", max_bytes=1 << 26)
            found += [f"{path} shows {name}" for text, name in hidden if len(text) >= _SHORTEST and text in data]
        return found
    finally:
        await machine.close()


async def _paths(machine: Machine) -> list[str]:
    listed = await machine.exec(["find", ".", "-type", "f", "-print0"], timeout_s=30.0, max_output=1 << 24)
    if listed.exit_code != 0 or listed.truncated:
        raise RollmillError("the files of the machine cannot be listed", hint="the image needs `find`")
    return [path.decode("utf-8", "surrogateescape")[2:] for path in listed.output.split(b"\0") if path]


def _texts(value: Any, name: str) -> Iterator[tuple[bytes, str]]:
    if isinstance(value, str):
        yield value.strip().encode("utf-8", "replace"), name
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _texts(inner, f"{name}.{key}")
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            yield from _texts(inner, f"{name}.{number}")
