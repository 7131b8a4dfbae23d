"""The gradient of an RL step: forward and backward passes over its micro-batches, and the figures of its tokens.

One forward pass gives the loss and its figures. Log-probs of a reference, and of a teacher that sees hints, are
computed before it, under the weights that the step trains from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rollmill.models.decoder import Decoder
from rollmill.training.batching import MicroBatch, SampledFacts
from rollmill.training.config import RLConfig
from rollmill.training.diagnostics import TokenMeasures, distance, token_figures
from rollmill.training.numerics.router_replay import RouterMeasures, replay_of
from rollmill.training.packed_pass import moved
from rollmill.training.parallelism import Parallelism, Passes, PolicyPass
from rollmill.training.rl.advantage import kl_advantages
from rollmill.training.rl.kl_reference import Reference
from rollmill.training.rl.policy_loss import PolicyTokens, policy_loss, step_divisor
from rollmill.training.update_guard import TokenSample

_MOST_HINT = 5.0  # of |log teacher − log student|: a token that a teacher rules out must not outweigh the step


class StepSequences(NamedTuple):
    """What a step trains on, packed."""

    microbatches: Sequence[MicroBatch]
    hinted: Sequence[MicroBatch]  # turns with a hint in their context, for the teacher
    groups_T: np.ndarray | None  # int64, an index: a trajectory's KL is compared with those of the same index
    expected_tokens: float = 1.0  # per trajectory


class PolicyGradient:
    def __init__(self, config: RLConfig, reference: Reference | None, trajectories: int) -> None:
        """`trajectories` of a full step."""
        self._config, self._reference, self._trajectories = config, reference, trajectories

    def backward(
        self,
        model: Decoder,
        sequences: StepSequences,
        accumulate: Callable[[], None],
        parallel: Parallelism,
    ) -> dict[str, Any]:
        """As `Objective.backward`. Collective."""
        parts = sequences.microbatches
        references = [self._reference.logprobs(parallel, model, part) if self._reference else None for part in parts]
        sizes_T = _sizes(parts)
        shared = _StepTotals(
            divisor=step_divisor(
                self._config,
                expected=self._trajectories * sequences.expected_tokens,
                tokens=sum(len(part.targets_M) for part in parts),
                samples=int((sizes_T > 0).sum()),
            ),
            sizes_T=sizes_T,
            queued_T=_queued(parts),
            kl_advantages_T=self._kl_advantages(sequences, references),
            teacher_H=_teach(parallel.passes, model, sequences.hinted),
        )
        router, passes = RouterMeasures(), list[_Pass]()
        for part, reference_M in zip(parts, references, strict=True):
            if passes:
                accumulate()
            replay = replay_of(part, self._config.replay_plausibility) if self._config.router_replay else None
            policy = parallel.passes.recompute(model, part, replay)
            passes.append(self._backward_part(policy, part, reference_M, shared))
            router.add(policy.routings, policy.replay)
        loss = sum(torch.stack([each.loss for each in passes]).tolist()) if passes else 0.0
        router.over_ranks(parallel.ranks)
        if math.isfinite(loss):  # otherwise the step changes nothing
            router.move_gate_biases(model, self._config.gate_bias_rate)
        tokens = sum(len(part.tokens_N) for part in parts)
        return {"loss": loss, "tokens": tokens, **_figures(parts, passes, shared), **router.figures()}

    @torch.no_grad()
    def sampled(self, model: Decoder, parts: Sequence[MicroBatch], passes: Passes) -> TokenSample:
        """Log-probs and entropies under the weights of this moment, through the routes that are trained. Collective."""
        found = []
        for part in parts:
            replay = replay_of(part, self._config.replay_plausibility) if self._config.router_replay else None
            policy = passes.recompute(model, part, replay)
            found.append(TokenSample(policy.logprobs_M, policy.entropies_M))
        return TokenSample(*(torch.cat(column) for column in zip(*found, strict=True)))

    def _kl_advantages(self, sequences: StepSequences, references: Sequence[Tensor | None]) -> np.ndarray | None:
        """float64 [T]: what the KL of each trajectory adds to its advantage, if KL is subtracted from the reward."""
        if self._config.kl_factor == 0 or self._config.kl_form != "k1_reward":
            return None
        assert sequences.groups_T is not None
        kl_T = np.zeros(len(sequences.groups_T))
        for part, reference_M in zip(sequences.microbatches, references, strict=True):
            assert part.facts is not None and reference_M is not None
            kl_T += np.bincount(
                part.facts.trajectory, part.facts.logprobs - reference_M.cpu().numpy(), minlength=len(kl_T)
            )
        return kl_advantages(kl_T, sequences.groups_T, self._config.kl_factor)

    def _backward_part(
        self, policy: PolicyPass, part: MicroBatch, reference_M: Tensor | None, shared: _StepTotals
    ) -> _Pass:
        facts = part.facts
        assert facts is not None, "sequences of sampled tokens carry their facts"
        device = policy.logprobs_M.device
        tokens = PolicyTokens(
            logprobs=policy.logprobs_M,
            engine_logprobs=moved(torch.from_numpy(facts.logprobs), device),
            advantages=moved(torch.from_numpy(shared.advantages(facts)), device)
            + self._config.hint_factor * shared.distance(facts, policy.logprobs_M.detach()),
            sequences=moved(_sequence_of(part), device),
            reference_logprobs=reference_M,
            entropies=policy.entropies_M,
            sample_sizes=moved(torch.from_numpy(shared.sizes_T[facts.trajectory]), device),
        )
        result = policy_loss(tokens, self._config, shared.divisor)
        result.loss.backward()
        columns = [
            result.log_weights_M,
            result.kept_M,
            result.clipped_M,
            result.vetoed_M,
            policy.entropies_M.detach(),
            *([] if reference_M is None else [reference_M - policy.logprobs_M.detach()]),
        ]
        return _Pass(result.loss.detach(), torch.stack([column.float() for column in columns]))


@dataclass(frozen=True)
class _StepTotals:
    """What the micro-batches of a step share. [T] is over the trajectories of its record."""

    divisor: float
    sizes_T: np.ndarray  # float32, how many targets each trajectory has: the segments of one are one sample
    queued_T: np.ndarray
    kl_advantages_T: np.ndarray | None
    teacher_H: Tensor | None  # log-probs of the tokens of hinted turns, with the hint in their context

    def advantages(self, facts: SampledFacts) -> np.ndarray:
        """float32 [M]"""
        if self.kl_advantages_T is None:
            return facts.advantages
        return facts.advantages + self.kl_advantages_T[facts.trajectory].astype(np.float32)

    def distance(self, facts: SampledFacts, logprobs_M: Tensor) -> Tensor | float:
        """[M]: log teacher − log student at the tokens of hinted turns, bounded; 0 elsewhere."""
        if self.teacher_H is None or facts.hint is None:
            return 0.0
        hint_M = moved(torch.from_numpy(facts.hint), logprobs_M.device)
        distance_M = (self.teacher_H[hint_M.clamp(min=0)] - logprobs_M).clamp(-_MOST_HINT, _MOST_HINT)
        return torch.where(hint_M >= 0, distance_M, 0.0)


@torch.no_grad()
def _teach(passes: Passes, model: Decoder, parts: Sequence[MicroBatch]) -> Tensor | None:
    """[H], under the weights that the step trains from. Collective."""
    found, places = [], []
    for part in parts:
        found.append(passes.recompute(model, part, None).logprobs_M)
        assert part.facts is not None and part.facts.hint is not None
        places.append(torch.from_numpy(part.facts.hint))
    return torch.cat(found)[torch.cat(places).argsort().to(found[0].device)] if found else None


class _Pass(NamedTuple):
    """What a micro-batch measured. It stays on the device: reading it at once would wait for the backward pass."""

    loss: Tensor
    columns: Tensor  # FP32 [5 or 6, M]: Δ, kept, clipped, vetoed, entropies, distance to the reference


def _figures(parts: Sequence[MicroBatch], passes: Sequence[_Pass], shared: _StepTotals) -> dict[str, Any]:
    """The figures of all tokens, read from the device in one go."""
    if not passes:
        return token_figures([])
    log_weights, kept, clipped, vetoed, entropies, *to_reference = (
        torch.cat([each.columns for each in passes], 1).cpu().numpy()
    )
    facts = [part.facts for part in parts if part.facts is not None]
    measures = TokenMeasures(
        log_weights=log_weights,
        kept=kept.astype(np.bool_),
        clipped=clipped.astype(np.bool_),
        vetoed=vetoed.astype(np.bool_),
        advantages=np.concatenate([shared.advantages(each) for each in facts]),
        entropies=entropies,
        staleness=np.concatenate([each.staleness for each in facts]),
        queued=np.concatenate([shared.queued_T[each.trajectory] for each in facts]),
    )
    return {**token_figures([measures]), **(distance("reference", to_reference[0]) if to_reference else {})}


def _sizes(parts: Sequence[MicroBatch]) -> np.ndarray:
    """float32 [T]: the targets of each trajectory, of all its segments."""
    trajectories = [part.facts.trajectory for part in parts if part.facts is not None]
    return np.bincount(np.concatenate(trajectories or [np.empty(0, np.int64)])).astype(np.float32)


def _queued(parts: Sequence[MicroBatch]) -> np.ndarray:
    """int64 [T]: the staleness of each trajectory's newest token, which is what it gained while it waited."""
    facts = [part.facts for part in parts if part.facts is not None]
    queued_T = np.full(max((int(each.trajectory.max()) + 1 for each in facts), default=0), np.iinfo(np.int64).max)
    for each in facts:
        np.minimum.at(queued_T, each.trajectory, each.staleness)
    return queued_T


def _sequence_of(part: MicroBatch) -> Tensor:
    """int64 [M]: which sequence each target belongs to."""
    ends = torch.tensor(part.lengths).cumsum(0)
    return torch.searchsorted(ends, part.rows_M.cpu(), right=True)
