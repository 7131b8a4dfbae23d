"""Environments of OpenEnv, behind a server: reset ─► observation ─► answer ─► action ─► step ─► reward ─► …

A task is a seed of `reset`. The model gets each observation as a user message: JSON. What it answers is the action: a
JSON object, also in a fence, or the text of the one field that actions need. The model is told of an action that the
server does not take. The value of an episode is the sum of the rewards of its steps; each is also a part of its turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import re
from typing import Any

from pydantic import Field, TypeAdapter, model_validator

from rollmill.environments.harness import Harness, HarnessResult
from rollmill.environments.harnesses.model import Asking, ModelClient, ModelSettings
from rollmill.environments.harnesses.summary import Messages
from rollmill.environments.harnesses.tools import cut
from rollmill.environments.harnesses.turns import is_cut
from rollmill.environments.packages.package_process import PackageConfig, PackageProcess
from rollmill.environments.packages.reported import GRADING, REPORT, hand_in_report
from rollmill.environments.task import Task
from rollmill.environments.tasks.listed import ListedTasks
from rollmill.errors import HarnessError
from rollmill.machines.machine import Machine
from rollmill.strict import FreeJson, StrictModel, parse_json
from rollmill.types import TURN, Sampling

_INVALID = "error: the environment does not take this action"
_FENCE = re.compile(r"```[^\n`]*\n(.*)\n```", re.DOTALL)
_OBJECT = TypeAdapter[dict[str, FreeJson]](dict[str, FreeJson])
_ERROR = 2000  # characters


class OpenEnvConfig(PackageConfig):
    url: str = Field("", description="The server. Not set: `server` starts one on this host.")
    server: tuple[str, ...] = Field(
        (),
        description="Command that starts a server on this host, with `{port}` where its port belongs. It finds the "
        "programs that are installed beside `python`.",
    )
    reset: dict[str, Any] = Field(default_factory=dict, description="More arguments of `reset`, beside `seed`.")
    system_prompt: str = Field("", description="System message before the first observation. Empty: none.")
    max_turns: int = Field(20, ge=1, description="Most answers of the model in one episode.")
    max_observation: int = Field(
        10_000, ge=20, description="Most characters of one observation that the model reads; the middle is cut."
    )

    request_deadline_s: float = Field(
        120.0, gt=0, description="Seconds to wait for a model or a server that is away, or for a server that is full."
    )

    @model_validator(mode="after")
    def _has_a_server(self) -> OpenEnvConfig:
        if bool(self.url) == bool(self.server):
            raise ValueError("set `url` or `server`, one of them: where is the environment?")
        return self

    @property
    def what(self) -> str:
        return f"openenv {self.url or ' '.join(self.server)}"

    def process(self) -> PackageProcess:
        order = {"url": self.url, "server": self.server, "patience_s": self.request_deadline_s}
        return PackageProcess(self.what, self, "openenv_program.py", order)


class OpenEnvTasks(ListedTasks):
    name = "openenv"

    def __init__(self, config: OpenEnvConfig) -> None:
        super().__init__(_task(config, seed) for seed in range(config.tasks))


def _task(config: OpenEnvConfig, seed: int) -> Task:
    task_id, reset = f"openenv/{seed}", {"seed": seed, **config.reset}
    return Task(
        id=task_id,
        instruction=f"reset with {json.dumps(reset)}",
        split=config.split_of(task_id),
        family="openenv",
        submission=(REPORT,),
        grading={**GRADING, "reset": reset},
    )


class _Step(StrictModel):
    observation: dict[str, FreeJson] = Field(default_factory=dict)
    reward: float | None = None
    done: bool = False
    invalid: bool = False
    field: str | None = None


class OpenEnvHarness(Harness):
    name = "openenv"
    wants_machine = False

    def __init__(self, config: OpenEnvConfig) -> None:
        self.config = config
        self._process = config.process()
        self._model = ModelClient(deadline_s=config.request_deadline_s)
        self._sessions = itertools.count()

    def preflight(self) -> None:
        """TaskError if the package or the server is not there."""
        self.config.process().ask_alone({"field": True})

    def opening(self, task: Task) -> tuple[Messages, list[dict[str, Any]]]:
        """Without the first observation, which is not known yet."""
        system = self.config.system_prompt
        return ([{"role": "system", "content": system}] if system else []), []

    async def run(
        self, task: Task, machine: Machine, *, base_url: str, api_key: str, sampling: Sampling
    ) -> HarnessResult:
        asking = Asking(self._model, base_url, api_key, ModelSettings(), sampling)
        episode = _Episode(self._process, self.config, str(next(self._sessions)))
        try:
            first = await episode.begin(task.grading.get("reset", {}))
            result = await self._play(episode, asking, [*self.opening(task)[0], first])
        finally:
            await asyncio.shield(asyncio.create_task(episode.end()))
        await episode.report(machine)
        return result

    async def _play(self, episode: _Episode, asking: Asking, messages: Messages) -> HarnessResult:
        for turn in range(1, self.config.max_turns + 1):
            choice = await asking.answer(messages, turn, {})
            if choice is None or is_cut(choice):
                return HarnessResult("length", turn, 0, episode.refused)
            observation = await episode.act(turn - 1, choice["message"].get("content"))
            if episode.done:
                return HarnessResult("done", turn, 0, episode.refused)
            messages = [*messages, choice["message"], observation]
        return HarnessResult("max_turns", self.config.max_turns, 0, episode.refused)

    async def close(self) -> None:
        await self._process.close()
        await self._model.close()


class _Episode:
    """One session on the server."""

    def __init__(self, process: PackageProcess, config: OpenEnvConfig, session: str) -> None:
        self._process, self._config, self._session = process, config, session
        self._field: str | None = None
        self._steps = 0
        self._rewards: dict[str, float] = {}  # of turns
        self.refused = 0
        self.done = False

    async def begin(self, reset: dict[str, Any]) -> dict[str, Any]:
        """The first message to the model."""
        step = await self._ask({"reset": reset})
        self._field = step.field
        return self._message(step)

    async def act(self, turn: int, answer: Any) -> dict[str, Any]:
        """Take the action that the model answered with. The next message to it."""
        step = await self._ask({"step": action_of(answer if isinstance(answer, str) else "", self._field)})
        if step.invalid:
            self.refused += 1
            return {"role": "user", "content": _INVALID}
        self._steps += 1
        self.done = step.done
        if step.reward is not None:
            self._rewards[f"{TURN}{turn}"] = step.reward
        return self._message(step)

    async def report(self, machine: Machine) -> None:
        what = self._config.what
        if self._steps and not self._rewards:
            raise HarnessError(f"{what} gave no reward in {self._steps} steps", hint="its observations need `reward`")
        evidence = {"environment": what, "steps": self._steps, "refused": self.refused, "done": self.done}
        await hand_in_report(machine, what, sum(self._rewards.values()), self._rewards, evidence)

    async def end(self) -> None:
        with contextlib.suppress(HarnessError):
            await self._process.ask({"close": self._session})

    async def _ask(self, request: dict[str, Any]) -> _Step:
        answer = await self._process.ask({**request, "session": self._session})
        try:
            return _Step.model_validate(answer)
        except ValueError as error:
            raise HarnessError(f"{self._config.what}: its answer cannot be used: {error}"[:_ERROR]) from None

    def _message(self, step: _Step) -> dict[str, Any]:
        text = json.dumps(step.observation, ensure_ascii=False)
        return {"role": "user", "content": cut(text, self._config.max_observation)}


def action_of(answer: str, field: str | None) -> dict[str, Any]:
    """The action that an answer is. `field`: the one that actions need, if it is one. Whatever the model wrote is an
    action: the server decides whether it is a good one."""
    text = answer.encode("utf-8", "replace").decode().strip()
    fenced = _FENCE.fullmatch(text)
    with contextlib.suppress(ValueError, RecursionError):
        action = parse_json(fenced[1] if fenced else text, _OBJECT)
        return action
    return {field: text} if field is not None else {"answer": text}
