"""What `benchmarks.async_speedup` simulates: slow tools."""

from __future__ import annotations

from pathlib import Path

from benchmarks.async_speedup import create, slow_tools
from rollmill.kinds import build
from rollmill.machines.images.image import BUILT_IN
from rollmill.machines.namespace.client import NamespaceHost


async def test_commands_of_slow_tools_wait_and_say_so(tmp_path: Path) -> None:
    run = create(tmp_path, *slow_tools([0.25]), "name=slow")
    assert run.config.harness is not None
    harness, host = build(run.config.harness), NamespaceHost()
    machine = await host.create(BUILT_IN)
    try:
        result = await harness.exec(machine, ("true",))
        assert result.exit_code == 0 and result.seconds > 0.25  # the time it waited, and its own
    finally:
        await machine.close()
        await host.close()
        await harness.close()
