"""Training in one process, which has all tensors. Also chooses between it and several ranks."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from rollmill.errors import TrainingError
from rollmill.models.config import ModelConfig
from rollmill.models.decoder import Decoder
from rollmill.models.device import decoder_like, decoder_on, is_full
from rollmill.models.dither import dithered
from rollmill.models.host_tensors import load_host, round_into, round_to_form_, to_host
from rollmill.models.moe import Replay
from rollmill.storage.objects import Objects
from rollmill.training.batching import MicroBatch
from rollmill.training.config import TrainingConfig
from rollmill.training.numerics.next_token import NextTokenPasses
from rollmill.training.packed_pass import forward_packed, token_logprobs
from rollmill.training.parallelism import FormExport, Gather, Parallelism, PolicyPass
from rollmill.training.publishing.device_delta import DeviceDelta, codes_on_device
from rollmill.training.state import read_tensors, write_whole
from rollmill.types import Version
from rollmill.weights.format.tensors import HostTensor, Tensors
from rollmill.weights.reading.weight_store import WeightStore
from rollmill.weights.writing.encoder import DevicePayloads
from rollmill.weights.writing.publisher import Alone

T = TypeVar("T")


class OneRank(Alone):
    def from_first_slowly(self, make: Callable[[], T]) -> T:
        return make()

    def watched(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def leave(self) -> None: ...


class SingleProcess:
    """ModelIO, ParameterRows and Passes."""

    def make_model(self, config: ModelConfig, form: str, device: torch.device) -> Decoder:
        return decoder_on(device, config, form)

    def make_like(self, model: Decoder) -> Decoder:
        return decoder_like(model)

    def initialise(self, model: Decoder, seed: int) -> None:
        model.initialise(seed)
        frozen = [(name, each) for name, each in model.named_parameters() if not each.requires_grad]
        round_to_form_(frozen, model.form)  # no optimizer serves what is beside an adapter

    def load_version(self, model: Decoder, store: WeightStore, version: Version, form: str) -> None:
        load_host(model, store.load(version, form))

    def load_held(self, model: Decoder, tensors: Tensors) -> None:
        load_host(model, tensors)

    def form_bytes(self, model: Decoder, form: str, *, on_device: bool) -> HostBytes:
        return HostBytes(form, on_device)

    def write_state(
        self, objects: Objects, folder: str, described: Mapping[str, Any], tensors: Mapping[str, Tensor]
    ) -> None:
        write_whole(objects, folder, described, tensors)

    def read_state(self, objects: Objects, folder: str, described: Mapping[str, Any]) -> dict[str, Tensor]:
        return read_tensors(objects, folder, described)

    def local(self, tensor: Tensor) -> Tensor:
        return tensor

    def whole_norm(self, norm: Tensor) -> Tensor:
        return norm

    def gather_of(self, name: str) -> Gather | None:
        return None

    def round_into(self, parameters: Iterable[tuple[str, Tensor, Tensor]], form: str) -> None:
        round_into(parameters, form)

    def dithered(self, name: str, values: Tensor, form: str, seed: int) -> Tensor:
        return dithered(name, values, form, seed)

    def recompute(self, model: Decoder, part: MicroBatch, replay: Replay | None) -> PolicyPass:
        assert part.facts is not None, "sequences of sampled tokens carry their facts"
        output, hidden_MW = forward_packed(model, part, replay)
        temperatures_M = torch.from_numpy(part.facts.temperatures)
        logprobs_M, entropies_M = token_logprobs(model, hidden_MW, part.targets_M, temperatures_M, part.facts.shapes)
        return PolicyPass(logprobs_M, entropies_M, output.routings, replay)

    def next_token(self, model: Decoder, balance: float) -> NextTokenPasses:
        return NextTokenPasses(model, balance)


class HostBytes:
    """The bytes of whole tensors. Deltas are coded on the device if it has room for a copy of the weights."""

    owned = None

    def __init__(self, form: str, on_device: bool) -> None:
        self._form, self._on_device = form, on_device
        self._delta: DeviceDelta | None = None  # made with the first export, if there is room for it
        self._newest: FormExport | None = None
        self._frozen: dict[str, HostTensor] | None = None  # what no step changes, copied with the first export

    def export(self, model: Decoder) -> FormExport:
        state = model.state_dict()
        frozen = [name for name, each in model.named_parameters() if not each.requires_grad]
        if frozen and self._frozen is None:  # beside an adapter
            self._frozen = to_host({name: state[name] for name in frozen}, self._form)
        for name in frozen:
            del state[name]
        payloads = self._code(state) if self._on_device and not frozen else None
        tensors = {**(self._frozen or {}), **to_host(state, self._form)}
        self._newest = FormExport(tensors, tensors, payloads)
        return self._newest

    def _code(self, state: Mapping[str, Tensor]) -> DevicePayloads | None:
        """The changes since the last export. If the device is full, the host codes them from now on."""
        try:
            if self._delta is not None:
                return self._delta.make()
            if codes_on_device(state, self._form):
                self._delta = DeviceDelta(state, self._form)
        except RuntimeError as error:
            if not is_full(error):
                raise
            self._delta, self._on_device = None, False
        return None

    def published(self, exported: FormExport, digest: str) -> None:
        if self._delta is not None and exported is self._newest:
            self._delta.base = digest


_PROCESS = SingleProcess()
SINGLE = Parallelism(OneRank(), _PROCESS, _PROCESS, _PROCESS)


def choose_parallelism(
    name: str, device: torch.device, config: TrainingConfig, environment: Mapping[str, str] = os.environ
) -> Parallelism:
    """One process, or the `config.ranks` ranks that the environment describes.

    `name`: what the ranks meet for. Groups of ranks may meet at the same address one after the other. Collective.
    """
    size = int(environment.get("WORLD_SIZE", "1"))
    if size != config.ranks:
        raise TrainingError(
            f"training.ranks is {config.ranks}, but the environment describes {size} ranks (WORLD_SIZE)",
            hint="start as many ranks as the configuration says, or unset WORLD_SIZE and rollmill starts them",
        )
    if size == 1:
        return SINGLE
    from rollmill.training.parallel.many_ranks import join_ranks

    return join_ranks(name, device, config, environment)
