"""A store over HTTP, read-only: how one region reads another one's objects. Server and client of the same three calls.

    GET  /objects/KEY     the bytes; `Range: bytes=FIRST-LAST` for a part, HEAD for the size
    GET  /list?prefix=    {"keys": […]}
    GET  /folders?prefix= {"folders": […]}

With a token, every request needs `Authorization: Bearer TOKEN`. What arrives is untrusted: readers check digests.
"""

from __future__ import annotations

import asyncio
import builtins
import hmac
import http.client
import json
import re
import threading
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

from rollmill.errors import ObjectMissing, StorageError

if TYPE_CHECKING:
    from aiohttp import web

    from rollmill.storage.objects import Objects

_TIMEOUT_SECONDS = 30.0
_PIECE = 8 << 20
_LARGEST_REPLY = 1 << 30  # a reply announced larger than this is refused before any of it is read
_LARGEST_REFUSAL = 1 << 16
_RANGE = re.compile(r"bytes=(\d{1,18})-(\d{1,18})")


def object_app(objects: Objects, token: str | None = None) -> web.Application:
    """An aiohttp application that serves one store, read-only."""
    from aiohttp import web

    @web.middleware
    async def guard(request: web.Request, handler: Any) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if token is not None and not hmac.compare_digest(given.encode(), token.encode()):
            return web.json_response({"error": "a bearer token is needed"}, status=401)
        try:
            return await handler(request)
        except ObjectMissing as error:
            return web.json_response({"error": error.message}, status=404)
        except StorageError as error:
            return web.json_response({"error": error.message}, status=500)

    async def listing(request: web.Request) -> web.Response:
        call, name = (objects.list, "keys") if request.path.endswith("/list") else (objects.folders, "folders")
        return web.json_response({name: await asyncio.to_thread(call, request.query.get("prefix", ""))})

    async def read(request: web.Request) -> web.StreamResponse:
        return await _send(request, objects, request.match_info["key"])

    app = web.Application(middlewares=[guard])
    app.router.add_get("/list", listing)
    app.router.add_get("/folders", listing)
    app.router.add_get("/objects/{key:.+}", read)  # answers HEAD too
    return app


async def _send(request: web.Request, objects: Objects, key: str) -> web.StreamResponse:
    from aiohttp import web

    size = await asyncio.to_thread(objects.head, key)
    if size is None:
        raise ObjectMissing(f"no object {key!r}")
    start, stop, status = 0, size, 200
    if "Range" in request.headers:
        wanted = _RANGE.fullmatch(request.headers["Range"])
        if wanted is None or int(wanted[1]) >= size or int(wanted[2]) < int(wanted[1]):
            return web.Response(status=416, headers={"Content-Range": f"bytes */{size}"})
        start, stop, status = int(wanted[1]), min(int(wanted[2]) + 1, size), 206
    response = web.StreamResponse(status=status, headers={"Content-Type": "application/octet-stream"})
    response.content_length = stop - start
    if status == 206:
        response.headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
    await response.prepare(request)
    if request.method != "HEAD":
        for first in range(start, stop, _PIECE):
            await response.write(await asyncio.to_thread(objects.get_range, key, first, min(_PIECE, stop - first)))
    await response.write_eof()
    return response


class HttpBackend:
    """The client: one kept-alive connection, reopened once when the server has closed it. Any thread may call."""

    def __init__(self, url: str, token: str | None = None) -> None:
        parts = urlsplit(url)
        if not parts.hostname or parts.username or parts.query or parts.fragment:
            raise StorageError(f"{url!r} is not the address of an object store", hint="for example http://host:8000")
        self._url = url
        self._path = parts.path.rstrip("/")
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._connection = kind(parts.hostname, parts.port, timeout=_TIMEOUT_SECONDS)
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._lock = threading.Lock()

    def get(self, key: str) -> bytes:
        return self._request("GET", key, f"/objects/{quote(key)}")[1]

    def get_range(self, key: str, start: int, length: int) -> bytes:
        if length == 0:
            return b""
        wanted = {"Range": f"bytes={start}-{start + length - 1}"}
        status, data = self._request("GET", key, f"/objects/{quote(key)}", wanted, limit=length)
        if status != 206:
            raise StorageError(f"{self._url} does not answer range requests as an object store does")
        return data

    def head(self, key: str) -> int | None:
        try:
            return self._request("HEAD", key, f"/objects/{quote(key)}")[0]
        except ObjectMissing:
            return None

    def list(self, prefix: str) -> builtins.list[str]:
        return self._names("list", "keys", prefix)

    def folders(self, prefix: str) -> builtins.list[str]:
        return self._names("folders", "folders", prefix)

    def put(self, key: str, data: bytes) -> None:
        raise self._read_only(key)

    def create(self, key: str, data: bytes) -> None:
        raise self._read_only(key)

    def delete(self, key: str) -> None:
        raise self._read_only(key)

    def _names(self, call: str, field: str, prefix: str) -> builtins.list[str]:
        try:
            names = json.loads(self._request("GET", prefix, f"/{call}?prefix={quote(prefix)}")[1])[field]
        except (ValueError, LookupError, TypeError, RecursionError):
            names = None
        if not isinstance(names, builtins.list) or not all(isinstance(name, str) for name in names):
            raise StorageError(f"{self._url} did not answer {call} as an object store does")
        return names

    def _request(
        self, method: str, key: str, path: str, headers: dict[str, str] | None = None, limit: int = _LARGEST_REPLY
    ) -> tuple[int, bytes]:
        """(status, body); for HEAD, (size, nothing). A connection that the server has closed is opened again, once."""
        with self._lock:
            for attempt in (1, 2):
                try:
                    self._connection.request(method, self._path + path, headers={**self._headers, **(headers or {})})
                    return self._reply(method, key, self._connection.getresponse(), limit)
                except (OSError, http.client.HTTPException) as error:
                    self._connection.close()
                    if attempt == 2:
                        raise StorageError(
                            f"{key!r} at {self._url}: {error or type(error).__name__}",
                            hint="check that the region is up and reachable; the call can be repeated",
                        ) from error
        raise AssertionError("unreachable")

    def _reply(self, method: str, key: str, response: http.client.HTTPResponse, limit: int) -> tuple[int, bytes]:
        if method == "HEAD" and response.status == 200:
            response.read()
            return int(response.headers.get("Content-Length") or 0), b""
        if response.status not in (200, 206):
            response.read(_LARGEST_REFUSAL)
            self._forget_unread(response)
            raise self._refusal(key, response.status)
        if response.length is None or response.length > limit:
            self._forget_unread(response)
            raise StorageError(f"{key!r} at {self._url}: a reply of {response.length} bytes, at most {limit} expected")
        return response.status, response.read()

    def _forget_unread(self, response: http.client.HTTPResponse) -> None:
        if not response.isclosed():  # the next reply on this connection would begin in the middle of this one
            self._connection.close()

    def _refusal(self, key: str, status: int) -> StorageError:
        if status == 404:
            return ObjectMissing(f"no object {key!r} at {self._url}")
        hint = "the store asks for another token" if status == 401 else None
        return StorageError(f"{key!r} at {self._url}: HTTP status {status}", hint=hint)

    def _read_only(self, key: str) -> StorageError:
        return StorageError(
            f"{key!r} cannot be written at {self._url}: a store over HTTP is read-only",
            hint="write to the region's own store",
        )
