"""Commands as E2B's SDKs see them: a number, a stream of events, two outputs."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import posixpath
from typing import Any

from aiohttp import web

from rollmill.errors import MachineError
from rollmill.machines.machine import WORK, Process, ProcessState
from rollmill.machines.remote import rpc
from rollmill.machines.remote.rpc import RpcError, text
from rollmill.machines.remote.service import Lent

MOST_BYTES = 1 << 26  # of a file, and of the output of a command
_POLLS_S = (0.005, 0.01, 0.02, 0.05, 0.1)  # pauses between looks at a running command
_MOST_KEPT = 8  # commands of a machine before those that have ended are forgotten
_SPLIT = 'errors=$1; shift; exec "$@" 2>"$errors"'  # a machine joins the two outputs of a command; E2B does not


def user_of(request: web.Request) -> str | None:
    """The user that a client asks for: its name is that of HTTP's basic authentication, without a password."""
    kind, _, word = request.headers.get("Authorization", "").partition(" ")
    if kind.lower() != "basic":
        return None
    try:
        return base64.b64decode(word, validate=True).decode().partition(":")[0] or None
    except ValueError:  # UnicodeDecodeError is one
        raise RpcError("invalid_argument", "the header Authorization names no user") from None


async def begin(lent: Lent, asked: dict[str, Any], user: str | None) -> int:
    """Start a command. Returns its number. RpcError: it cannot start."""
    words = [text(asked, "cmd"), *asked.get("args", [])]
    environment = {**lent.environment, **asked.get("envs", {})}
    if not all(isinstance(word, str) for word in [*words, *environment, *environment.values()]):
        raise RpcError("invalid_argument", "'args' and 'envs' must be strings")
    await _forget_ended(lent)
    directory = inside(asked.get("cwd") or WORK)
    number = lent.number()  # before anything is awaited: commands may start side by side
    argv = ["sh", "-c", _SPLIT, "sh", _errors(number), *words]
    try:
        most = MOST_BYTES >> 2
        process = await lent.machine.start(argv, cwd=directory, env=environment, max_output=most, user=user)
    except (OSError, MachineError) as error:
        raise RpcError("unavailable" if isinstance(error, MachineError) else "invalid_argument", str(error)) from None
    return lent.keep(process, number)


async def _forget_ended(lent: Lent) -> None:
    """A machine keeps the output of a command whose client left. Too many of them, and none could start."""
    if len(lent.processes) < _MOST_KEPT:
        return
    for number, process in list(lent.processes.items()):
        with contextlib.suppress(OSError, MachineError):
            if (await process.state()).exit_code is not None:
                await process.stop()
                lent.processes.pop(number, None)


async def stream(request: web.Request, lent: Lent, number: int, limit_s: float | None = None) -> web.StreamResponse:
    """Send the events of a command. At the time limit of its client it ends, with everything that it started."""
    response = web.StreamResponse(headers={"Content-Type": "application/connect+json"})
    await response.prepare(request)
    end: dict[str, Any] = {}
    try:
        await response.write(rpc.envelope({"event": {"start": {"pid": number}}}))
        process = lent.processes[number]
        try:
            async with asyncio.timeout(limit_s):
                state = await _watch(response, process)
        except TimeoutError:
            end = {"error": {"code": "deadline_exceeded", "message": f"the command ran longer than {limit_s} s"}}
        await _send(response, "stderr", await _read_errors(lent, number))
        if lent.processes.pop(number, None) is not None:  # others may follow the same command
            await process.stop()
        if not end:
            await response.write(rpc.envelope({"event": {"end": _ending(state)}}))
    except ConnectionResetError:
        return response  # the client left; the command goes on
    except (OSError, MachineError, KeyError) as error:
        end = {"error": {"code": "unavailable", "message": str(error)}}
    await response.write(rpc.envelope(end, rpc.END))
    return response


async def _watch(response: web.StreamResponse, process: Process) -> ProcessState:
    """Send output as it grows, until the command ends."""
    sent, pauses = 0, list(_POLLS_S)
    while True:
        state = await process.state()
        if not state.truncated or state.exit_code is not None:
            await _send(response, "stdout", state.output[sent:])
            sent = max(sent, len(state.output))
        if state.exit_code is not None or state.stopped is not None:
            return state
        await asyncio.sleep(pauses.pop(0) if len(pauses) > 1 else pauses[0])


async def _send(response: web.StreamResponse, which: str, data: bytes) -> None:
    if data:
        content = {"event": {"data": {which: base64.b64encode(data).decode()}}}
        await response.write(rpc.envelope(content))


def inside(path: str) -> str:
    if not isinstance(path, str) or not path:
        raise RpcError("invalid_argument", "a path is needed")
    return posixpath.normpath(posixpath.join(WORK, path))


def _errors(number: int) -> str:
    return f"/tmp/.errors-{number}"  # noqa: S108  in the machine


async def _read_errors(lent: Lent, number: int) -> bytes:
    with contextlib.suppress(OSError):
        return await lent.machine.read(_errors(number), max_bytes=MOST_BYTES)
    return b""


def _ending(state: ProcessState) -> dict[str, Any]:
    if state.stopped is not None:
        return {"exitCode": -9, "exited": False, "status": f"stopped: {state.stopped}", "error": state.stopped}
    return {"exitCode": state.exit_code, "exited": True, "status": f"exit status {state.exit_code}"}
