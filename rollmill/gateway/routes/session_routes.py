"""Sessions over HTTP: open, show, seal and delete one; list them all; forget a user."""

from __future__ import annotations

import asyncio
import json

from aiohttp import web

from rollmill.errors import GatewayError
from rollmill.gateway.gateway_parts import GatewayParts
from rollmill.gateway.recording.entries import encode_open
from rollmill.gateway.sessions.registry import pseudonym
from rollmill.gateway.sessions.session_overview import describe_session
from rollmill.gateway.sessions.sessions import Session, SessionFacts, check_id, parse_facts
from rollmill.gateway.wire.body import parse_object
from rollmill.strict import short
from rollmill.trajectories.storable import LONGEST_OBJECT_KEY, is_key


class SessionRoutes:
    def __init__(self, parts: GatewayParts) -> None:
        self._workers = parts.workers
        self._access = parts.access
        self._registry = parts.registry
        self._recorder = parts.recorder
        self._sealer = parts.sealer
        self._early = parts.early
        self._trajectories = parts.given.trajectories
        self._secret = parts.given.admin_token.encode()

    def add_to(self, app: web.Application) -> None:
        app.router.add_post("/sessions", self.open)
        app.router.add_get("/sessions", self.list)
        app.router.add_get("/sessions/{id}", self.show)
        app.router.add_post("/sessions/{id}/seal", self.seal)
        app.router.add_delete("/sessions/{id}", self.delete)
        app.router.add_post("/forget", self.forget)

    async def open(self, request: web.Request) -> web.StreamResponse:
        """Open a session whose requests become one trajectory.

        Needs: a key with the scope rollout; for production traffic one with the scope admin.
        Takes: {"trajectory", "traffic": "rollout" or "production"}, and optionally run, task_id, group_id, min_version,
        line (of min_version) and provenance.
        Returns: {"key"}: the API key of this session, the same if it is already open; 409 if it is sealed.
        """
        await self._access.check(request, "rollout")
        facts = parse_facts(parse_object(await request.read()))
        if self._workers.elsewhere(request, facts.trajectory):
            return await self._workers.forward(request, facts.trajectory)
        await self._check_traffic(request, facts)
        sealed = await self._sealer.is_sealed(facts.trajectory)
        session = self._registry.get(facts.trajectory)
        if sealed or (session is not None and session.facts != facts):
            what = "already sealed" if sealed else "open with different fields"
            raise GatewayError(f"{facts.trajectory} is {what}", status=409, hint="use a new id")
        if session is None:
            await self._recorder.append(facts.trajectory, encode_open(facts))
            # the same request, sent twice, may have opened it while this one waited for the disk
            session = self._registry.get(facts.trajectory) or self._registry.add(facts)
            session.logged = True
        return web.json_response({"key": self._registry.key(facts.trajectory)})

    async def seal(self, request: web.Request) -> web.StreamResponse:
        """End a session: store its record and finish its trajectory.

        Needs: a key with the scope rollout; for production traffic one with the scope admin.
        Takes: {"submission_key"}: the object with the submission, or null.
        Returns: {"trajectory", "payload_key", "tokens", …}; the same if it is already sealed.
        """
        id = check_id(request.match_info["id"])
        if self._workers.elsewhere(request, id):
            return await self._workers.forward(request, id)
        await self._session_to_end(request)
        submission_key = parse_object(await request.read() or b"{}").get("submission_key")
        if submission_key is not None and not is_key(submission_key, LONGEST_OBJECT_KEY):
            raise GatewayError(f"submission_key must be an object key or null, got {short(submission_key)}")
        return web.json_response(await self._sealer.seal(id, submission_key))

    async def _session_to_end(self, request: web.Request) -> Session | None:
        """The open session that the path names. Raises 403 if the key may not seal or delete it."""
        await self._access.check(request, "rollout")
        session = self._registry.get(check_id(request.match_info["id"]))
        if session is not None:
            await self._check_traffic(request, session.facts)
        return session

    async def _check_traffic(self, request: web.Request, facts: SessionFacts) -> None:
        """Raises 403 for a production session if the key is only for rollouts."""
        if facts.traffic == "production":
            await self._access.check(request, "admin")

    async def show(self, request: web.Request) -> web.StreamResponse:
        """Say how long the requests of an open session have waited for an engine, in all.

        Needs: a key with the scope read; for a rollout session also one with the scope rollout.
        Returns: {"waited_seconds"}: a request that is waiting now counts too; 404 if there is no such session.
        """
        id = check_id(request.match_info["id"])
        if self._workers.elsewhere(request, id):
            return await self._workers.forward(request, id)
        session = self._registry.get(id)
        production = session is not None and session.facts.traffic == "production"
        await self._access.check(request, "read", *(() if production else ("rollout",)))
        if session is None:
            raise GatewayError("there is no such open session", status=404, hint="it was sealed or never opened")
        return web.json_response({"waited_seconds": session.waits.seconds()})

    async def delete(self, request: web.Request) -> web.StreamResponse:
        """Delete a session and its record.

        Needs: a key with the scope rollout; for production traffic one with the scope admin.
        Returns: {"deleted"}: false if there was no such session.
        """
        id = check_id(request.match_info["id"])
        if self._workers.elsewhere(request, id):
            return await self._workers.forward(request, id)
        session = await self._session_to_end(request)
        deleted = session is not None and await self._sealer.give_up(session, "the session was deleted")
        return web.json_response({"deleted": deleted})

    async def list(self, request: web.Request) -> web.Response:
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
            await self._sealer.give_up(session, "its user was forgotten")
        await self._early.forget(ended)
        await self._recorder.erase()  # sealed sessions may still be in the file
        deleted, kept = await asyncio.to_thread(self._trajectories.delete_user, name)
        if await self._early.forget([], deleted):
            await self._recorder.erase()
        count = len(ended) + sum(other["open"] for other in others)
        deleted = [*deleted, *(id for other in others for id in other["deleted"])]
        return web.json_response({"open": count, "deleted": deleted, "kept": kept})
