"""The rule that turns signals of users into a reward. Declared in the TOML, with a version; a pure function.

    reward = Σ over kinds of signals: weight · mean of their values,   bounded by `least` and `most`

    accepted = 1.0, reverted = -1.0:   a user took an answer (value 1) and undid it later (value 1):   1 − 1 = 0
    edited = 1.0:                      80 % of an answer survived the user's edits:                     0.8

A conversation without any of these signals has no reward: silence is neither good nor bad. Each reward keeps the rule's
version and digest, so a later change of the rule is visible in the data.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pydantic import Field

from rollmill.config import Config
from rollmill.types import Reward

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
    accepts_above: float = Field(
        0.0, description="A conversation counts as accepted if its reward is above this: what a canary compares."
    )

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(self.model_dump(mode="json"), sort_keys=True).encode()).hexdigest()[:16]

    def accepts(self, reward: float) -> bool:
        return reward > self.accepts_above


def reward_of(rule: RuleConfig, signals: Sequence[Signal]) -> float | None:
    """The reward of one conversation; None without a signal that counts."""
    means = _means(rule, signals)
    if not means:
        return None
    return min(rule.most, max(rule.least, sum(rule.weights[kind] * mean for kind, mean in means.items())))


def kind_of_task(signals: Sequence[Signal]) -> str:
    """What the product called the task; "" if it said nothing."""
    return next((signal.label for signal in reversed(signals) if signal.kind == "task" and signal.label), "")


def distilled_reward(rule: RuleConfig, signals: Sequence[Signal], raw: float, baseline: float) -> Reward:
    """The reward that is stored and trained on: relative to the population's mean."""
    parts = {"raw": raw, "baseline": baseline, "solved": float(rule.accepts(raw)), **_means(rule, signals)}
    return Reward(raw - baseline, parts, {"rule": rule.version, "digest": rule.digest}, f"rule {rule.version}")


def _means(rule: RuleConfig, signals: Sequence[Signal]) -> Mapping[str, float]:
    values: dict[str, list[float]] = defaultdict(list)
    for signal in signals:
        if signal.kind in rule.weights and signal.value is not None:
            values[signal.kind].append(signal.value)
    return {kind: sum(given) / len(given) for kind, given in values.items()}
