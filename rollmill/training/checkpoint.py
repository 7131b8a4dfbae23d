"""Checkpoints: everything a step needs of the steps before it (fp32 masters, Adam moments, counters, random state).

    checkpoints/LINE/00000010/state.safetensors     written first
    checkpoints/LINE/00000010/checkpoint.json       written last, with the digest of the state: now it counts

A restart takes the newest one that reads back whole. Versions in the weight store are no substitute: they are rounded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

import safetensors
import safetensors.torch
import torch
from blake3 import blake3
from torch import Tensor

from rollmill import telemetry
from rollmill.errors import StorageError, TrainingError
from rollmill.storage.objects import Objects


@dataclass(frozen=True)
class Checkpoint:
    line: str
    step: int
    bad_steps: int  # steps in a row with gradients not finite, up to here
    tensors: Mapping[str, Tensor]


class Checkpoints:
    def __init__(self, objects: Objects, keep: int) -> None:
        self._objects = objects
        self._keep = keep

    def save(self, checkpoint: Checkpoint) -> None:
        """Durable when this returns. Older checkpoints of the line beyond `keep` are then removed."""
        folder = _folder(checkpoint.line, checkpoint.step)
        state = safetensors.torch.save({name: tensor.contiguous() for name, tensor in checkpoint.tensors.items()})
        described = {
            "line": checkpoint.line,
            "step": checkpoint.step,
            "bad_steps": checkpoint.bad_steps,
            "bytes": len(state),
            "blake3": blake3(state).hexdigest(),
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
        }
        self._objects.put(f"{folder}/state.safetensors", state)
        self._objects.put(f"{folder}/checkpoint.json", json.dumps(described, indent=1).encode())
        for step in self.steps(checkpoint.line)[: -self._keep]:
            # the description goes first, so that what is half removed no longer counts
            self._objects.delete(f"{_folder(checkpoint.line, step)}/checkpoint.json")
            self._objects.delete(f"{_folder(checkpoint.line, step)}/state.safetensors")

    def steps(self, line: str) -> list[int]:
        """Steps with a complete checkpoint, oldest first."""
        keys = self._objects.list(f"checkpoints/{line}")
        return sorted(int(key.split("/")[-2]) for key in keys if key.endswith("/checkpoint.json"))

    def newest(self, line: str) -> Checkpoint | None:
        """The newest one that reads back whole; None if there never was one."""
        steps = self.steps(line)
        for step in reversed(steps):
            try:
                return self._read(line, step)
            except (StorageError, safetensors.SafetensorError, ValueError, KeyError) as error:
                text = f"checkpoint {step} of {line} is unreadable, trying an older one: {error}"
                telemetry.emit("warning", text=text)
        if steps:
            raise TrainingError(
                f"none of the checkpoints of line {line!r} (steps {steps}) reads back whole",
                hint="restore checkpoints/ from a backup, or start another line from a published version",
            )
        return None

    def _read(self, line: str, step: int) -> Checkpoint:
        folder = _folder(line, step)
        described = json.loads(self._objects.get(f"{folder}/checkpoint.json"))
        state = self._objects.get(f"{folder}/state.safetensors")
        if blake3(state).hexdigest() != described["blake3"]:
            raise ValueError("its bytes do not match their digest")
        return Checkpoint(line, step, int(described["bad_steps"]), safetensors.torch.load(state))


def _folder(line: str, step: int) -> str:
    return f"checkpoints/{line}/{step:08d}"
