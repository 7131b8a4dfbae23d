"""A read-only store over HTTP, the client: one region reads another region's objects (object_server.py)."""

from __future__ import annotations

import builtins
import collections
import http.client
import time
from collections.abc import Sequence
from email.utils import parsedate_to_datetime
from typing import IO, NamedTuple
from urllib.parse import quote, urlsplit

from pydantic import TypeAdapter

from rollmill.backoff import Backoff
from rollmill.errors import ObjectMissing, StorageError
from rollmill.storage.backend import PATIENCE_SECONDS, Backend, Stat
from rollmill.strict import parse_json
from rollmill.tls import own_context

_LARGEST_REPLY = 1 << 30  # a larger reply is refused before it is read
_LARGEST_REFUSAL = 1 << 16
_SLOWEST_BYTES_PER_SECOND = 50_000  # a slower reply is given up
_MOST_IDLE = 32  # connections kept for the next requests
_TRY_AGAIN = {429, 502, 503, 504}
_PAUSE_SECONDS = 0.1, 2.0  # the first pause before a busy server is asked again, and the longest
UNAUTHORISED_HINT = "send `Authorization: Bearer TOKEN`; TOKEN is `store_token` in the run's run.json"
_NAMES = TypeAdapter(dict[str, list[str]])


class _Reply(NamedTuple):
    status: int
    headers: http.client.HTTPMessage
    body: bytes


class HttpBackend(Backend):
    """The client; any thread may call it. Connections are reused, one per concurrent request: a new one costs a round
    trip."""

    def __init__(self, url: str, token: str | None = None, patience: float = PATIENCE_SECONDS) -> None:
        parts = urlsplit(url)
        if not parts.hostname or parts.username or parts.query or parts.fragment:
            raise StorageError(f"{url!r} is not the address of an object store", hint="for example http://host:8000")
        self._url = url
        self._path = parts.path.rstrip("/")
        self._address = parts.hostname, parts.port
        self._tls = parts.scheme == "https"
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._patience = patience
        self._idle: collections.deque[http.client.HTTPConnection] = collections.deque()  # its methods are atomic

    def _connection(self, timeout: float) -> http.client.HTTPConnection:
        if self._tls:
            return http.client.HTTPSConnection(*self._address, timeout=timeout, context=own_context())
        return http.client.HTTPConnection(*self._address, timeout=timeout)

    def get(self, key: str) -> bytes:
        return self._request("GET", key, f"/objects/{quote(key)}").body

    def get_range(self, key: str, start: int, length: int) -> bytes:
        if length == 0:
            return b""
        wanted = {"Range": f"bytes={start}-{start + length - 1}"}
        reply = self._request("GET", key, f"/objects/{quote(key)}", wanted, limit=length)
        if reply.status == 416:
            return b""
        if reply.status != 206:
            raise StorageError(f"{self._url} does not answer range requests like an object store")
        return reply.body

    def stat(self, key: str) -> Stat | None:
        try:
            headers = self._request("HEAD", key, f"/objects/{quote(key)}").headers
        except ObjectMissing:
            return None
        try:
            modified = parsedate_to_datetime(headers["Last-Modified"])
            return Stat(int(headers["Content-Length"]), modified.timestamp())
        except (ValueError, TypeError, OverflowError):
            raise StorageError(f"{self._url} does not report the size and time of {key!r}") from None

    def list(self, prefix: str) -> builtins.list[str]:
        return self._names("list", "keys", prefix)

    def folders(self, prefix: str) -> builtins.list[str]:
        return self._names("folders", "folders", prefix)

    def put(self, key: str, data: bytes) -> None:
        raise self._read_only(key)

    def create(self, key: str, data: bytes) -> None:
        raise self._read_only(key)

    def create_from(self, key: str, file: IO[bytes]) -> None:
        raise self._read_only(key)

    def delete(self, keys: Sequence[str]) -> None:
        raise self._read_only(keys[0])

    def wait_for(self, key: str, seconds: float) -> bytes | None:
        reply = self._request("GET", key, f"/watch?key={quote(key)}&seconds={seconds:.3f}", silence=seconds)
        return reply.body if reply.status == 200 else None

    def _names(self, call: str, field: str, prefix: str) -> builtins.list[str]:
        body = self._request("GET", prefix, f"/{call}?prefix={quote(prefix)}").body
        try:
            return parse_json(body, _NAMES)[field]
        except (ValueError, KeyError):
            raise StorageError(f"{self._url} did not answer {call} like an object store") from None

    def _request(
        self,
        method: str,
        key: str,
        path: str,
        headers: dict[str, str] | None = None,
        limit: int = _LARGEST_REPLY,
        silence: float = 0.0,
    ) -> _Reply:
        """One request. A failed connection is opened again once; a busy server is retried for `patience` seconds.
        `silence` is the number of seconds the server may wait on purpose.
        """
        backoff = Backoff(*_PAUSE_SECONDS, patience=self._patience + silence)
        failures = 0
        while True:
            try:
                reply = self._exchange(method, path, {**self._headers, **(headers or {})}, limit, silence)
            except (OSError, http.client.HTTPException) as error:
                failures += 1
                if failures == 2:
                    raise StorageError(
                        f"{key!r} at {self._url}: {error or type(error).__name__}",
                        hint="check that the region is up and reachable; the call can be repeated",
                    ) from error
                continue
            pause = backoff.failed()
            if reply.status not in _TRY_AGAIN or pause > backoff.left():
                return self._accepted(key, reply)
            time.sleep(pause)

    def _accepted(self, key: str, reply: _Reply) -> _Reply:
        if reply.status in (200, 204, 206, 416):
            return reply
        if reply.status == 404:
            raise ObjectMissing(f"no object {key!r} at {self._url}")
        hint = UNAUTHORISED_HINT if reply.status == 401 else None
        raise StorageError(f"{key!r} at {self._url}: HTTP status {reply.status}", hint=hint)

    def _exchange(self, method: str, path: str, headers: dict[str, str], limit: int, silence: float) -> _Reply:
        """One exchange. The connection is kept only if the whole answer was read."""
        timeout = self._patience / 3
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = self._connection(timeout)
        kept = False
        try:
            if connection.sock is None:
                connection.connect()
            connection.sock.settimeout(timeout + silence)
            connection.request(method, self._path + path, headers=headers)
            response = connection.getresponse()
            body = self._body(method, path, response, limit)
            kept = response.isclosed() and not response.will_close and len(self._idle) < _MOST_IDLE
            return _Reply(response.status, response.headers, body)
        except OSError:
            self._forget_idle()  # the others are probably broken too
            raise
        finally:
            if kept:
                self._idle.append(connection)
            else:
                connection.close()

    def _body(self, method: str, path: str, response: http.client.HTTPResponse, limit: int) -> bytes:
        if method == "HEAD" or response.status not in (200, 206):
            return response.read(_LARGEST_REFUSAL)
        if response.length is None or response.length > limit:
            raise StorageError(f"{path!r} at {self._url}: a reply of {response.length} bytes, at most {limit} expected")
        length = response.length
        deadline = time.monotonic() + self._patience + length / _SLOWEST_BYTES_PER_SECOND
        parts: builtins.list[bytes] = []
        while part := response.read1(1 << 18):
            parts.append(part)
            if time.monotonic() > deadline:
                raise TimeoutError("the reply is too slow")
        body = b"".join(parts)
        if len(body) != length:
            raise http.client.IncompleteRead(body, length - len(body))
        response.read()  # returns nothing, but marks the response as finished
        return body

    def _forget_idle(self) -> None:
        while True:
            try:
                self._idle.pop().close()
            except IndexError:
                return

    def _read_only(self, key: str) -> StorageError:
        return StorageError(
            f"{key!r} cannot be written at {self._url}: a store over HTTP is read-only",
            hint="write to the region's own store",
        )
