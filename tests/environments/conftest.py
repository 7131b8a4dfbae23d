"""Real machines for the tests of environments. One machine host serves a module, so its tests share one event loop:

pytestmark = pytest.mark.asyncio(loop_scope="module")
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping

import pytest
import pytest_asyncio

from rollmill.environments.machines.images import BUILT_IN
from rollmill.environments.machines.namespace.client import NamespaceConfig, NamespaceHost, NamespaceMachine
from rollmill.errors import MachineError


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def host() -> AsyncIterator[NamespaceHost]:
    host = NamespaceHost(NamespaceConfig(memory_mb=128, disk_mb=16, processes=32))
    try:
        await host.start()
    except MachineError as error:
        if error.message.startswith("cannot enter namespaces"):
            pytest.skip(str(error))
        raise
    yield host
    await host.close()


@pytest_asyncio.fixture(loop_scope="module")
async def machine(host: NamespaceHost) -> AsyncIterator[NamespaceMachine]:
    machine = await host.create(BUILT_IN)
    yield machine
    await machine.close()


async def run_python(
    machine: NamespaceMachine, program: str, *, timeout_s: float = 20.0, env: Mapping[str, str] | None = None
) -> str:
    """What a program printed; it must have ended well."""
    result = await machine.exec(["python", "-c", program], timeout_s=timeout_s, env=env)
    assert result.exit_code == 0, result
    return result.output.decode().strip()
