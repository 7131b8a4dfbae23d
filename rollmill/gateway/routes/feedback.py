"""POST /v1/feedback: what users say about an answer, a segment or a session, at any time.

Feedback is appended to the record of the trajectory, before or after it is sealed. Sending it again with the same `id`
changes nothing. A key gives feedback only about its own sessions; an admin key about all. Feedback may come before the
first answer of its session, under the name that the client gives to it: see recording/early_feedback.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Annotated, Any

from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rollmill.errors import GatewayError, TrajectoryError
from rollmill.gateway.access.keys import Key
from rollmill.gateway.gateway_parts import GatewayParts
from rollmill.gateway.recording.early_feedback import Early
from rollmill.gateway.sessions.identity import named_session
from rollmill.gateway.sessions.registry import key_id_of
from rollmill.gateway.sessions.sessions import check_id
from rollmill.gateway.wire.body import parse_object
from rollmill.signals import KEPT, checked
from rollmill.strict import describe_problem
from rollmill.types import TrafficClass, TrajectoryState

_Short = Annotated[str, Field(min_length=1, max_length=128)]


class Feedback(BaseModel):
    """`session`, `segment` or `answer` says what it is about; answers carry all three."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    id: _Short | None = None
    session: _Short | None = None
    segment: Annotated[str, Field(min_length=1, max_length=160)] | None = None
    answer: Annotated[str, Field(min_length=1, max_length=180)] | None = None  # SEGMENT/NUMBER
    kind: _Short = "feedback"
    value: Annotated[float, Field(ge=-1e6, le=1e6)] | None = None
    label: _Short | None = None
    text: Annotated[str, Field(max_length=4000)] | None = None


class FeedbackRoutes:
    def __init__(self, parts: GatewayParts) -> None:
        self._workers = parts.workers
        self._access = parts.access
        self._registry = parts.registry
        self._sealer = parts.sealer
        self._trajectories = parts.given.trajectories
        self._early = parts.early

    def add_to(self, app: web.Application) -> None:
        app.router.add_post("/v1/feedback", self.give)

    async def give(self, request: web.Request) -> web.StreamResponse:
        """Append feedback to the record of a session, at any time.

        Needs: a key with the scope feedback that owns the session.
        Takes: {"session", "segment" or "answer", and "value", "label" or "text"}, optionally id and kind. The path
        /s/SESSION/v1/feedback and the header x-rollmill-session name the session too.
        Returns: {"trajectory", "feedback"}: the number of the feedback, the same for the same id. Status 202 and
        "feedback": null if the session has no answer yet: the feedback waits for one, for up to a day.
        """
        given = _parse(await request.read(), named_session(request))
        if self._workers.elsewhere(request, _about(given)):
            return await self._workers.forward(request, _about(given))
        key = await self._access.admit(request, "feedback", samples=False)
        trajectory, begun = await self._find(key, given)
        about = {name: getattr(given, name) for name in ("segment", "answer", "label", "text")}
        data = {**{name: said for name, said in about.items() if said is not None}, "key": key.id}
        if not begun or trajectory is None:
            name = trajectory if given.session is None else given.session
            assert name is not None, "feedback without a session is about a trajectory"
            await self._early.add(Early(key.id, name, given.kind, given.value, data, given.id, trajectory))
            return web.json_response({"trajectory": trajectory, "feedback": None}, status=202)
        try:
            number = await asyncio.to_thread(
                self._trajectories.add_feedback, trajectory, given.kind, given.value, data, given.id
            )
        except TrajectoryError as error:
            raise GatewayError(error.message, hint=error.hint) from None
        return web.json_response({"trajectory": trajectory, "feedback": number})

    async def _find(self, key: Key, given: Feedback) -> tuple[str | None, bool]:
        """The trajectory that it is about, and whether it has an answer: then its row exists when this returns. None if
        a session of this key may come to have the name. Raises if the key does not own it."""
        segment, name = _segment(given), _about(given)
        session = self._registry.named(name, key.id) or self._registry.get(name)
        if session is not None:
            facts = session.facts
            _check_owner(key, facts.traffic, facts.provenance)
            if not session.stored:
                raise GatewayError("this session is not stored: its user did not agree", status=410)
            if facts.traffic == "production" and not session.segments:
                return facts.trajectory, False  # a row is written only when there is something to store
            if facts.traffic == "production":
                await self._sealer.list_now(session)
            return facts.trajectory, True
        try:
            row = await asyncio.to_thread(self._trajectories.get, name)
        except TrajectoryError:
            if segment is None and "production" in key.scopes:
                return None, False
            raise _unknown() from None
        _check_owner(key, row.traffic, row.provenance)
        if row.state == TrajectoryState.deleted:
            raise _unknown()
        return row.id, True


def _parse(body: bytes, named: str | None) -> Feedback:
    try:
        given = Feedback.model_validate(parse_object(body))
    except ValidationError as error:
        raise GatewayError(describe_problem(error), hint=f"the fields are {', '.join(Feedback.model_fields)}") from None
    if named is not None and given.session not in (None, named):
        raise GatewayError("the path or the header and the body name two sessions", hint="leave one of them out")
    given = given.model_copy(update={"session": given.session or named})
    if given.session is None and given.segment is None and given.answer is None:
        raise GatewayError("what the feedback is about is missing", hint="session, segment or answer")
    if given.value is None and given.label is None and given.text is None:
        raise GatewayError("the feedback is empty", hint="value, label or text")
    if given.value is not None:
        try:
            checked(given.kind, given.value)
        except ValueError as error:
            raise GatewayError(f"value: {error}", hint="a kind of your own may have any value") from None
    if given.kind == "kept" and not KEPT.fullmatch(given.label or ""):
        raise GatewayError(f"label: {given.label!r} names no change that was kept", hint="two commits: BASE..COMMIT")
    return given


def _segment(given: Feedback) -> str | None:
    return given.answer.rpartition("/")[0] if given.answer else given.segment


def _about(given: Feedback) -> str:
    """The name of the session, or the trajectory that the segment belongs to."""
    segment = _segment(given)
    return check_id(segment.rpartition(".")[0] if segment else given.session)


def _check_owner(key: Key, traffic: TrafficClass, provenance: Mapping[str, Any]) -> None:
    """Rollouts belong to the run: no agent and no user can say something about them."""
    mine = traffic == "production" and key_id_of(provenance) == key.id
    if not mine and not key.allows("admin"):
        raise _unknown()


def _unknown() -> GatewayError:
    """The same for a session of another key: who asks does not learn that it exists."""
    return GatewayError(
        "there is no such session of this key", status=404, hint="answers carry the trajectory in `rollmill`"
    )
