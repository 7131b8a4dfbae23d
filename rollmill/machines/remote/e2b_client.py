"""[machine] kind = "e2b": machines of a server that speaks E2B's HTTP API, E2B's own or `rollmill machines serve`.

    create   POST /sandboxes, DELETE /sandboxes/ID          at `api_url`, with the key
    exec     POST /process.Process/Start (rpc.py)           at the sandbox's URL, with the token of the sandbox
    read     GET /files, write: POST /files

An image is a template of the server. Sandboxes are asked for without a way to the internet. They have no snapshots,
forks, ports or long-running processes here. A command ends at its time limit; what it left running ends with its
sandbox. What the server answers is checked, and anything else is an infrastructure failure.

E2B's own package is not used for this: it gives the output of commands as text, and archives are bytes; and it reads an
error of any length into memory, while what answers in a sandbox may be under its commands' control.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import errno
import os
import posixpath
import re
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote

import aiohttp
from pydantic import Field

from rollmill.config import Config
from rollmill.errors import ConfigError, MachineError, NoCapacity, TaskError
from rollmill.machines.guest.output import Output
from rollmill.machines.images.image import BUILT_IN
from rollmill.machines.machine import USERS, WORK, Capabilities, ExecResult, Machine, MachineHost, Order, Snapshot
from rollmill.machines.remote import rpc

_PORT = 49983  # of the agent in a sandbox
_DOMAIN = "e2b.app"
_ID, _TOKEN, _HOST = (
    re.compile(words, re.ASCII) for words in (r"[\w-]{1,100}", r"[\w.:=+/-]{0,300}", r"[\w.-]{1,250}(:\d{1,5})?")
)
_ANSWER_S = 60.0  # beyond a command's own time limit
_START_S = 120.0
_LARGEST = 1 << 24  # bytes of an envelope, or of an answer that is no file
_RUN = 'exec "$@" < "$0"'
_MAKE_WORK = f"mkdir -p {WORK} && chmod a+rwx {WORK}"
_KILLED = -9


class E2BConfig(Config):
    """Settings of machines of an E2B server."""

    api_url: str = Field("https://api.e2b.app", description="URL of the server's API.")
    sandbox_url: str | None = Field(
        None,
        description="URL of all sandboxes, if the server has one for all, as `rollmill machines serve` has. Not set: "
        "each has the name that the server gives it.",
    )
    key_env: str = Field("E2B_API_KEY", description="Environment variable with the key. The key stands in no file.")
    lease_s: float = Field(
        3600.0,
        ge=60,
        description="Seconds after which the server ends a machine that nobody has used. Requests renew it.",
    )


class E2BHost(MachineHost):
    """Creates machines on an E2B server. One per event loop."""

    def __init__(self, config: E2BConfig) -> None:
        self.config = config
        self._key = os.environ.get(config.key_env, "")
        if not self._key:
            raise ConfigError(f"the environment has no {config.key_env}, the key of the E2B server", hint="export it")
        self._session: aiohttp.ClientSession | None = None
        self._machines: set[E2BMachine] = set()

    async def create(
        self, image: str, files: Mapping[str, bytes] | None = None, *, snapshot: Snapshot | None = None
    ) -> E2BMachine:
        if snapshot is not None:
            raise MachineError("machines of an E2B server have no snapshots", hint="leave `rollouts.checkpoint_s` out")
        template = "base" if image == BUILT_IN else image
        asked = {"templateID": template, "timeout": int(self.config.lease_s), "allow_internet_access": False}
        answer = await self.api("POST", "/sandboxes", asked)
        given = (answer.get("sandboxID"), answer.get("envdAccessToken") or "", answer.get("domain") or _DOMAIN)
        shapes = zip(given, (_ID, _TOKEN, _HOST), strict=True)
        names = [name for name, shape in shapes if isinstance(name, str) and shape.fullmatch(name)]
        if len(names) < len(given):
            raise MachineError(f"the E2B server names its machine strangely: {str(given[0])[:100]}")
        machine = E2BMachine(self, image, *names)
        self._machines.add(machine)
        try:
            made = await machine.exec(["sh", "-c", _MAKE_WORK], cwd="/", user="root", timeout_s=_ANSWER_S)
            if made.exit_code != 0:
                raise MachineError(f"a machine of the E2B server has no {WORK}: {made.output[-300:]!r}")
            for path, data in (files or {}).items():
                await machine.write(path, data)
        except OSError as error:
            await machine.close()
            raise TaskError(f"the files of a task cannot be written to a machine: {error}") from None
        except BaseException:
            await machine.close()
            raise
        return machine

    async def close(self) -> None:
        await asyncio.gather(*(machine.close() for machine in list(self._machines)))
        if self._session is not None:
            await self._session.close()
            self._session = None

    def forget(self, machine: E2BMachine) -> None:
        self._machines.discard(machine)

    async def api(self, method: str, path: str, content: dict[str, Any] | None = None) -> dict[str, Any]:
        """Ask the API. NoCapacity, TaskError (no such template), or MachineError."""
        url, headers = f"{self.config.api_url.rstrip('/')}{path}", {"X-API-Key": self._key}
        async with self.request(method, url, headers=headers, json=content, within_s=_START_S) as response:
            data = await _body(response)
            if response.status == 429:
                after = response.headers.get("Retry-After", "")
                wait_s = float(after) if after.isdecimal() else 5.0
                raise NoCapacity(f"the E2B server is full: {data[:300]!r}", retry_after_s=min(wait_s, 600.0))
            if response.status == 404 and method == "POST" and path == "/sandboxes":
                raise TaskError(f"the E2B server has no such template: {data[:300]!r}", hint="an image is a template")
            if response.status == 401:
                raise MachineError("the E2B server refuses the key", hint=f"is {self.config.key_env} right?")
            if response.status >= 300:
                raise MachineError(f"the E2B server answers {method} {path} with {response.status}: {data[:300]!r}")
        try:
            return rpc.message(data)
        except rpc.RpcError as error:
            raise MachineError(f"the E2B server answers no JSON: {error.message[:300]}") from None

    @contextlib.asynccontextmanager
    async def request(
        self, method: str, url: str, *, within_s: float, **options: Any
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """One request. MachineError: the server does not answer in time, or not at all.

        Redirections are not followed: a command may have taken over what answers in its machine, and this process
        reaches addresses that the machine does not.
        """
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None, sock_connect=10.0))
        try:
            async with (
                asyncio.timeout(within_s),
                self._session.request(method, url, allow_redirects=False, **options) as response,
            ):
                yield response
        except TimeoutError:
            raise MachineError(f"the E2B server did not answer within {within_s:.0f} s") from None
        except (aiohttp.ClientError, ConnectionError) as error:
            raise MachineError(f"the E2B server does not answer: {error!r}") from None


class E2BMachine(Machine):
    capabilities = Capabilities(kernel="own", snapshot="none", users=USERS)

    def __init__(self, host: E2BHost, image: str, identifier: str, token: str, domain: str) -> None:
        self.image = f"{image}@e2b"  # templates have no digest
        self.id = identifier
        self._host = host
        self._url = host.config.sandbox_url or f"https://{_PORT}-{identifier}.{domain}"
        self._headers = {"E2b-Sandbox-Id": identifier, "E2b-Sandbox-Port": str(_PORT)}
        if token:
            self._headers["X-Access-Token"] = token
        self._renewed_at = time.monotonic()
        self._stdins = 0
        self._closed = False

    async def exec(self, argv: Sequence[str], **options: Any) -> ExecResult:
        order = self.order(argv, **options)
        await self._renew()
        stdin = "/dev/null"
        if order.stdin:
            self._stdins += 1
            stdin = f"/tmp/.stdin-{self._stdins}"  # noqa: S108  in the machine
            await self.write(stdin, order.stdin)
        process = {
            "cmd": "sh",
            "args": ["-c", _RUN, stdin, *order.argv],
            "envs": dict(order.env or {}),
            "cwd": posixpath.join(WORK, order.cwd),
        }
        return await self._run(process, order)

    async def _run(self, process: dict[str, Any], order: Order) -> ExecResult:
        headers = {
            **self._headers,
            "Content-Type": "application/connect+json",
            "Connect-Protocol-Version": "1",
            "Connect-Timeout-Ms": str(max(1, round(order.timeout_s * 1000))),
            "Authorization": f"Basic {base64.b64encode(f'{order.user or USERS[0]}:'.encode()).decode()}",
        }
        output, began, number = Output(order.max_output), time.monotonic(), None
        body, url = rpc.envelope({"process": process}), f"{self._url}/process.Process/Start"
        ending: dict[str, Any] | None = None
        try:
            within_s = order.timeout_s + _ANSWER_S
            async with self._host.request("POST", url, headers=headers, data=body, within_s=within_s) as response:
                if response.status != 200:
                    raise _refused(response.status, await _body(response))
                async for last, content in _envelopes(response.content):
                    event = content.get("event") or {}
                    number = (event.get("start") or {}).get("pid", number)
                    for data in (event.get("data") or {}).values():
                        output.add(base64.b64decode(data))
                    ending = event.get("end") or ending
                    if last:
                        return _result(ending, content.get("error"), output, time.monotonic() - began)
        except (ValueError, TypeError, AttributeError, asyncio.IncompleteReadError) as error:
            raise MachineError(f"the E2B server's answer makes no sense: {error!r}") from None
        except asyncio.CancelledError:
            await asyncio.shield(self._kill(number))
            raise
        raise MachineError("the E2B server stopped in the middle of its answer")

    async def _kill(self, number: object) -> None:
        """End the command of a caller that was cancelled."""
        if number is None:
            return
        content = {"process": {"pid": number}, "signal": "SIGNAL_SIGKILL"}
        url = f"{self._url}/process.Process/SendSignal"
        with contextlib.suppress(MachineError):
            async with self._host.request("POST", url, headers=self._headers, json=content, within_s=_ANSWER_S):
                pass

    async def read(self, path: str, *, max_bytes: int = 1 << 20) -> bytes:
        async with self._files("GET", path) as response:
            if response.status == 404:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            if response.status != 200:
                raise _refused(response.status, await _body(response))
            data = bytearray()
            async for part in response.content.iter_any():
                data += part
                if len(data) > max_bytes:
                    raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), path)
            return bytes(data)

    async def write(self, path: str, data: bytes) -> None:
        form = aiohttp.FormData()
        form.add_field("file", data, filename=posixpath.join(WORK, path), content_type="application/octet-stream")
        async with self._files("POST", path, data=form) as response:
            if response.status != 200:
                raise _refused(response.status, await _body(response))

    @contextlib.asynccontextmanager
    async def _files(self, method: str, path: str, **options: Any) -> AsyncIterator[aiohttp.ClientResponse]:
        if not path or "\0" in path:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        await self._renew()
        place = quote(posixpath.join(WORK, path).encode("utf-8", "surrogateescape"), safe="/")
        url = f"{self._url}/files?path={place}&username={USERS[0]}"
        async with self._host.request(method, url, headers=self._headers, within_s=_ANSWER_S, **options) as response:
            yield response

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._host.forget(self)
        with contextlib.suppress(MachineError):  # its lease ends it
            await self._host.api("DELETE", f"/sandboxes/{self.id}")

    async def _renew(self) -> None:
        now = time.monotonic()
        if now - self._renewed_at > self._host.config.lease_s / 4:
            self._renewed_at = now
            content = {"timeout": int(self._host.config.lease_s)}
            await self._host.api("POST", f"/sandboxes/{self.id}/timeout", content)


async def _body(response: aiohttp.ClientResponse) -> bytes:
    data = bytearray()
    async for part in response.content.iter_any():
        data += part
        if len(data) > _LARGEST:
            raise MachineError(f"the E2B server answers with more than {_LARGEST} bytes")
    return bytes(data)


def _refused(status: int, data: bytes) -> Exception:
    """400 and 507 are about what was asked for; anything else is the server's failure."""
    said = data[:300].decode("utf-8", "replace")
    if status in (400, 507):
        return OSError(errno.ENOSPC if status == 507 else errno.EINVAL, said)
    return MachineError(f"the E2B server answers with {status}: {said}")


def _result(ending: dict[str, Any] | None, error: Any, output: Output, seconds: float) -> ExecResult:
    """How a command ended. A field that is 0 or false may be left out: so is JSON of protocol buffers."""
    if error is not None:
        if error.get("code") == "deadline_exceeded":
            return ExecResult(_KILLED, output.bytes(), output.truncated, "time", seconds)
        if error.get("code") == "invalid_argument":
            raise OSError(errno.EINVAL, str(error.get("message"))[:300])
        raise MachineError(f"a command failed at the E2B server: {str(error)[:300]}")
    if ending is None:
        raise MachineError("the E2B server does not say how a command ended")
    code = ending.get("exitCode", 0)
    if not isinstance(code, int) or isinstance(code, bool) or abs(code) >= 1 << 16:
        raise MachineError(f"the E2B server gives no exit code: {str(code)[:100]}")
    why = ending.get("error")
    stopped = why if why in ("memory", "processes", "machine") and not ending.get("exited") else None
    return ExecResult(code, output.bytes(), output.truncated, stopped, seconds)


async def _envelopes(content: aiohttp.StreamReader) -> AsyncIterator[tuple[bool, dict[str, Any]]]:
    """Whether it is the last one, and what is in it."""
    while True:
        flags, length = rpc.head(await content.readexactly(rpc.HEAD_BYTES))
        if length > _LARGEST:
            raise ValueError(f"an envelope of {length} bytes")
        data = await content.readexactly(length)
        try:
            yield bool(flags & rpc.END), rpc.message(data)
        except rpc.RpcError as error:
            raise ValueError(error.message) from None
