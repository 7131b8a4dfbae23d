"""Reinforcement learning on finished groups.

A step takes the groups that have waited longest, decides about each of their trajectories (training/selection.py),
writes its record to the run's ledger, and only then trains. A record that is already there is a step a killed trainer
left behind: it is run again from the same payloads, in the same order.

One forward pass gives the loss and its figures. After the commit a few trajectories are computed again under the
versions that sampled them, to see whether trainer and engine agree (training/mismatch.py).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rollmill import telemetry
from rollmill.models.config import ModelConfig
from rollmill.models.decoder import Decoder
from rollmill.training.batching import STALE, MicroBatch, TokenRule, pack
from rollmill.training.config import FORM, RLConfig
from rollmill.training.diagnostics import TokenMeasures, mismatch_figures, token_figures, warnings
from rollmill.training.lineage import Lineage
from rollmill.training.loss import policy_loss
from rollmill.training.mismatch import MismatchMeter, Sample, ServedWeights, choose_sample
from rollmill.training.objective import StepOutcome
from rollmill.training.recompute import recompute
from rollmill.training.replay import RouterAgreement, replay_of
from rollmill.training.selection import (
    Contents,
    exclude_unusable,
    read_segments,
    trainable_sequences,
    weigh_groups,
)
from rollmill.trajectories.ledger import Ledger
from rollmill.trajectories.store import TrajectoryStore
from rollmill.types import Segment, StepRecord, TrajectoryState, Version
from rollmill.weights.store import WeightStore

POLL_S = 0.02


@dataclass(frozen=True)
class Pace:
    """How much experience a step takes and how old it may be; the dispatcher goes by the same numbers."""

    groups_per_step: int
    group_size: int
    max_staleness: int


@dataclass(frozen=True)
class RolloutBatch:
    record: StepRecord
    microbatches: list[MicroBatch]
    sample: Sample  # what of it mismatch is measured on
    masked: Counter[str]  # sampled tokens that are not learnt from, by reason
    rewards: np.ndarray  # of every graded trajectory of the step's groups, also those without signal
    wait_seconds: float


class RLObjective:
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
    ) -> None:
        self._config = config
        self._model = model_config
        self._ledger = ledger
        self._trajectories = trajectories
        self._pace = pace
        self._budget = tokens_per_microbatch
        # tokens are at most max_staleness versions older than the one trained from
        served = ServedWeights(weights, FORM, keep=pace.max_staleness + 1)
        self._mismatch = MismatchMeter(
            served, model_config, budget=tokens_per_microbatch, router_replay=config.router_replay
        )
        self._divisor = pace.groups_per_step * pace.group_size * config.expected_tokens

    def next_batch(self, number: int, lineage: Lineage, stopping: Callable[[], bool]) -> RolloutBatch | None:
        rule = TokenRule(lineage, base=number - 1, max_staleness=self._pace.max_staleness)
        record = self._ledger.step(number)
        waited = 0.0
        if record is not None:
            contents = read_segments(self._trajectories, list(record.trajectories), self._model)
        else:
            start = time.time()
            groups = self._wait_for_groups(stopping)
            waited = time.time() - start
            if groups is None:
                return None
            record, contents = self._choose(number, groups, rule)
            self._ledger.write_step(record)
        return self._batch(record, contents, rule, waited)

    def _wait_for_groups(self, stopping: Callable[[], bool]) -> list[str] | None:
        with telemetry.busy("wait"):
            while True:
                if stopping():
                    return None
                groups = self._ledger.ready_groups(self._pace.groups_per_step)
                if len(groups) == self._pace.groups_per_step:
                    return [group.id for group in groups]
                time.sleep(POLL_S)

    def _choose(self, number: int, groups: list[str], rule: TokenRule) -> tuple[StepRecord, Contents]:
        graded, excluded = weigh_groups(self._ledger.members(groups))
        contents = read_segments(self._trajectories, list(graded), self._model)
        unusable = exclude_unusable(graded, contents, rule)
        record = StepRecord(
            run=self._ledger.run,
            number=number,
            line=rule.lineage.line,
            groups=tuple(groups),
            trajectories={id: entry for id, entry in graded.items() if id not in unusable},
            excluded={**excluded, **unusable},
            created_at=time.time(),
        )
        return record, contents

    def _batch(self, record: StepRecord, contents: Contents, rule: TokenRule, waited: float) -> RolloutBatch:
        sequences, masked = [], Counter[str]()
        trained: list[Sequence[Segment]] = []
        for id, (_, _, advantage) in record.trajectories.items():
            content = contents[id]
            if isinstance(content, str):
                # Only on a re-run: deleted after the step was committed. The weights cannot come out the same without
                # it, so the loop will go on in a new line.
                text = f"step {record.number} is run again without {id}: {content}"
                telemetry.emit("warning", step=record.number, text=text)
                continue
            found, left_out = trainable_sequences(content, advantage, rule)
            sequences += found
            masked += left_out
            trained.append(content)
        rows = [row for group in record.groups for row in self._trajectories.list(record.run, group_id=group)]
        rewards = [row.reward for row in rows if row.state == TrajectoryState.graded]
        return RolloutBatch(
            record=record,
            microbatches=pack(sequences, self._budget),
            sample=choose_sample(record.number, trained, rule),
            masked=masked,
            rewards=np.array(rewards, np.float64),
            wait_seconds=waited,
        )

    def backward(self, model: Decoder, batch: RolloutBatch) -> dict[str, Any]:
        self._mismatch.served.remember(model)  # engines sample with this version until the next one reaches them
        total, agreement = 0.0, RouterAgreement()
        measures: list[TokenMeasures] = []
        for part in batch.microbatches:
            loss, measured = self._backward_part(model, part, agreement)
            total += loss
            measures.append(measured)
        return {
            "loss": total,
            "tokens": sum(len(part.tokens_N) for part in batch.microbatches),
            **token_figures(measures),
            **agreement.figures(),
        }

    def _backward_part(
        self, model: Decoder, part: MicroBatch, agreement: RouterAgreement
    ) -> tuple[float, TokenMeasures]:
        facts = part.facts
        assert facts is not None, "sequences of sampled tokens carry their facts"
        replay = replay_of(part) if self._config.router_replay else None
        policy = recompute(model, part, replay)
        result = policy_loss(
            policy.logprobs_M,
            torch.from_numpy(facts.logprobs),
            torch.from_numpy(facts.advantages),
            mask_delta=self._config.mask_delta,
            ratio_penalty=self._config.ratio_penalty,
            weight_cap=self._config.weight_cap,
            divisor=self._divisor,
        )
        result.loss.backward()
        agreement.add(policy.routings, replay)
        measured = TokenMeasures(
            log_weights=result.log_weights_M.numpy(),
            kept=result.kept_M.numpy(),
            entropies=policy.entropies_M.numpy(),
            staleness=facts.staleness,
        )
        return result.loss.item(), measured

    def publishes(self, number: int) -> bool:
        return True

    def commit(self, number: int, version: Version, digest: str) -> None:
        self._ledger.commit_step(number, version, digest)

    def report(self, batch: RolloutBatch, outcome: StepOutcome) -> None:
        rewards = batch.rewards
        with telemetry.busy("measure"):
            mismatch = mismatch_figures(*self._mismatch.measure(outcome.number, batch.sample))
        figures = {
            **outcome.figures,
            **mismatch,
            "groups": len(batch.record.groups),
            "trajectories": len(batch.record.trajectories),
            "reward_mean": float(rewards.mean()) if rewards.size else None,
            "solve_rate": float((rewards >= self._config.solved_at).mean()) if rewards.size else None,
            "masked_stale": batch.masked[STALE],
            "masked": {reason: count for reason, count in batch.masked.items() if count},
            "excluded": dict(Counter(state.value for state, _ in batch.record.excluded.values())),
            "wait_seconds": batch.wait_seconds,
            "seconds": outcome.seconds,
            **outcome.update.figures(),
        }
        telemetry.emit("step", step=outcome.number, steps=outcome.steps, version=outcome.number, **figures)
        for text in warnings(figures):
            telemetry.emit("warning", step=outcome.number, text=text)
