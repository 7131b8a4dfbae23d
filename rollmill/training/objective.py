"""An Objective decides what a step trains on and computes its gradient; the loop does the rest.

Implementations are in `rl/` and `pretraining/`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from rollmill.models.decoder import Decoder
from rollmill.training.batching import MicroBatch
from rollmill.training.lineage import Lineage
from rollmill.training.optimizers.master_optimizer import Update
from rollmill.training.parallelism import Parallelism, Passes
from rollmill.training.single import SINGLE
from rollmill.training.update_guard import TokenSample
from rollmill.types import Version
from rollmill.weights.format.tensors import Tensors


@dataclass(frozen=True)
class StepOutcome:
    """What the loop knows about a finished step; `figures` come from the objective's backward pass."""

    number: int
    steps: int
    update: Update
    seconds: float
    figures: dict[str, Any]


class StepBatch(Protocol):
    @property
    def microbatches(self) -> Sequence[MicroBatch]: ...

    @property
    def lr(self) -> float:
        """The learning rate of the update."""
        ...


Batch = TypeVar("Batch", bound=StepBatch)


def leave_on_model() -> None:
    """Does nothing: the gradients of all micro-batches add up on the model, in the parameters' type."""


class Objective(ABC, Generic[Batch]):
    """A derived class says what a step trains on and computes its gradient; all else has a default."""

    needs_commits = False  # whether a batch depends on the commit of the step before, which is then waited for

    @abstractmethod
    def next_batch(self, number: int, lr: float, lineage: Lineage, stopping: Callable[[], bool]) -> Batch | None:
        """What step `number` trains on; waits until it is there. None once `stopping()`.

        A step asked for again gets the same batch, bit for bit: that is how a restart re-runs it. `lr` is the learning
        rate that the schedule gives the step; a recorded step keeps the one it had.
        """

    @abstractmethod
    def backward(
        self,
        model: Decoder,
        batch: Batch,
        accumulate: Callable[[], None] = leave_on_model,
        parallel: Parallelism = SINGLE,
    ) -> dict[str, Any]:
        """Forward and backward over the whole batch; returns figures. Collective.

        Gradients are left on the model; if there are none, there was nothing to learn. `accumulate` is called after
        each micro-batch but the last. It may take the gradients off, to add them up in FP32.
        """

    @abstractmethod
    def report(self, batch: Batch, outcome: StepOutcome) -> None:
        """Measure and emit. What takes time may be put off until the next batch is waited for. Collective."""

    most_drift = 0.0  # how far an update may move the policy (training/update_guard.py); 0: updates are not measured

    def sampled(self, model: Decoder, batch: Batch, passes: Passes) -> TokenSample | None:
        """A few sampled tokens of the batch under the weights of this moment. None: there are none. Collective."""
        return None

    def remember(self, digest: str, tensors: Tensors) -> None:
        """The weights the next step trains from (this rank's rows), with the digest they are published under."""

    def publishes(self, number: int) -> bool:
        """Whether step `number` ends in a published version."""
        return True

    def commit(self, number: int, version: Version, digest: str) -> None:
        """Step `number` is published as `version`. May be called again after a crash: it must be idempotent."""

    def finish(self, *, failed: bool) -> None:
        """No further step follows in this `run`: emit what was put off. `failed`: by an error. Collective."""
