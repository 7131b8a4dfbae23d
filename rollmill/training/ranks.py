"""A Placement says where a model's tensors are, and does what differs with it.

    whole      all tensors in this process (training/single.py)
    sharded    rows of every tensor on each of several ranks (training/parallel/sharded_ranks.py)

The loop and all it uses are the same for both. With a sharded placement every rank runs the loop; a method marked
"Collective" must then be called by every rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from rollmill.models.config import ModelConfig
from rollmill.models.decoder import Decoder
from rollmill.models.moe import Replay, Routing
from rollmill.storage.objects import Objects
from rollmill.training.batching import MicroBatch
from rollmill.training.config import TrainingConfig
from rollmill.types import Version
from rollmill.weights.format.manifest import Manifest
from rollmill.weights.format.tensors import Tensors
from rollmill.weights.reading.weight_store import WeightStore

T = TypeVar("T")


class Recomputed(NamedTuple):
    logprobs_M: Tensor  # of all targets, under the distribution they were sampled from
    entropies_M: Tensor
    routings: Sequence[Routing]  # of this rank's tokens
    replay: Replay | None  # what the routings were made with, for the same tokens


class Gather(NamedTuple):
    """How to gather a matrix whose rows are on several ranks."""

    rows: Callable[[Tensor], Tensor]  # this rank's rows → the whole matrix. Collective
    first: int  # the first row that is here


class Passes(Protocol):
    """Forward and backward passes of one model on the next-token loss."""

    @property
    def model(self) -> Decoder: ...

    def __call__(self, part: MicroBatch, targets: int, tokens: int) -> tuple[Tensor, Tensor | None]:
        """The micro-batch's part of the loss of a step with `targets` targets and `tokens` tokens, and how often each
        layer's router chose each expert for this rank's tokens [layers, experts]. Leaves gradients on the model."""
        ...


class ModelPublisher(Protocol):
    """Publishes one line. All methods are collective."""

    @property
    def last(self) -> Manifest | None: ...

    def resume(self) -> None:
        """Take over the line at its head."""
        ...

    def export(self, model: Decoder) -> Any:
        """The bytes of a version, or the part of them that this rank publishes."""
        ...

    def held(self, exported: Any) -> Tensors:
        """The part of an export that this rank computes with: its rows, in the served form."""
        ...

    def matches(self, manifest: Manifest, exported: Any) -> bool:
        """Whether that version has these bytes."""
        ...

    def publish(self, number: int, exported: Any, parent: Version | None, metadata: Mapping[str, Any]) -> Manifest: ...


class Placement(Protocol):
    """One placement is for models of one configuration: `make_model` comes before what concerns their parameters."""

    # ranks

    @property
    def first(self) -> bool:
        """Whether this process decides, keeps the ledger and reports."""
        ...

    @property
    def rank(self) -> int:
        """Which rank this process is, from 0."""
        ...

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        ...

    def from_first(self, value: T) -> T:
        """The first rank's value, on every rank. Collective."""
        ...

    def from_first_slowly(self, make: Callable[[], T]) -> T:
        """What `make` returns on the first rank, on every rank: for work of the first rank that may take any time.
        Collective."""
        ...

    def watched(self) -> contextlib.AbstractContextManager[None]:
        """If ranks wait too long for others inside, the error names those that did not come."""
        ...

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in order of rank. Collective."""
        ...

    def leave(self) -> None:
        """The work is done: end the process group, if there is one."""
        ...

    # models

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
        """Load the weights that a publisher of this model returned from `held`."""
        ...

    def local(self, tensor: Tensor) -> Tensor:
        """The part of a parameter or gradient that is in this process. It shares the tensor's memory."""
        ...

    # passes

    def recompute(self, model: Decoder, part: MicroBatch, replay: Replay | None) -> Recomputed:
        """Log-probs and entropies of the targets of sampled sequences. Collective."""
        ...

    def release(self, model: Decoder) -> None:
        """Free what a forward pass gathered, if no backward pass follows."""
        ...

    def next_token_passes(self, model: Decoder, balance: float) -> Passes:
        """`balance`: factor of the loss that spreads tokens over experts."""
        ...

    # updates

    def whole_norm(self, norm: Tensor) -> Tensor:
        """The norm of the whole gradient, from the norm of the rows that are here. Collective."""
        ...

    def gather_of(self, name: str) -> Gather | None:
        """How to gather a matrix that is sharded like this parameter. None if the matrix is whole here."""
        ...

    def round_into(self, parameters: Iterable[tuple[str, Tensor, Tensor]], form: str) -> None:
        """(name, values, target): round the values of each parameter to a quantised form, into the target. The target
        may be the values. Collective."""
        ...

    def dithered(self, name: str, values: Tensor, form: str, seed: int) -> Tensor:
        """Rows of a parameter, moved among the numbers that round to them (models/dither.py). Collective."""
        ...

    # bytes in and out

    def publisher(
        self, model: Decoder, weights: WeightStore, line: str, form: str, config: TrainingConfig
    ) -> ModelPublisher: ...

    def write_state(
        self, objects: Objects, folder: str, described: Mapping[str, Any], tensors: Mapping[str, Tensor]
    ) -> None:
        """Write the tensors of a checkpoint, then `described` with where they are. Collective."""
        ...

    def read_state(self, objects: Objects, folder: str, described: Mapping[str, Any]) -> dict[str, Tensor]:
        """What this process holds of the tensors of a checkpoint, whichever placement wrote it."""
        ...
