"""The rule that turns signals of users into rewards. Declared in the TOML, with a version; a pure function.

    reward of an answer = Σ over its signals: weight · value,   bounded by `least` and `most`

    accepted = 1.0, reverted = -1.0:   a user took an answer (value 1) and undid it later (value 1):   1 − 1 = 0
    edited = 1.0:                      80 % of an answer survived the user's edits:                     0.8

A kind that is said again about the same answer replaces what was said before. Signals about the whole conversation have
no answer to name: each of them counts. The reward of a conversation is the mean of the rewards of its answers, so nine
accepted answers and one that was undone are 0.8.

An answer without any of these signals has no reward: silence is neither good nor bad. Each reward keeps the rule's
version and digest, so a later change of the rule is visible in the data.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pydantic import Field

from rollmill.config import Config
from rollmill.types import ANSWER, Grade

WEIGHTS = {
    "accepted": 1.0,
    "edited": 1.0,
    "reverted": -1.0,
    "retried": -0.5,
    "sentiment": 0.5,
    "thumbs": 0.5,
}


@dataclass(frozen=True)
class Signal:
    """Feedback of a user, as it is stored."""

    kind: str
    value: float | None
    label: str | None = None
    answer: str = ""  # SEGMENT/NUMBER, or a segment; "": the whole conversation


class RuleConfig(Config):
    """How signals become rewards."""

    version: str = Field("1", min_length=1, description="Name of this rule. Change it whenever you change a weight.")
    weights: dict[str, float] = Field(
        default_factory=lambda: dict(WEIGHTS),
        description="Weight of each kind of signal; kinds without a weight do not count. A value is multiplied by it: "
        "of latency, in seconds, a weight of -0.01 takes a hundredth per second.",
    )
    least: float = Field(-1.0, description="Lowest reward.")
    most: float = Field(1.0, description="Highest reward.")
    accepted_from: float = Field(
        0.5,
        description="An answer or a conversation counts as accepted if its reward is at least this: what a canary "
        "compares. Of an answer that was edited, this share must survive.",
    )

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(self.model_dump(mode="json"), sort_keys=True).encode()).hexdigest()[:16]

    def accepts(self, reward: float) -> bool:
        return reward >= self.accepted_from


def answer_rewards(rule: RuleConfig, signals: Sequence[Signal]) -> dict[str, float]:
    """The reward of each answer that a signal counts for; that of the whole conversation has the name ""."""
    said: dict[str, dict[tuple[str, int], float]] = defaultdict(dict)
    for number, signal in enumerate(signals):
        if signal.kind in rule.weights and signal.value is not None:
            again = 0 if signal.answer else number
            said[signal.answer][signal.kind, again] = rule.weights[signal.kind] * signal.value
    return {answer: min(rule.most, max(rule.least, sum(given.values()))) for answer, given in said.items()}


def reward_of(rule: RuleConfig, signals: Sequence[Signal]) -> float | None:
    """The reward of one conversation; None without a signal that counts."""
    rewards = answer_rewards(rule, signals)
    return sum(rewards.values()) / len(rewards) if rewards else None


def kind_of_task(signals: Sequence[Signal], answer: str = "") -> str:
    """What the product called the task of an answer, else that of the conversation; "" if it said nothing."""
    labels = [(signal.answer, signal.label) for signal in reversed(signals) if signal.kind == "task" and signal.label]
    return next((label for about, label in labels if about == answer), labels[0][1] if labels else "")


def distilled_reward(
    rule: RuleConfig, signals: Sequence[Signal], raws: Mapping[str, float], advantages: Mapping[str, float]
) -> Grade:
    """The reward that is stored and trained on. `advantages`: by answer, relative to the population's mean."""
    raw = sum(raws.values()) / len(raws)
    value = sum(advantages.values()) / len(advantages)
    counts = Counter(signal.kind for signal in signals if signal.kind in rule.weights and signal.value)
    parts = {"raw": raw, "baseline": raw - value, "solved": float(rule.accepts(raw)), **counts}
    parts |= {f"{ANSWER}{answer}": advantage for answer, advantage in advantages.items()}
    return Grade(value, parts, {"rule": rule.version, "digest": rule.digest}, f"rule {rule.version}")
