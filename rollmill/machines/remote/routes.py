"""What a Rollmill dispatcher asks of another host's machines: one route per kind of request, frames in and out.

A frame (guest/frames.py) is a JSON header and raw bytes. Answers of a machine are frames with status 200: a result,
or {"errno", "message"}: these arguments cannot be served. {"failed": text} is a failure of the infrastructure. Other
states: 401 without the key, 404 for a machine that is not here any more, 503 with Retry-After if the host is full.
"""

from __future__ import annotations

import dataclasses
import errno
import time
from typing import Any

from aiohttp import web

from rollmill.errors import MachineError, NoCapacity, TaskError
from rollmill.machines.framed_machine import Answer
from rollmill.machines.guest import frames as wire
from rollmill.machines.machine import Process, Snapshot, longest
from rollmill.machines.remote.ports import serve_connection, serve_port
from rollmill.machines.remote.service import Lent, Service

LEASE_S = 60.0  # of a machine; each request and each renewal begins it anew
_TYPING_S = 5.0  # for a terminal to take what is typed, before its client is answered
_EXEC = ("cwd", "env", "timeout_s", "max_output", "user")
_START = ("cwd", "env", "max_output", "pty", "user")


class Routes:
    def __init__(self, service: Service) -> None:
        self._service = service

    def add_to(self, app: web.Application) -> None:
        app.router.add_get("/machines", self.load)
        app.router.add_post("/machines", self.create)
        app.router.add_post("/machines/renew", self.renew)
        app.router.add_post("/machines/{id}/{operation}", self.ask)
        app.router.add_get("/machines/{id}/listen", self.listen)
        app.router.add_get("/machines/{id}/connections/{number}", self.connect)
        app.router.add_delete("/machines/{id}", self.end)
        app.router.add_get("/snapshots/{id}", self.export)
        app.router.add_delete("/snapshots/{id}", self.forget)

    async def load(self, request: web.Request) -> web.Response:
        """How many machines this host has room for.

        Needs: the key.
        Returns: capacity, running, starts, images.
        """
        self._check_key(request)
        service = self._service
        running = len(service.all())
        facts = {
            "capacity": service.capacity,
            "starts": service.starts,
            "running": running,
            "images": sorted(service.images),
        }
        return web.json_response(facts)

    async def create(self, request: web.Request) -> web.Response:
        """Start a machine.

        Needs: the key.
        Takes: a frame with image, files, and the state to start with: the name of a snapshot, or its bytes.
        Returns: id, image, what it can do.
        """
        self._check_key(request)
        header, body = await _frame(request)
        files, rest = _files(header, body)
        image, snapshot = str(header["image"]), header.get("snapshot")
        if "state" in header:
            snapshot = Snapshot(image, rest)
        try:
            lent = await self._service.create(image, files, snapshot=snapshot, lease_s=LEASE_S)
        except NoCapacity as error:
            return web.Response(status=503, text=error.message, headers={"Retry-After": f"{error.retry_after_s:.1f}"})
        except TaskError as error:
            return frame_answer({"task": error.message, "hint": error.hint})
        except KeyError:
            raise MachineError("the snapshot is not on this host any more") from None
        return frame_answer(_describe(lent))

    async def renew(self, request: web.Request) -> web.Response:
        """Begin the leases of machines anew.

        Needs: the key.
        Takes: {"ids"}.
        Returns: those that are gone.
        """
        self._check_key(request)
        header, _ = await _frame(request)
        gone = []
        for identifier in header["ids"]:
            try:
                lent = self._service.find(identifier)
                lent.ends = max(lent.ends, time.monotonic() + LEASE_S)  # that of a long command is longer
            except KeyError:
                gone.append(identifier)
        return frame_answer({"gone": gone})

    async def ask(self, request: web.Request) -> web.Response:
        """Run a command in a machine, read or write its files, save or copy it.

        Needs: the key.
        Takes: a frame.
        Returns: a frame.
        """
        lent = self._find(request)
        header, body = await _frame(request)
        lent.ends = time.monotonic() + LEASE_S + longest(float(header.get("timeout_s", 0.0)))
        try:
            return frame_answer(*await self._serve(lent, request.match_info["operation"], header, body))
        except OSError as error:
            return frame_answer(
                {"errno": error.errno or errno.EIO, "message": str(error.strerror), "path": error.filename}
            )

    async def listen(self, request: web.Request) -> web.StreamResponse:
        """Open a port in a machine, and offer what its programs connect to it (ports.py).

        Needs: the key.
        Returns: a WebSocket: the port, then one message per connection.
        """
        return await serve_port(request, self._find(request))

    async def connect(self, request: web.Request) -> web.StreamResponse:
        """Carry one connection of a port.

        Needs: the key.
        Returns: a WebSocket with its bytes.
        """
        try:
            return await serve_connection(request, self._find(request))
        except (KeyError, ValueError):
            raise web.HTTPNotFound(text="there is no such connection") from None

    async def end(self, request: web.Request) -> web.Response:
        """End a machine.

        Needs: the key.
        Returns: nothing.
        """
        await self._service.end(self._find(request).id)
        return frame_answer({})

    async def export(self, request: web.Request) -> web.Response:
        """The bytes of a saved state, for a machine on another host.

        Needs: the key.
        Returns: a frame.
        """
        self._check_key(request)
        try:
            return frame_answer({}, await self._service.export(request.match_info["id"]))
        except KeyError:
            raise web.HTTPNotFound(text="the snapshot is not on this host any more") from None
        except OSError as error:
            return frame_answer({"errno": error.errno or errno.EIO, "message": str(error.strerror)})

    async def forget(self, request: web.Request) -> web.Response:
        """Let go of a saved state.

        Needs: the key.
        Returns: nothing.
        """
        self._check_key(request)
        try:
            await self._service.forget(request.match_info["id"])
        except KeyError:
            raise web.HTTPNotFound from None
        return frame_answer({})

    async def _serve(self, lent: Lent, operation: str, header: dict[str, Any], body: bytes) -> Answer:
        machine = lent.machine
        match operation:
            case "exec":
                options = {name: header[name] for name in _EXEC if name in header}
                result = await machine.exec(header["argv"], stdin=body, **options)
                return {**dataclasses.asdict(dataclasses.replace(result, output=b"")), "output": None}, result.output
            case "start":
                options = {name: header[name] for name in _START if name in header}
                return {"process": lent.keep(await machine.start(header["argv"], stdin=body, **options))}, b""
            case "state" | "stop" | "input" | "resize":
                process = lent.processes.get(header["process"])
                if process is None:
                    raise ProcessLookupError(errno.ESRCH, "no such process")
                return await _ask_process(process, operation, header, body)
            case "read":
                return {}, await machine.read(header["path"], max_bytes=min(header["max_bytes"], wire.MAX_BODY))
            case "pack":
                options = {name: header[name] for name in ("max_bytes", "timeout_s", "whole")}
                return {}, await machine.pack(header["path"], **options)
            case "write":
                await machine.write_all(_files(header, body)[0])
                return {}, b""
            case "snapshot":
                return {"snapshot": await self._service.save(lent)}, b""
            case "fork":
                if not 0 < header["count"] <= self._service.room():
                    raise OSError(errno.EAGAIN, f"no room for {header['count']} copies")
                self._service.starting += header["count"]
                try:
                    made = await machine.fork(header["count"])
                finally:
                    self._service.starting -= header["count"]
                copies = [self._service.lend(copy, lent.image, LEASE_S) for copy in made]
                return {"machines": [_describe(copy) for copy in copies]}, b""
            case "pause" | "resume" | "prepare":
                await {"pause": machine.pause, "resume": machine.resume, "prepare": machine.prepare}[operation]()
                return {}, b""
        raise OSError(errno.ENOSYS, f"unknown request {operation!r}")

    def _check_key(self, request: web.Request) -> None:
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if not self._service.is_key(given):
            raise web.HTTPUnauthorized(text="the key of this service is needed: Authorization: Bearer KEY")

    def _find(self, request: web.Request) -> Lent:
        self._check_key(request)
        try:
            return self._service.find(request.match_info["id"])
        except KeyError:
            raise web.HTTPNotFound(text="this machine is not here any more") from None


async def _frame(request: web.Request) -> tuple[dict[str, Any], bytes]:
    try:
        return wire.unpack(await request.read())
    except wire.WireError:
        raise web.HTTPBadRequest(text="this is no frame") from None


def _files(header: dict[str, Any], body: bytes) -> tuple[dict[str, bytes], bytes]:
    """The files of a request, and what comes behind them."""
    files, start = {}, 0
    for path, size in header.get("files", []):
        files[path] = body[start : start + size]
        start += size
    return files, body[start:]


def frame_answer(header: dict[str, Any], body: bytes = b"") -> web.Response:
    return web.Response(body=wire.pack(header, body), content_type="application/octet-stream")


async def _ask_process(process: Process, operation: str, header: dict[str, Any], body: bytes) -> Answer:
    match operation:
        case "input":
            return {"count": await process.write(body, _TYPING_S)}, b""
        case "resize":
            await process.resize(header["rows"], header["columns"])
            return {}, b""
    state = await (process.state() if operation == "state" else process.stop())
    return {"exit_code": state.exit_code, "truncated": state.truncated, "stopped": state.stopped}, state.output


def _describe(lent: Lent) -> dict[str, Any]:
    able = dataclasses.asdict(lent.machine.capabilities)
    return {"id": lent.id, "image": lent.machine.image, "capabilities": able}
