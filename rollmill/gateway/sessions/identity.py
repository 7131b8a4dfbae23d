"""Which session a request belongs to: its path /s/SESSION/v1/…, its header `x-rollmill-session`, or its key.

Every answer carries the header `x-rollmill-session`. A client that sends it back continues its conversation over any
connection. Coding agents name their conversation in headers of their own: a production request without any other name
belongs to that one. A name only means something under the key that sends it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from aiohttp import web

from rollmill.errors import GatewayError
from rollmill.gateway.sessions.sessions import Session, check_id, is_id
from rollmill.gateway.wire.dialect import ModelRequest

HEADER: Final = "x-rollmill-session"
_PATH = "/s/{session}"
_CLAUDE_CODE, _OPENCODE = "x-claude-code-session-id", "x-opencode-session"
_CODEX = "x-codex-turn-metadata"  # Codex sends it beside `session-id`, a name that other programs may use otherwise


def add_session_paths(app: web.Application) -> None:
    """Every route /v1/… exists as /s/SESSION/v1/… too."""
    for route in list(app.router.routes()):
        path = route.resource.canonical if route.resource is not None else ""
        if path.startswith("/v1/") and route.method != "HEAD":
            app.router.add_route(route.method, _PATH + path, route.handler)


def path_without_session(path: str) -> str:
    return "/" + path.split("/", 3)[-1] if path.startswith("/s/") else path


def named_session(request: web.Request) -> str | None:
    """The session that the path or the header names; None if neither does."""
    in_path, in_header = request.match_info.get("session"), request.headers.get(HEADER)
    if in_path is not None and in_header is not None and in_path != in_header:
        raise GatewayError("the path and the header name two sessions", hint=f"leave out the header {HEADER}")
    name = in_path if in_path is not None else in_header
    return None if name is None else check_id(name)


def agent_session(headers: Mapping[str, str]) -> str | None:
    """The conversation as a coding agent names it, if its name can be one here."""
    codex = headers.get("session-id") or headers.get("session_id") if _CODEX in headers else None
    name = headers.get(_CLAUDE_CODE) or headers.get(_OPENCODE) or codex
    return name if is_id(name) else None


def conversation(http: web.Request, request: ModelRequest) -> str | None:
    """The conversation that a production request names: itself, or as its agent does."""
    return named_session(http) or agent_session(http.headers) or (request.session if is_id(request.session) else None)


def check_named(name: str | None, session: Session) -> None:
    """A request with the key of a session cannot name another one."""
    if name is not None and name != session.facts.trajectory:
        raise GatewayError("this key belongs to another session", status=403, hint="leave out the name of the session")
