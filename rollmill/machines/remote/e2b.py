"""E2B's HTTP API over the machines of this host, as far as its SDKs use it: sandboxes, commands, files.

    Sandbox.create, connect, list, get_info, set_timeout, kill, is_running
    commands.run (also in the background), list, connect, kill
    files.read, write, list, exists, get_info, make_dir, rename, remove

Give an SDK `E2B_API_URL` and `E2B_SANDBOX_URL`, both the URL of this service, and its key as `E2B_API_KEY`. A template
is the name of an image; `base` is the one that is built in. Paths and commands begin in the work directory. Not there:
input to a running command, terminals, watching directories, pausing, other users than those of the machine.
"""

from __future__ import annotations

import datetime
import json
import os
import posixpath
import re
import time
from typing import Any

from aiohttp import BodyPartReader, web
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from rollmill.errors import MachineError, NoCapacity, TaskError
from rollmill.machines.images.image import BUILT_IN
from rollmill.machines.remote import rpc
from rollmill.machines.remote.directories import answer
from rollmill.machines.remote.e2b_commands import MOST_BYTES, begin, inside, stream, user_of
from rollmill.machines.remote.rpc import RpcError
from rollmill.machines.remote.service import Lent, Service
from rollmill.strict import parse_json

_VERSION = "0.4.0"  # of E2B's agent in a sandbox that this speaks like
_LEASE_S = 300.0  # the default of E2B
_LONGEST_LEASE_S = 86400.0
_FILE_NAME = re.compile(r'filename="([^"]*)"')  # aiohttp's own would lose the slash at the beginning of a path


class Asked(BaseModel):
    """Fields of E2B that mean nothing here are left out."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)


class NewSandbox(Asked):
    templateID: str = "base"
    timeout: float = Field(_LEASE_S, gt=0, le=_LONGEST_LEASE_S)
    metadata: dict[str, str] = Field(default_factory=dict)
    envVars: dict[str, str] = Field(default_factory=dict)


class Timeout(Asked):
    timeout: float = Field(_LEASE_S, gt=0, le=_LONGEST_LEASE_S)


class E2B:
    def __init__(self, service: Service) -> None:
        self._service = service

    def add_to(self, app: web.Application) -> None:
        app.router.add_post("/sandboxes", self.create)
        app.router.add_post("/v2/sandboxes", self.create)
        app.router.add_get("/sandboxes", self.list)
        app.router.add_get("/v2/sandboxes", self.list)
        app.router.add_post("/sandboxes/{id}/connect", self.connect)
        app.router.add_post("/v2/sandboxes/{id}/connect", self.connect)
        app.router.add_get("/sandboxes/{id}", self.info)
        app.router.add_delete("/sandboxes/{id}", self.kill)
        app.router.add_post("/sandboxes/{id}/timeout", self.set_timeout)
        app.router.add_get("/health", self.health)
        app.router.add_get("/files", self.read)
        app.router.add_post("/files", self.write)
        app.router.add_post("/process.Process/Start", self.start)
        app.router.add_post("/process.Process/Connect", self.follow)
        app.router.add_post("/process.Process/List", self.processes)
        app.router.add_post("/process.Process/SendSignal", self.signal)
        app.router.add_post("/filesystem.Filesystem/{operation}", self.directory)

    # --- sandboxes

    async def create(self, request: web.Request) -> web.Response:
        """Start a machine of an image.

        Needs: the key, as X-API-Key.
        Takes: templateID, timeout, metadata, envVars.
        Returns: its id and token.
        """
        self._check_key(request)
        asked = await _body(request, NewSandbox)
        image = BUILT_IN if asked.templateID == "base" else asked.templateID
        try:
            lent = await self._service.create(image, lease_s=asked.timeout)
        except NoCapacity as error:
            return _refuse(429, str(error), {"Retry-After": str(max(1, round(error.retry_after_s)))})
        except TaskError as error:
            return _refuse(404, str(error))
        except MachineError as error:
            return _refuse(500, str(error))
        lent.metadata, lent.environment = asked.metadata, asked.envVars
        return web.json_response(_sandbox(lent), status=201)

    async def list(self, request: web.Request) -> web.Response:
        """The machines that run.

        Needs: the key.
        Returns: a list.
        """
        self._check_key(request)
        return web.json_response([_details(lent) for lent in self._service.all()])

    async def info(self, request: web.Request) -> web.Response:
        """One machine.

        Needs: the key.
        Returns: image, start, end of its lease.
        """
        return web.json_response(_details(self._named(request)))

    async def connect(self, request: web.Request) -> web.Response:
        """Use a machine from elsewhere.

        Needs: the key.
        Takes: timeout.
        Returns: its id and token.
        """
        lent = self._named(request)
        asked = await _body(request, Timeout)
        lent.ends = max(lent.ends, time.monotonic() + asked.timeout)
        return web.json_response(_sandbox(lent))

    async def set_timeout(self, request: web.Request) -> web.Response:
        """Let a machine live this long from now.

        Needs: the key.
        Takes: timeout, in seconds.
        Returns: nothing.
        """
        lent = self._named(request)
        lent.ends = time.monotonic() + (await _body(request, Timeout)).timeout
        return web.Response(status=204)

    async def kill(self, request: web.Request) -> web.Response:
        """End a machine.

        Needs: the key.
        Returns: nothing.
        """
        await self._service.end(self._named(request).id)
        return web.Response(status=204)

    async def health(self, request: web.Request) -> web.Response:
        """Whether a machine runs.

        Needs: its token.
        Returns: nothing; 502 if it has ended.
        """
        try:
            self._sandbox(request)
        except RpcError:
            return _refuse(502, "the machine has ended")
        return web.Response(status=204)

    # --- files

    async def read(self, request: web.Request) -> web.Response:
        """Read a file of a machine.

        Needs: its token.
        Takes: path.
        Returns: its bytes.
        """
        lent = self._sandbox(request)
        try:
            data = await lent.machine.read(inside(request.query.get("path", "")), max_bytes=MOST_BYTES)
        except FileNotFoundError as error:
            return _refuse(404, str(error))
        except (OSError, MachineError) as error:
            return _refuse(400 if isinstance(error, OSError) else 502, str(error))
        return web.Response(body=data, content_type="application/octet-stream")

    async def write(self, request: web.Request) -> web.Response:
        """Write files of a machine.

        Needs: its token.
        Takes: path and the bytes, or a form with files.
        Returns: what was written.
        """
        lent = self._sandbox(request)
        files: dict[str, bytes] = {}
        if request.content_type == "multipart/form-data":
            async for part in await request.multipart():
                if isinstance(part, BodyPartReader) and (named := _FILE_NAME.search(_disposition(part))):
                    path = request.query.get("path") or named[1].replace("%22", '"')
                    files[inside(path)] = bytes(await part.read())
        else:
            files[inside(request.query.get("path", ""))] = await request.read()
        try:
            for path, data in files.items():
                await lent.machine.write(path, data)
        except OSError as error:
            return _refuse(507 if error.errno == 28 else 400, str(error))
        except MachineError as error:
            return _refuse(502, str(error))
        written = [{"name": posixpath.basename(path), "type": "file", "path": path} for path in files]
        return web.json_response(written)

    async def directory(self, request: web.Request) -> web.Response:
        """List, look at, make, move or remove files of a machine.

        Needs: its token.
        Takes: path, depth, source, destination.
        Returns: entries.
        """
        lent = self._sandbox(request)
        fields = rpc.message(await request.read())
        return web.json_response(await answer(lent.machine, request.match_info["operation"], fields))

    # --- commands

    async def start(self, request: web.Request) -> web.StreamResponse:
        """Start a command in a machine.

        Needs: its token.
        Takes: process, an object with cmd, args, envs and cwd.
        Returns: a stream of events: its number, its output, its end.
        """
        lent = self._sandbox(request)
        asked = rpc.only_message(await request.read()).get("process")
        if not isinstance(asked, dict):
            raise RpcError("invalid_argument", "'process' must be an object")
        number = await begin(lent, asked, user_of(request))
        limit = request.headers.get("Connect-Timeout-Ms", "")
        return await stream(request, lent, number, float(limit) / 1000 if limit.isdecimal() else None)

    async def follow(self, request: web.Request) -> web.StreamResponse:
        """Follow a command that runs already.

        Needs: the token of its machine.
        Takes: its number.
        Returns: as Start.
        """
        lent = self._sandbox(request)
        number = _number(rpc.only_message(await request.read()))
        if number not in lent.processes:
            raise RpcError("not_found", f"no command {number} runs")
        return await stream(request, lent, number)

    async def processes(self, request: web.Request) -> web.Response:
        """The commands that run in a machine.

        Needs: its token.
        Returns: their numbers.
        """
        config = {"cmd": "", "args": [], "envs": {}}
        running = [{"pid": number, "config": config} for number in self._sandbox(request).processes]
        return web.json_response({"processes": running})

    async def signal(self, request: web.Request) -> web.Response:
        """End a command and all that it started, whatever the signal.

        Needs: the token of its machine.
        Takes: its number.
        Returns: nothing.
        """
        lent = self._sandbox(request)
        number = _number(rpc.message(await request.read()))
        process = lent.processes.get(number)
        if process is None:
            raise RpcError("not_found", f"no command {number} runs")
        try:
            await process.stop()
        except OSError as error:
            raise RpcError("unavailable", str(error)) from None
        return web.json_response({})

    # --- who may

    def _check_key(self, request: web.Request) -> None:
        if not self._service.is_key(request.headers.get("X-API-Key", "")):
            raise web.HTTPUnauthorized(text='{"code": 401, "message": "X-API-Key is not the key of this service"}')

    def _named(self, request: web.Request) -> Lent:
        self._check_key(request)
        try:
            return self._service.find(request.match_info["id"])
        except KeyError:
            raise web.HTTPNotFound(text='{"code": 404, "message": "no such sandbox"}') from None

    def _sandbox(self, request: web.Request) -> Lent:
        """The machine that the headers name. Its token, or the key of the service, is needed."""
        try:
            lent = self._service.find(request.headers.get("E2b-Sandbox-Id", ""))
        except KeyError:
            raise RpcError("not_found", "no such sandbox") from None
        given = request.headers.get("X-Access-Token", "")
        if not self._service.is_token(lent, given) and not self._service.is_key(request.headers.get("X-API-Key", "")):
            raise RpcError("unauthenticated", "X-Access-Token is not the token of this sandbox")
        return lent


async def _body(request: web.Request, kind: type[Any]) -> Any:
    try:
        return parse_json(await request.read() or b"{}", TypeAdapter(kind))
    except ValueError as error:
        raise web.HTTPBadRequest(text=json.dumps({"code": 400, "message": str(error)})) from None


def _refuse(status: int, message: str, headers: dict[str, str] | None = None) -> web.Response:
    return web.json_response({"code": status, "message": message}, status=status, headers=headers)


def _disposition(part: BodyPartReader) -> str:
    return part.headers.get("Content-Disposition", "")


def _number(fields: dict[str, Any]) -> int:
    selector = fields.get("process")
    number = selector.get("pid") if isinstance(selector, dict) else None
    if not isinstance(number, int):
        raise RpcError("invalid_argument", "'process.pid' must be a number")
    return number


def _sandbox(lent: Lent) -> dict[str, Any]:
    return {
        "templateID": lent.image,
        "sandboxID": lent.id,
        "clientID": "rollmill",
        "envdVersion": _VERSION,
        "envdAccessToken": lent.token,
    }


def _details(lent: Lent) -> dict[str, Any]:
    ends = time.time() + lent.ends - time.monotonic()
    return {
        **{name: value for name, value in _sandbox(lent).items() if name != "envdAccessToken"},
        "startedAt": _date(lent.started),
        "endAt": _date(ends),
        "cpuCount": os.cpu_count() or 1,
        "memoryMB": 256,
        "diskSizeMB": 64,
        "state": "running",
        "metadata": lent.metadata,
    }


def _date(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat()
