"""Creates virtual machines: boots one template per image, and restores every machine from it. asyncio."""

from __future__ import annotations

import asyncio
import inspect
import os
import platform
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import Field

from rollmill.errors import MachineError, TaskError
from rollmill.machines.agent_machine import AgentMachineConfig
from rollmill.machines.images import services
from rollmill.machines.images.image import Image, obtain_image
from rollmill.machines.images.os_layer import python_version
from rollmill.machines.machine import USERS, Capabilities, MachineHost, Snapshot
from rollmill.machines.qemu import initramfs, ram
from rollmill.machines.qemu.launch import Accelerator, Shape, why_no_kvm
from rollmill.machines.qemu.machine import QemuMachine, state_of
from rollmill.machines.qemu.parts import find_parts
from rollmill.machines.qemu.vm import Saved, StateRefused, Vm

_BOOT_S: dict[Accelerator, float] = {"kvm": 10.0, "tcg": 180.0}  # until the first command has run
_MOST_SLOWDOWN = 100.0
_WARM_UPS = 12
_SETTLE_S = 1.0
_KERNEL_MB = 96  # what a guest needs beside its files to boot
_MEASUREMENTS, _LOOPS = 3, 2  # of the slowdown


class QemuConfig(AgentMachineConfig):
    memory_mb: int = Field(
        default=256, ge=192, description="Memory of one machine in MiB, for its kernel, processes and files together."
    )
    accelerator: Accelerator | None = Field(
        None,
        description="`kvm` or `tcg` (software). Not set: KVM where a machine boots with it in time, else software.",
    )


@dataclass(frozen=True)
class Template:
    """A guest that has booted and run a command, saved."""

    shape: Shape
    saved: Saved
    capabilities: Capabilities
    boot_s: float  # until its agent answered


class QemuHost(MachineHost):
    """Creates virtual machines. The first one of an image boots its template, which takes seconds. One per event loop.

    All templates and machines are held by this process: when it ends, none is left.
    """

    def __init__(self, config: QemuConfig | None = None) -> None:
        self.config = config or QemuConfig()
        # by packages, operating system and services
        self._templates: dict[tuple[str | None, str | None, str | None], asyncio.Task[Template]] = {}
        self._running: set[Vm] = set()
        self.why_no_kvm: str | None = None  # it is not tried again for the next template
        self._starting = asyncio.Semaphore(os.cpu_count() or 1)  # more at once only slow each other down

    async def create(
        self, image: str, files: Mapping[str, bytes] | None = None, *, snapshot: Snapshot | None = None
    ) -> QemuMachine:
        loaded = await obtain_image(image, self.config)
        template = await self.template(loaded)
        saved = template.saved if snapshot is None else state_of(snapshot)
        async with self._starting:
            try:
                vm = await Vm.restore(template.shape, saved)
            except StateRefused as error:
                if snapshot is None:
                    raise
                return QemuMachine(self, loaded, error.vm, template.capabilities, begun=True)
        self._running.add(vm)
        machine = QemuMachine(self, loaded, vm, template.capabilities, begun=snapshot is not None)
        wanted = {**(loaded.files if snapshot is None else {}), **(files or {})}
        return await machine.begin(wanted, trusted=snapshot is None)

    async def slowdown(self, image: str) -> float:
        loaded = await obtain_image(image, self.config)
        return (await self.template(loaded)).capabilities.slowdown

    async def template(self, image: Image) -> Template:
        """The template of an image; booted on first use. MachineError says what this host lacks."""
        key = (image.packages, image.root, image.digest if image.services else None)
        task = self._templates.get(key)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = self._templates[key] = asyncio.create_task(self._make_template(image))
        return await asyncio.shield(task)  # of several that wait, one may be cancelled

    async def end(self, vm: Vm) -> int:
        """End a machine. Returns QEMU's exit code."""
        code = await vm.end()
        self._running.discard(vm)  # not before: if the caller is cancelled, `close` ends it
        return code

    async def release(self, snapshot: Snapshot) -> None:
        state_of(snapshot).close()

    async def close(self) -> None:
        """End all machines."""
        for task in self._templates.values():
            task.cancel()
        if self._templates:
            await asyncio.wait(self._templates.values())
        for task in self._templates.values():
            if not task.cancelled() and task.exception() is None:
                task.result().saved.close()
        self._templates.clear()
        for vm in list(self._running):
            await self.end(vm)

    async def _make_template(self, image: Image) -> Template:
        _check_packages(image)
        parts = find_parts(image.architecture)
        own = parts.architecture.name == platform.machine()
        chosen: Accelerator | None = self.config.accelerator if own else "tcg"  # KVM runs this host's architecture only
        if chosen is not None:
            return await self._boot(Shape(parts, chosen, self.config.memory_mb), image)
        self.why_no_kvm = self.why_no_kvm or why_no_kvm()
        if self.why_no_kvm is None:
            try:
                return await self._boot(Shape(parts, "kvm", self.config.memory_mb), image)
            except MachineError as error:
                self.why_no_kvm = f"no guest boots with KVM within {_BOOT_S['kvm']:.0f} s: {error.message}"
        return await self._boot(Shape(parts, "tcg", self.config.memory_mb), image)

    async def _boot(self, shape: Shape, image: Image) -> Template:
        began = time.monotonic()
        with open(ram.create(0, "initramfs"), "w+b") as file:
            extra = [path for service in image.services for path in service.files]
            limits = limits_of(self.config)
            size = await asyncio.to_thread(
                initramfs.build, shape.parts, limits, image.packages, file, extra, tree=image.root
            )
            file.flush()
            _check_room(image, size + os.fstat(file.fileno()).st_size, shape.memory_mb)
            vm = await Vm.boot(shape, file)
        self._running.add(vm)
        limit_s = _BOOT_S[shape.accelerator]
        arch = shape.parts.architecture.name
        basic = Capabilities(kernel="own", snapshot="full", pause=True, listen=True, architecture=arch, users=USERS)
        machine = QemuMachine(self, image, vm, basic)
        try:
            async with asyncio.timeout(limit_s):
                await vm.ask_init({"op": "ping"}, within_s=limit_s)
                await machine.exec(["true"], timeout_s=limit_s)
                boot_s = time.monotonic() - began
                slowdown = await measure_slowdown(machine, limit_s)
            if image.services:  # they have time limits of their own
                machine.capabilities = replace(basic, slowdown=slowdown)
                await services.begin(machine, image.services, image.services_state(), warm=True)
            async with asyncio.timeout(limit_s):
                await warm_up(machine)
            saved = await vm.save()
        except BaseException as error:
            failure = await vm.failed(error)
            self._running.discard(vm)
            raise failure from error
        self._running.discard(vm)
        vm.agent.close()
        return Template(shape, saved, replace(basic, slowdown=slowdown), boot_s)


def _check_packages(image: Image) -> None:
    """TaskError if the image has packages for this host's Python, and an operating system with another one."""
    if image.root is None or image.packages is None or image.architecture != platform.machine():
        return
    version = python_version(Path(image.root))
    if version != sys.version_info[:2]:
        raise TaskError(
            f"the packages of image {image.name!r} are for Python {sys.version_info[0]}.{sys.version_info[1]}, and its "
            f"operating system has {version}",
            hint='use [machine] kind = "namespace", or a suite with the Python of this host',
        )


def _check_room(image: Image, size: int, memory_mb: int) -> None:
    """TaskError if a guest has no room for its own files and their archive, which it unpacks when it boots."""
    if image.root is not None and (needed := (size >> 20) + _KERNEL_MB) > memory_mb:
        raise TaskError(
            f"a virtual machine of image {image.name!r} keeps its programs in memory, and needs {needed} MiB to boot",
            hint=f"machine.memory_mb = {needed + 128}, or fewer packages in the image",
        )


def limits_of(config: AgentMachineConfig) -> dict[str, int]:
    """What a guest's init limits its agent to."""
    return {
        "memory": config.memory_mb << 20,
        "disk": config.disk_mb << 20,
        "processes": config.processes,
        "open_files": config.open_files,
    }


async def warm_up(machine: QemuMachine) -> None:
    """Do what every machine does first, so often that Python has specialised its code, and all that is lazy is done.

    What a machine runs for the first time, its QEMU translates: less code is a faster start.
    """
    for _ in range(_WARM_UPS):
        await machine.renew(trusted=True)
        await machine.write_all({})
        await machine.exec(["true"], timeout_s=60.0)
    await machine.prepare()
    await asyncio.sleep(_SETTLE_S)  # what the kernel put off
    await machine.renew(trusted=True)


async def measure_slowdown(machine: QemuMachine, limit_s: float) -> float:
    """How many times more CPU time Python takes in the guest than on this host.

    The clock of a guest goes on while other work has its processor, so only the CPU time of its QEMU tells. What a
    command costs beyond its loops is measured alone and taken off. The least of a few measurements each.
    """
    nothing_s = min([await _loops_cpu_s(machine, 0, limit_s) for _ in range(_MEASUREMENTS)])
    guest_s = min([await _loops_cpu_s(machine, _LOOPS, limit_s) for _ in range(_MEASUREMENTS)]) - nothing_s
    return min(max(1.0, guest_s / await asyncio.to_thread(_host_cpu_s)), _MOST_SLOWDOWN)


async def _loops_cpu_s(machine: QemuMachine, loops: int, limit_s: float) -> float:
    began_s = machine.vm.cpu_s()
    program = f"{inspect.getsource(run_loops)}print(run_loops({loops}))"
    result = await machine.exec(["python", "-c", program], timeout_s=limit_s)
    if result.output != b"%d\n" % run_loops(loops):
        raise MachineError(f"Python does not work in a guest: {result.output[-300:]!r}")
    return machine.vm.cpu_s() - began_s


def _host_cpu_s() -> float:
    measured = []
    for _ in range(_MEASUREMENTS):
        began_s = time.thread_time()
        run_loops(_LOOPS)
        measured.append(time.thread_time() - began_s)
    return min(measured)


def run_loops(count: int) -> int:
    """Runs in the guest too."""
    total = 0
    for number in range(50000 * count):
        total += number * number % 7
    return total
