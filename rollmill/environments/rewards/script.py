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

What this cannot protect: with "exit" and "reward_file" a command of the task runs in the machine where the submission
lies. If the command imports submitted code, that code can end the process with success (`os._exit(0)`), write the
reward file and read the grading files. With "python", `"isolation"` says whether the test may run in one process with
the submission (apart/levels.py).
"""

from __future__ import annotations

import contextlib
import math
from typing import Literal

from pydantic import Field, FiniteFloat, TypeAdapter, field_validator

from rollmill.config import Config
from rollmill.environments.episode import Episode
from rollmill.environments.machine import ExecResult, Machine
from rollmill.environments.rewards.apart.levels import Isolation, Judge, Plan, counted
from rollmill.environments.rewards.apart.session import Order
from rollmill.environments.rewards.clean import DoesNotFit, clean_machine, evidence_of, read_grading
from rollmill.environments.task import Task
from rollmill.environments.tasks.jsonl import Base64, contents
from rollmill.environments.tasks.programs import parse_python
from rollmill.errors import TaskError
from rollmill.strict import StrictModel, parse_json
from rollmill.types import Reward

_MAX_REWARD = 1 << 16  # bytes of a reward file
_NUMBERS: TypeAdapter[float | dict[str, float]] = TypeAdapter(FiniteFloat | dict[str, FiniteFloat])
_TEST = "hidden::test"


class ScriptConfig(Config):
    timeout_s: float = Field(
        10.0, gt=0, description="Seconds that grading one submission may take; a task's own `timeout_s` goes before it."
    )
    max_output: int = Field(1 << 16, ge=100, description="Most bytes of output that the grader reads.")


class _Grading(StrictModel):
    kind: Literal["script"]
    files: dict[str, str | Base64] = Field(default_factory=dict)
    env: dict[str, str] = Field(default_factory=dict)
    timeout_s: float | None = Field(None, gt=0)


class _Exit(_Grading):
    verdict: Literal["exit"] = "exit"
    command: list[str] = Field(min_length=1)


class _RewardFile(_Grading):
    verdict: Literal["reward_file"]
    command: list[str] = Field(min_length=1)
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


class Script:
    """Value 1 if the script says that the submission passes, else 0; or the number in the reward file."""

    name = "script"
    kind = "script"
    cannot_protect = (
        "By exit code or reward file, the command of a task runs where the submission lies. Submitted code that it "
        "imports or starts can read the grading files, end the process with success and write the reward file; no "
        'grader can tell. With verdict "python" the test runs apart from the submission, where the task allows it.'
    )

    def __init__(self, config: ScriptConfig | None = None) -> None:
        self.config = config or ScriptConfig()
        self._judge = Judge()

    async def grade(self, episode: Episode) -> Reward:
        task = episode.task
        grading = _parse(task)
        try:
            if isinstance(grading, _Python):
                judged = await self._judge.judge(episode, self._plan(grading))
                value, evidence = float(judged.verdicts.get(_TEST) == "passed"), judged.evidence
            else:
                async with clean_machine(episode, contents(grading.files), program=grading.command[0]) as machine:
                    result = await machine.exec(
                        grading.command,
                        env=grading.env,
                        timeout_s=(grading.timeout_s or self.config.timeout_s) * machine.capabilities.slowdown,
                        max_output=self.config.max_output,
                    )
                    if isinstance(grading, _RewardFile):
                        return await self._read_reward(machine, grading, result)
                    value, evidence = float(result.exit_code == 0 and result.stopped is None), evidence_of(result)
        except DoesNotFit as error:
            return Reward(0.0, evidence={"unwritable": str(error)}, grader=self.name)
        if missing := [path for path in task.paths if path not in episode.submission]:
            evidence["missing"] = missing[:20]
        return Reward(value, evidence=evidence, grader=self.name)

    async def weaknesses(self, episode: Episode) -> str:
        """What this reward cannot protect in a task; empty if it is no more than with any."""
        grading = _parse(episode.task)
        if isinstance(grading, _Python):
            return counted(list((await self._judge.levels(episode, self._plan(grading))).values()))
        return f"verdict {grading.verdict!r}: submitted code that the command imports or starts can decide it"

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

    async def _read_reward(self, machine: Machine, grading: _RewardFile, result: ExecResult) -> Reward:
        """Untrusted: submitted code ran in this machine. What is no finite number earns nothing."""
        evidence = evidence_of(result)
        for path in grading.reward_files:
            with contextlib.suppress(OSError):
                data = await machine.read(path, max_bytes=_MAX_REWARD)
                try:
                    numbers = _numbers(data)
                except ValueError as error:
                    return Reward(0.0, evidence={**evidence, "no_reward": f"{path}: {error}"[:500]}, grader=self.name)
                if isinstance(numbers, dict):
                    value = numbers.get("reward", sum(numbers.values()) / max(len(numbers), 1))
                    return Reward(value, {name[:100]: number for name, number in numbers.items()}, evidence, self.name)
                return Reward(numbers, evidence=evidence, grader=self.name)
        return Reward(0.0, evidence={**evidence, "no_reward": "no reward file was written"}, grader=self.name)


def _numbers(data: bytes) -> float | dict[str, float]:
    """ValueError for what is no finite number and no object of such."""
    try:
        return parse_json(data, _NUMBERS)
    except ValueError as error:
        with contextlib.suppress(ValueError):
            if math.isfinite(number := float(data.decode("ascii", "replace"))):  # `.5`, as bc writes it
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
