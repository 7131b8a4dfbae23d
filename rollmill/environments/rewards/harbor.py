"""The tests of a Harbor or Terminal-Bench task decide, in the state in which the agent left its machine.

    task.grading = {"kind": "harbor", "verdict": "reward_file", "files": {"/tests/test.sh": "…"},
                    "command": ["/tests/test.sh"], "reward_files": ["/logs/verifier/reward.txt"]}

A new machine gets all files that the agent's machine had, at their places; processes are gone. A task with `processes`
is graded in the agent's machine itself, where they go on. With `separate` it is a clean machine, of the task's image or
of `image`, with the `artifacts` of the agent's. Then the tests are written, and the command runs. `verdict` is that of
the reward `script`: "exit", or "reward_file".

What this cannot protect: unless `separate`, the tests run where the agent could change any program and library. With
`processes`, a program that the agent left can also read the tests and write the verdict while they run.
"""

from __future__ import annotations

import contextlib
import io
import tarfile
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Literal

from pydantic import Field

from rollmill.environments.episode import Episode
from rollmill.environments.rewards.clean import DoesNotFit, evidence_of, read_grading
from rollmill.environments.rewards.script import Script
from rollmill.environments.task_machine import create_machine
from rollmill.environments.tasks.jsonl import Base64, contents
from rollmill.errors import TaskError
from rollmill.machines.machine import Machine
from rollmill.strict import StrictModel
from rollmill.types import Grade

_PREPARE = (
    "rm -rf /tests /logs/verifier; mkdir -p /tests /logs/verifier /logs/agent /logs/artifacts; "
    "chmod 777 /tests /logs /logs/verifier /logs/agent /logs/artifacts"
)
_SHORT_S = 30.0
_MOST_ARTIFACTS = 1 << 27  # bytes of one


class _Grading(StrictModel):
    kind: Literal["harbor"]
    verdict: Literal["exit", "reward_file"]
    files: dict[str, str | Base64]
    command: list[str] = Field(min_length=1)
    reward_files: list[str] = Field(default_factory=list)
    env: dict[str, str] = Field(default_factory=dict)
    timeout_s: float | None = Field(None, gt=0)
    user: str | None = None
    separate: bool = False
    artifacts: list[str] = Field(default_factory=list)
    image: str | None = None


class HarborReward(Script):
    """The number in the reward file; or value 1 if the tests end with exit code 0, else 0."""

    name = "harbor"
    kind = "harbor"
    wants_final_state = True
    cannot_protect = (
        "The tests run in the agent's machine as it was left, unless the task says `separate`: an agent that changes "
        "programs, libraries or settings of them can change the verdict."
    )

    async def grade(self, episode: Episode) -> Grade:
        grading = read_grading(episode.task, _Grading, hint="tasks of kind `harbor` have it")
        try:
            async with self._machine(episode, grading) as machine:
                seconds = (grading.timeout_s or self.config.timeout_s) * machine.capabilities.slowdown
                result = await machine.exec(
                    grading.command,
                    env=grading.env,
                    timeout_s=seconds,
                    max_output=self.config.max_output,
                    user=grading.user,
                )
                if grading.verdict == "reward_file":
                    return await self._read_reward(machine, grading.reward_files, result)
                passed = result.exit_code == 0 and result.stopped is None
                return Grade(float(passed), evidence=evidence_of(result), grader=self.name)
        except DoesNotFit as error:
            return Grade(0.0, evidence={"unwritable": str(error)}, grader=self.name)

    async def weaknesses(self, episode: Episode) -> str:
        if not episode.task.processes:
            return ""
        return "what the agent left running is there while the tests run, and can change their verdict"

    @contextlib.asynccontextmanager
    async def _machine(self, episode: Episode, grading: _Grading) -> AsyncIterator[Machine]:
        """Where the tests run, with their files."""
        if episode.state_refused is not None:
            raise DoesNotFit(episode.state_refused[:1000])
        machine = await episode.open_final_state()
        try:
            if grading.separate:
                machine = await self._apart(machine, episode, grading)
            result = await machine.exec(["sh", "-c", _PREPARE], cwd="/", timeout_s=_SHORT_S, user="root")
            if result.exit_code != 0:
                why = f"/tests and /logs cannot be made: {result.output[-300:]!r}"
                if grading.separate:
                    raise TaskError(f"task {episode.task.id}: {why}", hint="its image needs sh, rm, mkdir and chmod")
                raise DoesNotFit(why)
            try:
                await machine.write_all(contents(grading.files))
            except OSError as error:
                raise DoesNotFit(f"the tests cannot be written: {error}") from None
            yield machine
        finally:
            await machine.close()

    async def _apart(self, left: Machine, episode: Episode, grading: _Grading) -> Machine:
        """A clean machine with the artifacts of the one that the agent left, which ends."""
        try:
            found: dict[str, bytes] = {}
            for path in grading.artifacts:
                found |= await _take(left, path)
        finally:
            await left.close()
        task = episode.task
        if grading.image is not None:
            task = replace(task, image=grading.image, needs=None)
        return await create_machine(episode.machines, task, found)


async def _take(machine: Machine, path: str) -> dict[str, bytes]:
    """The file at a path, or the regular files below it. What is not there is no artifact."""
    with contextlib.suppress(OSError):
        return {path: await machine.read(path, max_bytes=_MOST_ARTIFACTS)}
    try:
        packed = await machine.pack(path, max_bytes=_MOST_ARTIFACTS, timeout_s=_SHORT_S, whole=False)
    except OSError:
        return {}
    found = {}
    with contextlib.suppress(tarfile.TarError), tarfile.open(fileobj=io.BytesIO(packed), mode="r:") as archive:
        for member in archive:
            parts = member.name.removeprefix("./").split("/")
            if member.isreg() and ".." not in parts and (content := archive.extractfile(member)) is not None:
                found[f"{path.rstrip('/')}/{'/'.join(parts)}"] = content.read()
    return found
