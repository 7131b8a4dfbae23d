"""Forgetting a user: open sessions leave memory and log, sealed ones lose their payloads. The index keeps their rows,
marked `deleted`, so that every report still adds up."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from aiohttp import web

from rollmill.errors import GatewayError
from rollmill.gateway.access.access import Access
from rollmill.gateway.recording.recorder import Recorder
from rollmill.gateway.recording.sealing import Sealer, delete_unfinished
from rollmill.gateway.sessions.early import About, EarlyFeedback
from rollmill.gateway.sessions.registry import Registry, pseudonym
from rollmill.gateway.sessions.session_overview import describe_session
from rollmill.gateway.wire.body import parse_object
from rollmill.gateway.workers import Workers, log_directories
from rollmill.storage.objects import Objects
from rollmill.trajectories.trajectory_store import TrajectoryStore

_REASON = "its user was forgotten"


class AdminRoutes:
    def __init__(
        self,
        access: Access,
        registry: Registry,
        sealer: Sealer,
        recorder: Recorder,
        trajectories: TrajectoryStore,
        admin_token: str,
        workers: Workers,
        early: EarlyFeedback,
    ) -> None:
        self._workers = workers
        self._early = early
        self._access = access
        self._registry = registry
        self._sealer = sealer
        self._recorder = recorder
        self._trajectories = trajectories
        self._secret = admin_token.encode()

    def add_to(self, app: web.Application) -> None:
        app.router.add_get("/sessions", self.sessions)
        app.router.add_post("/forget", self.forget)

    async def sessions(self, request: web.Request) -> web.Response:
        """List the open sessions.

        Needs: a key with the scope read.
        Returns: {"sessions"}: for each its trajectory, name, key, turns, tokens and state; never what was said.
        """
        await self._access.check(request, "read")
        others = [json.loads(answer)["sessions"] for answer in await self._workers.ask_others(request)]
        own = [describe_session(session) for session in self._registry]
        return web.json_response({"sessions": [session for listed in (own, *others) for session in listed]})

    async def forget(self, request: web.Request) -> web.Response:
        """Delete everything that was recorded of a user.

        Needs: a key with the scope admin.
        Takes: {"user"}: the name that requests gave.
        Returns: {"open", "deleted", "kept"}: open sessions that ended, trajectories whose payload was deleted, and
        those that cannot be deleted yet, each with the reason.
        """
        await self._access.check(request, "admin")
        user = parse_object(await request.read()).get("user")
        if not isinstance(user, str) or not user:
            raise GatewayError("user must be a name", hint='{"user": "NAME"}')
        others = [json.loads(answer) for answer in await self._workers.ask_others(request)]
        name = pseudonym(self._secret, user)
        ended = [session for session in self._registry if session.facts.provenance.get("user") == name]
        for session in ended:
            await self._sealer.give_up(session, _REASON)
        await self._early.forget(ended)
        await self._recorder.erase()  # sealed sessions may still be in the file
        deleted, kept = await asyncio.to_thread(self._trajectories.delete_user, name)
        if await self._early.forget([], deleted):
            await self._recorder.erase()
        count = len(ended) + sum(other["open"] for other in others)
        deleted = [*deleted, *(id for other in others for id in other["deleted"])]
        return web.json_response({"open": count, "deleted": deleted, "kept": kept})


async def forget_in_log(
    directory: Path, secret: str, user: str, trajectories: TrajectoryStore, objects: Objects
) -> int:
    """Removes the open sessions of a user from the log of a gateway that does not run, and the payloads of seals that
    did not end. Raises GatewayError if the gateway runs. Returns the number of sessions."""
    logs = log_directories(directory)
    return sum([await _forget_in(path, secret, user, trajectories, objects) for path in logs])


async def _forget_in(directory: Path, secret: str, user: str, trajectories: TrajectoryStore, objects: Objects) -> int:
    recorder = Recorder(directory, compact_bytes=1 << 62)
    try:
        registry = Registry(secret, keep_routes=False)
        registry.replay(recorder.replay())
        recorder.start()
        name = pseudonym(secret.encode(), user)
        found = [session for session in registry if session.facts.provenance.get("user") == name]
        for session in found:
            await asyncio.to_thread(delete_unfinished, trajectories, objects, session.facts.trajectory)
            await recorder.forget(session.facts.trajectory)
        about = About.of(found)
        for entry in registry.early:
            if about.has(entry.header):
                await recorder.forget(entry.session)
        await recorder.erase()
        return len(found)
    finally:
        recorder.close()
