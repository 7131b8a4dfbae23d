"""Feedback that comes before the first answer of its session is recorded: it waits in memory and in the log.

    POST /v1/feedback ─► waits under (key, name) ─► a session of that key and name has an answer ─► its record

It is dropped, and counted, when it has waited for too long, or when the user of the session did not agree to storing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import InitVar, asdict, dataclass, field
from typing import Any

from rollmill.errors import GatewayError, StorageError, TrajectoryError
from rollmill.gateway.recording.entries import LogEntry, encode_entry
from rollmill.gateway.recording.recorder import Recorder
from rollmill.gateway.recording.sealing import Sealer
from rollmill.gateway.sessions.registry import Registry
from rollmill.gateway.sessions.sessions import Session
from rollmill.gateway.watching.metrics import Metrics
from rollmill.trajectories.trajectory_store import TrajectoryStore

log = logging.getLogger(__name__)
_MOST, _MOST_PER_KEY = 10_000, 1_000
_LONGEST_S = 86400.0  # how long feedback waits for its session
_LOOK_S = 1.0


@dataclass
class Early:
    """`name`: the client's name for the session, or its trajectory. `trajectory` is set once there is a session."""

    key: str
    name: str
    kind: str
    value: float | None
    data: dict[str, Any]
    given_id: str | None
    trajectory: str | None = None
    at: float = field(default_factory=time.time)


@dataclass(frozen=True)
class About:
    """Sessions that feedback may be about: their trajectories, and the names that clients gave them."""

    trajectories: frozenset[str]
    names: frozenset[tuple[Any, str]]  # key, name

    @classmethod
    def of(cls, sessions: Iterable[Session], trajectories: Iterable[str] = ()) -> About:
        sessions = list(sessions)
        own = [session.facts.trajectory for session in sessions]
        names = [(session.facts.provenance.get("key"), session.name) for session in sessions]
        return cls(frozenset([*own, *trajectories]), frozenset(names))

    def has(self, early: Mapping[str, Any]) -> bool:
        """`early`: the fields of an Early."""
        return early["trajectory"] in self.trajectories or (early["key"], early["name"]) in self.names


@dataclass(eq=False, repr=False)
class EarlyFeedback:
    registry: Registry
    sealer: Sealer
    recorder: Recorder
    trajectories: TrajectoryStore
    metrics: Metrics
    logged: InitVar[Iterable[LogEntry]]  # what waited when the gateway stopped

    def __post_init__(self, logged: Iterable[LogEntry]) -> None:
        self._waiting = {entry.session: Early(**entry.header) for entry in logged}
        self.registry.opened = self._bind
        for session in self.registry:
            self._bind(session)

    async def add(self, early: Early) -> None:
        """Returns when it is in the log. The same id again changes nothing. Raises 429 if too much waits."""
        same = [each for each in self._waiting.values() if (each.key, each.name) == (early.key, early.name)]
        if early.given_id is not None and early.given_id in (each.given_id for each in same):
            return
        of_key = sum(each.key == early.key for each in self._waiting.values())
        if len(self._waiting) >= _MOST or of_key >= _MOST_PER_KEY:
            raise GatewayError(
                "too much feedback waits for sessions that do not exist", status=429, hint="send it after the answer"
            )
        id = f"early-{uuid.uuid4().hex}"
        self._waiting[id] = early
        try:
            await self.recorder.append(id, encode_entry("early", id, asdict(early)))
        except BaseException:
            del self._waiting[id]
            raise

    async def run(self) -> None:
        """Runs for ever: appends feedback to the records of sessions that exist now."""
        while True:
            for id, early in list(self._waiting.items()):
                try:
                    if await self._settled(early):
                        del self._waiting[id]
                        await self.recorder.forget(id)
                except (StorageError, OSError) as error:
                    log.warning("early feedback is not appended yet: %s", error)
            await asyncio.sleep(_LOOK_S)

    async def forget(self, sessions: Iterable[Session], trajectories: Iterable[str] = ()) -> bool:
        """Drops what waits for these sessions or trajectories: their user is forgotten. Returns whether any did."""
        about = About.of(sessions, trajectories)
        dropped = [id for id, early in self._waiting.items() if about.has(asdict(early))]
        for id in dropped:
            del self._waiting[id]
            await self.recorder.forget(id)
        return bool(dropped)

    def _bind(self, session: Session) -> None:
        """A session was opened: feedback of its key and name is about it, also after it is sealed."""
        provenance = session.facts.provenance
        for early in self._waiting.values():
            if early.trajectory is None and (early.key, early.name) == (provenance.get("key"), session.name):
                early.trajectory = session.facts.trajectory

    async def _settled(self, early: Early) -> bool:
        """Whether it needs to wait no longer: it was appended or dropped."""
        session = None if early.trajectory is None else self.registry.get(early.trajectory)
        if session is not None and not session.stored:
            return self._dropped("consent")
        if early.trajectory is not None and (session is None or session.segments):
            with contextlib.suppress(TrajectoryError):  # it was deleted, or its first answer failed
                if session is not None:
                    await self.sealer.list_now(session)
                await asyncio.to_thread(
                    self.trajectories.add_feedback,
                    early.trajectory,
                    early.kind,
                    early.value,
                    early.data,
                    early.given_id,
                )
                return True
            again = self.registry.named(early.name, early.key)
            early.trajectory = None if again is None else again.facts.trajectory
        return time.time() - early.at > _LONGEST_S and self._dropped("age")

    def _dropped(self, reason: str) -> bool:
        self.metrics.count("feedback_dropped_total", reason=reason)
        return True
