"""Checkpoints by many ranks, with torch.distributed.checkpoint: each writes its rows, any number of ranks reads them.

    checkpoints/LINE/00000010/state-00000-of-00002-00000.safetensors …     each rank's own, written first
    checkpoints/LINE/00000010/state-00001-of-00002-00000.safetensors …
    checkpoints/LINE/00000010/checkpoint.json      written last, by the first rank: which rows of which tensor are
                                                   where, each piece with its digest

One rank writes as training.checkpoint does; either reads the other's.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from rollmill.storage.objects import Objects
from rollmill.training.checkpoint import parts_of, rows_held, state_digest
from rollmill.training.parallel.rows import Rows, Shards
from rollmill.training.parallel.world import World


@dataclass(frozen=True)
class RowShard:
    """Rows of a tensor, as torch.distributed.checkpoint wants to know them."""

    tensor: Tensor
    rows: Rows

    def size(self) -> torch.Size:
        return torch.Size(self.rows.shape)

    @property
    def _chunk(self) -> ChunkStorageMetadata:
        rest = self.rows.shape[1:]
        offsets = torch.Size((self.rows.start, *(0 for _ in rest)))
        return ChunkStorageMetadata(offsets, torch.Size((self.rows.count, *rest)))

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        if not self.rows.count:
            return []
        properties = TensorProperties(dtype=self.tensor.dtype)
        data = TensorWriteData(chunk=self._chunk, properties=properties, size=self.size())
        return [WriteItem(MetadataIndex(name, self._chunk.offsets), WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [self._chunk] if self.rows.count else []


def write_state(
    objects: Objects, folder: str, described: Mapping[str, Any], tensors: Mapping[str, Tensor], shards: Shards
) -> None:
    """All ranks together. Durable when this returns; `described` goes into the description."""
    state = {name: _shard(tensor, rows_held(name, shards)) for name, tensor in tensors.items()}
    writer = _Writer(objects, folder, described, shards.world)
    dcp.save(state, storage_writer=writer, planner=_SavePlanner(dedup_save_to_lowest_rank=True))


def read_state(objects: Objects, folder: str, described: Mapping[str, Any], shards: Shards | None) -> dict[str, Tensor]:
    """What this rank holds of the tensors, or all of them on a rank that is alone. ValueError if it is not there."""
    tensors: dict[str, Tensor] = {}
    state: dict[str, RowShard | Tensor] = {}
    for name, entry in described["tensors"].items():
        rows = None if shards is None else rows_held(name, shards)
        shape = entry["shape"] if rows is None else (rows.count, *rows.shape[1:])
        tensors[name] = torch.empty(shape, dtype=getattr(torch, entry["dtype"]))
        state[name] = _shard(tensors[name], rows)
    reader = _Reader(objects, folder, described)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that a rank which is alone reads by itself
            planner = _LoadPlanner(flatten_state_dict=False)
            dcp.load(state, storage_reader=reader, planner=planner, no_dist=shards is None)
    except CheckpointException as error:  # not an Exception; holds what went wrong on each rank
        raise ValueError("; ".join(f"rank {rank}: {each[0]}" for rank, each in error.failures.items())) from None
    return tensors


def _shard(tensor: Tensor, rows: Rows | None) -> RowShard | Tensor:
    return tensor if rows is None else RowShard(tensor, rows)


class _SavePlanner(DefaultSavePlanner):
    def lookup_object(self, index: MetadataIndex) -> Any:
        return _tensor(self.state_dict[index.fqn])


class _LoadPlanner(DefaultLoadPlanner):
    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        """As it is: torch would first drop what is no tensor of its own."""
        self.state_dict = self.original_state_dict = state_dict
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return _tensor(self.state_dict[index.fqn])


def _tensor(value: RowShard | Tensor) -> Tensor:
    return value.tensor if isinstance(value, RowShard) else value


class _Writer(StorageWriter):
    def __init__(self, objects: Objects, folder: str, described: Mapping[str, Any], world: World) -> None:
        self._objects, self._folder, self._described = objects, folder, described
        self._object = f"state-{world.rank:05d}-of-{world.size:05d}"

    def reset(self, checkpoint_id: Any = None) -> None: ...

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        items = {item.index.fqn: item for item in plan.items}
        tensors = {name: planner.resolve_data(item) for name, item in items.items()}
        results = []
        for number, part in enumerate(parts_of(tensors)):  # type: ignore[arg-type]
            for name, place in self._write(f"{self._object}-{number:05d}.safetensors", part).items():
                results.append(WriteResult(items[name].index, place["bytes"], place))
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def _write(self, name: str, tensors: dict[str, Tensor]) -> dict[str, dict[str, Any]]:
        """One object, and where each tensor lies in it."""
        data = safetensors.torch.save(tensors)
        self._objects.put(f"{self._folder}/{name}", data)
        size = int.from_bytes(data[:8], "little")
        places: dict[str, dict[str, Any]] = {}
        for tensor, entry in json.loads(data[8 : 8 + size]).items():
            if tensor in tensors:
                start, stop = (8 + size + place for place in entry["data_offsets"])
                digest = state_digest(memoryview(data)[start:stop])
                places[tensor] = {"object": name, "start": start, "bytes": stop - start, "blake3": digest}
        return places

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        places = {result.index: result.storage_data for of_rank in results for result in of_rank}
        tensors: dict[str, Any] = {}
        for name, entry in metadata.state_dict_metadata.items():
            assert isinstance(entry, TensorStorageMetadata)
            pieces = [
                {
                    "offsets": list(chunk.offsets),
                    "sizes": list(chunk.sizes),
                    **places[MetadataIndex(name, chunk.offsets)],
                }
                for chunk in entry.chunks
            ]
            dtype = str(entry.properties.dtype).removeprefix("torch.")
            tensors[name] = {"dtype": dtype, "shape": list(entry.size), "pieces": pieces}
        body = json.dumps({**self._described, "tensors": tensors}, indent=1).encode()
        self._objects.put(f"{self._folder}/checkpoint.json", body)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


class _Reader(StorageReader):
    def __init__(self, objects: Objects, folder: str, described: Mapping[str, Any]) -> None:
        self._objects, self._folder, self._tensors = objects, folder, described["tensors"]
        self._places: dict[MetadataIndex, Any] = {}

    def reset(self, checkpoint_id: Any = None) -> None: ...

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        found: dict[str, Any] = {}
        for name, entry in self._tensors.items():
            chunks = [
                ChunkStorageMetadata(torch.Size(piece["offsets"]), torch.Size(piece["sizes"]))
                for piece in entry["pieces"]
            ]
            properties = TensorProperties(dtype=getattr(torch, entry["dtype"]))
            found[name] = TensorStorageMetadata(properties, torch.Size(entry["shape"]), chunks)
        return Metadata(found)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._places = {
            MetadataIndex(name, torch.Size(piece["offsets"])): (piece, entry["dtype"])
            for name, entry in self._tensors.items()
            for piece in entry["pieces"]
        }

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            piece = self._piece(item.storage_index)
            for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                piece = piece.narrow(dim, start, length)
            target = planner.resolve_tensor(item).detach()
            target.copy_(piece)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _piece(self, index: MetadataIndex) -> Tensor:
        """A piece as it was written: its digest is that of all of it."""
        place, dtype = self._places[MetadataIndex(index.fqn, index.offset)]
        data = self._objects.get_range(f"{self._folder}/{place['object']}", place["start"], place["bytes"])
        if state_digest(data) != place["blake3"]:
            raise ValueError(f"the bytes of {index.fqn} in {place['object']} do not match their digest")
        return torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype)).view(place["sizes"])

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True
