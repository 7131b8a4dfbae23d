"""One virtual machine: a QEMU process and its guest. Start, restore, save, pause, end.

Everything that QEMU opens is handed to it as an open file: guest memory, kernel, device state and sockets. So it runs
as a user of its own where we are root, without rights to any file of the host.

The saved state is the device state alone (`xen-save-devices-state`; nothing about it is particular to Xen), beside a
copy of guest memory. A restored QEMU loads it as an incoming migration that has no memory in it.

The guest's first process holds all others when a state is saved. In a restored guest they go on when it has entropy of
its own, so none of them draws a random number that one of another copy draws.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import subprocess
import time
import weakref
from typing import IO, Any

from rollmill.errors import MachineError
from rollmill.machines.guest import frames as wire
from rollmill.machines.qemu import disks, launch, ram
from rollmill.machines.qemu.launch import Shape, Started
from rollmill.machines.qemu.monitor import Monitor
from rollmill.machines.qemu.ports import Ports
from rollmill.machines.qemu.streams import MARK_BYTES

_LOAD_S = 60.0  # for a saved state to be loaded
_INIT_S = 60.0  # for the guest's first process to answer
END_S = 0.5  # its sockets close a moment before a process has ended
FROM_OUTSIDE = (-signal.SIGKILL, -signal.SIGTERM)  # no guest can make QEMU end like this
_SEED_BYTES = 64
_MAX_STATE = 1 << 26


class Saved:
    """The state of a guest: a sealed memory file, what its devices hold, and its own disk, if it has one. Closed when
    nobody refers to it."""

    def __init__(self, memory: int, devices: bytes, stood_still_s: float, disk: int | None = None) -> None:
        self.memory = memory
        self.devices = devices
        self.stood_still_s = stood_still_s  # how long the guest was stopped for it
        self.disk = disk
        self.close = weakref.finalize(self, _close, memory, disk)


class StateRefused(MachineError):
    """QEMU ended while it loaded a state. The guest that was saved can be the cause: part of it is in its memory."""

    def __init__(self, message: str, vm: Vm) -> None:
        super().__init__(message)
        self.vm = vm  # it has ended


class NoAnswer(MachineError):
    """The guest's first process does not answer as it should. Commands in the guest can be the cause."""


class Vm:
    def __init__(self, shape: Shape, started: Started, memory: int, disk: int | None, *, template: bool) -> None:
        self.process = started.process
        self.agent = started.agent
        self._shape = shape
        self._started = started
        self._monitor = Monitor(started.monitor)
        self._memory = memory  # of a template, the guest writes into this file; else it is that of the saved state
        self._disk = disk  # what it writes to, beside its memory
        self.template = template
        self._paused = False
        self._asking_init = asyncio.Lock()
        self._saving: asyncio.Task[Saved] | None = None
        self._ending: asyncio.Task[int] | None = None
        self._ended: int | None = None  # its exit code

    @classmethod
    async def boot(cls, shape: Shape, initramfs: IO[bytes], disk: int | None = None) -> Vm:
        """Start a template, with its own disk. The guest still boots when this returns."""
        try:
            memory = ram.create(shape.memory_mb << 20)
        except OSError as error:
            if disk is not None:
                os.close(disk)
            raise MachineError(f"a virtual machine did not start: {error}") from None
        vm = cls(shape, launch.start(shape, memory, initramfs.fileno(), disk), memory, disk, template=True)
        try:
            await vm._monitor.start()
            await asyncio.get_running_loop().sock_sendall(vm.agent, b"g")  # what the agent waits for
        except BaseException as error:
            raise await vm.failed(error) from error
        return vm

    @classmethod
    async def restore(cls, shape: Shape, saved: Saved) -> Vm:
        """A machine with the saved state. It is held until `renew`. StateRefused: not loaded."""
        try:
            memory = os.dup(saved.memory)
        except OSError as error:
            raise MachineError(f"a virtual machine did not start: {error}") from None
        try:
            disk = await _copy_disk(shape, saved.disk)
        except BaseException:
            os.close(memory)
            raise
        vm = cls(shape, launch.start(shape, memory, None, disk), memory, disk, template=False)
        loading = False
        try:
            os.pwrite(vm._started.devices, saved.devices, 0)
            await vm._monitor.start()
            loading = True
            await vm._monitor.ask("migrate-incoming", uri=f"fd:{vm._started.incoming}")
            async with asyncio.timeout(_LOAD_S):
                await vm._monitor.wait_while("inmigrate")
            await vm._monitor.ask("cont")
        except BaseException as error:
            ended_itself = loading and isinstance(error, Exception) and await vm.wait(END_S)
            failure = await vm.failed(error)
            if ended_itself and await vm.end() not in FROM_OUTSIDE:
                raise StateRefused(str(failure), vm) from error
            raise failure from error
        return vm

    async def renew(self, *, restored: bool = False) -> None:
        """Give the guest entropy of its own, and the time. One that was restored also gets a network address (MAC)."""
        header = {"op": "renew", "time_ns": time.time_ns(), "restored": restored}
        if restored:
            header["mac"] = "02" + secrets.token_hex(5)  # by its first bits: one host's, and given by nobody
        await self.ask_init(header, secrets.token_bytes(_SEED_BYTES))

    async def open_ports(self) -> Ports:
        """Ports that carry connections of the guest's programs. MachineError if its first process does not answer."""
        mark = secrets.token_bytes(MARK_BYTES)
        await self.ask_init({"op": "ports"}, mark)
        return Ports(self._started.ports, mark)

    async def ask_init(self, header: dict[str, Any], body: bytes = b"", *, within_s: float = _INIT_S) -> None:
        """A request to the guest's first process. MachineError if it does not answer as it should."""
        asking = asyncio.create_task(self._ask_init(header, body, within_s))
        try:
            await asyncio.shield(asking)  # the answer is read to its end, also if nobody waits for it any more
        except asyncio.CancelledError:
            asking.add_done_callback(lambda task: task.cancelled() or task.exception())
            raise

    async def _ask_init(self, header: dict[str, Any], body: bytes, within_s: float) -> None:
        async with self._asking_init:
            await self._exchange_with_init(header, body, within_s)

    async def _exchange_with_init(self, header: dict[str, Any], body: bytes, within_s: float) -> None:
        loop, connection = asyncio.get_running_loop(), self._started.init
        number = secrets.randbits(32)
        expected, received = wire.pack({"id": number}), b""
        try:
            async with asyncio.timeout(within_s):
                await loop.sock_sendall(connection, wire.pack({**header, "id": number}, body))
                while len(received) < len(expected) and (part := await loop.sock_recv(connection, 1024)):
                    received += part
        except (TimeoutError, OSError) as error:
            raise NoAnswer(f"the guest's first process does not answer: {error!r}") from None
        if received != expected:
            raise NoAnswer("the guest's first process gave no proper answer")

    async def save(self) -> Saved:
        """Save the state. The guest stands still meanwhile and then goes on; a template ends.

        A thread copies memory between open files, so they stay open until it is done: also if the caller is cancelled,
        and also if the machine ends meanwhile.
        """
        if self._saving is not None:
            await asyncio.wait([self._saving])
        self._saving = saving = asyncio.create_task(self._save())
        try:
            return await asyncio.shield(saving)
        except asyncio.CancelledError:
            saving.add_done_callback(_discard)
            await asyncio.wait([saving])
            raise

    async def _save(self) -> Saved:
        memory = os.dup(self._memory) if self.template else await asyncio.to_thread(ram.copy, self._memory)
        disk: int | None = None
        try:
            began = time.monotonic()
            await self._hold()
            try:
                devices = await self._save_devices()
                disk = await _copy_disk(self._shape, self._disk)
                if not self.template:
                    await asyncio.to_thread(ram.copy_changes, self.process.pid, memory)
            finally:
                await asyncio.shield(self._let_go())
            stood_still_s = time.monotonic() - began
            if self.template:
                await self.end()  # while it maps its memory, nobody can seal it
            ram.seal(memory)
        except BaseException:
            _close(memory, disk)
            raise
        return Saved(memory, devices, stood_still_s, disk)

    async def _hold(self) -> None:
        """Stop the guest at a moment at which its first process holds all others."""
        if self._paused:
            self.process.send_signal(signal.SIGCONT)
            await self._monitor.ask("cont")
        await self.ask_init({"op": "hold"})
        await self._monitor.ask("stop")

    async def _let_go(self) -> None:
        """A paused guest stays held: `resume` comes with `renew`."""
        if self._paused:
            self.process.send_signal(signal.SIGSTOP)
        elif not self.template:
            await self._monitor.ask("cont")
            await self.ask_init({"op": "ping"})

    async def _save_devices(self) -> bytes:
        file = self._started.devices
        await self._monitor.ask("xen-save-devices-state", filename=f"/proc/self/fd/{file}", live=False)
        return os.pread(file, _MAX_STATE, 0)

    async def pause(self) -> None:
        try:
            await self._monitor.ask("stop")
        except asyncio.CancelledError:  # nobody would resume it
            with contextlib.suppress(OSError, MachineError):
                await asyncio.shield(self._monitor.ask("cont"))
            raise
        self._paused = True
        # QEMU waits for the guest's next timer, whose clock stands still: it would poll again and again, and fast if
        # that timer was near.
        self.process.send_signal(signal.SIGSTOP)

    async def resume(self) -> None:
        self._paused = False  # also if the caller is cancelled: the guest goes on
        self.process.send_signal(signal.SIGCONT)
        await asyncio.shield(self._monitor.ask("cont"))

    def cpu_s(self) -> float:
        """CPU seconds that the process has used, guest included."""
        total = 0
        for thread in os.listdir(f"/proc/{self.process.pid}/task"):
            with open(f"/proc/{self.process.pid}/task/{thread}/schedstat") as file:
                total += int(file.read().split()[0])
        return total / 1e9

    async def wait(self, within_s: float) -> bool:
        """Whether the process ends by itself in that time."""
        try:
            await asyncio.to_thread(self.process.wait, within_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    @property
    def ended(self) -> bool:
        return self._ended is not None

    async def end(self) -> int:
        """End the process; safe to repeat. Returns its exit code: its own, if it had ended by itself."""
        if self._ending is None:
            self._ending = asyncio.create_task(self._end())
        return await asyncio.shield(self._ending)  # a caller that is cancelled leaves no file open

    async def _end(self) -> int:
        if self.process.poll() is None:
            self.process.kill()
        code = await asyncio.to_thread(self.process.wait)
        if self._saving is not None and not self.template:  # a template ends while it is saved
            await asyncio.wait([self._saving])  # it uses the files below, and fails now
        self._ended = code
        self._started.init.close()
        self._started.ports.close()
        for file in (self._started.devices, self._started.log):
            os.close(file)
        _close(self._memory, self._disk)
        await self._monitor.close()
        return code

    async def lacks_room(self) -> bool:
        """Whether QEMU has stopped the guest because the host has no room for what it writes to its disk."""
        try:
            return bool((await self._monitor.ask("query-status"))["status"] == "io-error")
        except (OSError, MachineError):
            return False

    def words(self) -> str:
        """The end of what QEMU and the guest's console have printed."""
        if self._ended is not None:
            return ""
        text = os.pread(self._started.log, launch.LOG_BYTES, 0).rstrip(b"\0").decode("utf-8", "replace").strip()
        return text[-600:]

    async def failed(self, error: BaseException) -> BaseException:
        """End a machine that could not be started. Returns what to raise."""
        words = ""
        with contextlib.suppress(OSError):
            words = self.words()
        await self.end()
        self.agent.close()
        if not isinstance(error, Exception):
            return error
        why = error.message if isinstance(error, MachineError) else repr(error)
        return MachineError(f"a virtual machine did not start: {why}; it printed: {words or 'nothing'}")


async def _copy_disk(shape: Shape, disk: int | None) -> int | None:
    if disk is None or shape.image_disk is None:
        return None
    copying = asyncio.create_task(asyncio.to_thread(disks.copy_own, disk, shape.image_disk.parent))
    try:
        return await asyncio.shield(copying)
    except asyncio.CancelledError:
        await asyncio.wait([copying])
        if copying.exception() is None:
            os.close(copying.result())
        raise


def _close(memory: int, disk: int | None) -> None:
    os.close(memory)
    if disk is not None:
        os.close(disk)


def _discard(saving: asyncio.Task[Saved]) -> None:
    """Close a state that nobody waits for any more."""
    if not saving.cancelled() and saving.exception() is None:
        saving.result().close()
