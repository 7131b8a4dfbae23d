"""Mid-training: next-token cross-entropy on documents.

The batch of step n is documents (n−1)·D … n·D − 1 of a stream that depends only on the seed. So a resumed run sees
exactly what an uninterrupted one would have seen, without any record.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rollmill import telemetry
from rollmill.errors import TrainingError
from rollmill.models.decoder import Decoder
from rollmill.training.batching import MicroBatch, PackedSequence, pack
from rollmill.training.config import MidtrainConfig
from rollmill.training.diagnostics import finite
from rollmill.training.lineage import Lineage
from rollmill.training.objective import StepOutcome, leave_on_model
from rollmill.training.placement import Passes, Placement
from rollmill.training.replay import RouterMeasures
from rollmill.training.source import Document, Documents
from rollmill.training.whole import WHOLE
from rollmill.types import Version
from rollmill.weights.format.tensors import HostTensor


@dataclass(frozen=True)
class DocumentBatch:
    microbatches: list[MicroBatch]
    tokens: int
    targets: int
    lr: float


class MidtrainObjective:
    def __init__(
        self,
        config: MidtrainConfig,
        documents: Documents,
        *,
        seed: int,
        max_context: int,
        tokens_per_microbatch: int,
    ) -> None:
        self._config = config
        self._documents = documents
        self._seed = seed
        self._max_context = max_context
        self._budget = tokens_per_microbatch
        self._stream: Iterator[Document] = iter(())
        self._next_document = -1
        self._passes: Passes | None = None

    def next_batch(
        self, number: int, lr: float, lineage: Lineage, stopping: Callable[[], bool]
    ) -> DocumentBatch | None:
        if stopping():
            return None
        sequences = [
            sequence
            for document in self._read((number - 1) * self._config.documents_per_step)
            if (sequence := self._sequence(document)) is not None
        ]
        return DocumentBatch(
            microbatches=pack(sequences, self._budget),
            tokens=sum(len(sequence.tokens) for sequence in sequences),
            targets=sum(len(sequence.targets) for sequence in sequences),
            lr=lr,
        )

    def _read(self, start: int) -> list[Document]:
        if start != self._next_document:
            self._stream = self._documents(self._seed, start)
        documents = list(itertools.islice(self._stream, self._config.documents_per_step))
        if len(documents) < self._config.documents_per_step:
            raise TrainingError(
                f"the document stream ended at document {start + len(documents)}",
                hint="it needs steps · documents_per_step documents: lower midtrain.steps, or repeat the stream",
            )
        self._next_document = start + len(documents)
        return documents

    def _sequence(self, document: Document) -> PackedSequence | None:
        tokens = np.asarray(document[0], np.int64)[: self._max_context]
        mask = np.asarray(document[1], np.bool_)[: self._max_context]
        picked = np.flatnonzero(mask[1:]) + 1
        if picked.size == 0:
            return None
        return PackedSequence(tokens=tokens[: picked[-1]], rows=picked - 1, targets=tokens[picked])

    def backward(
        self,
        model: Decoder,
        batch: DocumentBatch,
        accumulate: Callable[[], None] = leave_on_model,
        placement: Placement = WHOLE,
    ) -> dict[str, Any]:
        if self._passes is None or self._passes.model is not model:
            self._passes = placement.next_token_passes(model, self._config.balance)
        losses: list[Tensor] = []
        router = RouterMeasures()
        for part in batch.microbatches:
            if losses:
                accumulate()
            loss, load_LE = self._passes(part, batch.targets, batch.tokens)
            losses.append(loss)
            if load_LE is not None:
                router.add_load(len(part.tokens_N), load_LE)
        # read last, when everything is queued: reading waits for the device
        total = sum(torch.stack(losses).tolist()) if losses else 0.0
        return {"loss": total, "tokens": batch.tokens, **router.over_ranks(placement).load_figures()}

    def remember(self, digest: str, tensors: Mapping[str, HostTensor]) -> None:
        """Not needed: nothing is sampled."""

    def publishes(self, number: int) -> bool:
        return number % self._config.publish_every == 0

    def commit(self, number: int, version: Version, digest: str) -> None:
        """Nothing to do: documents are not consumed."""

    def report(self, batch: DocumentBatch, outcome: StepOutcome) -> None:
        telemetry.emit(
            "midtrain_step",
            step=outcome.number,
            steps=outcome.steps,
            **finite(outcome.figures),
            tokens_per_s=batch.tokens / outcome.seconds,
            **outcome.update.figures(),
        )
