"""A read-only store over HTTP: one region reads another region's objects. The server.

    GET  /objects/KEY             the bytes; `Range: bytes=FIRST-LAST` for a part, HEAD for size and Last-Modified
    GET  /list?prefix=            {"keys": […]}
    GET  /folders?prefix=         {"folders": […]}
    GET  /watch?key=KEY&seconds=S the bytes as soon as the object exists, 204 after S seconds

With a token, every request needs `Authorization: Bearer TOKEN`. What arrives is untrusted: readers check digests.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import re
import time
from email.utils import formatdate
from typing import TYPE_CHECKING, Any

from rollmill.errors import ObjectMissing, StorageError
from rollmill.storage.http import UNAUTHORISED_HINT
from rollmill.storage.objects import Objects

if TYPE_CHECKING:
    from aiohttp import web

_PIECE = 1 << 20  # bytes in memory per request
_LONGEST_WATCH_SECONDS, _WATCH_LOOK_SECONDS = 30.0, 0.02
_RANGE = re.compile(r"bytes=(\d{1,18})-(\d{1,18})")


def object_app(objects: Objects, token: str | None = None) -> web.Application:
    """An aiohttp application that serves one store, read-only."""
    from aiohttp import web

    @web.middleware
    async def guard(request: web.Request, handler: Any) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").removeprefix("Bearer ").encode(errors="replace")
        if token is not None and not hmac.compare_digest(given, token.encode()):
            error = "the store token is missing or wrong"
            return web.json_response({"error": error, "hint": UNAUTHORISED_HINT}, status=401)
        try:
            return await handler(request)
        except ObjectMissing as error:
            return web.json_response({"error": error.message}, status=404)
        except StorageError as error:
            return web.json_response({"error": error.message}, status=500)

    async def listing(request: web.Request) -> web.Response:
        """List the keys, or the folders, below a prefix.

        Needs: the store token.
        Takes: ?prefix=PREFIX.
        Returns: {"keys"} or {"folders"}.
        """
        call, name = (objects.list, "keys") if request.path.endswith("/list") else (objects.folders, "folders")
        return web.json_response({name: await asyncio.to_thread(call, request.query.get("prefix", ""))})

    async def read(request: web.Request) -> web.StreamResponse:
        """Read an object.

        Needs: the store token.
        Takes: header `Range: bytes=FIRST-LAST` for a part.
        Returns: the bytes; for HEAD only size and Last-Modified. 404 if there is no such object.
        """
        return await _send(request, objects, request.match_info["key"])

    async def watch(request: web.Request) -> web.StreamResponse:
        """Wait for an object, instead of polling.

        Needs: the store token.
        Takes: ?key=KEY&seconds=S.
        Returns: the bytes as soon as the object exists; 204 after S seconds, at most 30.
        """
        status = await _watch(request, objects)
        return await _send(request, objects, request.query["key"]) if status == 200 else web.Response(status=status)

    app = web.Application(middlewares=[guard])
    app.router.add_get("/watch", watch)
    app.router.add_get("/list", listing)
    app.router.add_get("/folders", listing)
    app.router.add_get("/objects/{key:.+}", read)  # answers HEAD too
    return app


async def _send(request: web.Request, objects: Objects, key: str) -> web.StreamResponse:
    from aiohttp import web

    found = await asyncio.to_thread(objects.stat, key)
    if found is None:
        raise ObjectMissing(f"no object {key!r}")
    size = found.bytes
    start, stop, status = 0, size, 200
    if "Range" in request.headers:
        wanted = _RANGE.fullmatch(request.headers["Range"])
        if wanted is None or int(wanted[1]) >= size or int(wanted[2]) < int(wanted[1]):
            return web.Response(status=416, headers={"Content-Range": f"bytes */{size}"})
        start, stop, status = int(wanted[1]), min(int(wanted[2]) + 1, size), 206
    response = web.StreamResponse(status=status, headers={"Content-Type": "application/octet-stream"})
    response.content_length = stop - start
    response.headers["Last-Modified"] = formatdate(found.modified, usegmt=True)
    if status == 206:
        response.headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
    with contextlib.suppress(ConnectionResetError):  # the client disconnected
        await response.prepare(request)
        if request.method != "HEAD":
            for first in range(start, stop, _PIECE):
                await response.write(await asyncio.to_thread(objects.get_range, key, first, min(_PIECE, stop - first)))
        await response.write_eof()
    return response


async def _watch(request: web.Request, objects: Objects) -> int:
    try:
        seconds = float(request.query.get("seconds", "0"))
    except ValueError:
        seconds = -1.0
    if not seconds >= 0:  # NaN is refused too
        return 400
    deadline = time.monotonic() + min(seconds, _LONGEST_WATCH_SECONDS)
    while await asyncio.to_thread(objects.head, request.query.get("key", "")) is None:
        left = deadline - time.monotonic()
        if left <= 0:
            return 204
        await asyncio.sleep(min(_WATCH_LOOK_SECONDS, left))
    return 200
