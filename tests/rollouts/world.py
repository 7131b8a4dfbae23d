"""Everything a rollout uses: a real gateway on a socket, real machines, a real store. The model is a script.

Only what is named `StandIn…` or `Scripted…` is not real.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

from rollmill.chat.format import assistant_message
from rollmill.chat.formats.compact import CompactFormat
from rollmill.chat.tokenizer import Tokenizer
from rollmill.demo.coding import CodingConfig, CodingHarness
from rollmill.demo.coding_tools import tool_schemas
from rollmill.environments.rewards.calls import Calls, CallsConfig
from rollmill.environments.task import Task, TaskSet
from rollmill.errors import GatewayError, MachineError
from rollmill.gateway.app import make_app
from rollmill.gateway.config import EngineEndpoint, GatewayConfig
from rollmill.gateway.gateway_parts import GatewayInputs
from rollmill.inference.server import make_app as make_engine_app
from rollmill.inference.server import serving
from rollmill.machines.images.image import BUILT_IN
from rollmill.machines.machine import Machine, MachineHost
from rollmill.rollouts.gateway_client import GatewayClient
from rollmill.rollouts.rollout import Outcome, Rollout
from rollmill.rollouts.rollout_context import RolloutContext
from rollmill.storage.database import open_database
from rollmill.storage.objects import Objects
from rollmill.trajectories.ledger import Ledger
from rollmill.trajectories.table_rows import TrajectoryRow
from rollmill.trajectories.trajectory_store import TrajectoryStore
from rollmill.types import Sampling, TrajectoryState
from tests.gateway.serve import GatewayServer
from tests.gateway.stand_in import StandIn
from tests.inference.world import TINY, engine_at, make_update
from tests.machines.stand_ins import StandInHost

ADMIN = "admin-secret"
RUN = "r"
SAMPLING = Sampling(max_tokens=400)
GATEWAY = GatewayConfig(engine_wait_s=1.0, health_interval_s=0.02, stream_above=1000)
SOLUTION = ("edit", {"path": "main.py", "line": 2, "text": "return x + 7"}), ("run", {}), ("done", {})


def make_task(number: int = 0, split: str = "train", **changes: Any) -> Task:
    """f should add 7, as the script makes it do. In tasks with an odd number f should add 8: the script fails."""
    offset = 7 + number % 2
    task = Task(
        id=f"{split}/{number}",
        family="add",
        split=split,
        instruction="fix main.py",
        image=BUILT_IN,
        files={
            "main.py": b"def f(x):\n    return x\n",
            "test.py": f"from main import f\nif f(1) != {1 + offset}:\n    raise SystemExit('fail')\n".encode(),
        },
        submission=("main.py",),
        grading={
            "kind": "calls",
            "module": "main.py",
            "function": "f",
            "cases": [[[3], 3 + offset], [[9], 9 + offset]],
        },
    )
    return replace(task, **changes)


class Additions(TaskSet):
    name = "additions"

    def train(self, seed: int) -> Iterator[Task]:
        return (make_task(number) for number in range(seed, 1 << 30))

    def heldout(self, split: str, count: int) -> list[Task]:
        return [make_task(number, split) for number in range(count)]

    def get(self, task_id: str) -> Task:
        split, _, number = task_id.partition("/")
        return make_task(int(number), split)


class ScriptedEngine(StandIn):
    """Gives the same answers to every session: answer N of the script at turn N, and then always the last."""

    script: list[list[int]]
    agent_token: int
    on_turn: Callable[[str, int], Awaitable[None]] | None = None  # (session, turn), before it answers

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        turn = body["tokens"].count(self.agent_token)
        if self.on_turn is not None:
            await self.on_turn(body["session"], turn)
        self.answers = [self.script[min(turn, len(self.script)) - 1]]
        return await super().generate(request)


class StandInLostGateway(GatewayClient):
    """Its gateway is lost at each seal: after the session was sealed, and before it answers."""

    def __init__(self, url: str) -> None:
        super().__init__(url, ADMIN)
        self.sealed: list[str] = []

    async def seal(self, trajectory: str, submission_key: str | None) -> dict[str, Any]:
        self.sealed.append(str((await super().seal(trajectory, submission_key))["trajectory"]))
        raise GatewayError("the gateway cannot be reached", status=503)


class FailingHost(StandInHost):
    """Fails to create machine N (from 1) if `fails(N)`; the others come from the real host."""

    def __init__(self, fails: Callable[[int], bool], host: MachineHost | None = None) -> None:
        self.fails = fails
        self.asked = 0
        if host is not None:
            self.host = host

    async def create(self, *arguments: Any, **options: Any) -> Machine:
        self.asked += 1
        if self.fails(self.asked):
            raise MachineError("no machine could be created: out of machines", hint="buy more")
        return await super().create(*arguments, **options)


async def regrade(context: RolloutContext, task: Task, id: str, key: str, facts: dict[str, Any]) -> Outcome:
    return await Rollout(context, task, id, sampling=SAMPLING, min_version=0, facts=facts).regrade(key)


@dataclass
class World:
    directory: Path
    tokenizer: Tokenizer
    engine: ScriptedEngine
    context: RolloutContext
    ledger: Ledger
    stack: contextlib.AsyncExitStack = field(repr=False)

    def says(self, *calls: tuple[str, dict[str, Any]] | list[int]) -> None:
        """Set the script of every session: tool calls, or plain tokens."""
        format = CompactFormat(self.tokenizer)
        self.engine.script = [
            call
            if isinstance(call, list)
            else format.render_answer(assistant_message(None, [(call[0], json.dumps(call[1]))]), tool_schemas())
            for call in calls
        ]

    async def play(self, task: Task | None = None, id: str = "t0", context: RolloutContext | None = None) -> Outcome:
        task = task or make_task()
        context = context or self.context
        context.trajectories.create(RUN, "g", task.id, [id], {"split": task.split})
        facts = {"run": RUN, "group_id": "g", "provenance": {"split": task.split}}
        return await Rollout(context, task, id, sampling=SAMPLING, min_version=0, facts=facts).run()

    def row(self, id: str = "t0") -> TrajectoryRow:
        return self.context.trajectories.get(id)

    def tool_results(self, id: str = "t0") -> list[str]:
        messages = self.context.trajectories.load(id).messages
        return [message["content"] for message in messages if message["role"] == "tool"]

    async def open_sessions(self) -> int:
        return int((await self.context.gateway._call("GET", "/health", None))["sessions"])

    def check_failed(self, outcome: Outcome, reason: str) -> None:
        """The trajectory has failed with `reason` and has no reward."""
        row = self.row(outcome.trajectory)
        assert outcome.reward is None and row.state == TrajectoryState.failed
        assert row.reason == outcome.reason and reason in str(row.reason), row.reason
        assert row.reward is None and self.context.trajectories.rewards([row.id]) == {row.id: []}


@contextlib.asynccontextmanager
async def open_world(directory: Path, tokenizer: Tokenizer, machines: MachineHost) -> AsyncIterator[World]:
    objects = Objects.open(directory / "store")
    database = open_database(f"sqlite:///{directory}/mill.db")
    trajectories = TrajectoryStore(database, objects)
    engine = ScriptedEngine([[]])
    engine.agent_token = tokenizer.token_id("<agent>")
    harness = CodingHarness(CodingConfig(tool_timeout_s=1.0, max_tool_output=200, request_deadline_s=60.0))
    async with contextlib.AsyncExitStack() as stack:
        server = await stack.enter_async_context(TestServer(engine.app()))
        url = await start_gateway(stack, directory, tokenizer, EngineEndpoint(str(server.make_url("")), "home"))
        gateway = await stack.enter_async_context(GatewayClient(url, ADMIN, patience_s=60.0))
        stack.push_async_callback(harness.close)
        grader = Calls(CallsConfig(timeout_s=1.0))
        context = RolloutContext(gateway, machines, machines, harness, grader, trajectories, objects, timeout_s=100.0)
        await gateway.wait_until_serving(0)
        world = World(directory, tokenizer, engine, context, Ledger(database, RUN), stack)
        world.says(*SOLUTION)
        yield world


async def start_gateway(
    stack: contextlib.AsyncExitStack, directory: Path, tokenizer: Tokenizer, engine: EngineEndpoint
) -> str:
    objects = Objects.open(directory / "store")
    trajectories = TrajectoryStore(open_database(f"sqlite:///{directory}/mill.db"), objects)
    log = directory / f"gateway-{engine.url.rpartition(':')[2].strip('/')}"
    given = GatewayInputs(GATEWAY, CompactFormat(tokenizer), tokenizer, trajectories, objects, log, ADMIN, [engine])
    server = await stack.enter_async_context(GatewayServer(make_app(given)))
    return str(server.make_url("")).rstrip("/")


@contextlib.asynccontextmanager
async def real_engine(world: World) -> AsyncIterator[RolloutContext]:
    """The world's context with the embedded engine instead of the script: version 1, random weights."""
    config = TINY.model_copy(update={"vocab_size": world.tokenizer.vocab_size})
    async with contextlib.AsyncExitStack() as stack:
        engine = await stack.enter_async_context(engine_at(make_update(1, config), model=config))
        runner = await stack.enter_async_context(serving(make_engine_app(engine), "127.0.0.1", 0))
        endpoint = EngineEndpoint(f"http://127.0.0.1:{runner.addresses[0][1]}", "home")
        url = await start_gateway(stack, world.directory, world.tokenizer, endpoint)
        gateway = await stack.enter_async_context(GatewayClient(url, ADMIN))
        await gateway.wait_until_serving(1)
        yield replace(world.context, gateway=gateway)
