"""The sharded placement: each rank has rows of every tensor, and computes a share of every micro-batch."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from rollmill.models.config import ModelConfig
from rollmill.models.decoder import Decoder
from rollmill.models.device import compute_dtype
from rollmill.models.dither import dithered
from rollmill.models.kernels.forms import is_quantised
from rollmill.models.moe import Replay
from rollmill.models.quantize import quantises
from rollmill.storage.objects import Objects
from rollmill.training.batching import MicroBatch
from rollmill.training.config import TrainingConfig
from rollmill.training.parallel.fsdp import release, sharded_decoder
from rollmill.training.parallel.mesh import Meshes
from rollmill.training.parallel.row_layout import Shards, local, own_rows, rounded, whole_matrix
from rollmill.training.parallel.shard_publisher import ShardPublisher, shard_publisher
from rollmill.training.parallel.sharded_loading import drawn_rows, fill_rows, stored_rows
from rollmill.training.parallel.sharded_passes import SpreadPasses, spread_logprobs
from rollmill.training.parallel.sharded_state import read_state, write_state
from rollmill.training.parallel.world import World, join
from rollmill.training.ranks import Gather, Recomputed
from rollmill.types import Version
from rollmill.weights.format.tensors import Tensors
from rollmill.weights.reading.weight_store import WeightStore

T = TypeVar("T")


class ShardedPlacement:
    def __init__(self, world: World, meshes: Meshes) -> None:
        self._world, self._meshes = world, meshes
        self._shards: Shards | None = None

    @property
    def shards(self) -> Shards:
        assert self._shards is not None, "make_model comes first"
        return self._shards

    @property
    def first(self) -> bool:
        return self._world.first

    @property
    def rank(self) -> int:
        return self._world.rank

    @property
    def ranks(self) -> int:
        return self._world.size

    def from_first(self, value: T) -> T:
        return self._world.from_first(value)

    def from_first_slowly(self, make: Callable[[], T]) -> T:
        return self._world.from_first_slowly(make)

    def watched(self) -> contextlib.AbstractContextManager[None]:
        return self._world.watched()

    def gather(self, value: T) -> list[T]:
        return self._world.gather(value)

    def leave(self) -> None:
        self._world.leave()

    def make_model(self, config: ModelConfig, form: str, device: torch.device) -> Decoder:
        return self._make(config, compute_dtype(device), form, device)

    def make_like(self, model: Decoder) -> Decoder:
        made = self._make(model.config, model.embedding.dtype, model.form, model.embedding.device)
        if model.exact:
            made.compute_exactly()
        return made

    def _make(self, config: ModelConfig, dtype: torch.dtype, form: str, device: torch.device) -> Decoder:
        model, self._shards = sharded_decoder(config, dtype, form, self._world, self._meshes, device)
        return model

    def initialise(self, model: Decoder, seed: int) -> None:
        fill_rows(model, self.shards, drawn_rows(model.config, self.shards, seed))

    def load_version(self, model: Decoder, store: WeightStore, version: Version, form: str) -> None:
        fill_rows(model, self.shards, stored_rows(model, self.shards, store, version, form))

    def load_held(self, model: Decoder, tensors: Tensors) -> None:
        fill_rows(model, self.shards, [tensors])

    def local(self, tensor: Tensor) -> Tensor:
        return local(tensor)

    def recompute(self, model: Decoder, part: MicroBatch, replay: Replay | None) -> Recomputed:
        return spread_logprobs(model, self.shards, part, replay)

    def release(self, model: Decoder) -> None:
        release(model)

    def next_token_passes(self, model: Decoder, balance: float) -> SpreadPasses:
        return SpreadPasses(model, self.shards, balance)

    def whole_norm(self, norm: Tensor) -> Tensor:
        """Every row is on one rank. In double precision, on the host."""
        [square] = self._world.sum([float(norm) ** 2])
        return torch.tensor(math.sqrt(square), dtype=torch.float64)

    def gather_of(self, name: str) -> Gather | None:
        rows = self.shards.own(name)
        if len(rows.shape) == 3:  # stacked experts: each is whole on its rank
            return None
        return Gather(self.shards.gather_of(name), rows.start)

    def round_into(self, parameters: Iterable[tuple[str, Tensor, Tensor]], form: str) -> None:
        for name, values, target in parameters:
            target.copy_(rounded(name, values, form, self.shards))

    def dithered(self, name: str, values: Tensor, form: str, seed: int) -> Tensor:
        if values.dim() == 2 and is_quantised(form) and quantises(name, values):
            whole = dithered(name, whole_matrix(name, values, self.shards), form, seed)
            return own_rows(name, whole, self.shards)
        return dithered(name, values, form, seed, self.shards.own(name).elements[0])

    def publisher(
        self, model: Decoder, weights: WeightStore, line: str, form: str, config: TrainingConfig
    ) -> ShardPublisher:
        return shard_publisher(model, self.shards, weights, line, form, config.snapshot_every, config.delta_goal)

    def write_state(
        self, objects: Objects, folder: str, described: Mapping[str, Any], tensors: Mapping[str, Tensor]
    ) -> None:
        write_state(objects, folder, described, tensors, self.shards)

    def read_state(self, objects: Objects, folder: str, described: Mapping[str, Any]) -> dict[str, Tensor]:
        return read_state(objects, folder, described, self.shards)


def join_ranks(
    name: str, device: torch.device, config: TrainingConfig, environment: Mapping[str, str]
) -> ShardedPlacement:
    """Meet the ranks that the environment describes. Collective."""
    world = join(name, device, environment, config.hang_minutes)
    return ShardedPlacement(world, Meshes(world.size, config.expert_parallel, config.context_parallel, device))
