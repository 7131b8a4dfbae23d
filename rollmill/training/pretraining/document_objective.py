"""Mid-training and SFT: next-token cross-entropy on the tokens of documents that are to be learnt.

The batch of step n is documents (n−1)·D … n·D − 1 of a mixture that depends on the seed alone. So a resumed run sees
exactly what an uninterrupted one would have seen, without any record.

Each rank reads and tokenises every `ranks`-th document of a step. Then the tokens are gathered in the order of the
documents and packed, on every rank alike: neither order nor micro-batches depend on who read what. A thread reads the
documents of the next step while a step trains.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rollmill import telemetry
from rollmill.models.decoder import Decoder
from rollmill.training.batching import MicroBatch, PackedSequence, SampledFacts, pack
from rollmill.training.config import MidtrainConfig
from rollmill.training.diagnostics import finite
from rollmill.training.lineage import Lineage
from rollmill.training.numerics.router_replay import RouterMeasures
from rollmill.training.objective import Objective, StepOutcome, leave_on_model
from rollmill.training.parallelism import NextTokenPass, Parallelism
from rollmill.training.pretraining.mixture import Mixture, windows
from rollmill.training.pretraining.read_ahead import ReadAhead
from rollmill.training.pretraining.source import Document
from rollmill.training.single import SINGLE


@dataclass(frozen=True)
class DocumentBatch:
    number: int  # of the step
    lr: float
    microbatches: list[MicroBatch] = field(default_factory=list)  # `backward` fills it in, from what all ranks read


class PackableDocument(NamedTuple):
    """A document that is ready to be packed."""

    sequences: list[PackedSequence]
    notes: list[str]
    source: str


class _Reader:
    """Reads this rank's share of documents. It does not know the model: its thread must not be the last to hold one."""

    def __init__(self, mixture: Mixture, documents_per_step: int, max_context: int) -> None:
        self._mixture = mixture
        self._size = documents_per_step
        self._max_context = max_context
        self.rank, self.ranks = 0, 1

    def step(self, number: int) -> list[PackableDocument]:
        """Of the documents of step `number`."""
        return [self.document(index) for index in self._share(range((number - 1) * self._size, number * self._size))]

    def heldout(self, number: int, places: Sequence[int]) -> list[PackableDocument]:
        """Of the held-out documents of source `number`."""
        part = self._mixture.parts[number]
        documents = (self._mixture.heldout(number, place) for place in self._share(places))
        return [self._prepared(document, part.overlap, part.name) for document in documents]

    def document(self, index: int) -> PackableDocument:
        document, part = self._mixture.read(index)
        return self._prepared(document, part.overlap, part.name)

    def _share(self, numbers: Sequence[int]) -> Sequence[int]:
        return numbers[self.rank :: self.ranks]

    def _prepared(self, document: Document, overlap: int, source: str) -> PackableDocument:
        cut = windows(document, self._max_context, overlap)
        notes = [*document.notes, *(["cut"] if len(cut) > 1 else [])]
        sequences = [sequence for each in cut if (sequence := _sequence(each)) is not None]
        return PackableDocument(sequences, notes if sequences or notes else ["nothing to learn"], source)


class MidtrainObjective(Objective[DocumentBatch]):
    def __init__(
        self,
        config: MidtrainConfig,
        mixture: Mixture,
        *,
        max_context: int,
        tokens_per_microbatch: int,
        steps: int | None = None,
    ) -> None:
        """`steps`: of the stage; no document is read ahead for a later one."""
        self._config = config
        self._mixture = mixture
        self._budget = tokens_per_microbatch
        self._pass: NextTokenPass | None = None
        self._parallel = SINGLE
        self._steps = steps
        self._reader = _Reader(mixture, config.documents_per_step, max_context)
        self._ahead = ReadAhead(self._reader.step, steps)

    def next_batch(
        self, number: int, lr: float, lineage: Lineage, stopping: Callable[[], bool]
    ) -> DocumentBatch | None:
        return None if stopping() else DocumentBatch(number, lr)

    def backward(
        self,
        model: Decoder,
        batch: DocumentBatch,
        accumulate: Callable[[], None] = leave_on_model,
        parallel: Parallelism = SINGLE,
    ) -> dict[str, Any]:
        if self._pass is None or self._pass.model is not model:
            self._pass, self._parallel = parallel.passes.next_token(model, self._config.balance), parallel
            self._reader.rank, self._reader.ranks = parallel.ranks.rank, parallel.ranks.size
            self._ahead = ReadAhead(self._reader.step, self._steps)
        if batch.number == 1:
            self._measure(0)
        counts = self.fill(batch)
        tokens = sum(len(part.tokens_N) for part in batch.microbatches)
        targets = sum(len(part.targets_M) for part in batch.microbatches)
        losses: list[Tensor] = []
        router = RouterMeasures()
        for part in batch.microbatches:
            if losses:
                accumulate()
            loss, load_LE = self._pass(part, targets, tokens)
            losses.append(loss)
            if load_LE is not None:
                router.add_load(len(part.tokens_N), load_LE)
        # read last, when everything is queued: reading waits for the device
        total = sum(torch.stack(losses).tolist()) if losses else 0.0
        figures = {"loss": total, "tokens": tokens, "targets": targets, **counts}
        router.over_ranks(parallel.ranks)
        if math.isfinite(total):  # otherwise the step changes nothing
            router.move_gate_biases(model, self._config.gate_bias_rate)
        return {**figures, **router.load_figures()}

    def fill(self, batch: DocumentBatch) -> dict[str, Any]:
        """Pack the documents of a step. Returns how many there are by source and by what was done to them, and how long
        the step waited for them. Collective."""
        start = time.monotonic()
        own = self._ahead.take(batch.number)
        waited = time.monotonic() - start
        read = self._gathered(own)
        batch.microbatches[:] = pack((sequence for each in read for sequence in each.sequences), self._budget)
        return {
            "documents": dict(Counter(each.source for each in read)),
            "notes": dict(Counter(note for each in read for note in each.notes)),
            "read_wait_seconds": waited,
        }

    def _gathered(self, own: list[PackableDocument]) -> list[PackableDocument]:
        """The documents of all ranks in their order, from the share of each. Collective."""
        ranks, shares = self._parallel.ranks.size, self._parallel.ranks.gather(own)
        total = sum(map(len, shares))
        return [shares[place % ranks][place // ranks] for place in range(total)]

    # held-out documents

    def _measure(self, step: int) -> None:
        """Emit the loss on held-out documents of each source. Collective."""
        assert self._pass is not None
        model = self._pass.model
        for number, part in enumerate(self._mixture.parts):
            documents = range(min(self._config.heldout_documents, len(self._mixture.chosen[number].heldout)))
            if not documents:
                continue
            own = self._ahead.call(partial(self._reader.heldout, number, documents))
            read = self._gathered(own)
            sequences = [_measurable(sequence) for each in read for sequence in each.sequences]
            total = 0.0
            with torch.no_grad(), telemetry.busy("measure"):
                for micro in pack(sequences, self._budget):
                    total -= float(self._parallel.passes.recompute(model, micro, None).logprobs_M.double().sum())
            targets = sum(len(sequence.targets) for sequence in sequences)
            telemetry.emit(
                "heldout_loss",
                step=step,
                source=part.name,
                documents=len(documents),
                targets=targets,
                loss=total / targets if targets else None,
            )

    def publishes(self, number: int) -> bool:
        return number % self._config.publish_every == 0

    def report(self, batch: DocumentBatch, outcome: StepOutcome) -> None:
        telemetry.emit(
            "document_step",
            step=outcome.number,
            steps=outcome.steps,
            **finite(outcome.figures),
            tokens_per_s=outcome.figures["tokens"] / outcome.seconds,
            **outcome.update.figures(),
        )
        if outcome.number % self._config.heldout_every == 0 or outcome.number == outcome.steps:
            self._measure(outcome.number)


def _sequence(document: Document) -> PackedSequence | None:
    tokens, mask = np.asarray(document.tokens, np.int64), np.asarray(document.learnt, np.bool_)
    picked = np.flatnonzero(mask[1:]) + 1  # nothing predicts a first token
    if picked.size == 0:
        return None
    return PackedSequence(tokens=tokens[: picked[-1]], rows=picked - 1, targets=tokens[picked])


def _measurable(sequence: PackedSequence) -> PackedSequence:
    """A sequence whose log-probs can be recomputed: at temperature 1."""
    count = len(sequence.targets)
    zeros, whole = np.zeros(count, np.float32), np.zeros(count, np.int64)
    return replace(sequence, facts=SampledFacts(zeros, np.ones(count, np.float32), zeros, whole, whole))
