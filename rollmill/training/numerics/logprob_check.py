"""Mismatch: how far trainer and engine disagree *on the same weights*. This is the figure that finds numerical bugs.

In an asynchronous run few tokens were sampled by the version being trained, so comparing the trained policy with the
engine shows how far the policy has moved (drift). To tell the two apart, a few trajectories of each step are recomputed
without gradients, under the weights that sampled them (P prompt, A sampled, T tool result):

    tokens       [P P P | A A A | T | A A]
    policy       [. . . | 3 3 4 | . | 4 4]      the version that sampled each token
    oldest KV    [. . . | 3 3 3 | . | 4 4]      recorded per answer; before the second one the cache was dropped
    probe of 3    P P P   A A                   Δ on two tokens, under version 3
    probe of 4    P P P   A A A   T   A A       Δ on the last two, under version 4
    left out                  A                 version 4 on keys that version 3 wrote: no weights give this log-prob

Engines may serve another form than the trainer's (publishing/exporter.py). Their tokens are compared with the same
version in the trainer's form, so the difference of the forms is part of the figure. They are reported apart, by form.

Nothing here changes the weights, the optimizer, a random state or the ledger: a run has the same digests with and
without these figures. A step is reported, and measured, when the trainer waits for groups. Groups that become ready
meanwhile wait for the rest of one measurement. If groups are ready at once, the step is reported without figures, but
at least one step in EVERY is measured. Several ranks measure at once, all together.
"""

from __future__ import annotations

import collections
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from rollmill import telemetry
from rollmill.errors import StorageError, WeightsError
from rollmill.models.decoder import Decoder
from rollmill.training.batching import MicroBatch, PackedSequence, TokenRule, pack, segment_sequence
from rollmill.training.diagnostics import mismatch_figures
from rollmill.training.lineage import form_held
from rollmill.training.numerics.frozen_model import FrozenModel
from rollmill.training.numerics.router_replay import replay_of
from rollmill.training.parallelism import Parallelism
from rollmill.types import PolicyRef, Segment, Version
from rollmill.weights.format.tensors import HostTensor
from rollmill.weights.reading.weight_store import WeightStore

# A forward pass is a third of a training pass. One trajectory in ten, and six at most, cost a few per cent of a step.
MOST_TRAJECTORIES = 6
ONE_IN = 10

EVERY = 10  # steps

MIXED = "attended to keys and values of other weights, or may have"
UNAVAILABLE = "the weights that sampled it are not available"
BUSY = "the next step was ready"
FAILED = "the trainer failed after the step"


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
    """What a step measures. Probes and `left_out` add up to the trained tokens of the chosen trajectories."""

    probes: Sequence[Probe]
    left_out: Counter[str]  # tokens by reason

    def split(self, form: str) -> tuple[Sample, dict[str, Sample]]:
        """The part that engines of `form` sampled, with all of `left_out`, and the parts of the other forms."""
        others = sorted({probe.policy.form for probe in self.probes} - {form})
        own, *rest = ([probe for probe in self.probes if probe.policy.form == each] for each in (form, *others))
        return Sample(own, self.left_out), {each: Sample(r, Counter()) for each, r in zip(others, rest, strict=True)}


def choose_sample(seed: int, trajectories: Sequence[Sequence[Segment]], rule: TokenRule) -> Sample:
    """Look at trajectories in an order drawn from the seed, until enough of them have something to measure."""
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
    """bool [T]: sampled by a version that also wrote all the keys and values it attended to."""
    oldest_T = np.full(len(segment.tokens), -1)
    for span in segment.spans:
        if span.finish != "abort":  # the oldest version of an aborted answer is a guess
            oldest_T[span.start : span.end] = span.oldest_kv_policy
    return segment.sampled & (oldest_T == segment.policy)


def _routes_of(segment: Segment, policy: int) -> np.ndarray | None:
    """bool [T]: the routes that were recorded under that policy. The weights that sample next compute a row.

    If a context is computed again (after an eviction, on another engine, in a child segment), the first record of a row
    stays, and other weights may have made it. The live router decides there.
    """
    if segment.routes_valid is None:
        return None
    sampled = np.flatnonzero(segment.sampled)
    following = np.searchsorted(sampled, np.arange(len(segment.tokens)), side="right")
    policy_next = np.append(segment.policy[sampled], -1)[following]
    inherited = np.arange(len(segment.tokens)) < (segment.parent[1] if segment.parent else 0)
    return segment.routes_valid & (policy_next == policy) & ~inherited


def _part(whole: PackedSequence, picked_M: np.ndarray, routes_valid: np.ndarray | None) -> PackedSequence:
    """The same context with only the picked targets, cut after the last one."""
    assert whole.facts is not None
    end = int(whole.rows[picked_M][-1]) + 1
    return PackedSequence(
        tokens=whole.tokens[:end],
        rows=whole.rows[picked_M],
        targets=whole.targets[picked_M],
        routes=None if whole.routes is None else whole.routes[:end],
        routes_valid=None if routes_valid is None else routes_valid[:end],
        facts=whole.facts.picked(picked_M),
    )


class ServedWeights:
    """Keeps this rank's rows of the newest `keep` versions, as engines serve them. Older ones come from the store."""

    def __init__(self, store: WeightStore, keep: int) -> None:
        self._store = store
        self._held: collections.deque[tuple[str, Mapping[str, HostTensor]]] = collections.deque(maxlen=keep)

    def remember(self, digest: str, tensors: Mapping[str, HostTensor]) -> None:
        if all(digest != held for held, _ in self._held):
            self._held.append((digest, tensors))

    def load(self, policy: PolicyRef, frozen: FrozenModel) -> None:
        """Load the bytes with that digest, or of another form the same version in the form of the frozen model. Raises
        WeightsError or StorageError if there are none."""
        version, form, wanted = Version(policy.line, policy.number), policy.form, policy.digest
        if form != frozen.decoder.form:
            self._check(version, policy)
            form = form_held(self._store, version, frozen.decoder.form)
            wanted = self._store.manifest(version, form).digest
        for digest, tensors in self._held:
            if digest == wanted:
                return frozen.parallel.models.load_held(frozen.decoder, tensors)
        if form == policy.form:
            self._check(version, policy)
        frozen.parallel.models.load_version(frozen.decoder, self._store, version, form)  # from before a restart

    def _check(self, version: Version, policy: PolicyRef) -> None:
        digest = self._store.manifest(version, policy.form).digest
        if digest != policy.digest:
            raise WeightsError(f"tokens name {version} with digest {policy.digest}, published is {digest}")


class MismatchMeter:
    """Computes probes with a second decoder. All methods are collective."""

    def __init__(self, served: ServedWeights, *, budget: int, router_replay: bool) -> None:
        self.served = served
        self._frozen: FrozenModel | None = None
        self._budget = budget
        self._router_replay = router_replay

    def compute_like(self, parallel: Parallelism, model: Decoder) -> None:
        """Measure where and as `model` computes: any other way would add a mismatch of its own."""
        if self._frozen is None:
            self._frozen = FrozenModel(parallel, model)

    @property
    def form(self) -> str:
        """The form that the trained model computes with."""
        assert self._frozen is not None, "compute_like comes first"
        return self._frozen.decoder.form

    @property
    def exact(self) -> bool:
        """Whether no bit may differ: the trained model computes exactly."""
        return self._frozen is not None and self._frozen.decoder.exact

    def measure(self, step: int, sample: Sample) -> tuple[np.ndarray, Counter[str]]:
        """Δ = log π − log μ of the measured tokens, and the number of the other tokens by reason."""
        sequences: dict[PolicyRef, list[PackedSequence]] = {}
        for probe in sample.probes:
            sequences.setdefault(probe.policy, []).append(probe.sequence)
        deltas: list[np.ndarray] = [np.empty(0, np.float32)]
        left_out = sample.left_out.copy()
        for policy, found in sequences.items():
            assert self._frozen is not None, "compute_like comes first"
            problem = self._load(policy, self._frozen)
            if problem is not None:
                # if this measurement fails, the step still counts
                left_out[UNAVAILABLE] += sum(len(sequence.targets) for sequence in found)
                text = f"mismatch of step {step} is not measured on all tokens: {problem}"
                telemetry.emit("warning", step=step, text=text)
                continue
            deltas += self._deltas(self._frozen, pack(found, self._budget))
        return np.concatenate(deltas), left_out

    def _load(self, policy: PolicyRef, frozen: FrozenModel) -> str | None:
        """Why these weights are not available, if so. If one rank lacks its rows, no rank computes: all would wait."""
        problem = None
        try:
            self.served.load(policy, frozen)
        except (WeightsError, StorageError) as error:
            problem = error.message
        return next(filter(None, frozen.parallel.ranks.gather(problem)), None)

    def _deltas(self, frozen: FrozenModel, parts: Iterable[MicroBatch]) -> list[np.ndarray]:
        found = []
        for part in parts:
            assert part.facts is not None
            replay = replay_of(part) if self._router_replay else None
            found.append(frozen.logprobs(part, replay).cpu().numpy() - part.facts.logprobs)
        return found


class _HeldStep(NamedTuple):
    step: int
    sample: Sample
    emit: Callable[[dict[str, Any]], None]


class HeldReport:
    """The report of the newest step, held back until there is time to measure."""

    def __init__(self, meter: MismatchMeter) -> None:
        self._meter = meter
        self._held: _HeldStep | None = None
        self._unmeasured = 0  # steps since the last measurement

    def hold(self, step: int, sample: Sample, emit: Callable[[dict[str, Any]], None]) -> None:
        """`emit` gets the mismatch figures of the step."""
        self.release(idle=False)
        self._held = _HeldStep(step, sample, emit)

    def release(self, *, idle: bool, failed: bool = False) -> None:
        """Emit the report, if one is held. `idle`: nothing waits for the trainer, so mismatch is measured. `failed`:
        after an error nothing is measured, for a second error would hide the first."""
        held, self._held = self._held, None
        if held is None:
            return
        self._unmeasured += 1
        deltas, left_out = np.empty(0, np.float32), held.sample.left_out.copy()
        by_form: dict[str, np.ndarray] = {}
        if not failed and (idle or self._unmeasured >= EVERY):
            with telemetry.busy("measure"):
                deltas, left_out, by_form = self._measure(held)
            self._unmeasured = 0
        else:
            left_out[FAILED if failed else BUSY] += sum(probe.tokens for probe in held.sample.probes)
        held.emit(mismatch_figures(deltas, left_out, by_form))

    def _measure(self, held: _HeldStep) -> tuple[np.ndarray, Counter[str], dict[str, np.ndarray]]:
        if not held.sample.probes:
            return np.empty(0, np.float32), held.sample.left_out.copy(), {}
        own, others = held.sample.split(self._meter.form)
        deltas, left_out = self._meter.measure(held.step, own)
        by_form = {}
        for form, sample in others.items():
            by_form[form], also = self._meter.measure(held.step, sample)
            left_out += also
        return deltas, left_out, by_form
