"""Episodes go on from their last checkpoint: on another host of machines, or with another dispatcher."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from rollmill.machines.machine import Snapshot
from rollmill.machines.namespace.client import NamespaceHost
from rollmill.machines.remote.client import RemoteConfig, RemoteHost
from rollmill.rollouts import episode_checkpoint as checkpoint
from rollmill.rollouts.clock import Clock
from rollmill.rollouts.episode_checkpoint import EpisodeProgress
from rollmill.types import GroupState, TrajectoryState
from tests.machines.stand_ins import StandInHost
from tests.machines.test_remote import SERVE, _wait_until_served
from tests.processes import free_port
from tests.rollouts.test_dispatcher import SIZE, StandInGateway, make_dispatcher, stop, until
from tests.rollouts.world import RUN, SOLUTION, StandInLostGateway, World

pytestmark = pytest.mark.asyncio(loop_scope="module")
EDIT, TEST, DONE = SOLUTION


async def test_an_episode_goes_on_on_another_host_when_its_host_is_killed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLMILL_MACHINES_KEY", "a-key-of-the-service")
    ports = [free_port(), free_port()]
    arguments = [[sys.executable, "-c", SERVE, "machines", "serve", "--port", str(port)] for port in ports]
    hosts = {f"http://127.0.0.1:{port}": subprocess.Popen(each) for port, each in zip(ports, arguments, strict=True)}  # noqa: ASYNC220
    remote = RemoteHost(RemoteConfig(hosts=list(hosts), patience_s=20.0))
    asked: list[int] = []
    try:
        await asyncio.to_thread(_wait_until_served, ports)

        async def on_turn(_: str, turn: int) -> None:
            asked.append(turn)
            if asked == [1, 2]:  # the edit is in the machine; the test run that this answer asks for finds no host
                (machine,) = remote._machines.values()
                os.kill(hosts[machine.place.name].pid, signal.SIGKILL)

        world.engine.on_turn = on_turn
        world.says(EDIT, TEST, DONE)
        outcome = await world.play(context=replace(world.context, machines=remote, checkpoint_s=0.0))
        assert outcome.solved, outcome
        assert asked == [1, 2, 2, 3]  # turn 2 again, and not the edit
        assert world.row().state == TrajectoryState.graded
        assert checkpoint._key("t0") not in world.context.objects.list("checkpoints")
        assert remote._machines == {}
        # what was sampled before the loss is there; the answer that led nowhere is a branch of its own
        payload = world.context.trajectories.load("t0")
        assert len(payload.segments) == 2 and outcome.result is not None and outcome.result.tool_calls == 3

        # without checkpoints the same loss costs the episode
        asked.clear()
        outcome = await world.play(id="t1", context=replace(world.context, machines=remote))
        assert outcome.lost and world.row("t1").state == TrajectoryState.failed
    finally:
        world.engine.on_turn = None
        await remote.close()
        for process in hosts.values():
            process.kill()
            process.wait()


async def test_the_next_dispatcher_goes_on_where_the_last_one_died(world: World) -> None:
    asked: Counter[tuple[str, int]] = Counter()
    blocked = True

    async def on_turn(segment: str, turn: int) -> None:
        session = segment.rpartition(".")[0]
        asked[session, turn] += 1
        while blocked and turn == 2 and not session.endswith("-2"):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        while blocked and turn == 1 and session.endswith("-2"):  # noqa: ASYNC110  it has no checkpoint yet
            await asyncio.sleep(0.01)

    world.engine.on_turn = on_turn
    context = replace(world.context, checkpoint_s=0.0)
    dispatching = asyncio.create_task(make_dispatcher(world, context=context, total=1).run())
    await until(lambda: len(asked) == 2 * SIZE - 1)
    await stop(dispatching)
    blocked = False
    await_grading = asyncio.create_task(make_dispatcher(world, context=context, total=1).run())
    await until(lambda: await_grading.done() or len(world.ledger.groups(GroupState.waiting)) == 1)
    await stop(await_grading)
    world.engine.on_turn = None
    group = f"{RUN}-000000"
    ids = sorted(row.id for row in world.ledger.members([group])[group])
    assert ids == [f"{group}-0", f"{group}-1", f"{group}-2_1"]  # the last one began again
    assert all(world.row(id).state == TrajectoryState.graded for id in ids)
    assert [asked[id, 1] for id in ids] == [1, 1, 1]  # what was before the checkpoint was not asked again
    assert world.context.objects.list("checkpoints") == []


async def test_a_checkpoint_that_cannot_be_used_costs_nothing_but_itself(world: World, host: NamespaceHost) -> None:
    context = replace(world.context, checkpoint_s=0.0)
    for data in (b"", b"\0" * 8, b"\xff" * 40, (2).to_bytes(8) + b"{}" + b"no zstd"):
        world.context.objects.put("checkpoints/t0", data)
        assert await checkpoint.find(context, "t0") is None
    assert (await world.play(context=context)).solved

    class StaysHere(StandInHost):  # a kind of machine whose state cannot leave its host
        def __init__(self) -> None:
            self.host = host

    seen: list[Any] = []
    outcome = await world.play(id="t1", context=replace(context, machines=StaysHere()))
    assert outcome.solved and not seen and world.context.objects.list("checkpoints") == []

    class Full(StaysHere):  # its snapshots fail
        async def export(self, snapshot: Snapshot) -> Snapshot:
            seen.append(time.monotonic())
            raise OSError("no room")

    assert (await world.play(id="t2", context=replace(context, machines=Full()))).solved and len(seen) == 2


async def test_names_that_are_no_unicode_and_a_limit_while_it_is_stored(
    world: World, host: NamespaceHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = replace(world.context, checkpoint_s=0.0)
    machine = await host.create("host-python")
    clock = Clock(context.gateway, "t0", machine)
    monkeypatch.setattr(context.gateway, "waited", lambda _: asyncio.sleep(0.0, 0.0))  # there is no session
    progress = EpisodeProgress(context, "t0", machine, clock, 0)
    await progress.reached({"cwd": "/work/\udcff", "n": 1})  # mkdir $'\xff'; cd $'\xff'
    found = await checkpoint.find(context, "t0")
    assert found is not None and found.harness == {"cwd": "/work/\udcff", "n": 1}
    await progress.reached({"cwd": object()})  # kept by nobody, and no error
    assert await checkpoint.find(context, "t0") == found

    put, go = context.objects.put, threading.Event()
    monkeypatch.setattr(context.objects, "put", lambda *arguments: go.wait(10.0) and put(*arguments))
    taking = asyncio.create_task(progress.reached({"n": 2}))
    await asyncio.sleep(0.5)
    taking.cancel()
    await asyncio.sleep(0.1)
    assert not taking.done()  # else the checkpoint would be stored after it was forgotten
    go.set()
    await asyncio.wait([taking])
    assert taking.cancelled()
    await checkpoint.forget(context, "t0")
    assert context.objects.list("checkpoints") == []
    await machine.close()


async def test_nothing_is_left_of_episodes_that_are_over(world: World) -> None:
    context = replace(world.context, checkpoint_s=0.0)
    async with StandInGateway(world.context.gateway.base_url, asks=False) as first:
        dispatching = asyncio.create_task(
            make_dispatcher(world, context=replace(context, gateway=first), total=1).run()
        )
        await until(lambda: first.waiting == SIZE)
        await stop(dispatching)
    ids = [f"{RUN}-000000-{member}" for member in range(SIZE)]
    assert context.objects.list("checkpoints") == [f"checkpoints/{id}" for id in ids]
    world.context.trajectories.fail(ids[0], "killed before the checkpoint was forgotten")
    # sealed by a gateway that cannot say so: what was handed in is graded, and no episode is played again
    async with StandInLostGateway(world.context.gateway.base_url) as second:
        again = asyncio.create_task(make_dispatcher(world, context=replace(context, gateway=second), total=1).run())
        await until(lambda: again.done() or len(world.ledger.groups(GroupState.waiting)) == 1)
        await stop(again)
    assert [world.row(id).state for id in ids[1:]] == [TrajectoryState.graded] * (SIZE - 1)
    assert context.objects.list("checkpoints") == []
