"""Episodes in virtual machines: they are graded on clean ones, and only their host's failures are no reward."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from rollmill.chat.tokenizer import Tokenizer
from rollmill.kinds import build
from rollmill.machines.machine import MachineSection
from rollmill.machines.qemu.host import QemuHost
from tests.machines.virtual import qemu_host  # noqa: F401
from tests.rollouts.world import SOLUTION, World, make_task, open_world

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]


@pytest_asyncio.fixture(loop_scope="module")
async def virtual_world(
    tmp_path: Path,
    tokenizer: Tokenizer,
    qemu_host: QemuHost,  # noqa: F811
) -> AsyncIterator[World]:
    async with open_world(tmp_path, tokenizer, qemu_host) as world:
        yield world


async def test_one_line_chooses_virtual_machines() -> None:
    host = build(MachineSection._read({"kind": "qemu", "memory_mb": 320}))
    assert isinstance(host, QemuHost) and host.config.memory_mb == 320
    await host.close()


async def test_right_and_wrong_episodes_are_graded_on_clean_machines(virtual_world: World) -> None:
    world = virtual_world
    world.says(SOLUTION[0], *SOLUTION)  # the same edit twice: the first machine keeps what it was told
    right, wrong = await asyncio.gather(world.play(make_task(0), "t0"), world.play(make_task(1), "t1"))
    assert right.solved and right.result is not None and right.result.stop == "done"
    assert wrong.reward is not None and wrong.reward.value == 0.0
    assert world.tool_results("t0") == ["ok", "ok", "ok"]


async def test_a_hostile_episode_costs_only_itself(virtual_world: World) -> None:
    """It fills its memory, and its tests never end. It is graded, and the next one is not disturbed."""
    world = virtual_world
    hostile = "x = [b'x' * (1 << 20) for _ in range(1000)]\nwhile True: pass"
    world.says(("write", {"path": "main.py", "content": hostile}), ("run", {}), ("done", {}))
    outcome = await world.play(make_task(0))
    assert outcome.reward is not None and outcome.reward.value == 0.0
    world.says(*SOLUTION)
    assert (await world.play(make_task(0), "t1")).solved
