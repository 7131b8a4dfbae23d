"""Where a model is trained: in one process, or over several ranks. What differs between the two, as four interfaces:

    Ranks           which rank this is, and how ranks agree            the loop, checkpoints, measurements
    ModelIO         models made, loaded, published and saved           the loop, exporter, checkpoints
    ParameterRows   this rank's rows of a parameter, and the rest      the optimizer
    Passes          forward and backward passes over a micro-batch     objectives, frozen models

    one process     all tensors are here               training/single.py
    several ranks   each has rows of every tensor      training/parallel/many_ranks.py

The loop and all it uses are the same for both. Every rank runs the loop; a method that is marked "Collective" must be
called by every rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from rollmill.models.config import ModelConfig
from rollmill.models.decoder import Decoder
from rollmill.models.moe import Replay, Routing
from rollmill.storage.objects import Objects
from rollmill.training.batching import MicroBatch
from rollmill.types import Version
from rollmill.weights.format.tensors import Tensors
from rollmill.weights.reading.weight_store import WeightStore
from rollmill.weights.writing.encoder import DevicePayloads
from rollmill.weights.writing.publisher import ChunkKey, OwnChunks, Peers

T = TypeVar("T")


class Ranks(Peers, Protocol):
    """`first`: whether this process decides, keeps the ledger and reports. `rank` counts from 0 to `size` - 1."""

    def from_first_slowly(self, make: Callable[[], T]) -> T:
        """What `make` returns on the first rank, on every rank: for work of the first rank that may take any time.
        Collective."""
        ...

    def watched(self) -> contextlib.AbstractContextManager[None]:
        """If ranks wait too long for others inside, the error names those that did not come."""
        ...

    def leave(self) -> None:
        """The work is done: end the process group, if there is one."""
        ...


class FormExport(NamedTuple):
    """The bytes of a version in one form, as this rank has them. Nobody changes them."""

    held: Tensors  # what this rank computes with: its rows, in the served form
    weights: Tensors | OwnChunks  # what this rank publishes
    payloads: DevicePayloads | None = None  # coded on the device: the changes since the export before


class FormBytes(Protocol):
    """Makes the bytes of one form. One that codes on the device must always export the same parameters."""

    @property
    def owned(self) -> Collection[ChunkKey] | None:
        """The chunks that this rank publishes. None: all."""
        ...

    def export(self, model: Decoder) -> FormExport:
        """Collective."""
        ...

    def published(self, exported: FormExport, digest: str) -> None:
        """An export is the version with this digest. If it is the newest export, the next delta can start from it."""
        ...


class ModelIO(Protocol):
    """Models of one configuration: `make_model` comes before what concerns their parameters."""

    def make_model(self, config: ModelConfig, form: str, device: torch.device) -> Decoder:
        """A decoder on the device; its parameters are not initialised. Collective."""
        ...

    def make_like(self, model: Decoder) -> Decoder:
        """Another decoder on the same device, sharded and computed like `model`. Collective."""
        ...

    def initialise(self, model: Decoder, seed: int) -> None:
        """Initialise with random weights from the seed."""
        ...

    def load_version(self, model: Decoder, store: WeightStore, version: Version, form: str) -> None:
        """Load the weights of a published version. Not collective: each rank reads its own rows."""
        ...

    def load_held(self, model: Decoder, tensors: Tensors) -> None:
        """Load the `held` weights of an export of this model."""
        ...

    def form_bytes(self, model: Decoder, form: str, *, on_device: bool) -> FormBytes:
        """What makes the bytes of `form` from models like this one. `on_device`: deltas may be coded there."""
        ...

    def write_state(
        self, objects: Objects, folder: str, described: Mapping[str, Any], tensors: Mapping[str, Tensor]
    ) -> None:
        """Write the tensors of a checkpoint, then `described` with where they are. Collective."""
        ...

    def read_state(self, objects: Objects, folder: str, described: Mapping[str, Any]) -> dict[str, Tensor]:
        """What this process holds of the tensors of a checkpoint, whatever number of ranks wrote it."""
        ...


class Gather(NamedTuple):
    """How to gather a matrix whose rows are on several ranks."""

    rows: Callable[[Tensor], Tensor]  # this rank's rows → the whole matrix. Collective
    first: int  # the first row that is here


class ParameterRows(Protocol):
    def local(self, tensor: Tensor) -> Tensor:
        """The part of a parameter or gradient that is in this process. It shares the tensor's memory."""
        ...

    def whole_norm(self, norm: Tensor) -> Tensor:
        """The norm of the whole gradient, from the norm of the rows that are here. Collective."""
        ...

    def gather_of(self, name: str) -> Gather | None:
        """How to gather a matrix that is sharded like this parameter. None if the matrix is whole here."""
        ...

    def round_into(self, parameters: Iterable[tuple[str, Tensor, Tensor]], form: str) -> None:
        """(name, values, target): round the values of each parameter to a form, into the target. The target may be the
        values. Collective."""
        ...

    def dithered(self, name: str, values: Tensor, form: str, seed: int) -> Tensor:
        """Rows of a parameter, moved among the numbers that round to them (models/dither.py). Collective."""
        ...


class PolicyPass(NamedTuple):
    """What a forward pass over sampled sequences gives."""

    logprobs_M: Tensor  # of all targets, under the distribution they were sampled from
    entropies_M: Tensor
    routings: Sequence[Routing]  # of this rank's tokens
    replay: Replay | None  # what the routings were made with, for the same tokens


class NextTokenPass(Protocol):
    """Forward and backward passes of one model on the next-token loss."""

    @property
    def model(self) -> Decoder: ...

    def __call__(self, part: MicroBatch, targets: int, tokens: int) -> tuple[Tensor, Tensor | None]:
        """The micro-batch's part of the loss of a step with `targets` targets and `tokens` tokens, and how often each
        layer's router chose each expert for this rank's tokens [layers, experts]. Leaves gradients on the model."""
        ...


class Passes(Protocol):
    def recompute(self, model: Decoder, part: MicroBatch, replay: Replay | None) -> PolicyPass:
        """Log-probs and entropies of the targets of sampled sequences. Where gradients are off, no backward pass
        follows, and what the pass gathered is freed. Collective."""
        ...

    def next_token(self, model: Decoder, balance: float) -> NextTokenPass:
        """`balance`: factor of the loss that spreads tokens over experts."""
        ...


@dataclass(frozen=True)
class Parallelism:
    """How a trainer is spread over processes."""

    ranks: Ranks
    models: ModelIO
    rows: ParameterRows
    passes: Passes
