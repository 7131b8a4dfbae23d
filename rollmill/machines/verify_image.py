"""Commands that must pass in a machine of an image before the image gets its name."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence

from rollmill.errors import TaskError
from rollmill.kinds import build
from rollmill.machines.images import image as images
from rollmill.machines.images.build import remove_image
from rollmill.machines.images.image import ImageRecord
from rollmill.machines.machine import Machine, MachineHost, MachineSection
from rollmill.machines.probe import probe

_VERIFY_S = 600.0
_ROOM_MB = 1024  # virtual machines keep an operating system of their own in memory


def build_verified(name: str, commands: Sequence[str], kind: str, make: Callable[[str], ImageRecord]) -> ImageRecord:
    """Build under another name, run the commands, and only then give the image its name."""
    unverified = f"{name[:40]}.unverified-{os.getpid()}"
    record = make(unverified)
    try:
        asyncio.run(_verify(unverified, commands, kind))
        record = record.model_copy(update={"verified": list(commands)})
        images.keep_record(name, record)
    finally:
        remove_image(unverified)
    return record


async def _verify(name: str, commands: Sequence[str], kind: str) -> None:
    own_system = images.load_image(name, None).root is not None
    room = {"memory_mb": _ROOM_MB} if own_system and kind == "qemu" else {}
    host: MachineHost = build(MachineSection.model_validate({"kind": kind, **room}))
    try:
        if own_system:  # nobody has run its programs yet: start, exec, save, restore
            await probe(host, name)
        machine = await host.create(name)
        await verify(machine, commands)
        await machine.close()
    finally:
        await host.close()


async def verify(machine: Machine, commands: Sequence[str]) -> None:
    """Run commands one after the other in a fresh machine. TaskError names the first that fails, and what it said."""
    for command in commands:
        limit = _VERIFY_S * machine.capabilities.slowdown
        result = await machine.exec(["sh", "-c", command], timeout_s=limit)
        if result.exit_code != 0:
            why = f"stopped by the limit {result.stopped!r}" if result.stopped else f"exit code {result.exit_code}"
            said = result.output.decode("utf-8", "replace")[-1500:].rstrip()
            raise TaskError(
                f"the image is not verified: {command!r} ended with {why}\n{said}".rstrip(),
                hint="change what the image is built from, or --verify; the name keeps what it had",
            )
