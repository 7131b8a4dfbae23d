"""What counts as an episode's own time, and what happens when it is over."""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from aiohttp.test_utils import unused_port

from rollmill.environments.task import WholeDiff
from rollmill.machines.machine import ExecResult, Machine, MachineHost
from rollmill.rollouts import rollout, work_diff
from rollmill.rollouts.gateway_client import GatewayClient
from rollmill.rollouts.hand_in import load_hand_in
from tests.machines.stand_ins import StandInHost
from tests.rollouts.test_dispatcher import SIZE, dispatch
from tests.rollouts.world import ADMIN, RUN, World, make_task

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_engines_that_are_gone_when_the_time_is_over(world: World) -> None:
    world.engine.refuse = (500, "out of order")
    harness = type(world.context.harness)(world.context.harness.config.model_copy(update={"request_deadline_s": 1.5}))
    outcome = await world.play(context=replace(world.context, harness=harness, timeout_s=0.5))
    await harness.close()
    world.check_failed(outcome, "harness: ")


class WatchedGateway(GatewayClient):
    """Counts how often it is asked for the time that an episode waited."""

    looks = 0

    async def waited(self, trajectory: str) -> float:
        self.looks += 1
        return await super().waited(trajectory)


async def test_an_episode_behind_a_busy_engine_is_not_cut_off(world: World) -> None:
    """The first answer waits in the engine's queue until the clock was looked at twice: its time would be over."""
    async with WatchedGateway(world.context.gateway.base_url, ADMIN) as gateway:

        async def queue(session: str, turn: int) -> None:
            while turn == 1 and gateway.looks < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            world.engine.timing = {"total_seconds": 1e-3, "queue_seconds": 0.0}

        world.engine.on_turn = queue
        outcome = await world.play(context=replace(world.context, gateway=gateway, timeout_s=1.0))
    assert outcome.solved and outcome.result is not None and outcome.result.stop == "done"
    key = world.row().submission_key
    assert key is not None and load_hand_in(world.context.objects, key).seconds < 1.0 <= gateway.looks


class Door:
    """Forwards connections to the gateway. While it is closed, nobody can reach the gateway."""

    def __init__(self, url: str) -> None:
        self._target = url.rpartition("/")[2].split(":")
        self._port = unused_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self._writers: set[asyncio.StreamWriter] = set()

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._forward, "127.0.0.1", self._port)

    def close(self) -> None:
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_connection(*self._target)
        self._writers |= {writer, inner_writer}
        if not self._server.is_serving():  # it was closed meanwhile
            self.close()
        await asyncio.gather(self._copy(reader, inner_writer), self._copy(inner_reader, writer))

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
        writer.close()


async def test_time_without_a_gateway_is_not_the_episodes(world: World) -> None:
    """The gateway is away for longer than the limit, while the first answer is sampled."""
    door = Door(world.context.gateway.base_url)
    await door.open()
    async with GatewayClient(door.url, ADMIN) as gateway:

        async def restart(session: str, turn: int) -> None:
            if turn == 1 and not gateway.away_seconds():
                door.close()
                while gateway.away_seconds() < 2.5:  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
                await door.open()

        world.engine.on_turn = restart
        outcome = await world.play(context=replace(world.context, gateway=gateway, timeout_s=2.0))
    door.close()
    assert outcome.solved and outcome.result is not None and outcome.result.stop == "done", outcome


async def test_rollouts_whose_gateway_is_elsewhere_now_are_tried_again_at_once(world: World) -> None:
    """All of them wait for an answer from its old address, where nobody listens any more. They are more than the
    failures in a row that stop a run."""
    doors = [Door(world.context.gateway.base_url) for _ in range(2)]
    for door in doors:
        await door.open()
    where = doors[0]
    asked: set[str] = set()

    async def move(session: str, turn: int) -> None:
        nonlocal where
        asked.add(session)
        while len(asked) < SIZE:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        if where is doors[0]:
            where = doors[1]
            doors[0].close()

    world.engine.on_turn = move
    async with GatewayClient(lambda: where.url, ADMIN) as gateway:
        await dispatch(world, context=replace(world.context, gateway=gateway), groups=1, give_up_after=2)
    doors[1].close()
    members = world.ledger.members([f"{RUN}-000000"])[f"{RUN}-000000"]
    assert sorted(row.id for row in members) == [f"{RUN}-000000-{member}_1" for member in range(SIZE)]
    reasons = [reason for _, reason in world.ledger.reasons()]
    assert reasons and all(f"is no longer at {doors[0].url}, " in str(reason) for reason in reasons), reasons


@dataclass
class QueueingHost(StandInHost):
    """A machine host whose first command waits for its turn until `turn` is true."""

    host: MachineHost
    turn: Callable[[], bool]

    async def create(self, *arguments: Any, **options: Any) -> Machine:
        machine = await self.host.create(*arguments, **options)
        exec = machine.exec

        async def queued(*arguments: Any, **options: Any) -> ExecResult:
            while not self.turn():  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            return await exec(*arguments, **options)

        machine.exec = queued  # type: ignore[method-assign]
        return machine

    async def close(self) -> None: ...


async def test_time_in_the_queue_of_a_machine_host_is_not_the_episodes(world: World) -> None:
    """A command may take 1 s of the 3 s. It waits for its turn until the clock was looked at twice."""
    async with WatchedGateway(world.context.gateway.base_url, ADMIN) as gateway:
        machines = QueueingHost(world.context.machines, lambda: gateway.looks >= 2)
        outcome = await world.play(context=replace(world.context, gateway=gateway, machines=machines, timeout_s=3.0))
    assert outcome.solved and outcome.result is not None and outcome.result.stop == "done", outcome


@dataclass
class SlowToPack(StandInHost):
    """A machine host whose machines take forever to pack their work directory."""

    host: MachineHost

    async def create(self, *arguments: Any, **options: Any) -> Machine:
        machine = await self.host.create(*arguments, **options)

        async def slow(*_: Any, **__: Any) -> bytes:
            await machine.exec(["sleep", "1000"], timeout_s=work_diff.PACK_S)
            raise OSError(errno.ETIMEDOUT, "too slow")

        machine.pack = slow  # type: ignore[method-assign]
        return machine

    async def close(self) -> None: ...


async def test_a_work_directory_that_takes_too_long_to_pack_is_refused(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent can make it slow, with many sparse files for example. That must not get it a fresh attempt."""
    monkeypatch.setattr(rollout, "GRACE_S", 2.0)
    monkeypatch.setattr(work_diff, "PACK_S", 2.0)
    context = replace(world.context, machines=SlowToPack(world.context.machines))
    outcome = await world.play(make_task(submission=WholeDiff()), context=context)
    assert outcome.reward is not None and outcome.reward.value == 0.0, outcome
    assert "too slow" in str(outcome.reward.evidence)
