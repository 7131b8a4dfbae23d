"""A script decides: hidden files and a command whose exit code is the verdict, or a hidden Python test.

    task.grading = {"kind": "script", "files": {"hidden_test.py": "…"}, "command": ["python", "hidden_test.py"]}
    task.grading = {"kind": "script", "verdict": "python", "test": "from main import f\\nassert f(3) == 4\\n"}

A clean machine gets the task's files, the declared submission over them, and the grading files last, so a submission
cannot replace them. `verdict` says what counts as passed:

    "exit"    (default) `command` ends with exit code 0 within `timeout_s`
    "reward_file"  `command` writes a number into the first of `reward_files` that is there, or an object with numbers:
              `reward`, or their mean
    "python"  `test` runs to its end, in a machine of its own: what it imports of the submission is a stand-in for what
              lies in a second machine, and results are compared as plain data (apart/)

With "exit" and "reward_file" the command runs where the submission lies, unless the task names `outputs`:

    task.grading = {"kind": "script", "inputs": {"in.txt": "3 10\\n"}, "outputs": ["out.txt"],
                    "run": ["sh", "-c", "python main.py < in.txt > out.txt"],
                    "files": {"check.py": "…"}, "command": ["python", "check.py"]}

Then `run` starts the submission in a machine of its own, with `inputs` and without `files`. The command runs in a
second machine that has the task's files, the grading files and the `outputs` of the first, and nothing else of the
submission. `run` may be left out if what was handed in is data: an answer, a table. A `run` that fails, or takes longer
than `timeout_s`, earns 0.

What this cannot protect: without `outputs`, submitted code that the command imports or starts can end the process with
success (`os._exit(0)`), write the reward file and read the grading files; files of it with the names of modules are
found by a Python command. With "python", `"isolation"` says whether the test may run in one process with the submission
(apart/levels.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Annotated, Literal

from pydantic import Field, FiniteFloat, TypeAdapter, field_validator, model_validator

from rollmill.environments.episode import Episode
from rollmill.environments.reward import Reward, TimedConfig
from rollmill.environments.rewards.apart.levels import Isolation, Levels, Plan
from rollmill.environments.rewards.apart.session import Order
from rollmill.environments.rewards.clean import DoesNotFit, check_program, clean_machine, evidence_of, read_grading
from rollmill.environments.task import Task
from rollmill.environments.task_machine import create_machine, for_all
from rollmill.environments.tasks.jsonl import Base64, contents
from rollmill.environments.tasks.programs import parse_python
from rollmill.errors import TaskError
from rollmill.machines.machine import ExecResult, Machine
from rollmill.strict import StrictModel, parse_json
from rollmill.trajectories.storable import LARGEST_NUMBER
from rollmill.types import Grade

_MAX_REWARD = 1 << 16  # bytes of a reward file
_MAX_PUT_OUT = 1 << 24  # bytes of one output
_Number = Annotated[FiniteFloat, Field(ge=-LARGEST_NUMBER, le=LARGEST_NUMBER)]  # others cannot be stored
_NUMBERS: TypeAdapter[float | dict[str, float]] = TypeAdapter(_Number | dict[str, _Number])
_TEST = "hidden::test"


class ScriptConfig(TimedConfig):
    timeout_s: float = Field(
        10.0, gt=0, description="Seconds that grading one submission may take; a task's own `timeout_s` goes before it."
    )
    max_output: int = Field(1 << 16, ge=100, description="Most bytes of output that the grader reads.")


class _Grading(StrictModel):
    kind: Literal["script"]
    files: dict[str, str | Base64] = Field(default_factory=dict)
    env: dict[str, str] = Field(default_factory=dict)
    timeout_s: float | None = Field(None, gt=0)


class _Command(_Grading):
    command: list[str] = Field(min_length=1)
    run: list[str] = Field(default_factory=list)  # in a machine with the submission and `inputs`
    inputs: dict[str, str | Base64] = Field(default_factory=dict)
    outputs: list[str] = Field(default_factory=list)  # all that the command sees of that machine

    @model_validator(mode="after")
    def _is_apart(self) -> _Command:
        if (self.run or self.inputs) and not self.outputs:
            raise ValueError("`run` and `inputs` need `outputs`: the files that the command sees of the submission")
        if both := sorted(self.files.keys() & set(self.outputs)):
            raise ValueError(f"{both} are in `files` and in `outputs`")
        return self


class _Exit(_Command):
    verdict: Literal["exit"] = "exit"


class _RewardFile(_Command):
    verdict: Literal["reward_file"]
    reward_files: list[str] = Field(min_length=1)


class _Python(_Grading):
    verdict: Literal["python"]
    test: str
    isolation: Isolation = "auto"

    @field_validator("test")
    @classmethod
    def _is_python(cls, test: str) -> str:
        """ValueError for a test that is no Python: every submission would fail it."""
        try:
            parse_python(test)
        except SyntaxError as error:
            raise ValueError(str(error)) from None
        return test


class Script(Reward):
    """Value 1 if the script says that the submission passes, else 0; or the number in the reward file."""

    name = "script"
    kind = "script"
    cannot_protect = (
        "By exit code or reward file, the command of a task that names no `outputs` runs where the submission lies. "
        "Submitted code that it imports or starts can read the grading files, end the process with success and write "
        'the reward file; no grader can tell. With `outputs`, and with verdict "python", it runs apart from it.'
    )

    def __init__(self, config: ScriptConfig | None = None) -> None:
        self.config = config or ScriptConfig()
        self._levels = Levels()

    async def grade(self, episode: Episode) -> Grade:
        task = episode.task
        grading = _parse(task)
        try:
            if isinstance(grading, _Python):
                judged = await self._levels.judge(episode, self._plan(grading))
                value, evidence = float(judged.verdicts.get(_TEST) == "passed"), judged.evidence
            else:
                async with self._verifier(episode, grading) as machine:
                    result = await self._exec(machine, grading, grading.command, grading.env)
                    if isinstance(grading, _RewardFile):
                        return await self._read_reward(machine, grading.reward_files, result)
                    value, evidence = float(result.exit_code == 0 and result.stopped is None), evidence_of(result)
        except DoesNotFit as error:
            return Grade(0.0, evidence={"unwritable": str(error)}, grader=self.name)
        if missing := [path for path in task.paths if path not in episode.submission]:
            evidence["missing"] = missing[:20]
        return Grade(value, evidence=evidence, grader=self.name)

    async def weaknesses(self, episode: Episode) -> str:
        """What this reward cannot protect in a task; empty if it is no more than with any."""
        grading = _parse(episode.task)
        if isinstance(grading, _Python):
            return await self._levels.weaknesses(episode, self._plan(grading))
        if grading.outputs:
            return ""
        why = f"verdict {grading.verdict!r}: submitted code that the command imports or starts can decide it"
        return f"{why}, `outputs` would keep it apart"

    @contextlib.asynccontextmanager
    async def _verifier(self, episode: Episode, grading: _Command) -> AsyncIterator[Machine]:
        """The machine in which the command runs: beside the submission, or with nothing but its outputs."""
        task, files = episode.task, contents(grading.files)
        if not grading.outputs:
            program, pinned = grading.command[0], _runs_pytest(grading.command, files)
            async with clean_machine(episode, files, program=program, pinned=pinned) as machine:
                yield machine
            return
        found = await self._put_out(episode, grading)
        machine = await create_machine(episode.machines, task, files)
        try:
            await check_program(machine, task, grading.command[0])
            await for_all(machine, ["rm", "-rf", "--"], grading.outputs)
            for path, data in found.items():
                try:
                    await machine.write(path, data)
                except OSError as error:
                    raise DoesNotFit(f"{path}: {error}"[:1000]) from None
            yield machine
        finally:
            await machine.close()

    async def _put_out(self, episode: Episode, grading: _Command) -> dict[str, bytes]:
        """What the submission puts out, in a machine without the grading files. DoesNotFit if it fails."""
        found = {}
        program = grading.run[0] if grading.run else None
        async with clean_machine(episode, contents(grading.inputs), program=program) as machine:
            if grading.run:
                result = await self._exec(machine, grading, grading.run, {})
                if result.exit_code != 0 or result.stopped is not None:
                    raise DoesNotFit(f"`run` failed: {evidence_of(result)}")
            for path in grading.outputs:
                with contextlib.suppress(OSError):  # the command finds that it is not there
                    found[path] = await machine.read(path, max_bytes=_MAX_PUT_OUT)
        return found

    async def _exec(self, machine: Machine, grading: _Command, command: list[str], env: dict[str, str]) -> ExecResult:
        seconds = (grading.timeout_s or self.config.timeout_s) * machine.capabilities.slowdown
        return await machine.exec(command, env=env, timeout_s=seconds, max_output=self.config.max_output)

    def _plan(self, grading: _Python) -> Plan:
        seconds = grading.timeout_s or self.config.timeout_s
        order = Order(
            tests=[_TEST],
            hidden=list(grading.files),
            statements=grading.test,
            env=grading.env,
            pytest=False,
            timeout_s=seconds,
            test_timeout_s=seconds,
            max_output=self.config.max_output,
        )
        return Plan(order, contents(grading.files), grading.isolation)

    async def _read_reward(self, machine: Machine, paths: list[str], result: ExecResult) -> Grade:
        """Untrusted: submitted code may have run here. What is no number that can be stored earns nothing."""
        evidence = evidence_of(result)
        for path in paths:
            with contextlib.suppress(OSError):
                data = await machine.read(path, max_bytes=_MAX_REWARD)
                try:
                    numbers = _numbers(data)
                except ValueError as error:
                    return Grade(0.0, evidence={**evidence, "no_reward": f"{path}: {error}"[:500]}, grader=self.name)
                if isinstance(numbers, dict):
                    value = numbers.get("reward", sum(numbers.values()) / max(len(numbers), 1))
                    return Grade(value, {name[:100]: number for name, number in numbers.items()}, evidence, self.name)
                return Grade(numbers, evidence=evidence, grader=self.name)
        return Grade(0.0, evidence={**evidence, "no_reward": "no reward file was written"}, grader=self.name)


def _runs_pytest(command: list[str], files: dict[str, bytes]) -> bool:
    """Whether the command, or a grading file that it may run, names pytest: handed-in configuration could then load a
    plugin that turns failures into passes."""
    return any("pytest" in word for word in command) or any(b"pytest" in data for data in files.values())


def _numbers(data: bytes) -> float | dict[str, float]:
    """ValueError for what is no number that can be stored, and no object of such."""
    try:
        return parse_json(data, _NUMBERS)
    except ValueError as error:
        with contextlib.suppress(ValueError):
            if abs(number := float(data.decode("ascii", "replace"))) <= LARGEST_NUMBER:  # `.5`, as bc writes it
                return number
        raise error from None


def _parse(task: Task) -> _Exit | _RewardFile | _Python:
    hint = 'it needs {"kind": "script", "files": {path: text}, "command": [argv]}, or "verdict": "python" and "test"'
    if task.grading.get("verdict") == "reward_file":
        return read_grading(task, _RewardFile, hint='"verdict": "reward_file" needs "command" and "reward_files"')
    if task.grading.get("verdict") == "python":
        return read_grading(task, _Python, hint=hint)
    if unused := {"test", "reward_files"} & task.grading.keys():
        raise TaskError(f"task {task.id}: grading has {sorted(unused)}, but no verdict that reads it", hint=hint)
    return read_grading(task, _Exit, hint=hint)
