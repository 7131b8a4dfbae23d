"""Checkpoints: everything a step needs of the steps before it (fp32 masters, Adam moments, counters, random state).

    checkpoints/LINE/00000010/state-00000.safetensors …   written first, one after another: what is needed beside the
                                                          state is the memory of one of them
    checkpoints/LINE/00000010/checkpoint.json             written last, with their digests: now it counts

A restart takes the newest one that reads back whole. Versions in the weight store are no substitute: they are rounded.
Many ranks write a state each (training.parallel.checkpoint); any number of ranks, also one, goes on from either.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import safetensors
import safetensors.torch
import torch
from blake3 import blake3
from torch import Tensor

from rollmill import telemetry
from rollmill.errors import StorageError, TrainingError
from rollmill.storage.objects import Objects
from rollmill.training.parallel.rows import Rows, Shards

OBJECT_BYTES = 256 << 20
UNREADABLE = (StorageError, safetensors.SafetensorError, ValueError, KeyError, TypeError)


@dataclass(frozen=True)
class Checkpoint:
    """On many ranks the tensors are what this rank holds of them."""

    line: str
    step: int
    bad_steps: int  # steps in a row with gradients not finite, up to here
    tensors: Mapping[str, Tensor]


class Checkpoints:
    def __init__(self, objects: Objects, keep: int, shards: Shards | None = None) -> None:
        """With `shards` all ranks save and read together."""
        self._objects = objects
        self._keep = keep
        self._shards = shards

    def save(self, checkpoint: Checkpoint) -> None:
        """Durable when this returns. Older checkpoints of the line beyond `keep` are then removed."""
        folder = _folder(checkpoint.line, checkpoint.step)
        described: dict[str, Any] = {
            "line": checkpoint.line,
            "step": checkpoint.step,
            "bad_steps": checkpoint.bad_steps,
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
        }
        if self._shards is None:
            described["objects"] = [
                self._write(folder, f"state-{number:05d}.safetensors", part)
                for number, part in enumerate(parts_of(checkpoint.tensors))
            ]
            self._objects.put(f"{folder}/checkpoint.json", json.dumps(described, indent=1).encode())
        else:
            from rollmill.training.parallel.checkpoint import write_state

            write_state(self._objects, folder, described, checkpoint.tensors, self._shards)
        if self._shards is None or self._shards.world.first:
            self._remove_old(checkpoint.line)

    def _write(self, folder: str, name: str, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        data = safetensors.torch.save(dict(tensors))
        self._objects.put(f"{folder}/{name}", data)
        return {"name": name, "bytes": len(data), "blake3": state_digest(data)}

    def _remove_old(self, line: str) -> None:
        for step in self.steps(line)[: -self._keep]:
            # the description goes first, so that what is half removed no longer counts
            self._objects.delete(f"{_folder(line, step)}/checkpoint.json")
            for key in self._objects.list(_folder(line, step)):
                self._objects.delete(key)

    def steps(self, line: str) -> list[int]:
        """Steps with a complete checkpoint, oldest first."""
        keys = self._objects.list(f"checkpoints/{line}")
        return sorted(int(key.split("/")[-2]) for key in keys if key.endswith("/checkpoint.json"))

    def newest(self, line: str) -> Checkpoint | None:
        """The newest one that reads back whole; None if there never was one."""
        steps = self._agreed(self.steps(line))
        for step in reversed(steps):
            found, problem = self._try(line, step)
            if self._all(found is not None):
                return found
            if problem is not None:
                text = f"checkpoint {step} of {line} is unreadable, trying an older one: {problem}"
                telemetry.emit("warning", text=text)
        if steps:
            raise TrainingError(
                f"none of the checkpoints of line {line!r} (steps {steps}) reads back whole",
                hint="restore checkpoints/ from a backup, or start another line from a published version",
            )
        return None

    def _try(self, line: str, step: int) -> tuple[Checkpoint | None, str | None]:
        """The checkpoint, or why it cannot be read."""
        described: dict[str, Any] | None = None
        problem = None
        try:
            described = json.loads(self._objects.get(f"{_folder(line, step)}/checkpoint.json"))
        except UNREADABLE as error:
            problem = str(error)
        described = self._agreed(described)
        if described is None:
            return None, problem
        try:
            return self._read(line, step, described), None
        except UNREADABLE as error:
            return None, str(error)

    def _read(self, line: str, step: int, described: Mapping[str, Any]) -> Checkpoint:
        folder = _folder(line, step)
        if "tensors" in described:
            from rollmill.training.parallel.checkpoint import read_state

            tensors: Mapping[str, Tensor] = read_state(self._objects, folder, described, self._shards)
        else:
            tensors = dict(self._objects_read(folder, described["objects"]))
        return Checkpoint(line, step, int(described["bad_steps"]), tensors)

    def _objects_read(self, folder: str, objects: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, Tensor]]:
        for entry in objects:
            data = self._objects.get(f"{folder}/{entry['name']}")
            if state_digest(data) != entry["blake3"]:
                raise ValueError(f"the bytes of {entry['name']} do not match their digest")
            for name, tensor in safetensors.torch.load(data).items():
                yield name, tensor if self._shards is None else _own_rows(name, tensor, self._shards)

    def _agreed(self, value: Any) -> Any:
        return value if self._shards is None else self._shards.world.from_first(value)

    def _all(self, good: bool) -> bool:
        return good if self._shards is None else self._shards.world.all(good)


def parts_of(tensors: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """In order, on the host, as much at a time as one object should hold."""
    part: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors.items():
        if part and size + tensor.nbytes > OBJECT_BYTES:
            yield part
            part, size = {}, 0
        part[name] = tensor.detach().cpu().contiguous()
        size += tensor.nbytes
    yield part


def state_digest(data: bytes | memoryview) -> str:
    return blake3(data, max_threads=blake3.AUTO).hexdigest()


def rows_held(name: str, shards: Shards) -> Rows | None:
    """Which rows of a tensor of the state are here: those of its parameter. None: all of it, as on any rank."""
    parameter = name.partition(".")[2]  # master.NAME, mean.NAME, square.NAME
    return shards.own(parameter) if parameter in shards.rows else None


def _own_rows(name: str, tensor: Tensor, shards: Shards) -> Tensor:
    rows = rows_held(name, shards)
    return tensor if rows is None else tensor[rows.start : rows.stop].clone()


def _folder(line: str, step: int) -> str:
    return f"checkpoints/{line}/{step:08d}"
