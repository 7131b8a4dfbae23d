"""Keeps an engine at the head of its line: polls the store in a thread, applies updates between two decode steps.

source, in a thread                     event loop                            engine
1  poll: fetch, decode, verify ──────►  2  apply: prepare beside decoding ──► 3  write, audit, switch the label
   weights in host memory                  (refused: 1 gives everything again)
4  wait for the next version  ◄───────     a hint, a lend or a recall ends the wait
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from rollmill import telemetry
from rollmill.backoff import Backoff
from rollmill.errors import EngineError, RollmillError, StorageError, WeightsError
from rollmill.inference.engine import Engine
from rollmill.inference.lent_engine import Guests, Loan
from rollmill.types import Version
from rollmill.weights.format.object_keys import valid_name
from rollmill.weights.reading.leases import HeldLeases
from rollmill.weights.reading.line_follower import LEASE_SECONDS, LineFollower, Update
from rollmill.weights.reading.weight_store import WeightStore
from rollmill.weights.regions.mirror import Mirror

log = logging.getLogger(__name__)
RETRY_SECONDS, LONGEST_RETRY_SECONDS = 1.0, 30.0
LONGEST_WAIT_SECONDS = 2.0
_WAIT_SHARE = 0.05  # of the time since the last event: a version per minute is seen at most 3 seconds late


class UpdateSource(Protocol):
    """A `Follower` of weights/reading/line_follower.py, or a `PinnedSource`. An update is valid until the next call."""

    problem: str | None

    def poll(self) -> Update | None: ...
    def again(self) -> Update | None: ...
    def hint(self) -> None: ...
    def wait(self, seconds: float) -> None: ...
    def close(self) -> None: ...


class PinnedSource:
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
            host = self._store.hold(self._version, self._form)
        except (StorageError, WeightsError) as error:
            self.problem = str(error)
            return None
        manifest, seconds = host.manifest, time.perf_counter() - started
        assert manifest is not None, "what is restored is whole"
        self.problem = self._leases.problem
        self._update = Update(
            manifest.policy, host.tensors, None, None, manifest.bytes, {"fetch": seconds}, manifest.created_at
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
    """Runs until it is cancelled. `problem` says why the engine is not at the newest version. `guests` are the requests
    that it answers: weights of another line wait until there is none."""

    def __init__(self, engine: Engine, source: UpdateSource, poll_seconds: float) -> None:
        self._engine, self._source, self._poll_seconds = engine, source, poll_seconds
        self.guests = Guests()
        self._refused: str | None = None
        self._backoff = Backoff(RETRY_SECONDS, LONGEST_RETRY_SECONDS)
        self._retry_seconds = 0.0
        self._happened_at = time.monotonic()  # when a version or a hint last came
        self._wake = asyncio.Event()
        self._orders: list[tuple[Callable[[], Update | None], asyncio.Future[None]]] = []

    @property
    def problem(self) -> str | None:
        return self._refused or self._source.problem

    def hint(self) -> None:
        """There may be a new version: poll now, and often for a while."""
        self._source.hint()
        self._happened_at = time.monotonic()
        self._wake.set()

    async def lend(self, line: str, seconds: float = math.inf, notice_s: float = 0.0) -> None:
        """Follows another line as soon as no request is answered, and keeps the own weights in memory. After `seconds`
        it returns by itself; lending it again to the same line prolongs that. For `notice_s` it serves as before, so
        that gateways learn that it is lent."""
        self._lendable()
        now, loan = time.monotonic(), self.guests.loan
        if loan is None:
            loan = self.guests.loan = Loan(valid_name(line), now + notice_s)
        if loan.line != line or loan.state == "returning":
            raise EngineError(f"the engine is already lent to {loan.line}", hint="recall it first")
        loan.ends_at = now + seconds
        self.hint()

    async def recall(self) -> None:
        """Serves the own line again. Returns when the engine does."""
        source, loan = self._lendable(), self.guests.loan
        if loan is None:
            return
        if loan.state == "leaving":
            self.guests.loan = None
            return
        self.guests.turn_out(loan)
        await self._order(source.recall)
        if self._refused is not None:
            raise EngineError(f"the engine's own weights were not applied: {self._refused}")
        self._settle()

    async def run(self) -> None:
        try:
            while True:
                self._wake.clear()
                await self._obey()
                await self._keep_loan()
                if self._orders:  # a recall does not wait for weights that are not needed any more
                    continue
                update = await asyncio.to_thread(self._source.poll)
                if update is None and self._refused is not None:
                    update = await asyncio.to_thread(self._source.again)
                if update is not None:
                    await self._apply(update)
                self._settle()
                await self._wait()
        finally:
            await asyncio.to_thread(self._source.close)

    def _lendable(self) -> LineFollower:
        if not isinstance(self._source, LineFollower):
            raise EngineError("an engine that is pinned to one version cannot be lent")
        return self._source

    async def _keep_loan(self) -> None:
        """Begins a loan when the last answer has ended, and ends one that is not prolonged."""
        loan = self.guests.loan
        if loan is None or loan.state == "returning":
            return
        if time.monotonic() >= loan.ends_at:
            log.warning("the loan to %s was not prolonged: the engine returns", loan.line)
            returning = asyncio.ensure_future(self.recall())
            await asyncio.sleep(0)
            await self._obey()
            await asyncio.gather(returning, return_exceptions=True)  # `problem` says what failed
        elif loan.state == "leaving" and time.monotonic() >= loan.opens_at and not self.guests:
            self.guests.open_loan(loan)  # first: no request of production may meet the other weights
            await asyncio.to_thread(self._lendable().lend, loan.line)

    def _settle(self) -> None:
        """A loan is over when the engine has its own weights again."""
        loan, source = self.guests.loan, self._source
        if loan is not None and loan.state == "returning" and isinstance(source, LineFollower) and source.lent is None:
            policy = self._engine.health()["policy"]
            if policy is not None and source.current is not None and policy == vars(source.current):
                self.guests.end_loan(loan)

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
            if self.guests.loan is not None and self.guests.loan.state == "leaving":
                seconds = self._poll_seconds
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
