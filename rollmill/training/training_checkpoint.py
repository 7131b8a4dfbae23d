"""Checkpoints: everything a step needs from the steps before it (fp32 masters, Adam moments, counters, random state).

    checkpoints/LINE/00000010/state-….safetensors     written first
    checkpoints/LINE/00000010/checkpoint.json         written last, with their digests: now the checkpoint counts

A restart takes the newest one whose bytes match their digests, and a new line the one of its parent. Versions in the
weight store are no substitute: they are rounded. training/state.py has the layout of the state; any number of ranks
goes on from what any number has written.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import safetensors
import torch
from torch import Tensor

from rollmill import telemetry
from rollmill.errors import StorageError, TrainingError
from rollmill.storage.objects import Objects
from rollmill.training.parallelism import Parallelism
from rollmill.training.single import SINGLE
from rollmill.training.state import DESCRIPTION

UNREADABLE = (StorageError, safetensors.SafetensorError, ValueError, KeyError, TypeError)


BUFFER = "buffer."  # prefix of tensors that are not parameters


@dataclass(frozen=True)
class Checkpoint:
    line: str
    step: int
    bad_steps: int  # steps in a row, up to this one, whose gradients were not finite
    tensors: Mapping[str, Tensor]  # what this rank holds of them

    def parts(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The state of the optimizer, and the model's buffers by name."""
        state = {name: tensor for name, tensor in self.tensors.items() if name != "rng"}
        saved = [name for name in state if name.startswith(BUFFER)]
        return state, {name.removeprefix(BUFFER): state.pop(name) for name in saved}


class Checkpoints:
    """`save`, `newest` and `at` are collective."""

    def __init__(self, objects: Objects, keep: int, parallel: Parallelism = SINGLE) -> None:
        self._objects = objects
        self._keep = keep
        self._ranks, self._models = parallel.ranks, parallel.models

    def save(self, checkpoint: Checkpoint) -> None:
        """Durable when this returns. Older checkpoints of the line beyond `keep` are then removed."""
        described = {
            "line": checkpoint.line,
            "step": checkpoint.step,
            "bad_steps": checkpoint.bad_steps,
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
        }
        folder = _folder(checkpoint.line, checkpoint.step)
        self._models.write_state(self._objects, folder, described, checkpoint.tensors)
        if self._ranks.first:
            self._remove_old(checkpoint.line)

    def _remove_old(self, line: str) -> None:
        for step in self.steps(line)[: -self._keep]:
            # the description goes first: without it a checkpoint that is half removed does not count
            self._objects.delete(f"{_folder(line, step)}/{DESCRIPTION}")
            self._objects.delete_all(self._objects.list(_folder(line, step)))

    def steps(self, line: str) -> list[int]:
        """Steps with a complete checkpoint, oldest first."""
        keys = self._objects.list(f"checkpoints/{line}")
        return sorted(int(key.split("/")[-2]) for key in keys if key.endswith(f"/{DESCRIPTION}"))

    def newest(self, line: str) -> Checkpoint | None:
        """The newest checkpoint that every rank can read; None if there never was one."""
        steps = self._ranks.from_first(self.steps(line))
        for step in reversed(steps):
            if (found := self._read(line, step)) is not None:
                return found
        if steps:
            raise TrainingError(
                f"none of the checkpoints of line {line!r} (steps {steps}) can be read",
                hint="restore checkpoints/ from a backup, or start another line from a published version",
            )
        return None

    def at(self, line: str, step: int) -> Checkpoint | None:
        """The checkpoint of one step, if there is one that every rank can read. Collective."""
        return self._read(line, step) if step in self._ranks.from_first(self.steps(line)) else None

    def _read(self, line: str, step: int) -> Checkpoint | None:
        found, problem = self._try(line, step)
        if problem is not None:
            telemetry.emit("warning", text=f"checkpoint {step} of {line} is unreadable: {problem}")
        return found if all(self._ranks.gather(found is not None)) else None

    def _try(self, line: str, step: int) -> tuple[Checkpoint | None, str | None]:
        """The checkpoint, or why it cannot be read."""
        described: dict[str, Any] | None = None
        problem = None
        try:
            described = json.loads(self._objects.get(f"{_folder(line, step)}/{DESCRIPTION}"))
        except UNREADABLE as error:
            problem = str(error)
        described = self._ranks.from_first(described)
        if described is None:
            return None, problem
        try:
            tensors = self._models.read_state(self._objects, _folder(line, step), described)
            return Checkpoint(line, step, int(described["bad_steps"]), tensors), None
        except UNREADABLE as error:
            return None, str(error)


def _folder(line: str, step: int) -> str:
    return f"checkpoints/{line}/{step:08d}"
