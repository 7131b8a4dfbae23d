"""[machine] kind = "firecracker": boots one template per image, and restores every machine from its files. asyncio."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import Field

from rollmill.errors import MachineError
from rollmill.machines.agent_machine import AgentMachineConfig
from rollmill.machines.firecracker import reaper
from rollmill.machines.firecracker.launch import FirecrackerParts, find_parts, plain_kernel
from rollmill.machines.firecracker.vm import FirecrackerVm, SavedFiles
from rollmill.machines.images import services
from rollmill.machines.images.image import Image, obtain_image
from rollmill.machines.machine import USERS, Capabilities, Snapshot
from rollmill.machines.qemu import initramfs
from rollmill.machines.qemu.host import limits_of, measure_slowdown, warm_up
from rollmill.machines.qemu.machine import QemuMachine

_BOOT_S = 20.0
_LONGEST = 60  # of the path of a socket the kernel takes 107 bytes


class FirecrackerConfig(AgentMachineConfig):
    memory_mb: int = Field(
        default=256, ge=192, description="Memory of one machine in MiB, for its kernel, processes and files together."
    )
    kernel: str | None = Field(
        None,
        description="Path of a guest kernel with vsock built in. Not set: the one of `rollmill machines setup`.",
    )
    directory: str | None = Field(
        None,
        description="Directory for jails and saved guests; each template takes `memory_mb` there. Not set: a directory "
        "below that of temporary files.",
    )


@dataclass(frozen=True)
class Template:
    parts: FirecrackerParts
    saved: SavedFiles
    capabilities: Capabilities


class FirecrackerHost:
    """One per event loop. `close` ends all processes; if this process is killed, reaper.py does."""

    def __init__(self, config: FirecrackerConfig | None = None) -> None:
        self.config = config or FirecrackerConfig()
        self._templates: dict[tuple[str | None, str | None], asyncio.Task[Template]] = {}
        self._running: set[FirecrackerVm] = set()
        self._starting = asyncio.Semaphore(2 * (os.cpu_count() or 1))
        self._directory: Path | None = None
        self._lock = -1  # an open file, while there is a directory
        self._reaper: subprocess.Popen[bytes] | None = None

    async def create(
        self, image: str, files: Mapping[str, bytes] | None = None, *, snapshot: Snapshot | None = None
    ) -> QemuMachine:
        loaded = await obtain_image(image, self.config)
        template = await self._template(loaded)
        saved = template.saved if snapshot is None else _state_of(snapshot)
        async with self._starting:
            vm = await FirecrackerVm.restore_files(template.parts, self._place(), saved)
        self._running.add(vm)
        machine = self._machine(loaded, vm, template.capabilities, begun=snapshot is not None)
        wanted = {**(loaded.files if snapshot is None else {}), **(files or {})}
        return await machine.begin(wanted, trusted=snapshot is None)

    async def slowdown(self, image: str) -> float:
        return (await self._template(await obtain_image(image, self.config))).capabilities.slowdown

    async def end(self, vm: FirecrackerVm) -> int:
        code = await vm.end()
        self._running.discard(vm)
        return code

    async def release(self, snapshot: Snapshot) -> None:
        _state_of(snapshot).close()

    async def close(self) -> None:
        """End all machines and delete their files."""
        for task in self._templates.values():
            task.cancel()
        if self._templates:
            await asyncio.wait(self._templates.values())
        self._templates.clear()
        for vm in list(self._running):
            await self.end(vm)
        if self._directory is not None:
            assert self._reaper is not None
            await asyncio.to_thread(self._reaper.communicate)  # it deletes the directory, unless it was killed
            await asyncio.to_thread(shutil.rmtree, self._directory, True)
            os.close(self._lock)
            self._directory = self._reaper = None

    async def _template(self, image: Image) -> Template:
        image.check_programs("firecracker")
        key = (image.packages, image.digest if image.services else None)
        task = self._templates.get(key)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = self._templates[key] = asyncio.create_task(self._make_template(image))
        return await asyncio.shield(task)

    async def _make_template(self, image: Image) -> Template:
        parts = find_parts(self.config.kernel)
        place = Path(tempfile.mkdtemp(prefix="boot-", dir=self._place()))
        try:
            kernel, initrd = place / "kernel", place / "initrd"
            kernel.write_bytes(await asyncio.to_thread(lambda: plain_kernel(parts.guest.kernel.read_bytes())))
            with initrd.open("w+b") as file:
                extra = [path for service in image.services for path in service.files]
                limits = limits_of(self.config)
                await asyncio.to_thread(
                    lambda: initramfs.build(parts.guest, limits, image.packages, file, extra, over_vsock=True)
                )
            for path in (kernel, initrd):
                path.chmod(0o444)
            vm = await FirecrackerVm.boot_files(parts, self._place(), kernel, initrd, self.config.memory_mb, _BOOT_S)
        finally:
            shutil.rmtree(place, ignore_errors=True)
        return await self._save_template(parts, image, vm)

    async def _save_template(self, parts: FirecrackerParts, image: Image, vm: FirecrackerVm) -> Template:
        self._running.add(vm)
        arch = parts.guest.architecture.name
        able = Capabilities(kernel="own", snapshot="full", pause=True, listen=True, architecture=arch, users=USERS)
        machine = self._machine(image, vm, able)
        try:
            async with asyncio.timeout(_BOOT_S):
                await vm.ask_init({"op": "ping"}, within_s=_BOOT_S)
                await machine.exec(["true"], timeout_s=_BOOT_S)
                able = replace(able, slowdown=await measure_slowdown(machine, _BOOT_S))
            machine.capabilities = able
            if image.services:
                await services.begin(machine, image.services, image.services_state(), warm=True)
            async with asyncio.timeout(_BOOT_S):
                await warm_up(machine)
            saved = await vm.save()
        except BaseException as error:
            failure = await vm.failed(error)
            self._running.discard(vm)
            raise failure from error
        self._running.discard(vm)
        return Template(parts, saved, able)

    def _machine(self, image: Image, vm: FirecrackerVm, able: Capabilities, *, begun: bool = False) -> QemuMachine:
        host: Any = self  # it has what a QemuHost has for its machines: create, end, release
        return QemuMachine(host, image, vm, able, begun=begun)

    def _place(self) -> Path:
        if self._directory is None:
            directory, self._lock = reaper.claim(self.config.directory)
            self._reaper = reaper.watch(directory)
            self._directory = directory
            if len(str(self._directory)) > _LONGEST:
                raise MachineError(f"{self._directory} is too long for sockets in it", hint="set `machine.directory`")
            self._directory.chmod(0o755)  # jailed processes are other users
        return self._directory


def _state_of(snapshot: Snapshot) -> SavedFiles:
    if not isinstance(snapshot.state, SavedFiles):
        raise MachineError("this snapshot was not made by a Firecracker machine of this process")
    return snapshot.state
