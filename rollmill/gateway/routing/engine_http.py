"""HTTP/1.1 to engines, with little work per request: every request of the gateway makes one of its own.

A connection carries one request at a time. It is kept for the next one if the answer was read to its end; otherwise it
is closed, and the engine notices that nobody waits. Errors: OSError if the connection fails or ends early, TimeoutError
if the engine is silent, EngineError if what it sends is not HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import re
import ssl
import time
from collections.abc import AsyncIterator
from typing import Final, Literal, NamedTuple, cast

from yarl import URL

from rollmill.errors import EngineError
from rollmill.keepalive import notice_lost_host
from rollmill.tls import own_context

_CONNECT_S = 5.0
_IDLE_S = 60.0  # a kept connection is not used again after this time: engines close theirs after 75 s
_SETTLE_S = 5.0  # how long an answer may take from its last token to its end
_LONGEST_HEAD = 64 << 10
_LONGEST_LINE = 4 << 10  # of the size of a chunk, or a trailer
_MOST_BUFFERED = 4 << 20  # bytes that nobody has read: then the connection is not read further
_STATUS = re.compile(rb"HTTP/1\.([01]) ([1-5][0-9][0-9])(?: [^\r\n]*)?")
_SIZE = re.compile(rb"([0-9A-Fa-f]{1,8})[ \t]*(?:;.*)?")
_SIZE_LINE = re.compile(rb"([0-9A-Fa-f]{1,8})\r\n")
_Part = Literal["head", "sized", "size", "chunk", "chunk end", "trailer", "rest", "end"]


class _Origin(NamedTuple):
    host: str
    port: int
    tls: bool


class EngineConnections:
    """`silence_s`: seconds without a byte after which an engine counts as dead."""

    def __init__(self, silence_s: float) -> None:
        self.silence_s = silence_s
        self._kept: dict[_Origin, dict[_Connection, float]] = {}  # since when; the one used last is at the end
        self._open: set[_Connection] = set()
        self._tls: ssl.SSLContext | None = None

    @contextlib.asynccontextmanager
    async def post(
        self, url: str, body: bytes, token: str | None, *, whole: bool = False
    ) -> AsyncIterator[_Connection]:
        """The connection with the answer. `async with` waits for the status; if the answer is wanted `whole`, for all
        of it, which takes fewer turns of the event loop."""
        origin, head = _head(url, token)
        connection = await self._asked(origin, b"%b%d\r\n\r\n%b" % (head, len(body), body), whole)
        try:
            yield connection
        finally:
            connection.leave()

    async def _asked(self, origin: _Origin, request: bytes, whole: bool) -> _Connection:
        kept = self.take(origin)
        if kept is not None:
            try:
                await kept.ask(request, whole)
                return kept
            except ConnectionError:
                if kept.heard:  # otherwise the engine closed it while it was idle: this is no failure
                    raise
        connection = await self.connect(origin)
        await connection.ask(request, whole)
        return connection

    def close(self) -> None:
        for connection in list(self._open):
            connection.abort()
        self._kept.clear()

    def take(self, origin: _Origin) -> _Connection | None:
        """A kept connection."""
        kept = self._kept.get(origin)
        while kept:
            connection, since = kept.popitem()
            if time.monotonic() - since < _IDLE_S:
                return connection
            connection.abort()
        return None

    async def connect(self, origin: _Origin) -> _Connection:
        if origin.tls and self._tls is None:
            self._tls = own_context() or ssl.create_default_context()
        async with asyncio.timeout(_CONNECT_S):
            _, connection = await asyncio.get_running_loop().create_connection(
                lambda: _Connection(self, origin), origin.host, origin.port, ssl=self._tls if origin.tls else None
            )
        return connection

    def opened(self, connection: _Connection) -> None:
        self._open.add(connection)

    def keep(self, connection: _Connection) -> None:
        self._kept.setdefault(connection.origin, {})[connection] = time.monotonic()

    def lost(self, connection: _Connection) -> None:
        self._open.discard(connection)
        kept = self._kept.get(connection.origin)
        if kept is not None:
            kept.pop(connection, None)
            if not kept:
                del self._kept[connection.origin]


class _Connection(asyncio.Protocol):
    """One request at a time, and its answer."""

    def __init__(self, connections: EngineConnections, origin: _Origin) -> None:
        self.origin: Final = origin
        self.heard = False  # whether a byte of the answer has come
        self._connections = connections
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._part: _Part = "end"
        self._pending = b""  # the beginning of a head or a line
        self._left = 0  # bytes of the chunk, or of a body with a length
        self.status = 0
        self._reusable = False
        self._pieces: list[bytes] = []
        self._buffered = 0
        self._paused = False
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._heard_at = 0.0
        self._timer: asyncio.TimerHandle | None = None  # stays between two requests: making one costs more than a look
        self._in_use = False
        self._settle_timer: asyncio.TimerHandle | None = None
        self._finished = self._settling = False  # the rest of the body is about to come; nobody reads it any more
        self._whole = False

    async def ask(self, request: bytes, whole: bool) -> None:
        """Sends a request. Returns when the status of its answer is there."""
        try:
            self._begin(request, whole)
            while not self.status or not self._is_due():
                if self._error is not None:
                    raise self._error
                await self._wait()
        except BaseException:
            self.leave()
            raise

    def _begin(self, request: bytes, whole: bool) -> None:
        assert self._transport is not None
        self.heard, self.status, self._part, self._reusable, self._error = False, 0, "head", False, None
        self._finished = False
        if self._transport.is_closing():
            raise ConnectionResetError("the engine has closed the connection")
        self._whole = whole
        self._heard_at = self._loop.time()
        self._in_use = True
        if self._timer is None:
            self._timer = self._loop.call_later(self._connections.silence_s, self._check_silence)
        self._transport.write(request)

    async def read_some(self) -> bytes:
        """The part of the body that has arrived since the last time; b"" at its end."""
        while not self._pieces:
            if self._error is not None:
                raise self._error
            if self._part == "end":
                return b""
            await self._wait()
        data = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces, self._buffered = [], 0
        if self._paused and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()
        return data

    async def read(self, most: int | None = None) -> bytes:
        """The body, or at least its first `most` bytes."""
        pieces, size = [], 0
        while piece := await self.read_some():
            pieces.append(piece)
            size += len(piece)
            if most is not None and size >= most:
                break
        return b"".join(pieces)

    def finish(self) -> None:
        """Nothing more of the body is needed: it ends by itself, and the connection is kept then."""
        self._finished = True

    def leave(self) -> None:
        """Nobody reads further."""
        self._pieces, self._buffered = [], 0
        self._in_use = False
        if self._error is None and self._part == "end" and not self._paused:
            self._end()
        elif self._finished and self._error is None and not self._paused:
            self._settling = True
            self._settle_timer = self._loop.call_later(_SETTLE_S, self.abort)
        else:
            self._error = None  # its traceback holds the request and this connection: a cycle
            self.abort()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        notice_lost_host(transport.get_extra_info("socket"))
        self._connections.opened(self)

    def data_received(self, data: bytes) -> None:
        self.heard, self._heard_at = True, self._loop.time()
        try:
            self._parse(data)
        except EngineError as error:
            self._fail(error)
            self.abort()
        if self._buffered > _MOST_BUFFERED and not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()
        if self._waiter is not None and self._is_due():
            self._wake()

    def eof_received(self) -> bool:
        if self._part == "rest":  # a body without a length ends with the connection
            self._part = "end"
            self._wake()
        return False

    def connection_lost(self, error: Exception | None) -> None:
        self._connections.lost(self)
        for timer in (self._timer, self._settle_timer):
            if timer is not None:
                timer.cancel()
        if self._part != "end":
            self._fail(ConnectionResetError(f"the engine closed the connection{f': {error}' if error else ''}"))
        self._wake()

    def _is_due(self) -> bool:
        """Whether somebody who waits has something to do."""
        return not self._whole or self._part == "end" or self._buffered > _MOST_BUFFERED

    def _wait(self) -> asyncio.Future[None]:
        self._waiter = self._loop.create_future()
        return self._waiter

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def _fail(self, error: Exception) -> None:
        self._error = self._error or error
        self._wake()

    def _check_silence(self) -> None:
        if not self._in_use:
            self._timer = None
            return
        allowed = self._connections.silence_s
        silent = self._loop.time() - self._heard_at
        if silent < allowed or self._paused:  # paused: it is this process that does not read
            again = allowed if self._paused else allowed - silent
            self._timer = self._loop.call_later(again, self._check_silence)
        else:
            self._fail(TimeoutError(f"the engine was silent for {allowed:g} s"))
            self.abort()

    def _end(self) -> None:
        if self._reusable and self._transport is not None and not self._transport.is_closing():
            self._connections.keep(self)
        else:
            self.abort()

    def _parse(self, data: bytes) -> None:
        if self._pending:
            data, self._pending = self._pending + data, b""
        at = 0
        while at < len(data):
            if self._part == "size":
                at = self._take_chunks(data, at)
            if self._part in ("sized", "chunk"):
                at = self._take(data, at)
            elif self._part == "rest":
                self._add(data[at:] if at else data)
                return
            elif self._part == "end":  # more than was announced: the next answer could not be told from it
                self._reusable = False
                return
            else:
                mark, limit = (b"\r\n\r\n", _LONGEST_HEAD) if self._part == "head" else (b"\r\n", _LONGEST_LINE)
                end = data.find(mark, at)
                if (len(data) if end < 0 else end) - at > limit:
                    raise EngineError("the engine's answer is not HTTP: a line or its headers are too long")
                if end < 0:
                    self._pending = data[at:]
                    return
                self._read_line(data[at:end])
                at = end + len(mark)
        if self._part == "end" and self._settling:
            self._settling = False
            if self._settle_timer is not None:
                self._settle_timer.cancel()
            self._end()

    def _take_chunks(self, data: bytes, at: int) -> int:
        """The chunks that are in `data` from their size to their end, as most are. Returns where they end."""
        while (found := _SIZE_LINE.match(data, at)) is not None:
            begin = found.end()
            end = begin + int(found[1], 16)
            if begin == end or not data.startswith(b"\r\n", end):  # the last chunk, or one that goes on
                break
            self._add(data[begin:end])
            at = end + 2
        return at

    def _take(self, data: bytes, at: int) -> int:
        """The part of the body that is in `data`. Returns where it ends."""
        end = min(len(data), at + self._left)
        self._add(data[at:end])
        self._left -= end - at
        if not self._left:
            self._part = "chunk end" if self._part == "chunk" else "end"
        return end

    def _add(self, piece: bytes) -> None:
        if not self._settling:
            self._pieces.append(piece)
            self._buffered += len(piece)

    def _read_line(self, line: bytes) -> None:
        if self._part == "head":
            self._read_head(line)
        elif self._part == "size":
            found = _SIZE.fullmatch(line)
            if found is None:
                raise EngineError(f"the engine's answer is not HTTP: {line[:80]!r} is not the size of a chunk")
            self._left = int(found[1], 16)
            self._part = "chunk" if self._left else "trailer"
        elif self._part == "chunk end":
            if line:
                raise EngineError("the engine's answer is not HTTP: a chunk is longer than its size")
            self._part = "size"
        elif not line:  # the trailers end with an empty line
            self._part = "end"

    def _read_head(self, head: bytes) -> None:
        first, *lines = head.split(b"\r\n")
        found = _STATUS.fullmatch(first)
        if found is None:
            raise EngineError(f"the engine's answer is not HTTP: it begins with {first[:80]!r}")
        status = int(found[2])
        if status < 200:  # the final status follows
            if status == 101:
                raise EngineError("the engine switches protocols, which nobody asked for")
            return
        fields: dict[bytes, bytes] = {}
        for line in lines:
            name, colon, value = line.partition(b":")
            if not colon or not name or name != name.strip():
                raise EngineError(f"the engine's answer is not HTTP: {line[:80]!r} is not a header")
            fields[name.lower()] = value.strip()
        self.status = status
        self._reusable = found[1] == b"1" and fields.get(b"connection", b"").lower() != b"close"
        self._read_length(fields)

    def _read_length(self, fields: dict[bytes, bytes]) -> None:
        length, coding = fields.get(b"content-length"), fields.get(b"transfer-encoding")
        if fields.get(b"content-encoding", b"identity").lower() != b"identity":
            raise EngineError("the engine's answer is compressed, which nobody asked for")
        if coding is not None:
            if coding.lower() != b"chunked" or length is not None:
                raise EngineError(f"the engine's answer has the transfer encoding {coding[:80]!r}")
            self._part = "size"
        elif length is not None:
            if not (length.isdigit() and len(length) < 16):
                raise EngineError(f"the engine's answer has the length {length[:80]!r}")
            self._left = int(length)
            self._part = "sized" if self._left else "end"
        elif self.status in (204, 304):
            self._part = "end"
        else:
            self._part, self._reusable = "rest", False


@functools.lru_cache(maxsize=1024)
def _head(url: str, token: str | None) -> tuple[_Origin, bytes]:
    """Where a request goes, and its head up to the length of its body."""
    parsed = URL(url)
    if parsed.raw_host is None or parsed.port is None or parsed.scheme not in ("http", "https"):
        raise EngineError(f"{url!r:.200} is not the URL of an engine")
    if token is not None and not (token.isascii() and token.isprintable()):
        raise EngineError("the token of the engine has characters that a header cannot hold")
    lines = [f"POST {parsed.raw_path_qs} HTTP/1.1", f"Host: {parsed.host_port_subcomponent}"]
    lines += [f"Authorization: Bearer {token}"] if token else []
    lines += ["Content-Type: application/json", "Content-Length: "]
    return _Origin(parsed.raw_host, parsed.port, parsed.scheme == "https"), "\r\n".join(lines).encode()
