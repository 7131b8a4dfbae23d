"""The machines that a host lends: created up to its capacity, ended by their owner or when their lease is over."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hmac
import logging
import secrets
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from rollmill.errors import NoCapacity
from rollmill.machines.machine import Machine, MachineHost, Process, Snapshot, release

log = logging.getLogger(__name__)
_REAP_S = 1.0
_MOST_SNAPSHOTS = 256
_START_S = 0.5  # about how long a start takes: when to ask again


@dataclass
class Lent:
    """One machine and its owner's rights to it."""

    id: str
    machine: Machine
    token: str
    image: str
    ends: float  # by the monotonic clock
    started: float = field(default_factory=time.time)
    metadata: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)  # of every command
    processes: dict[int, Process] = field(default_factory=dict)
    connections: dict[int, socket.socket] = field(default_factory=dict)  # of its ports, until they are claimed
    next_process: int = 1

    def number(self) -> int:
        """The number of the next process or connection."""
        number, self.next_process = self.next_process, self.next_process + 1
        return number

    def keep(self, process: Process, number: int | None = None) -> int:
        number = self.number() if number is None else number
        self.processes[number] = process
        return number


class Service:
    def __init__(self, host: MachineHost, key: str, *, capacity: int, starts: int) -> None:
        self._host = host
        self._key = key.encode()
        self.capacity, self.starts = capacity, starts
        self.starting = 0
        self.images: set[str] = set()  # that have started here
        self._lent: dict[str, Lent] = {}
        self._snapshots: dict[str, Snapshot] = {}  # oldest first
        self._reaper: asyncio.Task[None] | None = None

    async def create(
        self,
        image: str,
        files: Mapping[str, bytes] | None = None,
        *,
        snapshot: str | Snapshot | None = None,
        lease_s: float,
    ) -> Lent:
        """`snapshot`: one that is kept here, by name, or one of another host.

        NoCapacity if this host is full or starts enough machines already; KeyError: no such snapshot.
        """
        if len(self._lent) + self.starting >= self.capacity:
            raise NoCapacity(f"this host is full: {self.capacity} machines", retry_after_s=5.0)
        if self.starting >= self.starts:
            raise NoCapacity(f"this host starts {self.starting} machines already", retry_after_s=_START_S)
        saved = self._snapshots[snapshot] if isinstance(snapshot, str) else snapshot
        if self._reaper is None:
            self._reaper = asyncio.create_task(self._reap())
        self.starting += 1
        try:
            machine = await self._host.create(image, files, snapshot=saved)
        finally:
            self.starting -= 1
        self.images.add(image)
        return self.lend(machine, image, lease_s)

    def lend(self, machine: Machine, image: str, lease_s: float) -> Lent:
        lent = Lent(secrets.token_hex(10), machine, secrets.token_urlsafe(24), image, time.monotonic() + lease_s)
        self._lent[lent.id] = lent
        return lent

    def find(self, identifier: str) -> Lent:
        """KeyError: it never was, was ended, or its lease is over."""
        return self._lent[identifier]

    def all(self) -> list[Lent]:
        return list(self._lent.values())

    def room(self) -> int:
        return max(self.capacity - len(self._lent) - self.starting, 0)

    def is_key(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(errors="replace"), self._key)

    def is_token(self, lent: Lent, given: str) -> bool:
        return hmac.compare_digest(given.encode(errors="replace"), lent.token.encode())

    async def end(self, identifier: str) -> None:
        lent = self._lent.pop(identifier)
        while lent.connections:
            lent.connections.popitem()[1].close()
        await lent.machine.close()

    async def save(self, lent: Lent) -> str:
        """Keep the state of a machine here. The oldest of too many is let go of."""
        name = secrets.token_hex(10)
        self._snapshots[name] = await lent.machine.snapshot()
        if len(self._snapshots) > _MOST_SNAPSHOTS:
            await self.forget(next(iter(self._snapshots)))
        return name

    async def export(self, snapshot: str) -> bytes:
        """The bytes of a state that is kept here. KeyError: no such snapshot. OSError: it cannot leave this host."""
        exported = await self._host.export(self._snapshots[snapshot])
        if exported is None or not isinstance(exported.state, bytes):
            raise OSError(errno.ENOTSUP, "the state of such a machine stays on its host")
        return exported.state

    async def forget(self, snapshot: str) -> None:
        await release(self._host, self._snapshots.pop(snapshot))

    async def close(self) -> None:
        if self._reaper is not None:
            self._reaper.cancel()
        for identifier in list(self._lent):
            with contextlib.suppress(Exception):
                await self.end(identifier)
        await self._host.close()

    async def _reap(self) -> None:
        while True:
            await asyncio.sleep(_REAP_S)
            now = time.monotonic()
            for lent in [lent for lent in self._lent.values() if lent.ends <= now]:
                try:
                    await self.end(lent.id)
                except Exception:  # one that cannot be ended must not keep the others
                    log.warning("machine %s could not be ended when its lease was over", lent.id, exc_info=True)
