"""Environments of verifiers: their dataset is the tasks, they play the episode, and their rewards grade it.

The environment asks the model at the address of the episode's session, with its key, as any agent does. So its tokens
are recorded by the gateway, and nothing of verifiers' own traces is trained on.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field

from rollmill.environments.harness import Harness, HarnessResult
from rollmill.environments.packages.package_process import PackageConfig, PackageProcess
from rollmill.environments.packages.reported import GRADING, REPORT, hand_in_report
from rollmill.environments.task import Task
from rollmill.environments.tasks.listed import ListedTasks
from rollmill.errors import HarnessError, TaskError
from rollmill.machines.machine import Machine
from rollmill.strict import FreeJson, StrictModel
from rollmill.types import Sampling


class VerifiersConfig(PackageConfig):
    env: dict[str, Any] = Field(
        description="The environment, as the [env] table of a configuration of verifiers: `taskset.id` is the package, "
        "beside it are its arguments; `agent.harness` and `agent.runtime` say what plays it, and where."
    )

    @property
    def package(self) -> str:
        taskset = self.env.get("taskset")
        return str(self.env.get("id") or (taskset.get("id") if isinstance(taskset, dict) else None))

    def process(self) -> PackageProcess:
        return PackageProcess(f"verifiers {self.package}", self, "verifiers_program.py", {"env": self.env})


class _Row(StrictModel):
    id: str
    messages: list[dict[str, FreeJson]]
    data: dict[str, FreeJson]


class _Played(StrictModel):
    rewards: dict[str, list[float]]  # score and weight
    metrics: dict[str, float]
    stop: str | None
    truncated: bool
    timeout: bool
    trace: str
    info: FreeJson


class VerifiersTasks(ListedTasks):
    name = "verifiers"

    def __init__(self, config: VerifiersConfig) -> None:
        try:
            rows = [_Row.model_validate(row) for row in config.process().ask_alone({"tasks": config.tasks})]
        except ValueError as error:
            raise TaskError(f"verifiers {config.package}: its dataset cannot be used: {error}"[:2000]) from None
        super().__init__(_task(config, row) for row in rows)


def _task(config: VerifiersConfig, row: _Row) -> Task:
    task_id = f"{config.package}/{row.id}"
    return Task(
        id=task_id,
        instruction=row.messages,
        split=config.split_of(task_id),
        family=config.package,
        submission=(REPORT,),
        grading={**GRADING, "data": row.data},
    )


class VerifiersHarness(Harness):
    name = "verifiers"
    wants_machine = False

    def __init__(self, config: VerifiersConfig) -> None:
        self._what = f"verifiers {config.package}"
        self._process = config.process()

    async def run(
        self, task: Task, machine: Machine, *, base_url: str, api_key: str, sampling: Sampling
    ) -> HarnessResult:
        answer = await self._process.ask(
            {
                "data": task.grading.get("data"),
                "base_url": base_url,
                "api_key": api_key,
                "model": "rollmill",
                "sampling": {"max_tokens": sampling.max_tokens},  # the run decides the rest
            }
        )
        try:
            played = _Played.model_validate(answer)
        except ValueError as error:
            raise HarnessError(f"{self._what}: what it says of the episode cannot be used: {error}"[:2000]) from None
        if not played.rewards:
            raise HarnessError(f"{self._what} gave no reward", hint="its task needs a method with @vf.reward")
        await self._report(machine, played)
        if played.truncated:
            return HarnessResult("max_turns" if played.stop == "max_turns" else "length", 0, 0)
        return HarnessResult("time" if played.timeout else "done", 0, 0)

    async def _report(self, machine: Machine, played: _Played) -> None:
        parts = {f"reward.{name}": score for name, (score, _) in played.rewards.items()}
        parts |= {f"metric.{name}": value for name, value in played.metrics.items()}
        weights = {name: weight for name, (_, weight) in played.rewards.items()}
        evidence = {"environment": self._what, "weights": weights, "stop": played.stop, "trace": played.trace}
        value = sum(score * weight for score, weight in played.rewards.values())
        await hand_in_report(machine, self._what, value, parts, {**evidence, "info": played.info})

    async def close(self) -> None:
        await self._process.close()
