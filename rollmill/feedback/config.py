"""Settings of real-time RL."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field

from rollmill.config import Config
from rollmill.feedback.rule import RuleConfig


class CycleConfig(Config):
    """Learning from live users: `rollmill cycle run`. The gate is [gate], its suite is [evals]."""

    rule: RuleConfig = Field(RuleConfig(), description="How signals of users become rewards.")
    enough: int = Field(
        256, ge=8, description="Conversations to train on that end collecting. More give a steadier candidate, later."
    )
    settle_s: float = Field(
        60.0,
        ge=0,
        description="Seconds after the end of a conversation in which signals count. Later ones are kept, and never "
        "become part of its reward. Larger hears slower users, and each cycle waits that much longer.",
    )
    user_share: float = Field(
        0.1,
        gt=0,
        le=1,
        description="Most that the conversations of one user may be of `enough`; the first ones count. Users are those "
        "that requests name (`user`); conversations that name none have no such limit.",
    )
    credit: Literal["answers", "path", "decayed", "per_segment", "all"] = Field(
        "answers",
        description="Which tokens learn. `answers`: those of the answers that users said something about, each by its "
        "own signals. The others share the mean of a conversation, as `credit` of an RL stage says.",
    )
    max_lag: int = Field(
        0,
        ge=0,
        description="How many versions older than the live one a conversation's tokens may be. Every step makes one "
        "version, so the live version before the last promotion is `steps` older. 0: only the live version's.",
    )
    steps: int = Field(4, ge=1, description="Steps that the conversations of a cycle are divided over. 1 is on-policy.")
    lr: float | None = Field(
        None, gt=0, description="Learning rate, constant. Not set: 0.4 times that of the run's last RL stage."
    )
    share: float = Field(0.05, gt=0, le=0.5, description="Share of production sessions that a canary gets.")
    canary_sessions: int = Field(
        2000,
        ge=1,
        description="Sessions of the candidate with a signal after which a canary ends, and holds what has not shown "
        "that it is as good. What a held canary says names the number that `max_loss` takes.",
    )
    max_loss: float = Field(
        0.05,
        gt=0,
        le=1,
        description="Most that the share of accepted sessions may fall in a canary, of those with a signal and of all, "
        "and most that the share of sessions with a signal may change. 1: anything passes that users do not refuse.",
    )
    canary_per_user: int = Field(
        5, ge=1, description="Most sessions of one user that each side of a canary counts. Sessions without a name do."
    )
    model: str = Field("rollmill", description="The model that production asks for, and that a canary takes part of.")

    @property
    def most_of_user(self) -> int:
        return max(1, math.floor(self.enough * self.user_share))
