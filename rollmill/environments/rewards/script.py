"""A script decides: hidden files and a command whose exit code is the verdict, or a hidden Python test.

    task.grading = {"kind": "script", "files": {"hidden_test.py": "…"}, "command": ["python", "hidden_test.py"]}
    task.grading = {"kind": "script", "verdict": "python", "test": "from main import f\\nassert f(3) == 4\\n"}

A clean machine gets the task's files, the declared submission over them, and the grading files last, so a submission
cannot replace them. `verdict` says what counts as passed:

    "exit"    (default) `command` ends with exit code 0 within `timeout_s`
    "reward_file"  `command` writes a number into the first of `reward_files` that is there, or an object with numbers:
              `reward`, or their mean
    "python"  `test` runs to its end. Our driver then prints a word that was drawn for this run. It reads word and
              test from its standard input before any submitted code runs; neither is in a file of the machine.

What this cannot protect: a test that imports the submitted code runs in one process with it. With "exit", that code can
end the process with success (`os._exit(0)`) and can read the grading files. With "python" neither works, but code that
searches the frames of its process finds the word, and an object that equals everything passes any `assert`. Use the
reward `calls` where the expected values can be written as data: they never enter a machine.
"""

from __future__ import annotations

import contextlib
import json
import math
import secrets
from typing import Any, Literal

from pydantic import Field, FiniteFloat, TypeAdapter, field_validator

from rollmill.config import Config
from rollmill.environments.episode import Episode
from rollmill.environments.machine import WORK, ExecResult, Machine
from rollmill.environments.rewards.clean import DoesNotFit, clean_machine, evidence_of, read_grading
from rollmill.environments.task import Task
from rollmill.environments.tasks.jsonl import Base64, contents
from rollmill.environments.tasks.programs import parse_python
from rollmill.strict import StrictModel, parse_json
from rollmill.types import Reward

_MAX_REWARD = 1 << 16  # bytes of a reward file
_NUMBERS: TypeAdapter[float | dict[str, float]] = TypeAdapter(FiniteFloat | dict[str, FiniteFloat])
# Runs in the machine. It takes what it needs later as local names, before submitted code can patch a module. Standard
# input is a file that could be read again, so it is replaced.
_DRIVER = f"""
def drive():
    import json, os, sys
    write, leave = os.write, os._exit
    work = json.load(sys.stdin)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.path[0] = "{WORK}"
    program = compile(work.pop("test"), "<hidden test>", "exec")
    exec(program, {{"__name__": "__main__"}})
    try:
        sys.stdout.flush()
    finally:
        write(1, ("\\n" + work["word"] + "\\n").encode())
        leave(0)
drive()
"""


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
    cannot_protect = (
        "A test that imports submitted code runs in one process with it. By exit code, that code can end the process "
        'with success and read the grading files; with verdict "python" it can find the secret word in the frames of '
        "its process; a reward file it can write itself. An object that equals everything passes any assert."
    )

    def __init__(self, config: ScriptConfig | None = None) -> None:
        self.config = config or ScriptConfig()

    async def grade(self, episode: Episode) -> Reward:
        task = episode.task
        grading = _parse(task)
        word = secrets.token_hex(16)
        command = ["python", "-c", _DRIVER] if isinstance(grading, _Python) else grading.command
        stdin = json.dumps({"word": word, "test": grading.test}).encode() if isinstance(grading, _Python) else b""
        try:
            async with clean_machine(episode, contents(grading.files), program=command[0]) as machine:
                result = await machine.exec(
                    command,
                    env=grading.env,
                    stdin=stdin,
                    timeout_s=(grading.timeout_s or self.config.timeout_s) * machine.capabilities.slowdown,
                    max_output=self.config.max_output,
                )
                if isinstance(grading, _RewardFile):
                    return await self._read_reward(machine, grading, result)
        except DoesNotFit as error:
            return Reward(0.0, evidence={"unwritable": str(error)}, grader=self.name)
        passed, evidence = _verdict(result, word) if isinstance(grading, _Python) else _exit_verdict(result)
        if missing := [path for path in task.paths if path not in episode.submission]:
            evidence["missing"] = missing[:20]
        return Reward(1.0 if passed else 0.0, evidence=evidence, grader=self.name)

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


def _exit_verdict(result: ExecResult) -> tuple[bool, dict[str, Any]]:
    return result.exit_code == 0 and result.stopped is None, evidence_of(result)


def _verdict(result: ExecResult, word: str) -> tuple[bool, dict[str, Any]]:
    lines = result.output.decode("utf-8", "replace").splitlines()
    return word in lines, evidence_of(result, "\n".join(line for line in lines if word not in line))


def _parse(task: Task) -> _Exit | _RewardFile | _Python:
    hint = 'it needs {"kind": "script", "files": {path: text}, "command": [argv]}, or "verdict": "python" and "test"'
    if task.grading.get("verdict") == "reward_file":
        return read_grading(task, _RewardFile, hint='"verdict": "reward_file" needs "command" and "reward_files"')
    if task.grading.get("verdict") == "python":
        return read_grading(task, _Python, hint=hint)
    return read_grading(task, _Exit, hint=hint)
