"""Reinforcement learning on finished groups.

A step takes groups by earliest deadline (training/rl/deadlines.py), decides about each of their trajectories
(training/rl/selection.py), writes its record to the run's ledger, and only then trains. A record that exists already
was left by a killed trainer: the step runs again from the same payloads, in the same order.

The gradient is computed in training/rl/policy_passes.py. While the trainer waits for groups, a few trajectories of
the step before are recomputed under the versions that sampled them, to see whether trainer and engine agree
(training/numerics/logprob_check.py).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rollmill import telemetry
from rollmill.chat.format import ChatFormat
from rollmill.errors import TrajectoryChanged
from rollmill.models.config import ModelConfig
from rollmill.models.decoder import Decoder
from rollmill.training.batching import ABANDONED, STALE, MicroBatch, TokenRule, pack
from rollmill.training.config import ALONE, RLConfig
from rollmill.training.diagnostics import finite, nothing_left, warnings
from rollmill.training.lineage import Lineage
from rollmill.training.numerics.logprob_check import HeldReport, MismatchMeter, Sample, ServedWeights, choose_sample
from rollmill.training.objective import Objective, StepOutcome, leave_on_model
from rollmill.training.parallelism import Parallelism, Passes
from rollmill.training.rl.answer_credit import answer_advantages
from rollmill.training.rl.baseline import make_baseline
from rollmill.training.rl.deadlines import Candidate, choose_groups
from rollmill.training.rl.kl_reference import Reference
from rollmill.training.rl.policy_passes import PolicyGradient, StepSequences
from rollmill.training.rl.selection import (
    Contents,
    Exclusions,
    GradedEntries,
    comparable,
    exclude_unusable,
    read_segments,
    segment_sequences,
    weigh_groups,
)
from rollmill.training.rl.signal import OtherSignal
from rollmill.training.rl.turn_credit import group_token_advantages
from rollmill.training.single import SINGLE
from rollmill.training.update_guard import TokenSample, few_sequences
from rollmill.trajectories.ledger import GroupRow, Ledger, UntakenGroups
from rollmill.trajectories.staleness import Pace
from rollmill.trajectories.table_rows import TrajectoryRow
from rollmill.trajectories.trajectory_store import TrajectoryStore
from rollmill.types import Grade, GroupState, Segment, StepRecord, TrajectoryState, Version
from rollmill.weights.format.tensors import Tensors
from rollmill.weights.reading.weight_store import WeightStore

POLL_S = 0.1  # each look costs a few queries on cores that the rollouts need


@dataclass
class _Search:
    """The search for the groups of a step."""

    number: int
    started_at: float
    rule: TokenRule
    due_since: float | None = None  # enough groups are ready, but older ones are due
    closed: list[str] = field(default_factory=list)  # groups that turned out to have nothing to learn from
    considered: set[str] = field(default_factory=set)  # the groups that were there when the step chose its own

    def seconds_since(self, moment: float | None) -> float:
        return 0.0 if moment is None else time.time() - moment


@dataclass(frozen=True)
class RolloutBatch:
    record: StepRecord
    microbatches: list[MicroBatch]
    sample: Sample  # what mismatch is measured on
    masked: Counter[str]  # sampled tokens that are not trained on, by reason
    rewards: np.ndarray  # of every graded trajectory of the step's groups and of the closed ones
    lr: float  # of the update: the recorded one, if the step runs again
    wait_seconds: float
    expected_tokens: float = 1.0  # per trajectory
    due_seconds: float = 0.0  # the part of the wait in which enough groups were ready, but older ones were due
    closed: tuple[str, ...] = ()  # groups without signal that were closed before this step had enough groups
    groups_T: np.ndarray | None = None  # int64, an index: a trajectory's KL is compared with those of the same index
    solved: float | None = None  # share of the graded trajectories that are solved
    hinted: Sequence[MicroBatch] = ()  # turns with a hint in their context, for the teacher
    guarded: Sequence[MicroBatch] = ()  # a few sequences, for the step guard
    hints_refused: int = 0  # hints that could not be written into a context


class RLObjective(Objective[RolloutBatch]):
    def __init__(
        self,
        config: RLConfig,
        ledger: Ledger,
        trajectories: TrajectoryStore,
        weights: WeightStore,
        *,
        pace: Pace,
        model_config: ModelConfig,
        tokens_per_microbatch: int,
        format: ChatFormat | None = None,
    ) -> None:
        """`format` is needed to write hints."""
        self._config = config
        self._other = OtherSignal(config, trajectories, model_config, format)
        self._model = model_config
        self._ledger, self._untaken = ledger, UntakenGroups(ledger)
        self._trajectories = trajectories
        self._pace = pace
        self._budget = tokens_per_microbatch
        # tokens are at most max_staleness versions older than the one trained from; the next version is there too
        served = ServedWeights(weights, keep=pace.max_staleness + 2)
        self._mismatch = MismatchMeter(served, budget=tokens_per_microbatch, router_replay=config.router_replay)
        self._held, self._ranks = HeldReport(self._mismatch), 1
        self.needs_commits, self.most_drift = config.baseline == "population", config.max_step_drift
        self._baseline = make_baseline(config, ledger)
        self._with_signal: set[str] = set()  # waiting groups whose rewards were looked at
        reference = Reference(config.reference, weights) if config.reference else None
        self._gradient = PolicyGradient(config, reference, trajectories=pace.groups_per_step * pace.group_size)

    def next_batch(self, number: int, lr: float, lineage: Lineage, stopping: Callable[[], bool]) -> RolloutBatch | None:
        rule = TokenRule(lineage, base=number - 1, max_staleness=self._pace.max_staleness)
        record = self._ledger.step(number)
        if record is not None:
            contents = read_segments(self._trajectories, list(record.trajectories), self._model)
            return self._batch(record, contents, rule, lr)
        search = _Search(number, time.time(), rule)
        self._baseline.read(number - 1)
        while True:
            with telemetry.busy("wait"):
                groups = self._wait_for_groups(search, stopping)
            if groups is None or (not groups and self._is_over(number)):
                return None
            self._held.release(idle=False)
            due_seconds, wait_seconds = search.seconds_since(search.due_since), search.seconds_since(search.started_at)
            chosen = self._write_step(search, lr, groups, rule)
            if chosen is not None:
                batch = self._batch(*chosen, rule, lr, search.closed)
                return replace(batch, wait_seconds=wait_seconds, due_seconds=due_seconds)

    def _is_over(self, number: int) -> bool:
        """No group is left for step `number`, and none can start. Raises TrainingError if it is the first step."""
        if not self._pace.starts:
            return False  # it takes empty steps up to its last one
        error = nothing_left(number, self._ledger.results(number - 2, number), self._pace.replacement)
        if number == 1:
            raise error
        telemetry.emit(
            "warning", step=number, text=f"training ends before its last step: {error.message}. {error.hint}"
        )
        return True

    def _wait_for_groups(self, search: _Search, stopping: Callable[[], bool]) -> list[str] | None:
        """The groups of the next step, or None if it should not run."""
        seen: tuple[object, bool] | None = None
        while not stopping():
            # first, because nothing starts after it until the step is committed
            more = self._ledger.groups_started() < self._pace.most_started(search.number - 1)
            untaken = self._untaken.look()
            if seen is None or seen[0] is not untaken or seen[1] != more:
                waiting = [group.id for group in untaken if group.state == GroupState.waiting]
                if self._close_without_signal(search, waiting):
                    continue
                seen = untaken, more
                take = self._take(search, untaken, more)
                if take is not None:
                    return take
            self._held.release(idle=True)
            time.sleep(POLL_S)
        return None

    def _take(self, search: _Search, untaken: Sequence[GroupRow], more: bool) -> list[str] | None:
        candidates = [
            Candidate(group.id, self._pace.deadline(group.min_version), group.state == GroupState.waiting)
            for group in untaken
        ]
        search.considered = {group.id for group in untaken}
        choice = choose_groups(candidates, search.number, self._pace.groups_per_step, more)
        if choice.due and search.due_since is None:
            search.due_since = time.time()
            telemetry.emit("due", step=search.number, groups=choice.due)
        return choice.take

    def _close_without_signal(self, search: _Search, waiting: Sequence[str]) -> bool:
        """Close the groups that have nothing to learn from. True if there were any."""
        unknown = [group for group in waiting if group not in self._with_signal]
        self._with_signal.intersection_update(waiting)
        found = False
        for group, rows in self._ledger.members(unknown).items() if unknown else ():
            graded, excluded = self._weigh({group: rows}, search.rule)
            if graded:
                self._with_signal.add(group)
            else:
                found = True
                self._close(search, group, excluded)
                self._baseline.read(search.number - 1)
        return found

    def _weigh(
        self, members: Mapping[str, Sequence[TrajectoryRow]], rule: TokenRule
    ) -> tuple[GradedEntries, Exclusions]:
        return weigh_groups(members, self._baseline, lambda rows: self._other.in_group(rows, rule))

    def _close(self, search: _Search, group: str, excluded: Exclusions) -> None:
        self._ledger.close_group(group, excluded, search.number)
        search.closed.append(group)
        reasons = Counter(why for _, why in excluded.values())
        telemetry.emit("closed", group=group, step=search.number, reasons=dict(reasons))

    def _write_step(
        self, search: _Search, lr: float, groups: list[str], rule: TokenRule
    ) -> tuple[StepRecord, Contents] | None:
        """None if the groups have changed, so that others must be chosen."""
        members = self._ledger.members(groups)
        record, contents = self._choose(search.number, lr, members, rule)
        empty = [group for group in groups if not any(row.id in record.trajectories for row in members[group])]
        for group in empty:  # no token of it may be trained on, or what could be was deleted just now
            self._close(search, group, {row.id: record.excluded[row.id] for row in members[group]})
        if empty:
            return None
        try:
            self._ledger.write_step(record, search.considered)
        except TrajectoryChanged:  # one was deleted since it was read, or a group was admitted that may be due now
            return None
        return record, contents

    def _choose(
        self, number: int, lr: float, members: Mapping[str, Sequence[TrajectoryRow]], rule: TokenRule
    ) -> tuple[StepRecord, Contents]:
        graded, excluded = self._weigh(members, rule)
        contents = read_segments(self._trajectories, list(graded), self._model)
        by_answer = self._by_answer(self._grades(graded, contents), contents)
        unusable = exclude_unusable(graded, contents, rule, self._config, by_answer)
        record = StepRecord(
            run=self._ledger.run,
            number=number,
            line=rule.lineage.line,
            groups=tuple(members),
            trajectories={id: entry for id, entry in graded.items() if id not in unusable},
            excluded={**excluded, **unusable},
            created_at=time.time(),
            lr=lr,
        )
        return record, contents

    def _batch(
        self, record: StepRecord, contents: Contents, rule: TokenRule, lr: float, closed: Sequence[str] = ()
    ) -> RolloutBatch:
        sequences, masked = [], Counter[str]()
        trained: list[Sequence[Segment]] = []
        grades = self._grades(record.trajectories, contents)
        by_turn = self._by_turn(record, grades, contents) or self._by_answer(grades, contents)
        hints = self._other.hints()
        for index, (id, (_, _, advantage)) in enumerate(record.trajectories.items()):
            content = contents[id]
            if isinstance(content, str):
                # Only on a re-run: it was deleted after the step was committed. The weights will differ, so the loop
                # will continue in a new line.
                text = f"step {record.number} runs again without {id}: {content}"
                telemetry.emit("warning", step=record.number, text=text)
                continue
            found, left_out = segment_sequences(content, advantage, rule, self._config, index, by_turn.get(id))
            if hints is not None:
                found = hints.mark(content, found, grades[id])
            sequences += [sequence for sequence in found if sequence is not None]
            masked += left_out
            trained.append(content)
        members = [self._ledger.entered(group) for group in (*record.groups, *closed)]
        graded = [row for rows in members for row in rows if row.state == TrajectoryState.graded]
        group_of = comparable(members, by_family=self._config.baseline in ALONE)
        return RolloutBatch(
            record=record,
            microbatches=pack(sequences, self._budget),
            sample=choose_sample(record.number, trained, rule),
            masked=masked,
            rewards=np.array([row.reward for row in graded], np.float64),
            solved=sum(bool(row.solved) for row in graded) / len(graded) if graded else None,
            lr=lr if record.lr is None else record.lr,
            wait_seconds=0.0,
            expected_tokens=self._config.expected_tokens or self._ledger.first_tokens() or 1.0,  # 1: there are none
            closed=tuple(closed),
            groups_T=np.array([group_of[id] for id in record.trajectories], np.int64),
            guarded=pack(few_sequences(sequences), self._budget) if self.most_drift else [],
            hinted=pack(hints.sequences, self._budget) if hints is not None else [],
            hints_refused=hints.refused if hints is not None else 0,
        )

    def _grades(self, entries: Mapping[str, tuple[int, float, float]], contents: Contents) -> dict[str, Grade]:
        """The rewards that a step pins, if more than their values is needed. `entries` are as in its record."""
        if self._config.credit not in ("turns", "answers") and not self._config.hint_factor:
            return {}
        pinned = {id: reward_id for id, (reward_id, _, _) in entries.items()}
        return self._other.grades({id: each for id, each in pinned.items() if not isinstance(contents[id], str)})

    def _by_answer(self, grades: Mapping[str, Grade], contents: Contents) -> dict[str, list[np.ndarray]]:
        """Advantages of the tokens of each segment, if each answer has its own."""
        if self._config.credit != "answers":
            return {}
        readable = ((id, content) for id in grades if not isinstance(content := contents[id], str))
        return {id: answer_advantages(content, grades[id]) for id, content in readable}

    def _by_turn(
        self, record: StepRecord, grades: Mapping[str, Grade], contents: Contents
    ) -> dict[str, list[np.ndarray]]:
        """Advantages of the tokens of each segment, if each turn has its own. They follow from what the record pins."""
        if self._config.credit != "turns":
            return {}
        found: dict[str, list[np.ndarray]] = {}
        for group in record.groups:
            ids = [row.id for row in self._ledger.entered(group) if row.id in record.trajectories]
            group_of = [(content, grades[id]) for id in ids if not isinstance(content := contents[id], str)]
            if len(group_of) < 2:
                continue  # there is nothing to compare with: the advantage that the record pins counts
            known = [id for id in ids if not isinstance(contents[id], str)]
            found |= dict(zip(known, group_token_advantages(group_of), strict=True))
        return found

    def backward(
        self,
        model: Decoder,
        batch: RolloutBatch,
        accumulate: Callable[[], None] = leave_on_model,
        parallel: Parallelism = SINGLE,
    ) -> dict[str, Any]:
        self._mismatch.compute_like(parallel, model)
        self._ranks = parallel.ranks.size
        sequences = StepSequences(batch.microbatches, batch.hinted, batch.groups_T, batch.expected_tokens)
        return self._gradient.backward(model, sequences, accumulate, parallel)

    def sampled(self, model: Decoder, batch: RolloutBatch, passes: Passes) -> TokenSample | None:
        return self._gradient.sampled(model, batch.guarded, passes) if batch.guarded else None

    def remember(self, digest: str, tensors: Tensors) -> None:
        self._mismatch.served.remember(digest, tensors)

    def commit(self, number: int, version: Version, digest: str) -> None:
        self._ledger.commit_step(number, version, digest)

    def report(self, batch: RolloutBatch, outcome: StepOutcome) -> None:
        self._held.hold(outcome.number, batch.sample, lambda mismatch: self._emit(batch, outcome, mismatch))
        if self._ranks > 1:  # measuring is collective, and ranks do not wait for groups together
            self._held.release(idle=True)

    def finish(self, *, failed: bool) -> None:
        self._held.release(idle=True, failed=failed)

    def _emit(self, batch: RolloutBatch, outcome: StepOutcome, mismatch: Mapping[str, Any]) -> None:
        rewards = batch.rewards
        figures = {
            **outcome.figures,
            **mismatch,
            "groups": len(batch.record.groups),
            "groups_missing": self._pace.groups_per_step - len(batch.record.groups),
            "groups_closed": len(batch.closed),
            "trajectories": len(batch.record.trajectories),
            "reward_mean": float(rewards.mean()) if rewards.size else None,
            "solve_rate": batch.solved,
            **({"hinted_tokens": sum(len(part.targets_M) for part in batch.hinted)} if batch.hinted else {}),
            **({"hints_refused": batch.hints_refused} if batch.hints_refused else {}),
            "masked_stale": batch.masked[STALE],
            "abandoned_share": _share(batch.masked[ABANDONED], outcome.figures.get("trained_tokens", 0)),
            "masked": {reason: count for reason, count in batch.masked.items() if count},
            "excluded": dict(Counter(state.value for state, _ in batch.record.excluded.values())),
            "wait_seconds": batch.wait_seconds,
            "due_seconds": batch.due_seconds,
            "seconds": outcome.seconds,
            **outcome.update.figures(),
        }
        figures = finite(figures)
        telemetry.emit("step", step=outcome.number, steps=outcome.steps, version=outcome.number, **figures)
        for text in warnings(figures, exact=self._mismatch.exact):
            telemetry.emit("warning", step=outcome.number, text=text)


def _share(part: int, rest: int) -> float:
    return part / max(1, part + rest)
