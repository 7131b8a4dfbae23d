"""Finishes images in machines of them: their services are prepared, and commands must pass before an image is named."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rollmill.errors import TaskError
from rollmill.kinds import build
from rollmill.machines.images import image as images
from rollmill.machines.images import layers
from rollmill.machines.images.build import remove_image
from rollmill.machines.images.image import ImageRecord, LayerRecord
from rollmill.machines.images.services import STATE, RunningServices, Service
from rollmill.machines.machine import Machine, MachineHost, MachineSection
from rollmill.machines.probe import probe

_VERIFY_S = 600.0
_ROOM_MB = 1024  # virtual machines keep an operating system of their own in memory
_ROOM = {"kind": "namespace", "memory_mb": 2048, "disk_mb": 1024, "processes": 256, "open_files": 1024}


@contextlib.contextmanager
def other_name(name: str) -> Iterator[str]:
    """A name for an image until it is finished. It goes at the end of the block."""
    unfinished = f"{name[:40]}.unfinished-{secrets.token_hex(4)}"
    try:
        yield unfinished
    finally:
        with contextlib.suppress(TaskError):  # it was never built
            remove_image(unfinished)


def build_with_services(name: str, services: Sequence[Service], make: Callable[[str], ImageRecord]) -> ImageRecord:
    """Build under another name, prepare the services in a machine of that, and name the result."""
    with other_name(name) as base:
        record = make(base)
        state = asyncio.run(_prepare(base, services))
        root = images.images_directory()
        with tempfile.TemporaryDirectory(prefix=".building-", dir=root, ignore_cleanup_errors=True) as temporary:
            place = Path(temporary, "services")
            place.mkdir()
            (place / STATE).write_bytes(state)
            layer = layers.keep(place, root)
        parts = [*record.layers, LayerRecord(place="services", digest=layer.digest, bytes=layer.bytes)]
        facts = {"layers": parts, "services": list(services), "bytes": record.bytes + layer.bytes}
        record = record.model_copy(update={**facts, "digest": images.digest_of(parts, services)})
        images.keep_record(name, record)
    return record


def build_verified(name: str, commands: Sequence[str], kind: str, make: Callable[[str], ImageRecord]) -> ImageRecord:
    """Build under another name, run the commands, and only then give the image its name."""
    with other_name(name) as unverified:
        record = make(unverified)
        asyncio.run(_verify(unverified, commands, kind))
        record = record.model_copy(update={"verified": list(commands)})
        images.keep_record(name, record)
    return record


def _host(section: dict[str, Any]) -> MachineHost:
    host: MachineHost = build(MachineSection.model_validate(section))
    return host


async def _prepare(image: str, services: Sequence[Service]) -> bytes:
    host = _host(_ROOM)
    try:
        running = RunningServices(await host.create(image), services)
        await running.prepare()
        await running.start(warm=True)
        await running.stop(within_s=120.0)  # no agent has worked: the files must be whole
        return await running.pack()
    finally:
        await host.close()


async def _verify(name: str, commands: Sequence[str], kind: str) -> None:
    own_system = images.load_image(name, None).root is not None
    room = {"memory_mb": _ROOM_MB} if own_system and kind == "qemu" else {}
    host = _host({"kind": kind, **room})
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
