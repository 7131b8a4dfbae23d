"""Episode: one attempt at a task, as a reward sees it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollmill.environments.harness import HarnessResult
from rollmill.environments.task import Task
from rollmill.errors import RewardError
from rollmill.machines.machine import LentMachine, Machine, MachineHost, Snapshot

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
    links: Mapping[str, str] = field(default_factory=dict)  # path → target; only with the whole diff
    refused: str | None = None  # why nothing of what the agent left was taken; None if it was
    # the state in which the agent left its machine, for a reward with `wants_final_state`. None if the machines cannot
    # save it, and if the episode is graded later and it was too large to be kept, or had processes. Released afterwards
    final_state: Snapshot | None = None
    state_refused: str | None = None  # why it was not saved, by the agent's doing: too large, or a ruined machine

    async def open_final_state(self) -> Machine:
        """A new machine in the state in which the agent left its own; that one itself if the task has `processes`.
        Untrusted. The caller closes it. RewardError if the state is not there."""
        if self.final_state is None:
            why = self.state_refused or "the machines cannot save it, or the episode was played earlier"
            hint = "kept with an episode is a state of files of at most 16 MiB; play the task again for a reward"
            raise RewardError(f"the final state of the machine is not there: {why}", hint=hint)
        if isinstance(self.final_state.state, Machine):
            return LentMachine(self.final_state.state)
        return await self.machines.create(self.task.image, snapshot=self.final_state)
