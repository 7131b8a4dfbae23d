"""The dashboard over HTTP: read-only, no script but its own, nothing from elsewhere.

On loopback it needs no key, and answers only requests that name this machine: a page of another site cannot read it by
letting its own name point here. Beyond loopback every request needs an API key with the scope `read`, either as
`Authorization: Bearer KEY` or as the password that a browser asks for.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import ipaddress
import logging
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web
from markupsafe import Markup

from rollmill.dashboard.overview import Live
from rollmill.dashboard.render import render, static
from rollmill.dashboard.run_source import Source
from rollmill.dashboard.trajectory_pages import Filters, list_page, reading_page
from rollmill.errors import ConfigError, GatewayError, RollmillError, TrajectoryError
from rollmill.gateway.access.keys import KeyRing

log = logging.getLogger(__name__)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
        "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_STATIC = {
    "report.css": "text/css",
    "report.js": "text/javascript",
    "dashboard.css": "text/css",
    "dashboard.js": "text/javascript",
    "icon.svg": "image/svg+xml",
}


def make_app(source: Source, keys: KeyRing | None = None) -> web.Application:
    """With `keys`, every request needs one with the scope `read`; without, every request has to name loopback."""
    handlers = _Handlers(source)
    app = web.Application(middlewares=[_guard(keys)])
    app.router.add_get("/", handlers.overview)
    app.router.add_get("/live", handlers.live)
    app.router.add_get("/trajectories", handlers.trajectories)
    app.router.add_get("/trajectory", handlers.trajectory)
    app.router.add_get("/static/{name}", handlers.static)
    return app


class _Handlers:
    def __init__(self, source: Source) -> None:
        self._source, self._live = source, Live(source)

    def _page(self, place: str, content: Markup, *, live: bool = False) -> web.Response:
        return html(render("page", "page", self._source.name, place, content, live))

    async def overview(self, request: web.Request) -> web.Response:
        """Show the overview: state, processes, queues, costs, versions, and the report's figures as they grow.

        Needs: a key with the scope read, beyond loopback.
        Returns: HTML.
        """
        made = await asyncio.to_thread(self._live.snapshot)
        return self._page("overview", made.body, live=True)

    async def live(self, request: web.Request) -> web.Response:
        """Return the overview without its frame, for the script of the page.

        Needs: a key with the scope read, beyond loopback.
        Takes: header `If-None-Match` with the ETag of the last answer.
        Returns: HTML with an ETag; 304 if nothing has changed.
        """
        made = await asyncio.to_thread(self._live.snapshot)
        if request.headers.get("If-None-Match") == made.etag:
            return web.Response(status=304, headers={"ETag": made.etag})
        response = html(made.body)
        response.headers["ETag"] = made.etag
        return response

    async def trajectories(self, request: web.Request) -> web.Response:
        """List trajectories, newest first, 50 per page.

        Needs: a key with the scope read, beyond loopback.
        Takes: ?search=, run=, state=, solved=, split=, reward=, version=, after=.
        Returns: HTML; 400 if a filter cannot be read.
        """
        content = await asyncio.to_thread(list_page, self._source, Filters.of(request.query))
        return self._page("trajectories", content)

    async def trajectory(self, request: web.Request) -> web.Response:
        """Show one trajectory turn by turn: tokens, log-probs, the weights that sampled them, rewards, feedback.

        Needs: a key with the scope read, beyond loopback.
        Takes: ?id=ID.
        Returns: HTML; 404 if there is no such trajectory.
        """
        content = await asyncio.to_thread(reading_page, self._source, request.query.get("id", ""))
        return self._page("trajectories", content)

    async def static(self, request: web.Request) -> web.Response:
        """Return a style sheet, script or picture of the page.

        Needs: a key with the scope read, beyond loopback.
        Returns: the file; 404 for any other name.
        """
        if request.match_info["name"] not in _STATIC:
            raise web.HTTPNotFound
        name = request.match_info["name"]
        return web.Response(text=static(name), content_type=_STATIC[name], charset="utf-8")


def html(text: str, status: int = 200) -> web.Response:
    return web.Response(text=text, status=status, content_type="text/html", charset="utf-8")


def _guard(keys: KeyRing | None) -> Any:
    """Refuses who may not read, turns errors into pages, and adds the headers."""

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            if keys is not None:
                await keys.check(_secret(request), "read")
            elif not is_loopback(_named_host(request)):
                raise web.HTTPMisdirectedRequest(text="this dashboard is reached as localhost only\n")
            response = await handler(request)
        except GatewayError as error:
            response = _problem(error.message, error.hint, error.status)
            if error.status == 401:
                response.headers["WWW-Authenticate"] = 'Basic realm="Rollmill: any user name, a key as the password"'
        except (ConfigError, TrajectoryError) as error:
            response = _problem(error.message, error.hint, 400 if isinstance(error, ConfigError) else 404)
        except RollmillError as error:  # a store that does not answer: the page says so and tries again
            response = _problem(error.message, error.hint, 503)
        except web.HTTPException as error:
            response = _problem(error.text or error.reason, None, error.status)
        response.headers.update(HEADERS)
        return response

    return guard


def _problem(message: str, hint: str | None, status: int) -> web.Response:
    return html(render("page", "page", "Rollmill", "", render("page", "problem", message, hint), False), status)


def _secret(request: web.Request) -> str:
    """The key of a request; empty if it has none."""
    kind, _, given = request.headers.get("Authorization", "").partition(" ")
    if kind.lower() != "basic":
        return given.strip() if kind.lower() == "bearer" else ""
    try:
        return base64.b64decode(given, validate=True).decode().partition(":")[2]
    except (binascii.Error, UnicodeDecodeError):
        return ""


def _named_host(request: web.Request) -> str:
    try:
        return urlsplit(f"//{request.headers.get('Host', '')}").hostname or ""
    except ValueError:
        return ""


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
