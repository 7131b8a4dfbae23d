"""The types that several packages share. Plain data and numpy arrays, no torch.

The central record is the Segment. Two turns of a conversation, as the trainer gets them (P prompt, A sampled by the
policy, T tool result):

    tokens      [P P P P | A A A | T T | A A]
    sampled     [0 0 0 0 | 1 1 1 | 0 0 | 1 1]              a fact; batching decides what to learn from
    logprobs    [. . . . | -.1 -2.3 -.4 | . . | -.2 -.9]   under the exact distribution that sampled it
    policy      [. . . . | 0 0 1 | . . | 1 1]              index into `policies`; here the weights changed mid-answer
    routes      [tokens, moe layers, k]                    experts chosen when token t was the input, in top-k order;
                                                           routes_valid[t] says whether row t was recorded
"""

from __future__ import annotations

import enum
import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

TrafficClass = Literal["production", "rollout"]
Cause = Literal["start", "summary", "edit", "sub_agent", "retry", "fork", "template"]
FinishReason = Literal["stop", "length", "abort"]
# what `length` means, for people
CUT = "cut off by rollouts.max_answer_tokens, the request's max_tokens or the end of the context"


@dataclass(frozen=True, order=True)
class Version:
    """One set of weights: a line (training lineage) and a number on it."""

    line: str
    number: int

    def __str__(self) -> str:
        return f"{self.line}@{self.number}"


def same_line(first: str, second: str) -> bool:
    """Whether both names mean one line: a successor (rl.2) continues its line (rl), for example on other hardware."""
    return first == second or _origin(first) == _origin(second)


@functools.lru_cache(maxsize=4096)
def _origin(line: str) -> str:
    return re.sub(r"\.[0-9]+$", "", line)


@dataclass(frozen=True)
class PolicyRef:
    """The exact weights that sampled a token: version, form (bf16, fp8, …) and root digest of that form."""

    line: str
    number: int
    form: str
    digest: str


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. Log-probs are recorded under this exact distribution.

    In this order: penalties and biases change the logits, the temperature divides them, the grammar excludes tokens,
    then min_p, top_k and top_p do. Each works on the probabilities that the one before it has left.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: no cut
    max_tokens: int = 256
    stop_tokens: tuple[int, ...] = ()
    seed: int | None = None
    # The grammar that the tokens follow, as llguidance reads it: tokens that it does not allow had probability zero.
    grammar: str | None = None
    min_p: float = 0.0  # tokens with less than this share of the largest probability are excluded
    presence_penalty: float = 0.0  # subtracted from the logits of tokens that are in the answer
    frequency_penalty: float = 0.0  # subtracted once per occurrence of the token in the answer
    repetition_penalty: float = 1.0  # divides positive and multiplies negative logits of tokens in the context
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token, value that is added to its logit)

    @property
    def trainable(self) -> bool:
        """False if the distribution cannot be reconstructed: such spans are recorded and not trained on."""
        return self.temperature > 0

    @property
    def cuts(self) -> bool:
        """Whether tokens may be excluded. Then the tokens that are kept are recorded."""
        cut = self.top_k > 0 or self.top_p < 1 or self.min_p > 0
        return self.grammar is not None or (self.temperature > 0 and cut)

    @property
    def changes_logits(self) -> bool:
        """Whether there are penalties or biases. The trainer computes them again from the recorded tokens."""
        penalties = self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1
        return bool(penalties or self.logit_bias)


@dataclass
class Span:
    """A run of sampled tokens of one answer: tokens[start:end] of its segment."""

    start: int
    end: int
    sampling: Sampling
    finish: FinishReason
    engine: str
    region: str
    traffic: TrafficClass
    started_at: float  # seconds since the epoch
    ended_at: float
    oldest_kv_policy: int  # index into the segment's policies: the oldest weights that wrote KV this span attended to
    missing: str = ""  # what the engine did not report; such a span is not trained on
    answered: int = 0  # tokens of the same answer before this span: another engine may continue an answer
    outcome: bool = False  # its client declared this answer the outcome of the episode
    after_tools: bool = False  # it answers tool results: what the user asked before is still being worked on
    answer: int = 0  # the number of its answer in the segment, as clients know it: signals of users name it


@dataclass
class Segment:
    """One contiguous token context with per-token facts. All arrays have length T = len(tokens)."""

    id: str
    tokens: np.ndarray  # int32 [T]
    sampled: np.ndarray  # bool [T]
    logprobs: np.ndarray  # float32 [T], NaN where not sampled
    policy: np.ndarray  # int16 [T], index into policies, -1 where not sampled
    policies: list[PolicyRef]
    spans: list[Span]
    routes: np.ndarray | None = None  # uint8 or uint16 [T, moe layers, k]; None for a dense model
    routes_valid: np.ndarray | None = None  # bool [T]
    parent: tuple[str, int] | None = None  # (segment id, token offset): tokens[:offset] are copies of the parent's
    cause: Cause = "start"
    # The tokens that could be drawn where some were excluded; see trajectories/allowed_tokens.py. None if nothing was
    # recorded
    kept_sizes: np.ndarray | None = None  # int32 [T], bytes of each token's set, 0 where there is none
    kept: np.ndarray | None = None  # uint8, the sets one after the other

    def answers(self) -> list[list[Span]]:
        """The spans of each answer. Spans that touch are one answer: it was continued on another engine."""
        found: list[list[Span]] = []
        for span in sorted(self.spans, key=lambda span: span.start):
            if found and found[-1][-1].end == span.start:
                found[-1].append(span)
            else:
                found.append([span])
        return found


TURN = "turn."  # prefix of the parts of a reward that single turns earned: turn.0 is the first answer
ANSWER = "answer."  # prefix of the parts that users' signals about single answers gave: answer.SEGMENT/NUMBER


@dataclass(frozen=True)
class Grade:
    """A grade: its value, what it is made of, and the evidence. Append-only; a step pins the one it used.

    `parts["turn.2"]` is what the third answer alone earned of the value, for credit by turns.
    `parts["answer.live-1.0/2"]` is the advantage of one answer that users said something about, for credit by answers;
    `parts["answer."]` that of what they said about the whole conversation.
    """

    value: float
    parts: Mapping[str, float] = field(default_factory=dict)
    evidence: Mapping[str, Any] = field(default_factory=dict)
    grader: str = ""

    @property
    def solved(self) -> bool:
        """Whether the task counts as solved. If several rewards add up, the first one decides: `parts["solved"]`."""
        return float(self.parts.get("solved", self.value)) >= 1.0


class TrajectoryState(enum.StrEnum):
    running = "running"
    finished = "finished"
    graded = "graded"
    failed = "failed"
    quarantined = "quarantined"
    deleted = "deleted"


class LedgerState(enum.StrEnum):
    """What a training run did with a trajectory; keyed (run, trajectory)."""

    admitted = "admitted"
    leased = "leased"
    trained = "trained"
    stale = "stale"
    no_signal = "no_signal"
    dropped = "dropped"


class GroupState(enum.StrEnum):
    """A group counts against the staleness bound until it is final."""

    running = "running"
    waiting = "waiting"
    leased = "leased"
    final = "final"


# Stores refuse every transition that is not listed here, so every report adds up.
TRAJECTORY_TRANSITIONS: Mapping[TrajectoryState, frozenset[TrajectoryState]] = {
    TrajectoryState.running: frozenset({TrajectoryState.finished, TrajectoryState.failed, TrajectoryState.deleted}),
    TrajectoryState.finished: frozenset(
        {TrajectoryState.graded, TrajectoryState.failed, TrajectoryState.quarantined, TrajectoryState.deleted}
    ),
    TrajectoryState.graded: frozenset({TrajectoryState.quarantined, TrajectoryState.deleted}),
    TrajectoryState.failed: frozenset({TrajectoryState.deleted}),
    TrajectoryState.quarantined: frozenset({TrajectoryState.graded, TrajectoryState.deleted}),
    TrajectoryState.deleted: frozenset(),
}
LEDGER_TRANSITIONS: Mapping[LedgerState, frozenset[LedgerState]] = {
    LedgerState.admitted: frozenset(
        {LedgerState.leased, LedgerState.stale, LedgerState.no_signal, LedgerState.dropped}
    ),
    LedgerState.leased: frozenset({LedgerState.trained}),
    LedgerState.trained: frozenset(),
    LedgerState.stale: frozenset(),
    LedgerState.no_signal: frozenset(),
    LedgerState.dropped: frozenset(),
}
GROUP_TRANSITIONS: Mapping[GroupState, frozenset[GroupState]] = {
    GroupState.running: frozenset({GroupState.waiting, GroupState.final}),
    GroupState.waiting: frozenset({GroupState.leased, GroupState.final}),
    GroupState.leased: frozenset({GroupState.final}),
    GroupState.final: frozenset(),
}


@dataclass
class Trajectory:
    """A tree of segments (mostly a chain) with its rewards and where it came from."""

    id: str
    segments: list[Segment]
    task_id: str = ""
    group_id: str = ""
    state: TrajectoryState = TrajectoryState.running
    reason: str | None = None
    traffic: TrafficClass = "rollout"
    messages: list[dict[str, Any]] = field(default_factory=list)  # the conversation as text, for people to read
    provenance: dict[str, Any] = field(default_factory=dict)  # task family, split, image, harness, attempt …
    rewards: list[tuple[int, Grade]] = field(default_factory=list)  # (reward id, reward), oldest first


@dataclass(frozen=True)
class StepRecord:
    """Exactly what one optimizer step trains on, written before it runs. Create-only, keyed (run, number).

    Step `number` trains from version `number - 1` of `line` and publishes version `number`.
    """

    run: str
    number: int
    line: str
    groups: tuple[str, ...]
    # trajectory id -> (reward id, reward value, group advantage); only those that carry signal
    trajectories: Mapping[str, tuple[int, float, float]]
    # trajectory id -> (ledger state, reason) for the ones of these groups that are not trained on
    excluded: Mapping[str, tuple[LedgerState, str]]
    created_at: float
    # learning rate of the update; kept, because a run that is extended has another schedule. None in old records
    lr: float | None = None
