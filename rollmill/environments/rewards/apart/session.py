"""Runs hidden tests in a machine of their own, with the submission in another one, and relays what they say."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib.util
import json
import marshal
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollmill.errors import MachineError
from rollmill.machines.machine import WORK, ExecResult, Machine

START_S = 20.0
_CHUNK = 1 << 16
Open = Callable[[], AbstractAsyncContextManager[Machine]]


@dataclass(frozen=True)
class Order:
    """What a tester is asked to do."""

    tests: list[str]
    hidden: list[str]  # paths of the hidden files, relative to the work directory
    timeout_s: float  # for all tests, in a machine that is not slow
    test_timeout_s: float
    max_output: int
    paths: list[str] = field(default_factory=lambda: ["."])
    pytest: bool | None = None  # None: if it is there
    statements: str | None = None  # to run instead of test files
    env: Mapping[str, str] = field(default_factory=dict)
    trusting: frozenset[str] = frozenset()  # tests in which submitted objects may say what they are equal to


@dataclass(frozen=True)
class TesterReport:
    verdicts: dict[str, str]  # of the tests that have one: passed, failed or time
    printed: str
    framework: str
    result: ExecResult


_START = """
import importlib.util, marshal, sys
code, source = sys.stdin.buffer.read({code}), sys.stdin.buffer.read({source})
exec(marshal.loads(code) if importlib.util.MAGIC_NUMBER == {magic!r} else compile(source, "<rollmill>", "exec"))
"""


@dataclass(frozen=True)
class Program:
    """Modules of this package as one program: it runs in a machine that has nothing of ours. It is compiled here, and
    there only by another Python: each grading starts two of them."""

    start: str  # for `python -c`
    text: bytes  # what it reads first

    @classmethod
    @functools.cache
    def of(cls, *names: str) -> Program:
        lines = ["from __future__ import annotations"]
        for name in names:
            text = Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8")
            dropped = ("from __future__", "from rollmill.")
            text = text if name == names[-1] else text.replace('\nif __name__ == "__main__":\n    main()\n', "")
            lines += [line for line in text.splitlines() if not line.startswith(dropped)]
        source = "\n".join(lines).encode()
        code = marshal.dumps(compile(source, "<rollmill>", "exec", dont_inherit=True))
        start = _START.format(code=len(code), source=len(source), magic=importlib.util.MAGIC_NUMBER)
        return cls(start, code + source)

    async def run(self, machine: Machine, work: Mapping[str, object], **limits: Any) -> ExecResult:
        text = self.text + b"\n" + json.dumps(work).encode()
        return await machine.exec(["python", "-c", self.start], cwd="/", stdin=text, **limits)


async def run_apart(order: Order, open_tester: Open, open_worker: Open) -> TesterReport:
    """The verdicts of tests that run in one machine, with the submission in another. MachineError: a host failed."""
    async with contextlib.AsyncExitStack() as both:
        # at once: many gradings that each hold one machine and wait for the other would keep each other waiting
        opening = (both.enter_async_context(each()) for each in (open_worker, open_tester))
        worker, tester = map(_found, await asyncio.gather(*opening, return_exceptions=True))
        listener, port = await tester.listen()
        relaying = asyncio.create_task(_relay(listener, worker, order))
        try:
            return await _run(order, tester, port)
        finally:
            relaying.cancel()
            await asyncio.wait([relaying])
            if not relaying.cancelled() and relaying.exception() is not None:
                raise relaying.exception() or AssertionError


def _found(opened: Machine | BaseException) -> Machine:
    if isinstance(opened, BaseException):
        raise opened
    return opened


async def run_together(order: Order, machine: Machine) -> TesterReport:
    """The verdicts of tests that run in one process with the submission, which lies in this machine."""
    return await _run(order, machine, None)


async def _run(order: Order, machine: Machine, port: int | None) -> TesterReport:
    word, slowdown = secrets.token_hex(16), machine.capabilities.slowdown
    work = {
        "word": word,
        "port": port,
        "directory": WORK,
        "tests": order.tests,
        "hidden": order.hidden,
        "paths": [WORK if path == "." else f"{WORK}/{path}" for path in order.paths],
        "pytest": order.pytest,
        "statements": order.statements,
        "trusting": sorted(order.trusting),
        "timeout_s": order.timeout_s * slowdown,
        "test_timeout_s": order.test_timeout_s * slowdown,
    }
    tester, limit_s = Program.of("wire", "proxies", "tester"), order.timeout_s * slowdown + START_S
    result = await tester.run(machine, work, env=order.env, timeout_s=limit_s, max_output=order.max_output)
    return _told(result, word, order.tests)


def _told(result: ExecResult, word: str, tests: list[str]) -> TesterReport:
    verdicts, printed, framework = dict[str, str](), list[str](), ""
    for line in result.output.decode("utf-8", "replace").splitlines():
        if not line.startswith(f"{word} "):
            printed += [line] if line else []
            continue
        index, _, verdict = line[len(word) + 1 :].partition(" ")
        if index == "-1":
            framework = verdict
        else:
            verdicts.setdefault(tests[int(index)], verdict)
    return TesterReport(verdicts, "\n".join(printed), framework, result)


async def _relay(listener: socket.socket, machine: Machine, order: Order) -> None:
    """A worker for each connection of the tester, one after the other. MachineError: a machine's host failed."""
    with listener:
        listener.setblocking(False)
        async with _worker(machine, order) as to_worker:  # it starts while the tester does
            with await _accepted(listener) as to_tester:
                await _both_ways(to_tester, to_worker)
        while True:
            with await _accepted(listener) as to_tester:
                async with _worker(machine, order) as to_worker:
                    await _both_ways(to_tester, to_worker)


async def _accepted(listener: socket.socket) -> socket.socket:
    connection, _ = await asyncio.get_running_loop().sock_accept(listener)
    connection.setblocking(False)
    return connection


@contextlib.asynccontextmanager
async def _worker(machine: Machine, order: Order) -> AsyncIterator[socket.socket | None]:
    """A connection with a new worker; None if it ends before it connects. OSError of the machine is the submission's
    doing: an earlier worker may have ruined it."""
    try:
        listener, port = await machine.listen()
    except OSError:
        yield None
        return
    paths = [WORK if path == "." else f"{WORK}/{path}" for path in order.paths]
    work = {"port": port, "paths": paths, "directory": WORK}
    running = asyncio.create_task(_run_worker(machine, work, order.timeout_s * machine.capabilities.slowdown))
    with listener:
        listener.setblocking(False)
        accepting = asyncio.create_task(_accepted(listener))
        try:
            await asyncio.wait([running, accepting], return_when=asyncio.FIRST_COMPLETED)
            if not accepting.done():
                yield None
            else:
                with accepting.result() as connection:
                    yield connection
        finally:
            lost = running.done() and not running.cancelled() and running.exception()
            accepting.cancel()
            running.cancel()
            await asyncio.gather(running, accepting, return_exceptions=True)
        if isinstance(lost, MachineError):
            raise lost


async def _run_worker(machine: Machine, work: Mapping[str, object], limit_s: float) -> None:
    with contextlib.suppress(OSError):
        worker = Program.of("wire", "worker")
        await worker.run(machine, work, timeout_s=limit_s + START_S, max_output=1000)


async def _both_ways(one: socket.socket, other: socket.socket | None) -> None:
    """Until either of them ends. Without the other, the one ends at once."""
    if other is None:
        return
    copies = [asyncio.create_task(_copy(*pair)) for pair in ((one, other), (other, one))]
    try:
        await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for copy in copies:
            copy.cancel()
        await asyncio.wait(copies)


async def _copy(source: socket.socket, target: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    with contextlib.suppress(OSError):
        while data := await loop.sock_recv(source, _CHUNK):
            await loop.sock_sendall(target, data)
