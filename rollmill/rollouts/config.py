"""How rollouts are run; how many and how stale they may be stands at the root of the run's configuration."""

from __future__ import annotations

from pydantic import Field

from rollmill.config import Config


class RolloutConfig(Config):
    concurrency: int = Field(192, ge=1, description="rollouts in progress at once in one dispatcher")
    timeout_s: float = Field(120.0, gt=0, description="an episode that takes longer than this has failed")
    temperature: float = Field(1.0, gt=0, description="sampling temperature of training rollouts")
    max_answer_tokens: int = Field(64, ge=1, description="a model that does not stop is cut off after this many tokens")
    give_up_after: int = Field(64, ge=1, description="stop the run after this many failed rollouts in a row")
    simulated_tool_seconds: tuple[float, ...] = Field(
        (), description="SIMULATION, for benchmarks: every tool call also waits a time drawn from this list"
    )
