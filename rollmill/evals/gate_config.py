"""The bounds of the gate, as [gate] and the suites of [[evals.suites]] set them. gate.py compares with them."""

from __future__ import annotations

from pydantic import Field

from rollmill.config import Config

BY_ESTIMATE = 0.5  # alpha with which no proof is wanted
USUAL = 0.05
BOUNDS = {  # of [gate] that a suite may have of its own → how the names of their metrics begin
    "offline_bar": "bar",
    "max_quality_loss": "quality",
    "max_pass_k_loss": "pass@k",
    "max_more_tokens": "tokens_per",
    "max_more_engine_seconds": "engine_seconds",
    "max_more_seconds": "latency",
    "max_more_malformed": "malformed",
    "max_more_questions": "questions",
    "least_tasks": "",
}


class GateConfig(Config):
    """How much worse than the live version a candidate may be. A run that has this section refuses every version as
    `live` that has not passed."""

    offline_bar: float | None = Field(
        None, description="Least solve rate or mean reward of a live version, whatever the one before it reaches."
    )
    max_quality_loss: float = Field(
        0.04,
        ge=0,
        description="Most that quality may fall below the live version, and below the yardstick: so it is the budget "
        "of all promotions together. Quality is the solve rate, or the mean reward where rewards are not 0 or 1.",
    )
    yardstick: str | None = Field(
        None,
        pattern=r"^.+@\d+$",
        description="The version, such as `rl@40`, that quality is compared with beside the live one. Not set: the "
        "best version that was ever promoted.",
    )
    max_pass_k_loss: float = Field(
        1.0,
        ge=0,
        le=1,
        description="Most that the share of tasks may fall that k attempts solve at least once. 1: it decides nothing.",
    )
    max_more_tokens: float = Field(
        0.15, ge=0, description="Most that the tokens per solved task may rise, as a fraction."
    )
    max_more_engine_seconds: float = Field(
        0.5,
        ge=0,
        description="Most that the seconds in which engines compute, per solved task, may rise, as a fraction. On GPUs "
        "these are GPU-seconds.",
    )
    max_more_seconds: float = Field(0.5, ge=0, description="Most that the seconds per attempt may rise, as a fraction.")
    max_more_malformed: float = Field(
        0.03, ge=0, le=1, description="Most that the share of malformed tool calls may rise, as an absolute difference."
    )
    max_more_questions: float = Field(
        0.03, ge=0, le=1, description="Most that the share of attempts that end with a question may rise."
    )
    beside: bool = Field(
        True,
        description="Measure the live version again beside each candidate, on engines of its own, so that their "
        "seconds can be compared. Off: earlier attempts of the live version are used. That costs half, and then "
        "latency and seconds of engines decide nothing.",
    )
    alpha: float = Field(
        USUAL,
        gt=0,
        le=BY_ESTIMATE,
        description="Chance that a metric passes although it is beyond its bound. Smaller needs more attempts. 0.5: "
        "the estimate decides without proof, so a candidate exactly at its bound passes every second time.",
    )
    looks: int = Field(
        3,
        ge=1,
        le=8,
        description="How often a candidate is looked at that is within all bounds by estimate, and has not shown it: "
        "after each look all versions get twice as many attempts per task. So evals.attempts = 4 becomes 8, then 16. "
        "Each look has its part of `alpha`. More tell an equal candidate from a worse one, and take longer where it is "
        "close.",
    )
    least_tasks: int = Field(
        20, ge=1, description="Fewest tasks that both versions must have attempted. With fewer, nothing is promoted."
    )
