"""A machine that is asked by frames (guest/frames.py): its agent over a socket, or another host over HTTP.

Answers are not trusted: a command may have taken an agent over. Each has the fields that its request asks for, and no
more bytes than it allows. Anything else is a WireError.
"""

from __future__ import annotations

import asyncio
import errno
import math
import os
import signal
import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from rollmill.machines.guest import frames as wire
from rollmill.machines.machine import WORK, ExecResult, Machine, Order, Process, ProcessState, longest

_NOTE = 64  # bytes of the line that replaces the middle of a long output
_TYPED, _FULL_S = 4096, 0.02  # bytes typed at once; pause while a terminal takes none

Answer = tuple[dict[str, Any], bytes]


class FramedMachine(Machine):
    """Every request is one frame, and so is its answer. A kind adds how they travel."""

    limits_told: tuple[str | None, ...] = (None, "time", "memory", "processes")  # that may have ended a command
    environment: Mapping[str, str] = {}  # of every command, under what its caller gives

    @abstractmethod
    async def request(
        self, header: dict[str, Any], body: bytes = b"", *, timeout_s: float = 0.0, max_body: int = wire.MAX_BODY
    ) -> Answer | None:
        """Send a request and return its answer, `checked`; None if the machine's own commands ruined it. OSError:
        refused. MachineError: the infrastructure failed."""

    async def exec(self, argv: Sequence[str], **options: Any) -> ExecResult:
        order = self.order(argv, **options)
        header, began = self._header("exec", order), time.monotonic()
        most, limit_s = order.max_output + _NOTE, longest(order.timeout_s)
        answer = await self.request(header, order.stdin, timeout_s=limit_s, max_body=most)
        if answer is None:
            return ExecResult(exit_code=-signal.SIGKILL, output=b"", stopped="machine")
        reply, output = answer
        return ExecResult(
            exit_code=reply["exit_code"],
            output=output,
            truncated=reply["truncated"],
            stopped=reply["stopped"],
            seconds=min(reply["seconds"], time.monotonic() - began),
            starved=reply.get("starved") is True,
        )

    async def start(self, argv: Sequence[str], **options: Any) -> FramedProcess:
        order = self.order(argv, **options)
        answer = await self.request(self._header("start", order), order.stdin)
        return FramedProcess(self, None if answer is None else answer[0]["process"], order.max_output)

    async def read(self, path: str, *, max_bytes: int = 1 << 20) -> bytes:
        limit = min(max_bytes, wire.MAX_BODY)
        return await self.request_files({"op": "read", "path": _inside(path), "max_bytes": limit}, max_body=limit)

    async def pack(self, directory: str, *, max_bytes: int, timeout_s: float, whole: bool = True) -> bytes:
        most = min(max_bytes, wire.MAX_BODY >> 1)
        header = {"op": "pack", "path": _inside(directory), "max_bytes": most, "timeout_s": timeout_s, "whole": whole}
        return await self.request_files(header, timeout_s=timeout_s, max_body=wire.MAX_BODY)

    async def write(self, path: str, data: bytes) -> None:
        await self.write_all({path: data})

    async def write_all(self, files: Mapping[str, bytes]) -> None:
        entries = [[_inside(path), len(data)] for path, data in files.items()]
        await self.request_files({"op": "write", "files": entries}, b"".join(files.values()))

    async def request_files(
        self, header: dict[str, Any], body: bytes = b"", *, timeout_s: float = 0.0, max_body: int = 0
    ) -> bytes:
        answer = await self.request(header, body, timeout_s=timeout_s, max_body=max_body)
        if answer is None:
            raise FileNotFoundError(errno.ENOENT, "the machine's commands ended it", header.get("path"))
        return answer[1]

    def _header(self, operation: str, order: Order) -> dict[str, Any]:
        if order.max_output > wire.MAX_BODY - _NOTE:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return {"op": operation, **order.header(self.environment)}

    def checked(self, operation: str, reply: dict[str, Any]) -> dict[str, Any]:
        """The reply, if it has what the operation promises. WireError if not."""
        if "error" in reply:
            return reply
        if "errno" in reply:
            valid = _is_count(reply["errno"], 4095) and isinstance(reply.get("path"), str | None)
        elif operation in ("exec", "state", "stop"):
            code, seconds = reply.get("exit_code"), reply.get("seconds", 0.0)
            valid = (code is None and operation != "exec") or (isinstance(code, int) and abs(code) < 1 << 16)
            valid &= isinstance(reply.get("truncated"), bool) and reply.get("stopped") in self.limits_told
            valid &= isinstance(seconds, int | float) and math.isfinite(seconds) and seconds >= 0
            valid &= operation != "exec" or "seconds" in reply
        elif operation in ("start", "listen"):
            valid = _is_count(reply.get("process" if operation == "start" else "port"), 1 << 32)
        elif operation == "input":
            valid = reply.get("count") == 0 or _is_count(reply.get("count"), _TYPED)
        elif operation == "busy":
            valid = isinstance(reply.get("busy"), bool)
        else:
            valid = True
        if not valid:
            raise wire.WireError(f"no answer to {operation!r}")
        return reply


class FramedProcess(Process):
    """A process that keeps running between commands. `identifier` is None if the machine was ruined."""

    def __init__(self, machine: FramedMachine, identifier: int | None, max_output: int) -> None:
        self._machine, self._identifier, self._max_output = machine, identifier, max_output
        self._asking = asyncio.Lock()  # several may look at it and stop it
        self._last: ProcessState | None = None  # after stop

    async def state(self) -> ProcessState:
        return await self._ask("state")

    async def stop(self) -> ProcessState:
        return await self._ask("stop")

    async def write(self, data: bytes, within_s: float | None = None) -> int:
        deadline, done = time.monotonic() + (math.inf if within_s is None else within_s), 0
        while done < len(data) and time.monotonic() < deadline:
            count = (await self._tell({"op": "input"}, data[done : done + _TYPED]))["count"]
            done += count
            if not count:
                await asyncio.sleep(_FULL_S)
        return done

    async def resize(self, rows: int, columns: int) -> None:
        await self._tell({"op": "resize", "rows": rows, "columns": columns})

    async def _tell(self, header: dict[str, Any], body: bytes = b"") -> dict[str, Any]:
        answer = None
        if self._identifier is not None and self._last is None:
            answer = await self._machine.request({**header, "process": self._identifier}, body, max_body=0)
        if answer is None:
            raise OSError(errno.ESRCH, "the process has ended")
        return answer[0]

    async def _ask(self, operation: str) -> ProcessState:
        async with self._asking:
            if self._last is None:
                answer = None
                if self._identifier is not None:
                    header = {"op": operation, "process": self._identifier}
                    answer = await self._machine.request(header, max_body=self._max_output + _NOTE)
                reply, output = answer or (
                    {"exit_code": -signal.SIGKILL, "truncated": False, "stopped": "machine"},
                    b"",
                )
                state = ProcessState(reply["exit_code"], output, reply["truncated"], reply["stopped"])
                if operation == "state":
                    return state
                self._last = state
            return self._last


def _is_count(value: object, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= most


def _inside(path: str) -> str:
    """Relative paths are relative to the work directory. A NUL byte or half a surrogate pair names no file."""
    try:
        if not path or b"\0" in path.encode("utf-8", "surrogateescape"):
            raise ValueError
    except ValueError:  # UnicodeEncodeError is one
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path) from None
    return os.path.join(WORK, path)
