"""Mismatch: how far trainer and engine disagree *on the same weights*, the one figure that finds numerical bugs.

In an asynchronous run hardly a token was sampled by the version being trained, so comparing the trained policy with the
engine shows how far the policy has moved (drift). To tell the two apart, a few trajectories of each step are computed
once more, without gradients, under the very weights that sampled them (P prompt, A sampled, T tool result):

    tokens       [P P P | A A A | T | A A]
    policy       [. . . | 3 3 4 | . | 4 4]      the version that sampled each token
    oldest KV    [. . . | 3 3 3 | . | 4 4]      a fact of each answer; the second began after the cache had been dropped
    probe of 3    P P P   A A                   Δ on two tokens, under version 3
    probe of 4    P P P   A A A   T   A A       Δ on the last two, under version 4
    left out                  A                 version 4 on keys that version 3 wrote: no weights give this log-prob

Nothing here touches the weights, the optimizer, a random state or the ledger: a run with these figures and one without
have the same digests. The measurement comes after the step is committed, so that no engine waits for it.
"""

from __future__ import annotations

import collections
import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from rollmill import telemetry
from rollmill.errors import StorageError, WeightsError
from rollmill.models.decoder import Decoder
from rollmill.training.batching import MicroBatch, PackedSequence, SampledFacts, TokenRule, pack, segment_sequence
from rollmill.training.placement import Placement
from rollmill.training.replay import replay_of
from rollmill.training.twin import Twin
from rollmill.types import PolicyRef, Segment, Version
from rollmill.weights.format.tensors import HostTensor
from rollmill.weights.reading.store import WeightStore

# A forward pass is a third of a training pass, so one trajectory in ten, and six at most, are a few per cent of a step.
MOST_TRAJECTORIES = 6
ONE_IN = 10

MIXED = "attended to keys and values of other weights, or may have"
UNAVAILABLE = "the weights that sampled it cannot be had"


@dataclasses.dataclass(frozen=True)
class Probe:
    """Tokens of one segment that one version sampled, each on keys and values of that version alone."""

    policy: PolicyRef
    sequence: PackedSequence

    @property
    def tokens(self) -> int:
        return len(self.sequence.targets)


@dataclasses.dataclass(frozen=True)
class Sample:
    """What of a step is measured. Probes and `left_out` add up to the trained tokens of the trajectories looked at."""

    probes: Sequence[Probe]
    left_out: Counter[str]  # tokens by reason


def choose_sample(seed: int, trajectories: Sequence[Sequence[Segment]], rule: TokenRule) -> Sample:
    """Look at trajectories in an order drawn from the seed, until enough of them had something to measure."""
    wanted = min(MOST_TRAJECTORIES, -(-len(trajectories) // ONE_IN))
    probes: list[Probe] = []
    left_out: Counter[str] = Counter()
    for index in np.random.default_rng(seed).permutation(len(trajectories)):
        if wanted == 0:
            break
        found = [probe for segment in trajectories[index] for probe in _segment_probes(segment, rule, left_out)]
        wanted -= bool(found)
        probes += found
    return Sample(probes, left_out)


def _segment_probes(segment: Segment, rule: TokenRule, left_out: Counter[str]) -> list[Probe]:
    whole = segment_sequence(segment, 0.0, rule, Counter())
    if whole is None:
        return []
    policy_M = segment.policy[whole.rows + 1]
    pure_M = _pure(segment)[whole.rows + 1]
    left_out[MIXED] += int((~pure_M).sum())
    return [
        Probe(segment.policies[index], _part(whole, pure_M & (policy_M == index), _routes_of(segment, index)))
        for index in np.unique(policy_M[pure_M]).tolist()
    ]


def _pure(segment: Segment) -> np.ndarray:
    """bool [T]: sampled, and the version that did wrote all the keys and values it attended to."""
    oldest_T = np.full(len(segment.tokens), -1)
    for span in segment.spans:
        if span.finish != "abort":  # an engine that broke off did not live to tell: its oldest is a guess
            oldest_T[span.start : span.end] = span.oldest_kv_policy
    return segment.sampled & (oldest_T == segment.policy)


def _routes_of(segment: Segment, policy: int) -> np.ndarray | None:
    """bool [T]: the routes that were recorded under that policy. A row is computed with the weights that sample next.

    Where a context is computed again (after an eviction, on another engine, in a child segment) the first record of a
    row stands, which other weights made: there the live router is the one to ask.
    """
    if segment.routes_valid is None:
        return None
    sampled = np.flatnonzero(segment.sampled)
    following = np.searchsorted(sampled, np.arange(len(segment.tokens)), side="right")
    policy_next = np.append(segment.policy[sampled], -1)[following]
    inherited = np.arange(len(segment.tokens)) < (segment.parent[1] if segment.parent else 0)
    return segment.routes_valid & (policy_next == policy) & ~inherited


def _part(whole: PackedSequence, picked_M: np.ndarray, routes_valid: np.ndarray | None) -> PackedSequence:
    """The same context with some of its targets only, cut after the last."""
    assert whole.facts is not None
    end = int(whole.rows[picked_M][-1]) + 1
    return PackedSequence(
        tokens=whole.tokens[:end],
        rows=whole.rows[picked_M],
        targets=whole.targets[picked_M],
        routes=None if whole.routes is None else whole.routes[:end],
        routes_valid=None if routes_valid is None else routes_valid[:end],
        facts=SampledFacts(*(getattr(whole.facts, field.name)[picked_M] for field in dataclasses.fields(SampledFacts))),
    )


class ServedWeights:
    """The newest versions by digest, as the bytes engines serve; any other comes from the store. Of many ranks each has
    its rows."""

    def __init__(self, store: WeightStore, keep: int) -> None:
        self._store = store
        self._held: collections.deque[tuple[str, Mapping[str, HostTensor]]] = collections.deque(maxlen=keep)

    def remember(self, digest: str, tensors: Mapping[str, HostTensor]) -> None:
        if all(digest != held for held, _ in self._held):
            self._held.append((digest, tensors))

    def load(self, policy: PolicyRef, twin: Twin) -> None:
        """Load the bytes with that digest. Raises WeightsError or StorageError if there are none."""
        for digest, tensors in self._held:
            if digest == policy.digest:
                return twin.load_held(tensors)
        version = Version(policy.line, policy.number)  # of before a restart
        digest = self._store.manifest(version, policy.form).digest
        if digest != policy.digest:
            raise WeightsError(f"tokens name {version} with digest {policy.digest}, published is {digest}")
        twin.load_version(self._store, version, policy.form)


class MismatchMeter:
    """Computes probes with a decoder of its own. Of many ranks each calls all of it, at the same time."""

    def __init__(self, served: ServedWeights, *, budget: int, router_replay: bool) -> None:
        self.served = served
        self._twin: Twin | None = None
        self._budget = budget
        self._router_replay = router_replay

    def compute_like(self, placement: Placement, model: Decoder) -> None:
        """Measure where `model` computes and as it does: any other way would be a mismatch of the meter's own."""
        if self._twin is None:
            self._twin = Twin(placement, model)

    def measure(self, step: int, sample: Sample) -> tuple[np.ndarray, Counter[str]]:
        """Δ = log π − log μ of the tokens measured, and the ones that are not, by reason."""
        sequences: dict[PolicyRef, list[PackedSequence]] = {}
        for probe in sample.probes:
            sequences.setdefault(probe.policy, []).append(probe.sequence)
        deltas: list[np.ndarray] = [np.empty(0, np.float32)]
        left_out = sample.left_out.copy()
        for policy, found in sequences.items():
            assert self._twin is not None, "compute_like comes first"
            problem = self._load(policy, self._twin)
            if problem is not None:
                # a figure less, never a step less
                left_out[UNAVAILABLE] += sum(len(sequence.targets) for sequence in found)
                text = f"mismatch of step {step} is not measured on all tokens: {problem}"
                telemetry.emit("warning", step=step, text=text)
                continue
            deltas += self._deltas(self._twin, pack(found, self._budget))
        return np.concatenate(deltas), left_out

    def _load(self, policy: PolicyRef, twin: Twin) -> str | None:
        """Why these weights cannot be had. If one rank has not got its rows none computes: they would wait for it."""
        problem = None
        try:
            self.served.load(policy, twin)
        except (WeightsError, StorageError) as error:
            problem = error.message
        return next(filter(None, twin.placement.gather(problem)), None)

    def _deltas(self, twin: Twin, parts: Iterable[MicroBatch]) -> list[np.ndarray]:
        found = []
        for part in parts:
            assert part.facts is not None
            replay = replay_of(part) if self._router_replay else None
            found.append(twin.logprobs(part, replay).cpu().numpy() - part.facts.logprobs)
        return found
