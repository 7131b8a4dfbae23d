"""Tries a kind of machine on this host: start, exec, snapshot, restore. Nothing else shows that it works."""

from __future__ import annotations

import time
from dataclasses import dataclass

from rollmill.errors import MachineError
from rollmill.machines.images.image import BUILT_IN
from rollmill.machines.machine import Capabilities, MachineHost, release


@dataclass(frozen=True)
class Probed:
    capabilities: Capabilities
    start_s: float  # until the first command of a machine had ended, in a host that has started one before
    restore_s: float  # the same, of a machine that is restored from a snapshot
    why_no_kvm: str | None = None  # of a virtual machine that could have used it


async def probe(host: MachineHost, image: str = BUILT_IN) -> Probed:
    """MachineError says what does not work."""
    first = await host.create(image)  # may boot a template, or start a process
    await first.close()
    began = time.monotonic()
    machine = await host.create(image, {"kept": b"by the snapshot"})
    try:
        result = await machine.exec(["python", "-c", "print(6 * 7)"], timeout_s=60.0)
        start_s = time.monotonic() - began
        if result.output != b"42\n":
            raise MachineError(f"Python does not work in a machine: {result.output.decode('utf-8', 'replace')[-300:]}")
        snapshot = await machine.snapshot()
    finally:
        await machine.close()
    began = time.monotonic()
    restored = await host.create(image, snapshot=snapshot)
    try:
        result = await restored.exec(["cat", "kept"], timeout_s=60.0)
        restore_s = time.monotonic() - began
    finally:
        await restored.close()
        await release(host, snapshot)
    if result.output != b"by the snapshot":
        raise MachineError(f"a restored machine has lost its files: {result.output[-300:]!r}")
    return Probed(machine.capabilities, start_s, restore_s)
