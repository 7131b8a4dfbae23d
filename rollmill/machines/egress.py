"""The only way from a machine to the network: an HTTP proxy in the dispatcher, with an allow-list and a log.

A machine has no network. With `machine.egress` its commands find a proxy at a port of their loopback address. It opens
connections to the names on the list and to nothing else:

- CONNECT (HTTPS) passes bytes that nobody here can read. Plain HTTP loses headers that identify or forward (STRIPPED).
- A name that leads to an address of a private network is refused: a list of names must not open the inside.
- Every request is one line of JSON in the log, refused ones too.

What comes through the port is untrusted: its size, its time and the number of connections are bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import logging
import re
import socket
import time
from collections.abc import Sequence
from typing import NamedTuple

log = logging.getLogger(__name__)
STRIPPED = ("authorization", "cookie", "forwarded", "from", "proxy-", "referer", "via", "x-forwarded-", "x-real-ip")
_HOP = ("connection", "keep-alive", "te", "trailer", "upgrade")
_HEAD_BYTES = 32 << 10
_HEAD_S, _CONNECT_S, _LONGEST_S = 10.0, 10.0, 600.0
_MOST_CONNECTIONS = 32  # of one machine
_TARGET = re.compile(r"(?:http://)?([A-Za-z0-9.-]{1,253})(?::([0-9]{1,5}))?(/[^\s]*)?")


ENTRY = r"^(\*\.)?[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?(:[0-9]{1,5})?$"  # of an allow-list


class Request(NamedTuple):
    method: str
    host: str
    port: int
    path: str
    head: bytes  # what is sent on; b"": CONNECT


class Refused(Exception):
    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status, self.why = status, why


class Egress:
    """The proxy of one machine. `allowed`: NAME, NAME:PORT or *.NAME; without a port 80 and 443 are meant. `inside`:
    these names may lead to addresses of a private network."""

    def __init__(
        self, listener: socket.socket, allowed: Sequence[str], log_file: str | None, name: str, *, inside: bool = False
    ) -> None:
        self._inside = inside
        self._allowed, self._log_file, self._name = tuple(allowed), log_file, name
        self._listener = listener
        self._server: asyncio.Server | None = None
        self._open = 0

    async def start(self) -> None:
        self._listener.setblocking(False)
        self._server = await asyncio.start_server(self._serve, sock=self._listener, limit=_HEAD_BYTES)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()

    def _write_log(self, line: str) -> None:
        if self._log_file is None:
            return log.info("egress %s", line)
        with open(self._log_file, "a") as opened:
            opened.write(line + "\n")

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        facts: dict[str, object] = {"time": time.time(), "machine": self._name}
        self._open += 1
        try:
            if self._open > _MOST_CONNECTIONS:
                raise Refused(429, "too many connections")
            async with asyncio.timeout(_LONGEST_S):
                async with asyncio.timeout(_HEAD_S):
                    head = await reader.readuntil(b"\r\n\r\n")
                request = read_head(head)
                facts |= {"method": request.method, "host": request.host, "port": request.port, "path": request.path}
                facts |= await self._pass_on(request, reader, writer)
        except Refused as refused:
            facts |= {"refused": refused.why}
            answer = f"HTTP/1.1 {refused.status} Refused\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
            with contextlib.suppress(OSError):
                writer.write(answer.encode())
                await writer.drain()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            facts |= {"failed": type(error).__name__}
        finally:
            self._open -= 1
            writer.close()
            self._write_log(json.dumps(facts))

    async def _pass_on(
        self, request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> dict[str, int]:
        if not is_allowed(request.host, request.port, self._allowed):
            raise Refused(403, "not on the list")
        address = await _address(request.host, request.port, self._allowed, inside=self._inside)
        try:
            async with asyncio.timeout(_CONNECT_S):
                there, back = await asyncio.open_connection(address, request.port)
        except (OSError, TimeoutError):
            raise Refused(502, "cannot be reached") from None
        try:
            if request.head:
                back.write(request.head)
            else:
                writer.write(b"HTTP/1.1 200 Connected\r\n\r\n")
            sent, received = await asyncio.gather(_copy(reader, back), _copy(there, writer))
            return {"bytes_sent": sent, "bytes_received": received}
        finally:
            back.close()


def read_head(head: bytes) -> Request:
    """What is asked for, and the head that is sent on. Refused: it is no request to a proxy."""
    lines = head.decode("latin-1").split("\r\n")
    words = lines[0].split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1.") or not words[0].isalpha():
        raise Refused(400, "no request to a proxy")
    connects = words[0] == "CONNECT"
    target = _TARGET.fullmatch(words[1])
    if target is None or words[1].startswith("http://") == connects or (connects and target[3]):
        raise Refused(400, "no target that this proxy serves")
    host, port = target[1].lower().rstrip("."), int(target[2] or (443 if connects else 80))
    if not 0 < port < 65536:
        raise Refused(400, "no such port")
    if connects:
        return Request("CONNECT", host, port, "", b"")
    kept = [f"{words[0]} {target[3] or '/'} HTTP/1.1", f"Host: {host}" + (f":{port}" if port != 80 else "")]
    for line in lines[1:]:
        name, colon, _ = line.partition(":")
        whole = colon and re.fullmatch(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+", name) and not re.search(r"[\r\n\0]", line)
        if line and not whole:
            raise Refused(400, "a header that is none")  # a folded line or a bare line end could hide another request
        plain = name.lower()
        if line and plain != "host" and plain not in _HOP and not plain.startswith(STRIPPED):
            kept.append(line)
    return Request(
        words[0], host, port, target[3] or "/", "\r\n".join([*kept, "Connection: close", "", ""]).encode("latin-1")
    )


def is_allowed(host: str, port: int, allowed: Sequence[str]) -> bool:
    for entry in allowed:
        name, _, number = entry.lower().partition(":")
        if port not in ((int(number),) if number else (80, 443)):
            continue
        if host == name or (name.startswith("*.") and host.endswith(name[1:])):
            return True
    return False


async def _address(host: str, port: int, allowed: Sequence[str], *, inside: bool) -> str:
    """An address of the name. One of a private network only if the list has that very address, or with `inside`."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # UnicodeError: a label that is empty or too long
        raise Refused(502, "has no address") from None
    listed = {entry.partition(":")[0] for entry in allowed}
    for *_, address in found:
        text = str(address[0])
        if inside or ipaddress.ip_address(text).is_global or (text == host and text in listed):
            return text
    raise Refused(403, "leads to a private network")


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> int:
    count = 0
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 16):
            count += len(data)
            writer.write(data)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()
    return count
