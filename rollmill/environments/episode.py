"""Episode: one attempt at a task, as a reward sees it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollmill.environments.harness import HarnessResult
from rollmill.environments.machine import MachineHost
from rollmill.environments.task import Task

Submission = Mapping[str, bytes]  # path relative to the work directory -> contents; missing files are absent


@dataclass(frozen=True)
class Episode:
    """Everything but `task` and `machines` is the agent's doing: untrusted."""

    task: Task
    submission: Submission  # what was handed in: the paths that the task names, or the changed and new files
    machines: MachineHost  # creates clean machines for grading
    messages: Sequence[Mapping[str, Any]] = field(default=())  # the transcript, in OpenAI's form, tool calls included
    result: HarnessResult | None = None  # how it ended; None if that was not recorded
    tokens: int = 0  # that the policy sampled
    seconds: float = 0.0
    deleted: Sequence[str] = ()  # paths; only with the whole diff
    executable: Sequence[str] = ()  # paths of the submission that may be run as programs; only with the whole diff
    refused: str | None = None  # why nothing of what the agent left was taken; None if it was
