"""What an episode left: the files that it hands in, and how it ended. Stored before the seal and graded later."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace

import zstandard
from blake3 import blake3
from pydantic import BaseModel, ConfigDict, Field

from rollmill.environments.episode import Episode
from rollmill.environments.harness import HarnessResult
from rollmill.environments.rewards import transcript
from rollmill.environments.task import Task, WholeDiff
from rollmill.errors import ObjectExists, TrajectoryError
from rollmill.machines.lasting import LastingMachine
from rollmill.machines.machine import Machine, MachineHost, Snapshot
from rollmill.rollouts.work_diff import take_diff
from rollmill.storage.objects import Objects
from rollmill.trajectories.payload import seal_facts
from rollmill.types import Trajectory

_MOST_STATE, _LARGEST_STATE = 1 << 24, 1 << 32  # bytes of a final state that is kept, and unpacked
_DIGEST_BYTES = 65  # hexadecimal, and the end of its line


class HandIn(BaseModel):
    """With the trajectory's payload, everything that grading needs of an episode."""

    model_config = ConfigDict(extra="forbid", ser_json_bytes="base64", val_json_bytes="base64", frozen=True)

    files: dict[str, bytes] = {}
    deleted: list[str] = []
    executable: list[str] = []
    links: dict[str, str] = {}
    refused: str | None = None
    result: HarnessResult | None = None
    seconds: float = 0.0
    state: bytes = b""  # the final state as bytes, compressed, with which rewards can be given again; empty: not kept
    state_image: str = ""
    state_refused: str | None = None
    final_state: Snapshot | None = Field(None, exclude=True)  # of this process, and never stored

    @property
    def keeps_machine(self) -> bool:
        return self.final_state is not None and isinstance(self.final_state.state, Machine)

    def episode(self, task: Task, machines: MachineHost) -> Episode:
        """The episode without its transcript."""
        return Episode(
            task=task,
            submission=self.files,
            machines=machines,
            result=self.result,
            seconds=self.seconds,
            deleted=self.deleted,
            executable=self.executable,
            links=self.links,
            refused=self.refused,
            final_state=self.final_state,
            state_refused=self.state_refused,
        )


async def take_hand_in(
    machine: Machine,
    task: Task,
    clean: MachineHost,
    result: HarnessResult | None = None,
    seconds: float = 0.0,
    *,
    keep_state: bool = False,
) -> HandIn:
    """Read what the task hands in out of a machine. `clean` creates the machine that a whole diff is compared with.

    A file that the agent deleted or made unreadable is left out. Whatever the agent did to the machine is no error.
    With `keep_state` the machine's state is saved too; the caller releases it.
    """
    handed_in = await _read(machine, task, clean, result, seconds)
    if keep_state and isinstance(machine, LastingMachine):
        return handed_in.model_copy(update={"final_state": machine.keep()})
    if not keep_state or machine.capabilities.snapshot == "none":
        return handed_in
    try:
        return handed_in.model_copy(update={"final_state": await machine.snapshot()})
    except OSError as error:
        return handed_in.model_copy(update={"state_refused": str(error)})


async def with_kept_state(handed_in: HandIn, machines: MachineHost) -> HandIn:
    """The hand-in with its final state as bytes, if that can leave its host and is small."""
    if handed_in.final_state is None or handed_in.keeps_machine:
        return handed_in
    exported = await machines.export(handed_in.final_state)
    if exported is None or not isinstance(exported.state, bytes):
        return handed_in
    packed = await asyncio.to_thread(zstandard.compress, exported.state, 1)
    if len(packed) > _MOST_STATE:
        return handed_in
    return handed_in.model_copy(update={"state": packed, "state_image": exported.image})


async def _read(
    machine: Machine, task: Task, clean: MachineHost, result: HarnessResult | None, seconds: float
) -> HandIn:
    if isinstance(task.submission, WholeDiff):
        diff = await take_diff(machine, task, task.submission, clean)
        return HandIn(**vars(diff), result=result, seconds=seconds)
    files = {}
    for path in task.submission:
        with contextlib.suppress(OSError):
            files[path] = await machine.read(path)
    return HandIn(files=files, result=result, seconds=seconds)


def graded_episode(handed_in: HandIn, task: Task, machines: MachineHost, trajectory: Trajectory) -> Episode:
    """The episode as it was, from what is stored of it: the hand-in and the trajectory's payload."""
    tokens = seal_facts(trajectory)["sampled_tokens"]
    return with_counts(replace(handed_in.episode(task, machines), messages=trajectory.messages, tokens=tokens))


def with_counts(episode: Episode) -> Episode:
    """The episode with turns and tool calls counted in its transcript, if its harness reported none: it was cut off
    when its time was over, or it does not see them."""
    result = episode.result
    if result is None or result.turns:
        return episode
    given = replace(episode, messages=episode.task.messages)  # examples of answers in the task are not the agent's
    turns = max(0, len(transcript.answers(episode)) - len(transcript.answers(given)))
    calls = list(transcript.parsed_calls(episode))[len(list(transcript.parsed_calls(given))) :]
    bad = sum(arguments is None for _, arguments in calls)
    return replace(episode, result=replace(result, turns=turns, tool_calls=len(calls), bad_tool_calls=bad))


def hand_in_key(trajectory: str) -> str:
    return f"submissions/{trajectory}"


def store_hand_in(objects: Objects, trajectory: str, handed_in: HandIn) -> str:
    """Store it with its digest in front: what was damaged since would be graded as what the agent did."""
    key, data = hand_in_key(trajectory), handed_in.model_dump_json().encode()
    with contextlib.suppress(ObjectExists):  # stored before a crash: the first one counts
        objects.create(key, _digest(data) + data)
    return key


def load_hand_in(objects: Objects, key: str) -> HandIn:
    stored = objects.get(key)
    data = stored[_DIGEST_BYTES:]
    if _digest(data) != stored[:_DIGEST_BYTES]:
        raise TrajectoryError(f"the submission {key} is damaged", hint="its trajectory cannot be graded")
    handed_in = HandIn.model_validate_json(data)
    if not handed_in.state:
        return handed_in
    state = zstandard.ZstdDecompressor().decompress(handed_in.state, max_output_size=_LARGEST_STATE)
    return handed_in.model_copy(update={"final_state": Snapshot(handed_in.state_image, state)})


def _digest(data: bytes) -> bytes:
    return blake3(data).hexdigest().encode() + b"\n"
