"""No machine takes the processor from the commands of another one: limits count what a machine could run."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from rollmill.errors import Overcommitted
from rollmill.machines.images.image import BUILT_IN
from rollmill.machines.machine import Machine
from rollmill.machines.namespace.client import NamespaceHost
from rollmill.machines.pool import Pool
from tests.machines.test_processes import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

_PROCESSOR = min(os.sched_getaffinity(0))  # the one that all want
# each in a session of its own: some kernels share the processor by session
_BURN = f"""
for i in $(seq 24); do setsid taskset -c {_PROCESSOR} sh -c "while :; do :; done" & done
echo burning
while :; do :; done
"""
_WORK = """
import os, time
os.sched_setaffinity(0, {PROCESSOR})
while time.process_time() < SECONDS: pass
print("done")
"""


async def burn(machine: Machine) -> None:
    process = await machine.start(["sh", "-c", _BURN])
    assert (await until(process, b"burning")).exit_code is None


@pytest_asyncio.fixture(loop_scope="module")
async def burning(any_host: NamespaceHost) -> AsyncIterator[NamespaceHost]:
    """A host with a machine whose processes keep the first processor busy."""
    machine = await any_host.create(BUILT_IN)
    await burn(machine)
    yield any_host
    await machine.close()


async def work(machine: Machine, seconds: float, timeout_s: float) -> tuple[str | None, bool, bytes]:
    program = _WORK.replace("SECONDS", str(seconds)).replace("PROCESSOR", str(_PROCESSOR))
    result = await machine.exec(["python", "-c", program], timeout_s=timeout_s)
    return result.stopped, result.starved, result.output


async def test_a_busy_neighbour_costs_a_command_none_of_its_time(burning: NamespaceHost) -> None:
    machine = await burning.create(BUILT_IN)
    assert await work(machine, 0.2, 1.5) == (None, False, b"done\n")
    await machine.close()


async def test_a_command_that_waits_for_nothing_ends_in_time_on_a_busy_host(burning: NamespaceHost) -> None:
    machine = await burning.create(BUILT_IN)
    slept = await machine.exec(["sleep", "600"], timeout_s=0.5)
    assert (slept.stopped, slept.starved) == ("time", False) and slept.seconds < 4
    await machine.close()


async def test_a_command_that_burns_its_own_time_is_no_victim(any_host: NamespaceHost) -> None:
    machine = await any_host.create(BUILT_IN)
    result = await machine.exec(["sh", "-c", _BURN], timeout_s=0.5)
    assert (result.stopped, result.starved) == ("time", False)
    await machine.close()


async def test_only_in_grading_a_starved_command_is_an_error_and_never_alone(bare_host: NamespaceHost) -> None:
    """Without control groups 25 busy processes leave a neighbour so little that it reaches the longest time."""
    pool = Pool(bare_host)
    burner = await pool.create(BUILT_IN)
    await burn(burner)
    machine = await pool.create(BUILT_IN)
    assert (await work(machine, 20.0, 0.25))[:2] == ("time", True)
    grading = await pool.grading().create(BUILT_IN)
    with pytest.raises(Overcommitted):
        await work(grading, 20.0, 0.25)
    async with pool.grading().turn(alone=True):
        alone = await pool.grading().create(BUILT_IN)
        assert (await work(alone, 20.0, 0.25))[0] == "time"
    await asyncio.gather(*(each.close() for each in (burner, machine, grading, alone)))
