"""Training over several ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from rollmill.models.config import ModelConfig
from rollmill.models.decoder import Decoder
from rollmill.models.device import compute_dtype
from rollmill.models.dither import dithered
from rollmill.models.host_tensors import round_into
from rollmill.models.kernels.forms import is_quantised
from rollmill.models.moe import Replay
from rollmill.models.quantize import quantises
from rollmill.storage.objects import Objects
from rollmill.training.batching import MicroBatch
from rollmill.training.config import TrainingConfig
from rollmill.training.parallel.chunk_exchange import ChunkExchange, exchange_of
from rollmill.training.parallel.fsdp import release, sharded_decoder
from rollmill.training.parallel.mesh import Meshes
from rollmill.training.parallel.row_loading import drawn_rows, fill_rows, stored_rows
from rollmill.training.parallel.row_state import read_state, write_state
from rollmill.training.parallel.sharding import Sharding, local, own_rows, rounded, whole_matrix
from rollmill.training.parallel.split_passes import SplitPasses, split_logprobs
from rollmill.training.parallel.world import World, join
from rollmill.training.parallelism import Gather, Parallelism, PolicyPass
from rollmill.types import Version
from rollmill.weights.format.tensors import Tensors
from rollmill.weights.reading.weight_store import WeightStore

T = TypeVar("T")


class ShardedModels:
    """ModelIO, ParameterRows and Passes of a rank: it has rows of every tensor, and computes a share of every
    micro-batch."""

    def __init__(self, world: World, meshes: Meshes) -> None:
        self._world, self._meshes = world, meshes
        self._sharding: Sharding | None = None

    @property
    def sharding(self) -> Sharding:
        assert self._sharding is not None, "make_model comes first"
        return self._sharding

    def make_model(self, config: ModelConfig, form: str, device: torch.device) -> Decoder:
        return self._make(config, compute_dtype(device), form, device)

    def make_like(self, model: Decoder) -> Decoder:
        made = self._make(model.config, model.embedding.dtype, model.form, model.embedding.device)
        if model.exact:
            made.compute_exactly()
        return made

    def _make(self, config: ModelConfig, dtype: torch.dtype, form: str, device: torch.device) -> Decoder:
        model, self._sharding = sharded_decoder(config, dtype, form, self._world, self._meshes, device)
        return model

    def initialise(self, model: Decoder, seed: int) -> None:
        fill_rows(model, self.sharding, drawn_rows(model.config, self.sharding, seed))

    def load_version(self, model: Decoder, store: WeightStore, version: Version, form: str) -> None:
        fill_rows(model, self.sharding, stored_rows(model, self.sharding, store, version, form))

    def load_held(self, model: Decoder, tensors: Tensors) -> None:
        fill_rows(model, self.sharding, [tensors])

    def local(self, tensor: Tensor) -> Tensor:
        return local(tensor)

    def recompute(self, model: Decoder, part: MicroBatch, replay: Replay | None) -> PolicyPass:
        found = split_logprobs(model, self.sharding, part, replay)
        if not torch.is_grad_enabled():
            release(model)
        return found

    def next_token(self, model: Decoder, balance: float) -> SplitPasses:
        return SplitPasses(model, self.sharding, balance)

    def whole_norm(self, norm: Tensor) -> Tensor:
        """Every row is on one rank. In double precision, on the host."""
        [square] = self._world.sum([float(norm) ** 2])
        return torch.tensor(math.sqrt(square), dtype=torch.float64)

    def gather_of(self, name: str) -> Gather | None:
        rows = self.sharding.own(name)
        if len(rows.shape) == 3:  # stacked experts: each is whole on its rank
            return None
        return Gather(self.sharding.gather_of(name), rows.start)

    def round_into(self, parameters: Iterable[tuple[str, Tensor, Tensor]], form: str) -> None:
        if not is_quantised(form):
            return round_into(parameters, form)
        for name, values, target in parameters:
            target.copy_(rounded(name, values, form, self.sharding))

    def dithered(self, name: str, values: Tensor, form: str, seed: int) -> Tensor:
        if values.dim() == 2 and is_quantised(form) and quantises(name, values):
            whole = dithered(name, whole_matrix(name, values, self.sharding), form, seed)
            return own_rows(name, whole, self.sharding)
        return dithered(name, values, form, seed, self.sharding.own(name).elements[0])

    def form_bytes(self, model: Decoder, form: str, *, on_device: bool) -> ChunkExchange:
        return exchange_of(model, self.sharding, form)

    def write_state(
        self, objects: Objects, folder: str, described: Mapping[str, Any], tensors: Mapping[str, Tensor]
    ) -> None:
        write_state(objects, folder, described, tensors, self.sharding)

    def read_state(self, objects: Objects, folder: str, described: Mapping[str, Any]) -> dict[str, Tensor]:
        return read_state(objects, folder, described, self.sharding)


def join_ranks(name: str, device: torch.device, config: TrainingConfig, environment: Mapping[str, str]) -> Parallelism:
    """Meet the ranks that the environment describes. Collective."""
    world = join(name, device, environment, config.hang_minutes)
    return over_ranks(world, Meshes(world.size, config.expert_parallel, config.context_parallel, device))


def over_ranks(world: World, meshes: Meshes) -> Parallelism:
    world.groups += meshes.groups
    models = ShardedModels(world, meshes)
    return Parallelism(world, models, models, models)
