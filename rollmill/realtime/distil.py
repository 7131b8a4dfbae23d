"""Distil: production conversations with signals become rewards that a step can train on. Pure: it reads no store.

A live request has no group of attempts to be compared with. Its baseline is the population: the mean reward of the
other conversations of the same kind of task under the same version, or, if these are too few, of all kinds under that
version. Every conversation ends in exactly one count of the report, with the reason why it is not trained on.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from rollmill.realtime.rule import RuleConfig, Signal, distilled_reward, kind_of_task, reward_of
from rollmill.types import Reward

Lag = Callable[[str, int], int | None]  # line, number → how many versions older than the live one; None: not related
FEWEST = 8  # conversations of a population; the mean of fewer says little
TRAINABLE = "trainable"


@dataclass(frozen=True)
class Conversation:
    """What is known of a production conversation."""

    id: str
    state: str
    line: str | None
    oldest: int | None  # versions that sampled its tokens
    newest: int | None
    consent: str
    signals: Sequence[Signal]
    user: str = ""  # a pseudonym; "" if the product named none

    @property
    def version(self) -> str:
        """The newest one that sampled it."""
        return f"{self.line}@{self.newest}"


@dataclass(frozen=True)
class Population:
    """Conversations that are compared with each other."""

    kind: str
    version: str
    count: int
    mean: float
    variance: float


@dataclass
class Distilled:
    rewards: dict[str, Reward] = field(default_factory=dict)  # conversation → relative to its population
    counts: Counter[str] = field(default_factory=Counter)  # every conversation once: trainable, or why not
    populations: list[Population] = field(default_factory=list)


def distil(conversations: Sequence[Conversation], lag: Lag, rule: RuleConfig, max_lag: int) -> Distilled:
    """Rewards of the conversations that the live version sampled, or a version before it that is at most `max_lag`
    versions older."""
    found = Distilled()
    usable: list[tuple[Conversation, float]] = []
    for conversation in conversations:
        why = _unusable(conversation, lag, max_lag)
        raw = None if why else reward_of(rule, conversation.signals)
        if raw is None:
            found.counts[why or "no signal"] += 1
        else:
            usable.append((conversation, raw))
    by_kind, by_version = defaultdict(list), defaultdict(list)
    for conversation, raw in usable:
        by_kind[_key(conversation)].append(raw)
        by_version[conversation.version].append(raw)
    for (kind, version), raws in sorted(by_kind.items()):
        found.populations.append(Population(kind, version, len(raws), float(np.mean(raws)), float(np.var(raws))))
    for conversation, raw in usable:
        baseline = _baseline(raw, by_kind[_key(conversation)], by_version[conversation.version])
        if baseline is None:
            found.counts["too few to compare with"] += 1
        elif abs(raw - baseline) < 1e-9:
            found.counts["like its population: nothing to learn"] += 1
        else:
            found.rewards[conversation.id] = distilled_reward(rule, conversation.signals, raw, baseline)
            found.counts[TRAINABLE] += 1
    return found


def _key(conversation: Conversation) -> tuple[str, str]:
    return kind_of_task(conversation.signals), conversation.version


def _baseline(raw: float, of_kind: Sequence[float], of_version: Sequence[float]) -> float | None:
    """The mean of the others: of its kind if there are enough, else of its version."""
    for raws in (of_kind, of_version):
        if len(raws) >= FEWEST:
            return (sum(raws) - raw) / (len(raws) - 1)
    return None


def _unusable(conversation: Conversation, lag: Lag, max_lag: int) -> str | None:
    if conversation.state not in ("finished", "graded"):
        return f"{conversation.state}, not sealed" if conversation.state == "running" else conversation.state
    if conversation.consent != "train":
        return "without consent"
    if conversation.line is None or conversation.oldest is None or conversation.newest is None:
        return "of another version"
    most, least = lag(conversation.line, conversation.oldest), lag(conversation.line, conversation.newest)
    if most is None or least is None or most > max_lag or least < 0:
        return "of another version"
    return None
