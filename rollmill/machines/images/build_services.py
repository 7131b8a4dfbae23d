"""Prepares the services of an image in a machine of it: their files become a layer (services.py)."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from rollmill.kinds import build
from rollmill.machines.images import image as images
from rollmill.machines.images import layers
from rollmill.machines.images.build import remove_image
from rollmill.machines.images.image import ImageRecord, LayerRecord
from rollmill.machines.images.services import STATE, RunningServices, Service
from rollmill.machines.machine import MachineHost, MachineSection

_ROOM = {"kind": "namespace", "memory_mb": 2048, "disk_mb": 1024, "processes": 256, "open_files": 1024}


def build_with_services(name: str, services: Sequence[Service], make: Callable[[str], ImageRecord]) -> ImageRecord:
    """Build under another name, prepare the services in a machine of that, and name the result."""
    base = f"{name[:40]}.base-{os.getpid()}"
    record = make(base)
    try:
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
    finally:
        remove_image(base)
    return record


async def _prepare(image: str, services: Sequence[Service]) -> bytes:
    host: MachineHost = build(MachineSection.model_validate(_ROOM))
    try:
        running = RunningServices(await host.create(image), services)
        await running.prepare()
        await running.start(warm=True)
        await running.stop(within_s=120.0)  # no agent has worked: the files must be whole
        return await running.pack()
    finally:
        await host.close()
