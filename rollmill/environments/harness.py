"""Harness: runs an agent. It talks to the model at a URL and executes its tool calls in the machine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from rollmill.environments.task import Task
from rollmill.machines.machine import Machine
from rollmill.types import Sampling


@dataclass(frozen=True)
class HarnessResult:
    """How the episode ended. The policy caused each of these ends; a failure of the infrastructure raises instead."""

    # done: it said so; answer: it stopped calling tools; length: an answer or the context ran out of tokens;
    # time: the rollout's time was over; error: the agent program failed
    stop: Literal["done", "answer", "max_turns", "length", "time", "error"]
    turns: int  # 0 if the harness does not know: then turns and tool calls are counted in the transcript
    tool_calls: int
    bad_tool_calls: int = 0  # not JSON, unknown tool, wrong arguments: answered with an error the model can read
    note: str = ""  # for people: why it ended so


class Progress(Protocol):
    """How far an episode has come. The rollout keeps it with the state of the machine, see
    rollouts/episode_checkpoint.py."""

    state: dict[str, Any] | None  # what `reached` was given when the episode was interrupted; None: it begins

    async def reached(self, state: dict[str, Any]) -> None:
        """The episode can go on from here with `state` (JSON) and the machine as it is now. Breaks no episode."""
        ...


class Harness(ABC):
    """Base class of harnesses: `name` and `run` are needed, everything else has a default."""

    name: str

    # False: it only writes the files that it hands in. It gets a folder that can `read`, `write` and `close`, and no
    # machine is started for it: grading starts one.
    wants_machine = True
    # True: it can go on in the middle of an episode, and its `run` takes `progress: Progress | None`.
    resumable = False

    @abstractmethod
    async def run(
        self, task: Task, machine: Machine, *, base_url: str, api_key: str, sampling: Sampling
    ) -> HarnessResult:
        """One episode. HarnessError if the model cannot be reached; MachineError passes through.

        `base_url` is the session's own address and ends with /v1: chat completions are at base_url + /chat/completions.
        `api_key` is valid for this episode only. Requests with it are recorded as one trajectory. Take `temperature`,
        `top_p` and `seed` from `sampling`, or leave them out: the run decides them.

        When its time is over it is cancelled. It raises HarnessError then if it is waiting for a model that it cannot
        reach, so that the agent is not blamed for it.
        """

    def opening(self, task: Task) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """The first messages and the tools of a task: their tokens must fit into the context."""
        return task.messages, []

    def preflight(self) -> None:
        """Called before a run begins. ConfigError if something it needs here is missing."""

    async def close(self) -> None:
        """Called once, when no episode is left."""
