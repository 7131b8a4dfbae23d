"""One namespace machine as the client sees it."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Coroutine, Iterable, Mapping
from dataclasses import replace
from typing import Any, Protocol

from rollmill.errors import MachineError
from rollmill.machines.agent_machine import AgentMachine, AgentMachineConfig, Ended
from rollmill.machines.guest import frames as wire
from rollmill.machines.images import services
from rollmill.machines.images.image import Image
from rollmill.machines.images.services import RunningServices
from rollmill.machines.machine import USERS, Capabilities, Snapshot
from rollmill.machines.namespace import launch

_AT_ONCE = 8  # children that get files by one request


class Home(Protocol):
    """What a machine needs of the host that made it."""

    architecture: str
    measured_slowdown: float | None
    limits: dict[str, Any]

    @property
    def config(self) -> AgentMachineConfig: ...
    async def create(
        self, image: str, files: Mapping[str, bytes] | None = None, *, snapshot: Snapshot | None = None
    ) -> NamespaceMachine: ...
    async def create_empty(self, image: Image) -> NamespaceMachine: ...
    async def share(self, parent: int, children: list[int]) -> bool: ...
    async def end(self, identifier: int) -> bool | None: ...


class NamespaceMachine(AgentMachine):
    """One machine. Requests are answered one after the other; callers may share it."""

    capabilities = Capabilities(kernel="shared", snapshot="files", listen=True, users=USERS)

    def __init__(self, host: Home, identifier: int, image: Image, connection: socket.socket) -> None:
        super().__init__(image.reference, connection, str(identifier))
        self.host = host
        self._id = identifier
        self._image = image
        self._killed = False  # by someone outside, or by us because the machine host failed
        self.services: RunningServices | None = None
        self.capabilities = replace(
            self.capabilities,
            shared_fork=host.limits["shared_forks"],
            network="policy" if host.config.egress else "none",
            architecture=host.architecture,
            slowdown=host.measured_slowdown or 1.0,
        )

    async def set_up(self) -> None:
        """Returns when a new machine is set up; MachineError says why it could not be. Any request waits for it too."""
        async with self._nothing_pending():
            answer = await self._exchange(b"", "set up", 0, 0.0, 0)
            if answer is None or "error" in answer[0]:
                await self._lose("it does not answer" if answer is None else str(answer[0]["error"])[:500], False)

    async def snapshot(self) -> Snapshot:
        """The work directory, in the memory of this process: it is small (`disk_mb`). Services stop for it."""
        if self.services is None:
            return Snapshot(self.image, await self._pack_work())
        try:
            await self.services.stop()
            state = services.join(await self._pack_work(), await self.services.pack())
        finally:
            await self.services.start_again()
        return Snapshot(self.image, state)

    async def _pack_work(self) -> bytes:
        limit = min(self.host.config.disk_mb << 20, wire.MAX_BODY >> 1)  # the tar needs room of its own
        request = {"op": "snapshot", "max_bytes": limit}
        return await self.request_files(request, max_body=wire.MAX_BODY)

    async def restore(self, work: bytes) -> None:
        await self.request_files({"op": "restore"}, work)

    async def fork(self, count: int = 1) -> list[NamespaceMachine]:
        """Share the files with `count` new machines (forks.py). Where that is not possible, they get copies.

        It is not possible while a process or a service runs in the machine.
        """
        if self.services is None and self.capabilities.shared_fork and not await self._busy():
            children = await _all_or_none(self.host.create_empty(self._image) for _ in range(count))
            if await self._share_with(children):
                return children
        snapshot = await self.snapshot()
        return await _all_or_none(self.host.create(self._image.name, snapshot=snapshot) for _ in range(count))

    async def _busy(self) -> bool:
        answer = await self.request({"op": "busy"}, max_body=0)
        return answer is None or answer[0]["busy"]

    async def _share_with(self, children: list[NamespaceMachine]) -> bool:
        """Returns whether the children have the files; if not, they are closed."""
        shared = False
        try:
            async with self._nothing_pending():
                # If the caller is cancelled, the machine host goes on. Requests wait, because meanwhile the machine may
                # have no work directory.
                self._pending = sharing = asyncio.create_task(self._share([child._id for child in children]))
                shared = await asyncio.shield(sharing)
            if shared:
                for child in children:
                    await child.open_egress(self.host.config)
        except BaseException:
            shared = False
            raise
        finally:
            if not shared:
                await asyncio.gather(*(child.close() for child in children))
        return shared

    async def _share(self, children: list[int]) -> bool:
        """A few at once, so that the machine host serves others in between."""
        try:
            for first in range(0, len(children), _AT_ONCE):
                if not await self.host.share(self._id, children[first : first + _AT_ONCE]):
                    return False
            return True
        except MachineError:  # nobody knows whether the work directory is there
            self._killed = True
            await self.host.end(self._id)
            return False

    async def listen(self) -> tuple[socket.socket, int]:
        reply, _ = await self.request({"op": "listen"}) or ({}, b"")
        if not self._handed_over:
            raise OSError(errno.ENETDOWN, "the machine's commands ended it")
        return self._handed_over.pop(), reply["port"]

    async def close(self) -> None:
        """End the machine. When this returns, none of its processes is left. A request that is still running fails."""
        self._closed = True
        if self._egress is not None:
            await self._egress.close()
        await self.host.end(self._id)
        async with self._lock:
            self._connection.close()
            for unclaimed in self._handed_over:
                unclaimed.close()

    async def _end(self, begun: bool) -> Ended:
        killed = await self.host.end(self._id)
        if killed is None:
            return Ended(True, "; the machine host does not answer either")
        self._killed |= killed  # the machine host says it once
        if self._killed:
            return Ended(True, "; someone killed its first process", "is the host out of memory?")
        return Ended(False, "", "is the host overloaded?" if begun else launch.hint())


async def _all_or_none(starting: Iterable[Coroutine[Any, Any, NamespaceMachine]]) -> list[NamespaceMachine]:
    """Start machines at once. If one cannot start, the others are closed."""
    tasks = [asyncio.ensure_future(each) for each in starting]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        made = await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(each.close() for each in made if isinstance(each, NamespaceMachine)))
        raise
