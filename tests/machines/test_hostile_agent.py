"""A guest whose agent was taken over, answering the host. Whatever it says costs its own machine and nothing else."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollmill.errors import MachineError
from rollmill.machines.agent_machine import AgentMachine, Ended
from rollmill.machines.guest import frames as wire
from rollmill.machines.machine import Capabilities, ExecResult

GOOD = {"exit_code": 0, "truncated": False, "stopped": None, "seconds": 0.0, "id": 1}
RUINED = ExecResult(exit_code=-9, output=b"", stopped="machine")


class LostMachine(AgentMachine):
    """A machine whose host is healthy: whatever happens is its own doing."""

    capabilities = Capabilities(kernel="shared", snapshot="none")
    _grace_s = 2.0

    async def _end(self, begun: bool) -> Ended:
        self._connection.close()
        return Ended(False)

    async def close(self) -> None: ...


@asynccontextmanager
async def answering(data: bytes, *, begun: bool = True) -> AsyncIterator[LostMachine]:
    """A machine that answers its first request with `data` and ends."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setblocking(False)
    machine = LostMachine("image", ours, "hostile")
    machine._begun = begun  # a command took the agent over

    async def answer() -> None:
        await asyncio.get_running_loop().sock_recv(theirs, 1 << 16)
        await asyncio.get_running_loop().sock_sendall(theirs, data)
        theirs.close()

    task = asyncio.create_task(answer())
    try:
        yield machine
        await asyncio.gather(task, return_exceptions=True)
    finally:
        ours.close()
        theirs.close()


def raw(text: bytes, body: bytes = b"") -> bytes:
    return wire.LENGTHS.pack(len(text), len(body)) + text + body


async def test_a_proper_answer_is_taken() -> None:
    async with answering(wire.pack(GOOD, b"output")) as machine:
        assert (await machine.exec(["true"])).output == b"output"


async def test_an_answer_to_another_request_is_dropped() -> None:
    async with answering(wire.pack({**GOOD, "id": 77}, b"stale") + wire.pack(GOOD, b"mine")) as machine:
        assert (await machine.exec(["true"])).output == b"mine"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff" * 64,
        wire.LENGTHS.pack(1 << 31, 0),
        wire.LENGTHS.pack(2, 1 << 27) + b"{}",
        wire.pack(GOOD, b"x" * 2000),  # more than was asked for
        wire.pack({**GOOD, "id": 2}) * 40,
        wire.pack({"id": 1}),
        wire.pack({**GOOD, "exit_code": "0"}),
        wire.pack({**GOOD, "exit_code": None}),
        wire.pack({**GOOD, "exit_code": 10**30}),
        wire.pack({**GOOD, "truncated": 1}),
        wire.pack({**GOOD, "stopped": "machine"}),
        wire.pack({**GOOD, "seconds": -1.0}),
        wire.pack({**GOOD, "seconds": "soon"}),
        raw(json.dumps({**GOOD, "seconds": 1e308}).encode().replace(b"1e+308", b"1e999")),
        raw(b"[" * 100_000),
        raw(b"[1]"),
        raw(b"\xff\xfe"),
        wire.pack({"errno": "2", "id": 1}),
        wire.pack({"errno": -1, "id": 1}),
        wire.pack({"errno": 2, "path": ["x"], "id": 1}),
    ],
)
async def test_any_other_answer_ends_the_machine(data: bytes) -> None:
    async with answering(data) as machine:
        assert await machine.exec(["true"], max_output=1000) == RUINED
        assert await machine.exec(["true"]) == RUINED
        with pytest.raises(FileNotFoundError):
            await machine.read("main.py")


async def test_an_error_in_answer_to_the_first_command_is_believed_only_if_no_command_ever_ran() -> None:
    for operation in ("exec", "start"):
        async with answering(wire.pack({"error": "x", "id": 1}), begun=False) as machine:
            machine._proven = True
            if operation == "exec":
                assert await machine.exec(["true"]) == RUINED
            else:
                assert (await (await machine.start(["true"])).state()).stopped == "machine"
    async with answering(wire.pack({"error": "x", "id": 1}), begun=False) as machine:
        with pytest.raises(MachineError):
            await machine.exec(["true"])
    async with answering(wire.pack({"error": "x", "id": 1}), begun=False) as machine:
        machine._proven = True
        with pytest.raises(MachineError):  # no command was sent to it yet
            await machine.write("x", b"")


async def test_it_cannot_claim_more_time_than_has_passed() -> None:
    async with answering(wire.pack({**GOOD, "seconds": 1e6})) as machine:
        assert (await machine.exec(["true"])).seconds < 1e3


async def test_it_cannot_hand_over_a_file_with_more_bytes_than_asked_for() -> None:
    async with answering(wire.pack({"id": 1}, b"x" * 11)) as machine:
        with pytest.raises(FileNotFoundError):
            await machine.read("main.py", max_bytes=10)


anything: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
replies = st.fixed_dictionaries(
    {}, optional=dict.fromkeys((*GOOD, "errno", "path", "error", "process", "port"), anything)
)


def test_every_reply_is_taken_or_ends_the_machine() -> None:
    @settings(deadline=None, max_examples=200, suppress_health_check=list(HealthCheck))
    @given(replies, st.binary(max_size=40), st.sampled_from(["exec", "start", "read", "write"]))
    def run(reply: dict[str, Any], body: bytes, operation: str) -> None:
        async def ask() -> None:
            async with answering(wire.pack(reply, body)) as machine:
                calls = {
                    "exec": lambda: machine.exec(["true"]),
                    "start": lambda: machine.start(["true"]),
                    "read": lambda: machine.read("x"),
                    "write": lambda: machine.write("x", b""),
                }
                try:
                    result = await calls[operation]()
                except OSError as error:
                    assert error.errno is not None and os.strerror(error.errno)
                    return
                if isinstance(result, ExecResult):
                    assert isinstance(result.exit_code, int) and isinstance(result.output, bytes)

        asyncio.run(ask())

    run()
