"""The sections of a run that describe its environment, with the kinds that are built in."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, Field

from rollmill.config import NAME, Config
from rollmill.environments.harness import Harness
from rollmill.environments.reward import Reward
from rollmill.environments.sampler import Sampler
from rollmill.environments.task import TaskSet
from rollmill.kinds import KindSection, Slot, search_also
from rollmill.machines.machine import MachineSection
from rollmill.machines.pool import PoolConfig


class TasksSection(KindSection):
    _slot: ClassVar[Slot] = Slot(
        "tasks",
        TaskSet,
        {
            "jsonl": "rollmill.environments.tasks.jsonl:JsonlTasks",
            "directory": "rollmill.environments.tasks.task_directory:DirectoryTasks",
            "mbpp": "rollmill.environments.tasks.mbpp:MbppTasks",
            "humaneval": "rollmill.environments.tasks.humaneval:HumanEvalTasks",
            "harbor": "rollmill.environments.tasks.harbor:HarborTasks",
            "swe_bench": "rollmill.environments.tasks.swe_bench:SweBenchTasks",
            "verifiers": "rollmill.environments.packages.verifiers:VerifiersTasks",
            "openenv": "rollmill.environments.packages.openenv:OpenEnvTasks",
        },
        "rollmill.tasks",
    )


class HarnessSection(KindSection):
    _slot: ClassVar[Slot] = Slot(
        "harness",
        Harness,
        {
            "shell": "rollmill.environments.harnesses.shell:ShellHarness",
            "chat": "rollmill.environments.harnesses.chat:ChatHarness",
            "command": "rollmill.environments.harnesses.command:CommandHarness",
            "remote": "rollmill.environments.harnesses.remote:RemoteHarness",
            "verifiers": "rollmill.environments.packages.verifiers:VerifiersHarness",
            "openenv": "rollmill.environments.packages.openenv:OpenEnvHarness",
            "harbor": "rollmill.environments.packages.harbor:HarborAgentHarness",
        },
        "rollmill.harnesses",
        default="shell",
        removed={
            "coding": 'leave `kind` out: "shell" is the default. The small tools of the demo are '
            'kind = "rollmill.demo.coding:CodingHarness"'
        },
    )


class RewardSection(KindSection):
    _slot: ClassVar[Slot] = Slot(
        "rewards",
        Reward,
        {
            "calls": "rollmill.environments.rewards.calls:Calls",
            "script": "rollmill.environments.rewards.script:Script",
            "harbor": "rollmill.environments.rewards.harbor:HarborReward",
            "pytest": "rollmill.environments.rewards.pytest:Pytest",
            "logged_tests": "rollmill.environments.rewards.logged_tests:LoggedTests",
            "length": "rollmill.environments.rewards.length:Length",
            "behaviour": "rollmill.environments.rewards.behaviour:Behaviour",
            "judge": "rollmill.environments.rewards.judge:Judge",
            "reported": "rollmill.environments.packages.reported:Reported",
        },
        "rollmill.rewards",
    )

    weight: float = Field(1.0, description="What the value of this reward is multiplied with before all are added up.")


class RewardsFile(Config):
    """A file with nothing but [[rewards]], for grading again."""

    rewards: tuple[RewardSection, ...] = Field(min_length=1, description="As in a run.")
    modules: str | None = Field(None, description="Directory with modules of your own. Not set: the file's directory.")

    @classmethod
    def derive(cls, tree: dict[str, Any]) -> dict[str, Any]:
        if isinstance(tree.get("modules"), str):
            search_also(Path(tree["modules"]))
        return tree


class SamplerSection(KindSection):
    _slot: ClassVar[Slot] = Slot(
        "sampler",
        Sampler,
        {
            "uniform": "rollmill.environments.samplers.uniform:Uniform",
            "frontier": "rollmill.environments.samplers.frontier:Frontier",
        },
        "rollmill.samplers",
        default="uniform",
    )


class EnvironmentSection(Config):
    """One environment of several. Agents never see its name."""

    name: str = Field(
        pattern=NAME,
        description="The environment's name: its task `ID` is called `NAME/ID` in this run, and results are shown by "
        "it.",
    )
    weight: float = Field(
        1.0,
        gt=0,
        allow_inf_nan=False,
        description="How often a group gets a task of this environment: its weight divided by the sum of all weights.",
    )
    timeout_s: float | None = Field(
        None, gt=0, description="Seconds of its own that an episode may take. Not set: `rollouts.timeout_s`."
    )
    grading_timeout_s: float | None = Field(
        None, gt=0, description="Seconds that grading may take. Not set: `rollouts.grading_timeout_s`."
    )
    max_answer_tokens: int | None = Field(
        None, ge=1, description="Most tokens of one answer of the model. Not set: `rollouts.max_answer_tokens`."
    )
    tasks: TasksSection = Field(description="Where its tasks come from.")
    harness: HarnessSection = Field(
        default={}, validate_default=True, description="The agent that works on its tasks: its loop and its tools."
    )
    machine: MachineSection = Field(
        default={}, validate_default=True, description="The machine that each of its rollouts gets, and its limits."
    )
    pool: PoolConfig = Field(
        PoolConfig(),
        description="How many of its machines there may be. Environments whose [machine] and [pool] are equal share "
        "one pool.",
    )
    rewards: tuple[RewardSection, ...] = Field(
        default=({"kind": "calls"},),
        validate_default=True,
        min_length=1,
        description="What an episode is worth, as the run's [[rewards]].",
    )


def _have_names_of_their_own(given: tuple[EnvironmentSection, ...]) -> tuple[EnvironmentSection, ...]:
    names = [each.name for each in given]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"two environments are called {twice!r}: give each its own `name`")
    return given


EnvironmentSections = Annotated[tuple[EnvironmentSection, ...], AfterValidator(_have_names_of_their_own)]
