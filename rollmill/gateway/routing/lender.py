"""Lends engines of production to training while production needs few of them. Production always goes first.

    lender ── health of every engine, a few times per second
      load low for `quiet_s`:  POST /lend ──► engine: leaving ──► lent ──► its row in the fleet of training
      load high, or not the hour:  row deleted ──► POST /recall ──► engine: returning ──► own weights, from memory

Both fleets are in one database. Training's gateway follows its own, so it finds a lent engine as it finds any other.
What the lender knows it reads from the health of the engines, so it may die and start again. Then nobody prolongs the
loans, and the engines return by themselves after LOAN_S; the rows of training expire as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import aiohttp

from rollmill import telemetry
from rollmill.errors import RollmillError
from rollmill.gateway.config import GatewayConfig, LendingConfig
from rollmill.gateway.routing.fleet import RENEW_S, Fleet, Registration
from rollmill.keepalive import keepalive_connector
from rollmill.types import same_line

log = logging.getLogger(__name__)
TICK_S = 0.2
PREFIX = "lent-"  # of their names in training's fleet: apart from those of its own engines
LOAN_S = 15.0  # a loan that nobody prolongs ends
BY_ITSELF = "nobody prolonged the loan, or the engine was started again"
_LOOK_S = 1.0  # between two looks at the table of engines
_TIMEOUT = aiohttp.ClientTimeout(total=5)
_FAILURES = (aiohttp.ClientError, OSError, TimeoutError, ValueError, KeyError, TypeError, RollmillError)


@dataclass(frozen=True)
class Seen:
    """An engine of production as its health tells it."""

    registration: Registration
    places: int  # requests that it decodes together
    busy: int  # requests that it decodes, and that wait there
    lent: str | None
    loan: str | None  # leaving, lent or returning
    line: str  # of the weights that it serves

    @property
    def name(self) -> str:
        return self.registration.name


@dataclass(frozen=True)
class Decision:
    lend: Sequence[Seen] = ()
    recall: Sequence[Seen] = ()
    reason: str = ""  # in words, for people


@dataclass
class LendingRule:
    """Which engines to lend, and which to recall."""

    config: LendingConfig
    _quiet_since: float | None = field(default=None, init=False)

    def decide(self, engines: Sequence[Seen], now: float, minute: int) -> Decision:
        """`now` is in seconds, `minute` that of the day in UTC."""
        here = [each for each in engines if each.lent is None]
        away = [each for each in engines if each.loan in ("leaving", "lent")]
        if not is_hour(self.config.hours, minute):
            self._quiet_since = None
            return Decision(recall=away, reason=f"not one of the hours {', '.join(self.config.hours)}")
        needed = self._needed(engines, here, away)
        if needed:
            self._quiet_since = None
            return Decision(recall=needed, reason=self._need(here))
        spare = min(here, key=lambda each: (each.busy, each.name)) if len(here) > self.config.keep else None
        staying = sum(each.places for each in here) - (spare.places if spare else 0)
        if spare is None or _busy(here) > self.config.below * staying:
            self._quiet_since = None
        elif self._quiet_since is None:
            self._quiet_since = now
        if spare is None or self._quiet_since is None or now - self._quiet_since < self.config.quiet_s:
            return Decision()
        self._quiet_since = None
        load = f"the engines that stay would have a load of {_busy(here) / staying:.2f}"
        reason = f"{load}, at most {self.config.below:g} for {self.config.quiet_s:g} s"
        return Decision(lend=[spare], reason=reason)

    def _need(self, here: Sequence[Seen]) -> str:
        """Why engines are recalled."""
        if len(here) < self.config.keep:
            return f"production has {len(here)} engines, fewer than keep = {self.config.keep}"
        places = sum(each.places for each in here)
        load = f"{_busy(here) / places:.2f}" if places else "no place"
        return f"production has a load of {load}, above {self.config.above:g}"

    def _needed(self, engines: Sequence[Seen], here: Sequence[Seen], away: Sequence[Seen]) -> list[Seen]:
        """The engines to recall: as many as bring the load to the middle of `below` and `above`. Those that return
        already count."""
        busy, places = _busy(here), sum(each.places for each in here)
        if places and len(here) >= self.config.keep and busy <= self.config.above * places:
            return []
        places += sum(each.places for each in engines if each.loan == "returning")
        coming = sum(each.loan == "returning" for each in engines)
        needed: list[Seen] = []
        for each in sorted(away, key=lambda each: (each.loan != "leaving", each.name)):  # those that have not left yet
            enough = busy <= (self.config.below + self.config.above) / 2 * places
            if enough and len(here) + coming + len(needed) >= self.config.keep:
                break
            needed.append(each)
            places += each.places
        return needed


def is_hour(hours: Sequence[str], minute: int) -> bool:
    """Whether `minute` of the day is in one of the spans `HH:MM-HH:MM`; one that ends before it begins goes over
    midnight. Without spans every minute is."""
    if not hours:
        return True
    for span in hours:
        begin, end = (int(text[:2]) * 60 + int(text[3:]) for text in span.split("-"))
        if begin <= minute < end if begin < end else minute >= begin or minute < end:
            return True
    return False


def _busy(engines: Sequence[Seen]) -> int:
    return sum(each.busy for each in engines)


class Lender:
    """Lends the engines of `own` that follow `channel` to the gateways of `training`."""

    def __init__(
        self,
        config: LendingConfig,
        own: Fleet,
        training: Fleet,
        *,
        channel: str,
        line: str,
        gateway: GatewayConfig,
    ) -> None:
        """`gateway`: settings of the gateways of `own`."""
        self._rule, self._own, self._training = LendingRule(config), own, training
        self._channel, self._line, self._return_s = channel, line, config.return_s
        self._notice_s = 2 * gateway.health_interval_s  # by then every gateway has seen a change
        self._most_places = gateway.engine_requests
        self._registered: list[Registration] = []
        self._silent: set[str] = set()  # engines that did not answer; said once
        self._done: dict[str, float] = {}  # what is done every RENEW_S → when it was last done
        self._loans: dict[str, float] = {}  # engine → since when it is lent
        self._recalled: dict[str, tuple[float, str]] = {}  # engine → since when it should return, and why
        self._recalls: dict[str, asyncio.Task[bool]] = {}

    async def run(self) -> None:
        """Runs until it is cancelled; then all engines return."""
        headers = {"Authorization": f"Bearer {self._own.token}"}
        async with aiohttp.ClientSession(headers=headers, timeout=_TIMEOUT, connector=keepalive_connector()) as client:
            try:
                while True:
                    try:
                        await self.tick(client)
                    except _FAILURES as error:
                        log.warning("engines cannot be lent or recalled now: %s", error)
                    except Exception:
                        log.exception("engines cannot be lent or recalled now")
                        await asyncio.sleep(_LOOK_S)
                    await asyncio.sleep(TICK_S)
            finally:
                with contextlib.suppress(*_FAILURES):
                    lent = [each for each in await self._look(client) if each.lent is not None]
                    await asyncio.gather(*(self._take_back(client, each) for each in lent))

    async def tick(self, client: aiohttp.ClientSession) -> None:
        """Look at all engines once, and do what the rule says."""
        engines, today = await self._look(client), datetime.now(UTC)
        decided = self._rule.decide(engines, time.monotonic(), today.hour * 60 + today.minute)
        for each in decided.recall:
            self._recalled.setdefault(each.name, (time.monotonic(), decided.reason))
        for each in engines:
            if each.lent is None:
                self._returned(each)
            elif each.name not in self._recalled:
                await self._prolong(client, each)
            elif each.name not in self._recalls or self._recalls[each.name].done():
                self._recalls[each.name] = asyncio.create_task(self._recall(client, each))
        for each in decided.lend:
            if await self._lend(client, each):
                self._loans[each.name] = time.monotonic()
                told = {"line": self._line, "busy": _busy(engines), "engines": len(engines), "reason": decided.reason}
                telemetry.emit("lend", engine=each.name, **told)

    async def _look(self, client: aiohttp.ClientSession) -> list[Seen]:
        if self._due("look", _LOOK_S):
            self._registered = await asyncio.to_thread(self._own.registered)
        seen = await asyncio.gather(*(self._see(client, each) for each in self._registered))
        return [each for each in seen if each is not None]

    async def _see(self, client: aiohttp.ClientSession, engine: Registration) -> Seen | None:
        """None if the engine does not answer, or is not one of those that may be lent."""
        try:
            async with client.get(f"{engine.url}/health") as response:
                health: dict[str, Any] = await response.json(content_type=None)
            self._silent.discard(engine.name)
            serves, policy = health["serves"], health["policy"]
            if (serves["kind"], serves["name"]) != ("channel", self._channel) or policy is None:
                return None
            busy, places = int(health["running"]) + int(health["waiting"]), min(engine.capacity, self._most_places)
            return Seen(engine, places, busy, health["lent"], health["loan"], str(policy["line"]))
        except _FAILURES as error:
            if engine.name not in self._silent:
                self._silent.add(engine.name)
                log.warning("%s cannot be lent now: %s/health: %r", engine.name, engine.url, error)
            return None

    async def _lend(self, client: aiohttp.ClientSession, engine: Seen) -> bool:
        """Lend an engine, or prolong its loan. Returns whether the engine agreed."""
        body = {"line": self._line, "seconds": LOAN_S, "notice_s": self._notice_s}
        return await self._ask(client, engine, "lend", body, 5.0)

    async def _prolong(self, client: aiohttp.ClientSession, engine: Seen) -> None:
        """A loan that goes on is prolonged; an engine that serves training's line is in training's fleet."""
        if engine.lent != self._line or engine.loan == "returning":
            return
        self._loans.setdefault(engine.name, time.monotonic())
        if self._due(f"loan {engine.name}", RENEW_S):
            await self._lend(client, engine)
        ready = engine.loan == "lent" and same_line(engine.line, self._line)
        if ready and self._due(f"row {engine.name}", RENEW_S):
            guest = engine.registration.model_copy(update={"name": PREFIX + engine.name})
            await asyncio.to_thread(self._training.hold, guest, renews=False)

    async def _take_back(self, client: aiohttp.ClientSession, engine: Seen) -> None:
        self._recalled.setdefault(engine.name, (time.monotonic(), "lending ends"))
        if await self._recall(client, engine):
            self._returned(engine)

    async def _recall(self, client: aiohttp.ClientSession, engine: Seen) -> bool:
        """Returns whether the engine serves production again."""
        try:
            if self._done.pop(f"row {engine.name}", None) is not None:
                url = engine.registration.url
                await asyncio.to_thread(self._training.release, PREFIX + engine.name, url)
        except RollmillError as error:
            log.warning("%s stays in training's table until its row expires: %s", engine.name, error)
        return await self._ask(client, engine, "recall", {}, self._return_s)

    async def _ask(
        self, client: aiohttp.ClientSession, engine: Seen, what: str, body: dict[str, Any], seconds: float
    ) -> bool:
        url, timeout = f"{engine.registration.url}/{what}", aiohttp.ClientTimeout(total=seconds)
        try:
            async with client.post(url, json=body, timeout=timeout) as response:
                if response.status != 200:
                    log.warning("%s: /%s answered %s", engine.name, what, (await response.text())[:300])
                return response.status == 200
        except _FAILURES as error:
            log.warning("%s: /%s failed: %s: %s", engine.name, what, type(error).__name__, error)
            return False

    def _returned(self, engine: Seen) -> None:
        """Says that a loan is over, if the engine had one."""
        now, since = time.monotonic(), self._loans.pop(engine.name, None)
        recalled, reason = self._recalled.pop(engine.name, (None, BY_ITSELF))
        if since is None and recalled is None:
            return
        seconds = None if recalled is None else now - recalled
        late = seconds is not None and seconds > self._return_s
        if late:
            log.warning("%s took %.1f s to return; lending.return_s is %g", engine.name, seconds, self._return_s)
        lent = None if since is None else now - since
        told = {"line": self._line, "lent_s": lent, "seconds": seconds, "late": late, "reason": reason}
        telemetry.emit("returned", engine=engine.name, limit_s=self._return_s, **told)

    def _due(self, what: str, seconds: float) -> bool:
        """Whether `what` was not done for `seconds`; it then counts as done."""
        now = time.monotonic()
        if now - self._done.get(what, float("-inf")) < seconds:
            return False
        self._done[what] = now
        return True
