"""From trajectories to packed micro-batches. Each segment is one sequence; each sampled token is a target once.

An example (P prompt, A answer, T tool result; the last answer was sampled by weights over the staleness bound):

    tokens      [P0 P1 P2 | A3 A4 | T5 | A6 A7]
    targets      A3 A4                            tokens to train on: sampled, fresh enough, reconstructible
    rows         P2 A3                            the input that predicts each target
    inputs      [P0 P1 P2 | A3]                   inputs after the last row are not computed

Sampled tokens that are not targets are counted by reason. A child segment repeats the tokens it shares with its parent
by value. They are marked as not sampled there: they are context, and no token is trained on twice. All sequences of a
trajectory share its advantage and its index: a chain of summaries is one sample.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

from rollmill.errors import TrajectoryError
from rollmill.models.attention import packed_positions
from rollmill.models.config import ModelConfig
from rollmill.models.shaping import Shape
from rollmill.training.lineage import Lineage
from rollmill.trajectories.allowed_tokens import decode_kept, holds, split_kept
from rollmill.types import Segment

STALE = "stale"
GREEDY = "sampled at temperature 0"
TRUNCATED = "sampled with top-p, top-k or min-p, whose cut was not recorded"
GRAMMAR = "sampled under a grammar, whose mask was not recorded"
FOREIGN = "sampled by a line this one does not descend from"
NO_CONTEXT = "the first token of a segment, which nothing predicts"
ABANDONED = "not on the way to the outcome"
UNSAID = "of answers that no user said anything about"


@dataclass(frozen=True)
class SampledFacts:
    """What the engine recorded about each target, and what the step adds; all arrays are [M]."""

    logprobs: np.ndarray  # float32, the engine's own
    temperatures: np.ndarray  # float32
    advantages: np.ndarray  # float32
    staleness: np.ndarray  # int64, in versions
    trajectory: np.ndarray  # int64, index of its trajectory in the step
    shapes: np.ndarray | None = None  # of `Shape | None`; None if only temperatures shaped the distributions
    hint: np.ndarray | None = (
        None  # int64: the place of the token in the teacher's answer; -1: none (training/rl/hints.py)
    )

    def picked(self, rows: np.ndarray) -> SampledFacts:
        """The facts of some of the targets."""
        columns = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: column[rows] for name, column in columns.items() if column is not None})


@dataclass(frozen=True)
class PackedSequence:
    """One context with its targets, ready to be packed with others."""

    tokens: np.ndarray  # int64 [T] inputs
    rows: np.ndarray  # int64 [M] which input predicts the target
    targets: np.ndarray  # int64 [M]
    routes: np.ndarray | None = None  # [T, moe layers, k]
    routes_valid: np.ndarray | None = None  # bool [T]
    facts: SampledFacts | None = None  # None where nothing was sampled (documents)


@dataclass(frozen=True)
class MicroBatch:
    """Packed sequences: N inputs, M targets."""

    tokens_N: Tensor  # int64
    positions_N: Tensor  # int64, from 0 in each sequence
    lengths: list[int]
    rows_M: Tensor  # int64, into N
    targets_M: Tensor  # int64
    routes: np.ndarray | None
    routes_valid: np.ndarray | None
    facts: SampledFacts | None


@dataclass(frozen=True)
class TokenRule:
    """Which sampled tokens a step may train on. `base` is the number of the version it trains from."""

    lineage: Lineage
    base: int
    max_staleness: int


def segment_sequence(
    segment: Segment,
    advantage: float,
    rule: TokenRule,
    masked: Counter[str],
    trajectory: int = 0,
    credit_T: np.ndarray | None = None,
    advantages_T: np.ndarray | None = None,
    uncredited: str = ABANDONED,
) -> PackedSequence | None:
    """The sequence of a segment, or None if it has no token to train on. Counts the others in `masked`, by reason.

    `credit_T`: the share of the advantage that each token gets (training/rl/credit.py). None: all of it.
    `advantages_T`: each token has an advantage of its own (training/rl/turn_credit.py), in place of `advantage`.
    `uncredited`: why a token has no credit.
    """
    staleness_T = np.where(segment.sampled, _policy_ages(segment, rule)[segment.policy], 0)
    temperatures_T, learn_T = _reconstructible(segment, masked)
    if credit_T is not None:
        masked[uncredited] += int((learn_T & (credit_T == 0)).sum())
        learn_T &= credit_T != 0
    foreign_T = learn_T & (staleness_T == _UNRELATED)
    stale_T = learn_T & ~foreign_T & (staleness_T > rule.max_staleness)
    masked.update({FOREIGN: int(foreign_T.sum()), STALE: int(stale_T.sum())})
    picked = np.flatnonzero(learn_T & ~foreign_T & ~stale_T)
    if picked.size == 0:
        return None
    end = int(picked[-1])  # the last target is predicted by the input before it
    facts = SampledFacts(
        logprobs=segment.logprobs[picked],
        temperatures=temperatures_T[picked],
        advantages=(np.full(len(segment.tokens), advantage, np.float32) if advantages_T is None else advantages_T)[
            picked
        ]
        * (1 if credit_T is None else credit_T[picked]),
        staleness=np.maximum(staleness_T[picked], 0),
        trajectory=np.full(picked.size, trajectory, np.int64),
        shapes=_shapes(segment, picked),
    )
    tokens = segment.tokens.astype(np.int64)
    return PackedSequence(
        tokens=tokens[:end],
        rows=picked - 1,
        targets=tokens[picked],
        routes=None if segment.routes is None else segment.routes[:end],
        routes_valid=None if segment.routes_valid is None else segment.routes_valid[:end],
        facts=facts,
    )


_UNRELATED = np.iinfo(np.int64).max


def _policy_ages(segment: Segment, rule: TokenRule) -> np.ndarray:
    """The staleness of each policy of the segment."""
    positions = [rule.lineage.position(policy.line, policy.number) for policy in segment.policies]
    ages = [_UNRELATED if position is None else rule.base - position for position in positions]
    return np.array(ages or [0], np.int64)


def _reconstructible(segment: Segment, masked: Counter[str]) -> tuple[np.ndarray, np.ndarray]:
    """Temperatures [T], and which sampled tokens [T] have a distribution that the trainer can recompute."""
    temperatures_T = np.ones(len(segment.tokens), np.float32)
    learn_T = segment.sampled.copy()
    for span in segment.spans:
        temperatures_T[span.start : span.end] = span.sampling.temperature
        if span.missing:
            masked[span.missing] += span.end - span.start
            learn_T[span.start : span.end] = False
        elif not span.sampling.trainable:
            masked[GREEDY] += span.end - span.start
            learn_T[span.start : span.end] = False
        elif span.sampling.cuts:
            known = np.zeros(span.end - span.start, np.bool_)
            if segment.kept_sizes is not None:
                known = segment.kept_sizes[span.start : span.end] > 0
            masked[TRUNCATED if span.sampling.grammar is None else GRAMMAR] += int((~known).sum())
            learn_T[span.start : span.end] &= known
    if learn_T.size and learn_T[0]:
        masked[NO_CONTEXT] += 1
        learn_T[0] = False
    return temperatures_T, learn_T


def _shapes(segment: Segment, picked: np.ndarray) -> np.ndarray | None:
    """The shapes of the distributions of these tokens."""
    spans = [span for span in segment.spans if span.sampling.cuts or span.sampling.changes_logits]
    if not spans:
        return None
    sizes, kept = segment.kept_sizes, segment.kept
    sets = None if sizes is None or kept is None else split_kept(sizes, kept)
    shapes = np.full(picked.size, None, object)
    for span in spans:
        for index in np.flatnonzero((picked >= span.start) & (picked < span.end)):
            at = int(picked[index])
            held = sets[at] if sets is not None and span.sampling.cuts else b""
            shapes[index] = Shape(span.sampling, segment.tokens[:at], span.start - span.answered, held)
    return shapes


def check_fits(segments: Iterable[Segment], model: ModelConfig) -> None:
    """Raises TrajectoryError if this model cannot have produced them: payloads may come from anywhere."""
    for segment in segments:
        if len(segment.tokens) > model.max_context:
            raise TrajectoryError(f"a segment of {len(segment.tokens)} tokens for a context of {model.max_context}")
        if segment.tokens.size and int(segment.tokens.max()) >= model.vocab_size:
            raise TrajectoryError(f"token id {int(segment.tokens.max())} in a vocabulary of {model.vocab_size}")
        if segment.routes is not None and segment.routes_valid is not None:
            _check_routes(segment.routes[segment.routes_valid], model)
        _check_kept(segment, model.vocab_size)
        biases = [token for span in segment.spans for token, _ in span.sampling.logit_bias]
        if biases and not 0 <= min(biases) <= max(biases) < model.vocab_size:
            raise TrajectoryError(f"a logit_bias outside a vocabulary of {model.vocab_size}")


def _check_kept(segment: Segment, vocab_size: int) -> None:
    """A sampled token that could not be drawn would have log-prob -inf, and gradients that are not finite."""
    if segment.kept_sizes is None or segment.kept is None:
        return
    for token, kept in zip(segment.tokens.tolist(), split_kept(segment.kept_sizes, segment.kept), strict=True):
        if kept and not holds(decode_kept(kept, vocab_size), token):
            raise TrajectoryError(f"token {token} was sampled and is not in its set of kept tokens")


def _check_routes(routes: np.ndarray, model: ModelConfig) -> None:
    expected = (model.moe_layers, model.experts_per_token)
    if routes.shape[1:] != expected:
        raise TrajectoryError(f"routes of shape {routes.shape[1:]}, this model has {expected} (moe layers, k)")
    if int(routes.max(initial=0)) >= model.experts:
        raise TrajectoryError(f"a route to expert {int(routes.max())} of {model.experts}")
    ordered = np.sort(routes, axis=-1)
    if (ordered[..., 1:] == ordered[..., :-1]).any():
        raise TrajectoryError("a token routed to one expert twice", hint="padding must be marked as not valid")


def pack(sequences: Iterable[PackedSequence], budget: int) -> list[MicroBatch]:
    """Pack sequences into micro-batches of at most `budget` tokens (a longer sequence gets its own).

    Longest first: sequences of similar length share a micro-batch, which wastes least in padded attention. The sort is
    stable, so the same sequences in the same order give the same micro-batches, bit for bit.
    """
    batches: list[list[PackedSequence]] = []
    room = 0
    for sequence in sorted(sequences, key=lambda each: -len(each.tokens)):
        if not batches or len(sequence.tokens) > room:
            batches.append([])
            room = budget
        batches[-1].append(sequence)
        room -= len(sequence.tokens)
    return [_concatenate(batch) for batch in batches]


def _concatenate(batch: Sequence[PackedSequence]) -> MicroBatch:
    lengths = [len(sequence.tokens) for sequence in batch]
    starts = np.cumsum([0, *lengths[:-1]])
    rows = np.concatenate([start + sequence.rows for start, sequence in zip(starts, batch, strict=True)])
    return MicroBatch(
        tokens_N=torch.from_numpy(np.concatenate([sequence.tokens for sequence in batch])),
        positions_N=packed_positions(lengths),
        lengths=lengths,
        rows_M=torch.from_numpy(rows),
        targets_M=torch.from_numpy(np.concatenate([sequence.targets for sequence in batch])),
        routes=_concatenate_routes(batch, [sequence.routes for sequence in batch]),
        routes_valid=_concatenate_routes(batch, [sequence.routes_valid for sequence in batch]),
        facts=_concatenate_facts([sequence.facts for sequence in batch if sequence.facts is not None]),
    )


def _concatenate_routes(batch: Sequence[PackedSequence], parts: Sequence[np.ndarray | None]) -> np.ndarray | None:
    """Rows of sequences without routes are zeros and not valid, so the live router decides there."""
    known = next((part for part in parts if part is not None), None)
    if known is None:
        return None
    filled = [
        np.zeros((len(sequence.tokens), *known.shape[1:]), known.dtype) if part is None else part
        for sequence, part in zip(batch, parts, strict=True)
    ]
    return np.concatenate(filled)


_ABSENT: dict[str, tuple[object, type]] = {"shapes": (None, object), "hint": (-1, np.int64)}  # and their type


def _concatenate_facts(facts: Sequence[SampledFacts]) -> SampledFacts | None:
    if not facts:
        return None
    columns: dict[str, np.ndarray] = {}
    for name in (field.name for field in fields(SampledFacts)):
        parts = [getattr(each, name) for each in facts]
        if any(part is not None for part in parts):
            filled = [
                np.full(len(each.logprobs), *_ABSENT[name]) if part is None else part
                for each, part in zip(facts, parts, strict=True)
            ]
            columns[name] = np.concatenate(filled)
    return SampledFacts(**columns)
