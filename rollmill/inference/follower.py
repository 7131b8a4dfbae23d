"""Keeps an engine at the head of its line: polls the store in a thread, applies updates between two decode steps.

source, in a thread                     event loop                            engine
1  poll: fetch, decode, verify ──────►  2  apply: prepare beside decoding ──► 3  write, audit, switch the label
   an image in host memory                 (refused: 1 gives everything again)
4  wait for the next version  ◄───────     a hint, a lend or a recall ends the wait
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from rollmill import telemetry
from rollmill.backoff import Backoff
from rollmill.errors import EngineError, RollmillError, StorageError, WeightsError
from rollmill.inference.engine import Engine
from rollmill.types import Version
from rollmill.weights.reading.follower import LEASE_SECONDS, Follower, Update
from rollmill.weights.reading.leases import HeldLeases
from rollmill.weights.reading.store import WeightStore
from rollmill.weights.regions.mirror import Mirror

log = logging.getLogger(__name__)
RETRY_SECONDS, LONGEST_RETRY_SECONDS = 1.0, 30.0
LONGEST_WAIT_SECONDS = 2.0
_WAIT_SHARE = 0.05  # of the time since the last event: a version per minute is seen at most 3 seconds late


class UpdateSource(Protocol):
    """A `rollmill.weights.reading.follower.Follower`, or `Pinned`. An update is valid until the next call."""

    problem: str | None

    def poll(self) -> Update | None: ...
    def again(self) -> Update | None: ...
    def hint(self) -> None: ...
    def wait(self, seconds: float) -> None: ...
    def close(self) -> None: ...


class Pinned:
    """Stays at one version, for example to evaluate an old one. With `holder`, a lease in the own store keeps the
    version from being collected."""

    def __init__(
        self,
        store: WeightStore,
        version: Version,
        form: str,
        mirror: Mirror | None = None,
        holder: str | None = None,
        about: Mapping[str, str] | None = None,
    ) -> None:
        self._store, self._version, self._form, self._mirror = store, version, form, mirror
        self._leases = HeldLeases(store.objects, form, holder, LEASE_SECONDS, about)
        self._update: Update | None = None
        self.problem: str | None = None

    def poll(self) -> Update | None:
        if self._update is None:
            return self.again()
        self._leases.renew()
        self.problem = self._leases.problem
        return None

    def again(self) -> Update | None:
        started = time.perf_counter()
        self._update = None
        try:
            if self._mirror is not None:
                self._mirror.copy(self._version.line, self._form, self._version.number)
            self._leases.renew([self._version])  # before the read: it must not be collected meanwhile
            image = self._store.hold(self._version, self._form)
        except (StorageError, WeightsError) as error:
            self.problem = str(error)
            return None
        manifest, seconds = image.manifest, time.perf_counter() - started
        assert manifest is not None, "what is restored is whole"
        self.problem = self._leases.problem
        self._update = Update(
            manifest.policy, image.tensors, None, None, manifest.bytes, {"fetch": seconds}, manifest.created_at
        )
        return self._update

    def hint(self) -> None:
        pass

    def wait(self, seconds: float) -> None:
        time.sleep(seconds)

    def close(self) -> None:
        """Release the lease."""
        self._leases.close()


class EngineFollower:
    """Runs until it is cancelled. `problem` says why the engine is not at the newest version."""

    def __init__(self, engine: Engine, source: UpdateSource, poll_seconds: float) -> None:
        self._engine, self._source, self._poll_seconds = engine, source, poll_seconds
        self._refused: str | None = None
        self._backoff = Backoff(RETRY_SECONDS, LONGEST_RETRY_SECONDS)
        self._retry_seconds = 0.0
        self._happened_at = time.monotonic()  # when a version or a hint last came
        self._wake = asyncio.Event()
        self._orders: list[tuple[Callable[[], Update | None], asyncio.Future[None]]] = []

    @property
    def problem(self) -> str | None:
        return self._refused or self._source.problem

    @property
    def lent(self) -> str | None:
        """The line the engine is lent to, or None."""
        return self._source.lent if isinstance(self._source, Follower) else None

    def hint(self) -> None:
        """There may be a new version: poll now, and often for a while."""
        self._source.hint()
        self._happened_at = time.monotonic()
        self._wake.set()

    async def lend(self, line: str) -> None:
        """Follows another line and keeps the own weights in memory. The engine serves the own line until other weights
        come."""
        source = self._lendable()
        await self._order(lambda: source.lend(line))

    async def recall(self) -> None:
        """Serves the own line again. Returns when the engine does."""
        await self._order(self._lendable().recall)
        if self._refused is not None:
            raise EngineError(f"the engine's own weights were not applied: {self._refused}")

    async def run(self) -> None:
        try:
            while True:
                self._wake.clear()
                await self._obey()
                update = await asyncio.to_thread(self._source.poll)
                if update is None and self._refused is not None:
                    update = await asyncio.to_thread(self._source.again)
                if update is not None:
                    await self._apply(update)
                await self._wait()
        finally:
            await asyncio.to_thread(self._source.close)

    def _lendable(self) -> Follower:
        if not isinstance(self._source, Follower):
            raise EngineError("an engine that is pinned to one version cannot be lent")
        return self._source

    async def _order(self, order: Callable[[], Update | None]) -> None:
        """Has `order` run between two polls, and waits for it."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._orders.append((order, done))
        self.hint()
        await done

    async def _obey(self) -> None:
        while self._orders:
            order, done = self._orders.pop(0)
            try:
                update = await asyncio.to_thread(order)
                if update is not None:
                    await self._apply(update)
            except RollmillError as error:
                if not done.cancelled():
                    done.set_exception(error)
            else:
                if not done.cancelled():
                    done.set_result(None)

    async def _wait(self) -> None:
        """Waits longer when little happens. A source that notices a new version ends the wait itself."""
        if self._refused is not None:
            waiting = asyncio.ensure_future(asyncio.sleep(self._retry_seconds))
        else:
            idle = time.monotonic() - self._happened_at
            seconds = max(self._poll_seconds, min(idle * _WAIT_SHARE, LONGEST_WAIT_SECONDS))
            waiting = asyncio.ensure_future(asyncio.to_thread(self._source.wait, seconds))
        woken = asyncio.ensure_future(self._wake.wait())
        try:
            await asyncio.wait([waiting, woken], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (waiting, woken):
                task.cancel()

    async def _apply(self, update: Update) -> None:
        policy, start = update.policy, time.time()
        self._happened_at = time.monotonic()
        try:
            applied = await self._engine.apply(update)
        except RollmillError as error:
            if self._refused is None:
                log.error("%s@%d was not applied: %s", policy.line, policy.number, error)
            self._refused = str(error)
            self._retry_seconds = self._backoff.failed()
            return
        self._refused = None
        self._backoff.reset()
        health = self._engine.health()
        telemetry.emit("busy", what="apply", start=start, end=time.time())
        telemetry.emit(
            "apply",
            engine=health["engine"],
            region=health["region"],
            line=policy.line,
            version=policy.number,
            digest=policy.digest,
            bytes=update.bytes,
            fetch_seconds=sum(update.seconds.values()),
            pause_seconds=applied.pause_seconds,
            running=applied.running,
            since_publish_seconds=time.time() - update.created_at,
        )
