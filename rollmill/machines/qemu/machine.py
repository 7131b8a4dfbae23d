"""One virtual machine as its users see it."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol, Self

from rollmill.errors import MachineError, TaskError
from rollmill.machines.agent_machine import AgentMachine, AgentMachineConfig, Ended
from rollmill.machines.images.image import Image
from rollmill.machines.machine import Capabilities, Snapshot
from rollmill.machines.qemu.ports import Ports
from rollmill.machines.qemu.vm import END_S, FROM_OUTSIDE, NoAnswer, Saved, Vm


class Home(Protocol):
    """What a machine needs of the host that made it."""

    @property
    def config(self) -> AgentMachineConfig: ...
    async def create(
        self, image: str, files: Mapping[str, bytes] | None = None, *, snapshot: Snapshot | None = None
    ) -> QemuMachine: ...
    async def end(self, vm: Vm) -> int: ...
    async def release(self, snapshot: Snapshot) -> None: ...


class QemuMachine(AgentMachine):
    """One machine. Requests are answered one after the other; callers may share it."""

    _grace_s = 60.0  # emulation is slow, and more so while many machines start

    def __init__(self, host: Home, image: Image, vm: Vm, capabilities: Capabilities, *, begun: bool = False) -> None:
        """`begun`: it has the state of a machine whose commands may have done anything to it."""
        super().__init__(image.reference, vm.agent, f"in process {vm.process.pid}")
        self._begun = begun
        self._ruined = vm.ended  # its state could not be loaded
        self._proven = not vm.template
        self.capabilities = replace(capabilities, network="policy" if host.config.egress else "none")
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
                    await self.write_all(files)
        except OSError as error:
            await self.close()
            hint = "`machine.disk_mb` is the size of the work directory"
            raise TaskError(f"the files of a task cannot be written to a machine: {error}", hint=hint) from None
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
        code = await self._host.end(self.vm)
        if ended_itself and code in FROM_OUTSIDE:
            return Ended(True, f"; its QEMU was killed with signal {-code}", "is the host out of memory?")
        return Ended(False, f"; it printed: {words}" if words else "")


def state_of(snapshot: Snapshot) -> Saved:
    if not isinstance(snapshot.state, Saved):
        raise MachineError("this snapshot was not made by a virtual machine of this process")
    return snapshot.state
