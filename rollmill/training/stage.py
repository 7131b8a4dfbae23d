"""Stage: one part of a run, which trains a line of its own. The stages of a run follow each other.

    [[stages]]              line "midtrain": 0 … 300        from the checkpoint, or from random weights
    kind = "midtrain"
    steps = 300

    [[stages]]              line "rl": 0 … 32               from the last version of "midtrain"
    kind = "rl"
    steps = 32

A kind's class is constructed with its settings and makes the Objective that the step loop trains with. Implementations
are in `stages/`. Configurations are read without torch, so the module of a stage imports torch in `objective` only.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from pydantic import Field

from rollmill.config import NAME, Config, item_name
from rollmill.kinds import KindSection, Slot
from rollmill.models.config import ModelConfig
from rollmill.training.config import TrainingConfig
from rollmill.trajectories.staleness import Pace

if TYPE_CHECKING:
    from rollmill.chat.format import ChatFormat
    from rollmill.chat.tokenizer import Tokenizer
    from rollmill.training.objective import Objective
    from rollmill.training.parallelism import Ranks
    from rollmill.trajectories.ledger import Ledger
    from rollmill.trajectories.trajectory_store import TrajectoryStore
    from rollmill.weights.reading.weight_store import WeightStore


@dataclass(frozen=True)
class StageContext:
    """What an objective may need of the run."""

    name: str  # of the stage, and of its line
    steps: int
    seed: int  # differs between stages of one kind
    model: ModelConfig  # with the context of this stage
    tokenizer: Tokenizer
    format: ChatFormat
    tokens_per_microbatch: int  # of all ranks together
    ranks: Ranks
    ledger: Ledger  # of this stage
    trajectories: TrajectoryStore
    weights: WeightStore
    directory: Path  # the stage's own, beside the run, for what it keeps on this machine


class Stage(Protocol):
    """Constructed with its settings, in every process of the trainer. Its constructor imports no torch."""

    def objective(self, context: StageContext) -> Objective[Any]:
        """Called once per process, on every rank."""
        ...


class RolloutSettings(Config):
    """Settings of a stage that learns from rollouts. If the settings of a stage derive from this class, engines serve
    its line while it trains, and the dispatcher runs groups of rollouts for it."""

    groups_per_step: int = Field(
        8, ge=1, description="Groups that one RL step trains on. More give steadier and slower steps."
    )
    group_size: int = Field(
        8,
        ge=1,
        description="Attempts at one task that form a group; advantages are relative to the group. Larger finds signal "
        'in harder tasks and costs more rollouts. 1 needs `baseline = "population"`.',
    )
    max_staleness: int = Field(
        2,
        ge=0,
        description="How many versions old a token may be when it is trained on. Larger keeps engines and trainer "
        "busier; smaller is closer to on-policy. 0 is synchronous training.",
    )
    replacement: float = Field(
        2.0,
        ge=1,
        description="How many groups may be started per group that steps train on: those with nothing to learn from "
        "are closed and replaced. Raise it for hard tasks: if 2 % of attempts are solved, one group of 8 in seven has "
        "signal. Training ends early where a step finds no group at all; `--resume RUN replacement=N` goes on.",
    )

    rollouts: bool = Field(
        True,
        description="Whether groups of rollouts are started. Turned off, the stage trains on groups that were admitted "
        "before it began, and its steps take fewer when none are left. Real-time RL trains so.",
    )

    def pace(self, steps: int) -> Pace:
        """Of a stage with `steps` steps."""
        return Pace(
            self.groups_per_step,
            self.group_size,
            self.max_staleness,
            steps,
            starts=self.rollouts,
            replacement=self.replacement,
        )


class StageSection(KindSection):
    _slot: ClassVar[Slot] = Slot(
        "stages",
        Stage,
        {
            "midtrain": "rollmill.training.stages.midtrain:Midtrain",
            "sft": "rollmill.training.stages.sft:Sft",
            "rl": "rollmill.training.stages.rl:Reinforce",
        },
        "rollmill.stages",
    )

    name: str = Field(
        pattern=NAME,
        description="Name of the stage and of the line of weights that it trains. Not set: its kind. Two stages of one "
        "kind need different names.",
    )
    steps: int = Field(ge=0, description="Steps of the stage.")
    max_context: int | None = Field(
        None,
        gt=0,
        description="Most tokens in one context from this stage on. Longer than before stretches the rotary embedding "
        "(YaRN). Not set: as in the stage before.",
    )
    parent: str | None = Field(
        None,
        pattern=r"^[^@]+@\d+$",
        description="The version of this run that the stage starts from, as `line@number`. Not set: the last version "
        "of the stage before.",
    )
    evaluate: bool | None = Field(
        None, description="Evaluate on held-out tasks after this stage. Not set: only if it learns from rollouts."
    )
    training: TrainingConfig = Field(TrainingConfig(), description="The step loop of the stage.")

    @classmethod
    def _read(cls, value: Any) -> KindSection:
        return super()._read({**value, "name": item_name(value)} if isinstance(value, dict) else value)
