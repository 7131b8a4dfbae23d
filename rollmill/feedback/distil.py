"""Distil: production conversations with signals become rewards that a step can train on. Pure: it reads no store.

A live request has no group of attempts to be compared with. Its baseline is the population: the mean reward of
other conversations' answers to the same kind of task under the same version, or, if these are too few, to all kinds
under that version. What users say about a whole conversation is compared like an answer. One user may not speak for
all: only the first conversations of each user count. Every conversation ends in exactly one count of the report, with
the reason why it is not trained on.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from rollmill.feedback.rule import RuleConfig, Signal, answer_rewards, distilled_reward, kind_of_task
from rollmill.types import Grade

Lag = Callable[[str, int], int | None]  # line, number → how many versions older than the live one; None: not related
FEWEST = 8  # conversations with answers in a population; the mean of fewer says little
TRAINABLE = "trainable"
WITHOUT_CONSENT = "without consent to training"
_MOST_ANSWERS = 1000  # of a conversation; the newest ones count


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
    user: str = ""  # the user's pseudonym; "": the client named none

    @property
    def version(self) -> str:
        """The newest one that sampled it."""
        return f"{self.line}@{self.newest}"


@dataclass(frozen=True)
class Population:
    """Conversations whose answers are compared with each other."""

    kind: str
    version: str
    count: int
    mean: float  # of the mean rewards of their answers
    variance: float


@dataclass
class Distilled:
    rewards: dict[str, Grade] = field(default_factory=dict)  # conversation → relative to its population
    counts: Counter[str] = field(default_factory=Counter)  # every conversation once: trainable, or why not
    populations: list[Population] = field(default_factory=list)


def distil(
    conversations: Sequence[Conversation], lag: Lag, rule: RuleConfig, max_lag: int, most_of_user: int | None = None
) -> Distilled:
    """Rewards of the conversations that the live version sampled, or a version before it that is at most `max_lag`
    versions older. `most_of_user`: how many conversations of one user count."""
    found = Distilled()
    usable: list[tuple[Conversation, dict[str, float]]] = []
    of_user: Counter[str] = Counter()
    for conversation in conversations:
        why = _unusable(conversation, lag, max_lag)
        raws = {} if why else dict(list(answer_rewards(rule, conversation.signals).items())[-_MOST_ANSWERS:])
        if raws and conversation.user:
            of_user[conversation.user] += 1
            if most_of_user is not None and of_user[conversation.user] > most_of_user:
                why = "of a user with enough others"
        if why or not raws:
            found.counts[why or "no signal"] += 1
        else:
            usable.append((conversation, raws))
    _compare(usable, rule, found)
    return found


def _compare(usable: Sequence[tuple[Conversation, dict[str, float]]], rule: RuleConfig, found: Distilled) -> None:
    """Each answer with those of other conversations. `usable`: with the rewards of their answers."""
    by_kind: dict[tuple[str, str], _Peers] = defaultdict(_Peers)
    by_version: dict[str, _Peers] = defaultdict(_Peers)
    for conversation, raws in usable:
        for answer, raw in raws.items():
            by_kind[_key(conversation, answer)].add(conversation.id, raw)
            by_version[conversation.version].add(conversation.id, raw)
    for (kind, version), peers in sorted(by_kind.items()):
        means_N = np.array(peers.means())
        found.populations.append(Population(kind, version, means_N.size, float(means_N.mean()), float(means_N.var())))
    for conversation, raws in usable:
        advantages = {}
        for answer, raw in raws.items():
            baseline = by_kind[_key(conversation, answer)].mean_of_others(conversation.id)
            if baseline is None:
                baseline = by_version[conversation.version].mean_of_others(conversation.id)
            if baseline is not None:
                advantages[answer] = raw - baseline
        if not advantages:
            found.counts["too few to compare with"] += 1
        elif all(abs(advantage) < 1e-9 for advantage in advantages.values()):
            found.counts["like its population: nothing to learn"] += 1
        else:
            compared = {answer: raws[answer] for answer in advantages}
            found.rewards[conversation.id] = distilled_reward(rule, conversation.signals, compared, advantages)
            found.counts[TRAINABLE] += 1


def _key(conversation: Conversation, answer: str) -> tuple[str, str]:
    return kind_of_task(conversation.signals, answer), conversation.version


class _Peers:
    """The rewards of a population. Each conversation counts once, however many answers it has."""

    def __init__(self) -> None:
        self._of: dict[str, tuple[float, int]] = {}  # conversation → sum and count of its answers' rewards
        self._sum = 0.0  # of the means

    def add(self, conversation: str, raw: float) -> None:
        before, count = self._of.get(conversation, (0.0, 0))
        self._of[conversation] = before + raw, count + 1
        self._sum += (before + raw) / (count + 1) - (before / count if count else 0.0)

    def means(self) -> list[float]:
        return [total / count for total, count in self._of.values()]

    def mean_of_others(self, conversation: str) -> float | None:
        """None if there are too few. Its own answers led to each other: they are no comparison."""
        if len(self._of) < FEWEST:
            return None
        total, count = self._of[conversation]
        return (self._sum - total / count) / (len(self._of) - 1)


def _unusable(conversation: Conversation, lag: Lag, max_lag: int) -> str | None:
    if conversation.state not in ("finished", "graded"):
        return f"{conversation.state}, not sealed" if conversation.state == "running" else conversation.state
    if conversation.consent != "train":
        return WITHOUT_CONSENT
    if conversation.line is None or conversation.oldest is None or conversation.newest is None:
        return "of another version"
    most, least = lag(conversation.line, conversation.oldest), lag(conversation.line, conversation.newest)
    if most is None or least is None or most > max_lag or least < 0:
        return "of another version"
    return None
