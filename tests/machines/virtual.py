"""Virtual machines for tests: one booted template per module."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from rollmill.errors import MachineError
from rollmill.machines.qemu.host import QemuConfig, QemuHost, QemuMachine
from rollmill.machines.qemu.parts import find_parts

CONFIG = QemuConfig(memory_mb=256, disk_mb=16, processes=32)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def qemu_host() -> AsyncIterator[QemuHost]:
    """Skips where QEMU or its kernel is not installed, and nowhere else."""
    try:
        find_parts()
    except MachineError as error:
        pytest.skip(str(error))
    host = QemuHost(CONFIG)
    yield host
    await host.close()


async def run_python(machine: QemuMachine, program: str, *, timeout_s: float = 120.0) -> str:
    """The output of a program, which must exit with 0."""
    result = await machine.exec(["python", "-c", program], timeout_s=timeout_s)
    assert result.exit_code == 0, result
    return result.output.decode().strip()
