"""The whole placement: all tensors in this process, no other ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from rollmill.models.config import ModelConfig
from rollmill.models.decoder import Decoder
from rollmill.models.device import decoder_like, decoder_on, is_full
from rollmill.models.dither import dithered
from rollmill.models.host_tensors import load_host, to_host
from rollmill.models.moe import Replay
from rollmill.models.quantize import round_into
from rollmill.storage.objects import Objects
from rollmill.training.batching import MicroBatch
from rollmill.training.config import TrainingConfig
from rollmill.training.numerics.next_token import NextTokenPasses
from rollmill.training.publishing.device_delta import DeviceDelta, codes_on_device
from rollmill.training.ranks import Gather, Recomputed
from rollmill.training.state import read_tensors, write_whole
from rollmill.training.step import forward_packed, token_logprobs
from rollmill.types import Version
from rollmill.weights.format.manifest import Manifest, describe, root_digest
from rollmill.weights.format.tensors import Tensors
from rollmill.weights.reading.weight_store import WeightStore
from rollmill.weights.writing.encoder import Made
from rollmill.weights.writing.publisher import Publisher

T = TypeVar("T")


class WholePlacement:
    first = True
    rank = 0
    ranks = 1

    def from_first(self, value: T) -> T:
        return value

    def from_first_slowly(self, make: Callable[[], T]) -> T:
        return make()

    def watched(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def gather(self, value: T) -> list[T]:
        return [value]

    def leave(self) -> None: ...

    def make_model(self, config: ModelConfig, form: str, device: torch.device) -> Decoder:
        return decoder_on(device, config, form)

    def make_like(self, model: Decoder) -> Decoder:
        return decoder_like(model)

    def initialise(self, model: Decoder, seed: int) -> None:
        model.initialise(seed)

    def load_version(self, model: Decoder, store: WeightStore, version: Version, form: str) -> None:
        load_host(model, store.load(version, form))

    def load_held(self, model: Decoder, tensors: Tensors) -> None:
        load_host(model, tensors)

    def local(self, tensor: Tensor) -> Tensor:
        return tensor

    def recompute(self, model: Decoder, part: MicroBatch, replay: Replay | None) -> Recomputed:
        assert part.facts is not None, "sequences of sampled tokens carry their facts"
        output, hidden_MW = forward_packed(model, part, replay)
        temperatures_M = torch.from_numpy(part.facts.temperatures)
        logprobs_M, entropies_M = token_logprobs(model, hidden_MW, part.targets_M, temperatures_M, part.facts.shapes)
        return Recomputed(logprobs_M, entropies_M, output.routings, replay)

    def release(self, model: Decoder) -> None: ...

    def next_token_passes(self, model: Decoder, balance: float) -> NextTokenPasses:
        return NextTokenPasses(model, balance)

    def whole_norm(self, norm: Tensor) -> Tensor:
        return norm

    def gather_of(self, name: str) -> Gather | None:
        return None

    def round_into(self, parameters: Iterable[tuple[str, Tensor, Tensor]], form: str) -> None:
        round_into(parameters, form)

    def dithered(self, name: str, values: Tensor, form: str, seed: int) -> Tensor:
        return dithered(name, values, form, seed)

    def publisher(
        self, model: Decoder, weights: WeightStore, line: str, form: str, config: TrainingConfig
    ) -> WholePublisher:
        # an export is a copy that nobody changes
        return WholePublisher(Publisher(weights, line, form, config.snapshot_every, goal=config.delta_goal, keeps=True))

    def write_state(
        self, objects: Objects, folder: str, described: Mapping[str, Any], tensors: Mapping[str, Tensor]
    ) -> None:
        write_whole(objects, folder, described, tensors)

    def read_state(self, objects: Objects, folder: str, described: Mapping[str, Any]) -> dict[str, Tensor]:
        return read_tensors(objects, folder, described)


class Exported(NamedTuple):
    tensors: Tensors
    made: Made | None  # the coded changes since the export before


class WholePublisher:
    def __init__(self, publisher: Publisher) -> None:
        self._publisher = publisher
        self._delta: DeviceDelta | None = None  # made with the first export, if there is room for it
        self._codes = publisher.goal == "fast"  # whether deltas may be coded on the device
        self._newest: Exported | None = None

    @property
    def last(self) -> Manifest | None:
        return self._publisher.last

    def resume(self) -> None:
        self._publisher.resume()

    def export(self, model: Decoder) -> Exported:
        state, form = model.state_dict(), self._publisher.form
        made = self._make(state, form) if self._codes else None
        self._newest = Exported(to_host(state, form), made)
        return self._newest

    def _make(self, state: Mapping[str, Tensor], form: str) -> Made | None:
        """The changes since the last export. If the device is full, the host codes them from now on."""
        try:
            if self._delta is not None:
                return self._delta.make()
            if codes_on_device(state, form):
                self._delta = DeviceDelta(state, form)
        except RuntimeError as error:
            if not is_full(error):
                raise
            self._delta, self._codes = None, False
        return None

    def held(self, exported: Exported) -> Tensors:
        return exported.tensors

    def matches(self, manifest: Manifest, exported: Exported) -> bool:
        same = manifest.digest == root_digest(describe(exported.tensors))
        if same:
            self._name(exported, manifest)
        return same

    def publish(self, number: int, exported: Exported, parent: Version | None, metadata: Mapping[str, Any]) -> Manifest:
        manifest = self._publisher.publish(number, exported.tensors, parent, metadata, exported.made)
        self._name(exported, manifest)
        return manifest

    def _name(self, exported: Exported, manifest: Manifest) -> None:
        """These weights are this version. If they are the newest, the next delta can start from them."""
        if self._delta is not None and exported is self._newest:
            self._delta.base = manifest.digest


WHOLE = WholePlacement()
