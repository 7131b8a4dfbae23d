"""Virtual machines as their users see them, and their host: it boots one template per image, and restores every machine
from it. asyncio."""

from __future__ import annotations

import asyncio
import errno
import os
import platform
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from pydantic import Field

from rollmill.errors import MachineError, TaskError
from rollmill.machines.agent_machine import AgentMachine, AgentMachineConfig, Ended
from rollmill.machines.images import services
from rollmill.machines.images.image import Image, hold_images, obtain_image
from rollmill.machines.images.os_layer import python_version
from rollmill.machines.machine import USERS, Capabilities, MachineHost, Snapshot
from rollmill.machines.qemu import disks, initramfs, ram
from rollmill.machines.qemu.init import run_loops
from rollmill.machines.qemu.launch import Accelerator, Shape, why_no_kvm
from rollmill.machines.qemu.parts import SETUP, find_parts, has_disks
from rollmill.machines.qemu.ports import Ports
from rollmill.machines.qemu.vm import END_S, FROM_OUTSIDE, NoAnswer, Saved, StateRefused, Vm

_BOOT_S: dict[Accelerator, float] = {"kvm": 10.0, "tcg": 180.0}  # until the first command has run
_MOST_SLOWDOWN = 100.0
_WARM_UPS = 12
_SETTLE_S = 1.0
_KERNEL_MB = 96  # what a guest needs beside its files to boot
_MEASUREMENTS, _LOOPS = 3, 2  # of the slowdown


class QemuConfig(AgentMachineConfig):
    memory_mb: int = Field(
        default=2048,
        ge=192,
        description="Memory of one machine in MiB, for its kernel, processes and files together. Of an OCI image the "
        "files are on disks.",
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
        # by packages, operating system, and services or OCI image
        self._templates: dict[tuple[str | None, str | None, str | None], asyncio.Task[Template]] = {}
        self._running: set[Vm] = set()
        self._holding: int | None = None  # an open file, while machines use an OCI image
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
        key = (image.packages, image.root, image.digest if image.services or image.whole else None)
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
        holding, self._holding = self._holding, None
        if holding is not None:
            os.close(holding)

    async def _make_template(self, image: Image) -> Template:
        _check_packages(image)
        parts = find_parts(image.architecture, disks=image.whole is not None)
        own = parts.architecture.name == platform.machine()
        chosen: Accelerator | None = self.config.accelerator if own else "tcg"  # KVM runs this host's architecture only
        shape = Shape(parts, chosen or "tcg", self.config.memory_mb, await self._image_disk(image))
        if chosen is not None:
            return await self._boot(shape, image)
        self.why_no_kvm = self.why_no_kvm or why_no_kvm()
        if self.why_no_kvm is None:
            try:
                return await self._boot(shape._replace(accelerator="kvm"), image)
            except MachineError as error:
                self.why_no_kvm = f"no guest boots with KVM within {_BOOT_S['kvm']:.0f} s: {error.message}"
        return await self._boot(shape, image)

    async def _image_disk(self, image: Image) -> Path | None:
        if image.whole is None:
            return None
        if self._holding is None:
            self._holding = await asyncio.to_thread(hold_images)
        return await asyncio.to_thread(disks.image_disk, image)

    async def _boot(self, shape: Shape, image: Image) -> Template:
        began = time.monotonic()
        with open(ram.create(0, "initramfs"), "w+b") as file:
            extra = [path for service in image.services for path in service.files]
            given = (shape.parts, self.config.limits(), image.packages, file, extra)
            size = await asyncio.to_thread(initramfs.build, *given, tree=image.root, whole=image.whole)
            file.flush()
            _check_room(image, size + os.fstat(file.fileno()).st_size, shape.memory_mb)
            disk = None if shape.image_disk is None else disks.make_own(shape.image_disk.parent, self.config.disk_mb)
            vm = await Vm.boot(shape, file, disk)
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
                slowdown = await measure_slowdown(vm, limit_s)
            if image.services:  # they have time limits of their own
                machine.capabilities = replace(basic, slowdown=slowdown)
                await services.begin(machine, image.services, image.services_state(), warm=True)
            async with asyncio.timeout(limit_s):
                await warm_up(machine)
            saved = await vm.save()
        except BaseException as error:
            failure = await vm.failed(error)
            if image.whole and isinstance(failure, MachineError) and not has_disks(shape.parts):
                failure.hint = SETUP
            self._running.discard(vm)
            raise failure from error
        self._running.discard(vm)
        vm.agent.close()
        return Template(shape, saved, replace(basic, slowdown=slowdown), boot_s)


class QemuMachine(AgentMachine):
    """One machine. Requests are answered one after the other; callers may share it."""

    _grace_s = 60.0  # emulation is slow, and more so while many machines start

    def __init__(
        self, host: QemuHost, image: Image, vm: Vm, capabilities: Capabilities, *, begun: bool = False
    ) -> None:
        """`begun`: it has the state of a machine whose commands may have done anything to it."""
        super().__init__(image.reference, vm.agent, f"in process {vm.process.pid}")
        self._begun = begun
        self._ruined = vm.ended  # its state could not be loaded
        self._proven = not vm.template
        self.capabilities = replace(
            capabilities,
            network="policy" if host.config.egress else "none",
            egress=tuple(host.config.egress),
            memory_mb=host.config.memory_mb,
            disk_mb=host.config.disk_mb,
        )
        self.vm = vm
        self._host = host
        self._image = image.name
        self._paused = False
        self._ports: Ports | None = None  # from the first `listen` on

    async def snapshot(self) -> Snapshot:
        """Memory and all. Waits for the command that is running; processes that were started stand still meanwhile."""
        async with self._lock:
            if self._pending is not None:
                await asyncio.wait([self._pending])
            if self._ruined or self._closed:
                raise OSError(errno.ESRCH, "the machine has ended")
            try:
                return Snapshot(self.image, await self.vm.save())
            except (OSError, MachineError) as error:
                await self._blame("it could not be saved", error)
                raise OSError(errno.ESRCH, "the machine has ended") from None

    async def fork(self, count: int = 1) -> list[QemuMachine]:
        if count < 1:
            return []
        snapshot = await self.snapshot()
        made = [asyncio.create_task(self._host.create(self._image, snapshot=snapshot)) for _ in range(count)]
        try:
            await asyncio.wait(made)
            forks = [each.result() for each in made]
        except BaseException:
            await asyncio.shield(self._discard(made, snapshot))  # also if the caller is cancelled once more
            raise
        await self._host.release(snapshot)
        return forks

    async def _discard(self, made: list[asyncio.Task[QemuMachine]], snapshot: Snapshot) -> None:
        """Close the forks of which the caller gets none."""
        for each in made:
            each.cancel()
        for result in await asyncio.gather(*made, return_exceptions=True):
            if isinstance(result, QemuMachine):
                await result.close()
        await self._host.release(snapshot)

    async def _blame(self, what: str, error: Exception) -> None:
        """Returns if a guest in which a command has begun ended its QEMU, or does not answer: it is ruined. Otherwise
        MachineError."""
        why = f"{what}: {error!r}"
        if not isinstance(error, NoAnswer) and not await self.vm.wait(END_S):
            raise MachineError(f"machine {self._name}: {why}")
        await self._lose(why, self._begun)

    async def begin(self, files: Mapping[str, bytes], *, trusted: bool) -> Self:
        """What a restored machine needs before anyone uses it: entropy and time of its own, and its files. It is closed
        if that fails. `trusted`: see `renew`."""
        try:
            if await self.renew(trusted=trusted):
                await self._open_egress()
                if files:
                    await self.write_first(files)
        except BaseException:
            await self.close()
            raise
        return self

    async def _open_egress(self) -> None:
        try:
            await self.open_egress(self._host.config)
        except OSError:
            if not self._begun:
                raise  # else the commands of its parent used up what a port needs: it reaches nothing

    async def renew(self, *, trusted: bool, restored: bool = True) -> bool:
        """Give the guest entropy of its own and the time. Returns whether it took them.

        MachineError if a guest in which no command has run (`trusted`) does not. Any other ruined itself.
        """
        try:
            await self.vm.renew(restored=restored)
        except MachineError:
            if trusted or (await self._end(begun=True)).by_infrastructure:
                raise
            self._ruined = True
            return False
        return True

    async def pause(self) -> None:
        """The guest uses no processor time until `resume`. Requests wait for it. A ruined one uses none anyway."""
        if self._paused:
            return
        await self._lock.acquire()
        try:
            if self._pending is not None:
                await asyncio.wait([self._pending])
            if not self._ruined:
                await self.vm.pause()
                self._paused = True
        except (OSError, MachineError) as error:
            await self._blame("it could not be paused", error)
        finally:
            if not self._paused:
                self._lock.release()

    async def resume(self) -> None:
        """Go on, with the time of now."""
        if not self._paused:
            return
        self._paused = False  # from here on only this releases the lock, also if someone closes the machine meanwhile
        try:
            try:
                await self.vm.resume()
            except (OSError, MachineError) as error:
                await self._blame("it could not be resumed", error)
                return
            await self.renew(trusted=False, restored=False)
        finally:
            self._lock.release()

    async def prepare(self) -> None:
        """Have a process wait for the next command in the guest."""
        await self.request({"op": "prepare"})

    async def listen(self) -> tuple[socket.socket, int]:
        async with self._lock:
            if self._pending is not None:
                await asyncio.wait([self._pending])
            if self._ruined or self._closed:
                raise OSError(errno.ENETDOWN, "the machine has ended")
            try:
                async with asyncio.timeout(self._grace_s):
                    if self._ports is None or self._ports.closed:
                        self._ports = await self.vm.open_ports()
                    return await self._ports.listen()
            except (OSError, MachineError, TimeoutError) as error:
                if self._begun:  # its own commands may have used up what a port needs
                    raise OSError(errno.ENETDOWN, f"the machine opens no port: {error}") from None
                raise MachineError(f"machine {self._name} opens no port: {error!r}") from None

    async def close(self) -> None:
        """End the machine. A request that is still running fails."""
        self._closed = True
        if self._egress is not None:
            await self._egress.close()
        if self._ports is not None:
            self._ports.close()
        await self._host.end(self.vm)
        if self._paused:
            self._paused = False
            self._lock.release()
        async with self._lock:
            self._connection.close()

    async def _end(self, begun: bool) -> Ended:
        """Only QEMU's own process is evidence: one that someone killed was no doing of its guest."""
        words = self.vm.words() if not begun else ""
        ended_itself = await self.vm.wait(END_S)
        lacks_room = not ended_itself and await self.vm.lacks_room()
        code = await self._host.end(self.vm)
        if lacks_room:
            return Ended(True, "; the host has no room for what it writes", "is the disk of $ROLLMILL_IMAGES full?")
        if ended_itself and code in FROM_OUTSIDE:
            return Ended(True, f"; its QEMU was killed with signal {-code}", "is the host out of memory?")
        return Ended(False, f"; it printed: {words}" if words else "")


def state_of(snapshot: Snapshot) -> Saved:
    if not isinstance(snapshot.state, Saved):
        raise MachineError("this snapshot was not made by a virtual machine of this process")
    return snapshot.state


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


async def measure_slowdown(vm: Vm, limit_s: float) -> float:
    """How many times more CPU time Python takes in the guest than on this host. An image may have none, so the guest's
    first process runs it.

    The clock of a guest goes on while other work has its processor, so only the CPU time of its QEMU tells. What a
    request costs beyond its loops is measured alone and taken off. The least of a few measurements each.
    """
    nothing_s = min([await _loops_cpu_s(vm, 0, limit_s) for _ in range(_MEASUREMENTS)])
    guest_s = min([await _loops_cpu_s(vm, _LOOPS, limit_s) for _ in range(_MEASUREMENTS)]) - nothing_s
    return min(max(1.0, guest_s / await asyncio.to_thread(_host_cpu_s)), _MOST_SLOWDOWN)


async def _loops_cpu_s(vm: Vm, loops: int, limit_s: float) -> float:
    began_s = vm.cpu_s()
    await vm.ask_init({"op": "loops", "count": loops}, within_s=limit_s)
    return vm.cpu_s() - began_s


def _host_cpu_s() -> float:
    measured = []
    for _ in range(_MEASUREMENTS):
        began_s = time.thread_time()
        run_loops(_LOOPS)
        measured.append(time.thread_time() - began_s)
    return min(measured)
