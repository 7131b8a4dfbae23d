"""The sections of a run that describe its environment, with the kinds that are built in."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from rollmill.config import Config
from rollmill.environments.harness import Harness
from rollmill.environments.machine import MachineHost
from rollmill.environments.reward import Grader
from rollmill.environments.sampler import Sampler
from rollmill.environments.task import TaskSet
from rollmill.kinds import KindSection, Slot, search_also

_HERE = "rollmill.environments"


class TasksSection(KindSection):
    _slot: ClassVar[Slot] = Slot(
        "tasks",
        TaskSet,
        {
            "jsonl": f"{_HERE}.tasks.jsonl:JsonlTasks",
            "directory": f"{_HERE}.tasks.directory:DirectoryTasks",
            "mbpp": f"{_HERE}.tasks.mbpp:MbppTasks",
            "humaneval": f"{_HERE}.tasks.humaneval:HumanEvalTasks",
            "harbor": f"{_HERE}.tasks.harbor:HarborTasks",
            "swe_bench": f"{_HERE}.tasks.swe_bench:SweBenchTasks",
        },
        "rollmill.tasks",
    )


class MachineSection(KindSection):
    _slot: ClassVar[Slot] = Slot(
        "machine",
        MachineHost,
        {
            "namespace": f"{_HERE}.machines.namespace.client:NamespaceHost",
            "qemu": f"{_HERE}.machines.qemu.host:QemuHost",
            "firecracker": f"{_HERE}.machines.firecracker.host:FirecrackerHost",
            "remote": f"{_HERE}.machines.remote.client:RemoteHost",
            "e2b": f"{_HERE}.machines.remote.e2b_client:E2BHost",
        },
        "rollmill.machines",
        default="namespace",
    )


class HarnessSection(KindSection):
    _slot: ClassVar[Slot] = Slot(
        "harness",
        Harness,
        {
            "coding": f"{_HERE}.harnesses.coding:CodingHarness",
            "shell": f"{_HERE}.harnesses.shell:ShellHarness",
            "chat": f"{_HERE}.harnesses.chat:ChatHarness",
            "command": f"{_HERE}.harnesses.command:CommandHarness",
            "remote": f"{_HERE}.harnesses.remote:RemoteHarness",
        },
        "rollmill.harnesses",
        default="coding",
    )


class RewardSection(KindSection):
    _slot: ClassVar[Slot] = Slot(
        "rewards",
        Grader,
        {
            "calls": f"{_HERE}.rewards.hidden_tests:HiddenTests",
            "script": f"{_HERE}.rewards.script:Script",
            "pytest": f"{_HERE}.rewards.suite:Suite",
            "length": f"{_HERE}.rewards.length:Length",
            "behaviour": f"{_HERE}.rewards.behaviour:Behaviour",
            "judge": f"{_HERE}.rewards.judge:Judge",
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
            "uniform": f"{_HERE}.samplers.uniform:Uniform",
            "frontier": f"{_HERE}.samplers.frontier:Frontier",
        },
        "rollmill.samplers",
        default="uniform",
    )
