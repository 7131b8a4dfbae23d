"""Keeps an engine at the head of its line: asks the store in a thread, applies between two decode steps."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Protocol

from rollmill import telemetry
from rollmill.errors import RollmillError, StorageError, WeightsError
from rollmill.inference.engine import Engine
from rollmill.types import Version
from rollmill.weights.follower import Update
from rollmill.weights.store import WeightStore
from rollmill.weights.transfer import Mirror

log = logging.getLogger(__name__)
RETRY_SECONDS = 1.0


class UpdateSource(Protocol):
    """`rollmill.weights.follower.Follower`, or `Pinned`."""

    problem: str | None

    def poll(self) -> Update | None: ...


class Pinned:
    """One version, for good: what an evaluation of an old version is served from."""

    def __init__(self, store: WeightStore, version: Version, form: str, mirror: Mirror | None = None) -> None:
        self._store, self._version, self._form, self._mirror = store, version, form, mirror
        self._served = False
        self.problem: str | None = None

    def poll(self) -> Update | None:
        if self._served:
            return None
        started = time.perf_counter()
        try:
            if self._mirror is not None:
                self._mirror.copy(self._version.line, self._form, self._version.number)
            held = self._store.hold(self._version, self._form)
        except (StorageError, WeightsError) as error:
            self.problem = str(error)
            return None
        self._served, self.problem = True, None
        manifest, seconds = held.manifest, time.perf_counter() - started
        return Update(
            manifest.policy, held.tensors, set(held.tensors), manifest.bytes, {"fetch": seconds}, manifest.created_at
        )


class EngineFollower:
    """Runs until it is cancelled. `problem` says why the engine is not at the newest version, if it is not."""

    def __init__(self, engine: Engine, source: UpdateSource, poll_seconds: float) -> None:
        self._engine, self._source, self._poll_seconds = engine, source, poll_seconds
        self._refused: str | None = None

    @property
    def problem(self) -> str | None:
        return self._refused or self._source.problem

    async def run(self) -> None:
        update: Update | None = None
        while True:
            update = await asyncio.to_thread(self._source.poll) or update
            if update is not None and await self._apply(update):
                update = None
            await asyncio.sleep(self._poll_seconds if update is None else RETRY_SECONDS)

    async def _apply(self, update: Update) -> bool:
        policy, start = update.policy, time.time()
        try:
            applied = await self._engine.apply(update)
        except RollmillError as error:
            if self._refused is None:
                log.error("%s@%d was not applied: %s", policy.line, policy.number, error)
            self._refused = str(error)
            return False
        self._refused = None
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
        return True
