"""How rollouts are run. How many there are and how stale they may be is set at the root of the configuration."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel, Field

from rollmill.config import Config
from rollmill.environments.reward import TimedConfig
from rollmill.errors import ConfigError


def check_reward_times(rewards: Sequence[BaseModel], grading_timeout_s: float) -> None:
    """ConfigError if a reward may take longer than grading may. Tests that hang would then never be graded as hanging:
    the episode would be dropped first, and the policy could escape a zero."""
    for number, reward in enumerate(rewards):
        if isinstance(reward, TimedConfig) and reward.timeout_s >= grading_timeout_s:
            raise ConfigError(
                f"rewards.{number}.timeout_s is {reward.timeout_s:g}, but grading may take only "
                f"{grading_timeout_s:g} s in all",
                hint="set rollouts.grading_timeout_s to more, or this one to less",
            )


class DispatcherConfig(Config):
    replicas: int = Field(
        1,
        ge=1,
        le=64,
        description="How many dispatchers play the groups of a run. Each has `rollouts.concurrency` and a pool of "
        "machines of its own. The first also evaluates. If one dies, the others play its groups.",
    )


class RolloutConfig(Config):
    concurrency: int = Field(
        192,
        ge=1,
        description="Most episodes that run at once, per dispatcher. More keep the engines busier and take more "
        "memory for machines; `max_staleness` bounds them too.",
    )
    grading_concurrency: int | None = Field(
        None,
        ge=1,
        description="Most episodes that are graded at once, per dispatcher. They wait in a queue of their own and keep "
        "no other episode from starting; their machines are started first, so [pool] should have room for both. More "
        "take more memory for machines. Not set: as many as `concurrency`.",
    )
    timeout_s: float = Field(
        1800.0,
        gt=0,
        description="Seconds of its own that an episode may take; a task may set its own limit. Waits for the gateway "
        "or an engine, and grading, do not count.",
    )
    grading_timeout_s: float = Field(
        300.0,
        gt=0,
        description="Seconds that the grading of one episode may take. A judge that is down is asked again until then; "
        "after that the episode is dropped, and never gets a zero. In training, time in which the judge is down and no "
        "episode can be graded does not count: the run waits, and goes on when the judge is back.",
    )
    attempts: int = Field(
        3,
        ge=1,
        description="How often an episode is tried in all if the infrastructure fails: the machine host, the gateway, "
        "the engines. After that it counts as failed.",
    )
    checkpoint_s: float | None = Field(
        None,
        ge=0,
        description="Seconds between two checkpoints of an episode: its conversation and the files of its machine. "
        "After a crash of the dispatcher or of a host of machines, the episode goes on from the last one. For machines "
        "whose snapshots are files, and the harness shell; others begin again. Not set: none.",
    )
    temperature: float = Field(
        1.0,
        gt=0,
        description="Sampling temperature of training rollouts. Larger explores more; 1 samples from the policy "
        "itself.",
    )
    max_answer_tokens: int = Field(
        4096,
        ge=1,
        description="Most tokens of one answer of the model; a longer one is cut off and ends the episode. An answer "
        "also ends where the context is full, so this may be more than `model.max_context`.",
    )
    give_up_after: int = Field(
        64, ge=1, description="The run stops after this many failed rollouts in a row: then the host is at fault."
    )
