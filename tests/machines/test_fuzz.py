"""Any argument a model writes is served or refused with OSError, and pid 1 stays alive."""

from __future__ import annotations

import asyncio
import json
import math
import socket
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollmill.demo import coding_tools as tools
from rollmill.demo.coding import CodingHarness
from rollmill.environments.harnesses.tools import BadToolCall, parse_call
from rollmill.machines.guest import frames as wire
from rollmill.machines.images.image import BUILT_IN
from rollmill.machines.machine import ExecResult
from rollmill.machines.namespace.client import NamespaceHost, NamespaceMachine

# every code point, including lone surrogates, and the characters with a meaning in paths and programs
text = st.text(st.one_of(st.characters(), st.characters(categories=["Cs"]), st.sampled_from("/.\0\n~-")), max_size=30)
long_text = st.builds(lambda part, count: part * count, text, st.sampled_from([100, 5000, 70_000]))
anything: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=5,
)
paths = st.one_of(
    text, st.text("/.", max_size=12), long_text, st.just("a/" * 2000), st.sampled_from(["/proc/self/mem", "/dev/zero"])
)
fuzzed = settings(deadline=None, max_examples=50, suppress_health_check=list(HealthCheck))


async def check_alive(machine: NamespaceMachine) -> None:
    assert (await machine.exec(["echo", "alive"])).output == b"alive\n"
    assert not machine._ruined


async def served_or_refused(work: Any) -> Any:
    try:
        return await work
    except OSError:
        return None


def test_arguments_of_a_machine(fuzz_loop: asyncio.AbstractEventLoop, fuzz_machine: NamespaceMachine) -> None:
    machine = fuzz_machine

    @fuzzed
    @given(
        paths,
        st.binary(max_size=50),
        st.lists(text, max_size=4),
        text,
        st.dictionaries(text, text, max_size=2),
        st.data(),
    )
    def run(path: str, data: bytes, argv: list[str], cwd: str, env: dict[str, str], draw: st.DataObject) -> None:
        async def one() -> None:
            await served_or_refused(machine.read(path, max_bytes=draw.draw(st.sampled_from([0, 10, 1 << 40]))))
            await served_or_refused(machine.write("/tmp/" + path.strip("/"), data))
            result = await served_or_refused(machine.exec(argv, cwd=cwd, env=env, stdin=data, timeout_s=1.0))
            assert result is None or isinstance(result, ExecResult)
            python = ["python", "-c", *argv]
            await served_or_refused(
                machine.exec(python, timeout_s=draw.draw(st.sampled_from([1.0, math.nan, math.inf])))
            )
            await check_alive(machine)

        fuzz_loop.run_until_complete(one())

    run()


def test_values_of_the_wrong_type(fuzz_loop: asyncio.AbstractEventLoop, fuzz_machine: NamespaceMachine) -> None:
    """The frame itself: values that JSON cannot carry are refused before sending, the others by pid 1."""
    machine = fuzz_machine
    names = ["exec", "read", "write", "snapshot", "restore", "start", "state", "stop", "listen", "dance"]
    operations = st.sampled_from(names) | anything
    keys = st.sampled_from(
        ["argv", "cwd", "env", "timeout_s", "max_output", "path", "max_bytes", "files", "process", "extra"]
    )

    @fuzzed
    @given(operations, st.dictionaries(keys, anything, max_size=9), st.binary(max_size=20))
    def run(operation: Any, fields: dict[str, Any], body: bytes) -> None:
        async def one() -> None:
            if operation == "exec" and isinstance(fields.get("timeout_s"), int | float):
                fields["timeout_s"] = 0.2
            await served_or_refused(machine.request({**fields, "op": operation}, body))
            await check_alive(machine)

        fuzz_loop.run_until_complete(one())

    run()


def test_tool_calls(fuzz_loop: asyncio.AbstractEventLoop, fuzz_machine: NamespaceMachine) -> None:
    """Any call is answered with text: a result, or an error."""
    machine, harness = fuzz_machine, CodingHarness()
    names = st.sampled_from([tool.name for tool in tools.TOOLS]) | text | anything
    right = st.fixed_dictionaries(
        {}, optional={"path": paths, "content": text, "line": st.integers(-3, 10**20), "text": text}
    )
    arguments = st.one_of(
        st.builds(json.dumps, right), st.builds(json.dumps, st.dictionaries(text, anything, max_size=3)), text, anything
    )
    calls = st.fixed_dictionaries(
        {"function": st.fixed_dictionaries({"name": names, "arguments": arguments}) | anything}
    )

    @fuzzed
    @given(calls | anything)
    def run(call: Any) -> None:
        async def one() -> None:
            try:
                answer = await harness.call(machine, *parse_call(call, tools.TOOLS_BY_NAME))
                assert answer is None or isinstance(answer, str)
            except BadToolCall as bad:
                assert isinstance(bad.text, str)
            await check_alive(machine)

        fuzz_loop.run_until_complete(one())

    run()


@given(anything, st.binary(max_size=100))
@settings(deadline=None)
def test_a_frame_comes_back_as_it_was_sent(value: Any, body: bytes) -> None:
    try:
        frame = wire.pack({"value": value}, body)
    except OSError:
        return
    one, other = socket.socketpair()
    with one, other:
        one.sendall(frame)
        received = wire.receive(other.fileno())
        assert received == ({"value": json.loads(json.dumps(value))}, body)


@given(
    st.binary(max_size=60) | st.builds(lambda text: text.encode("utf-8", "replace"), st.builds(json.dumps, anything))
)
@settings(deadline=None)
def test_a_frame_needs_a_strict_json_header(data: bytes) -> None:
    try:
        header = wire.unpack_header(data)
    except wire.WireError:
        return
    json.dumps(header, allow_nan=False)


@pytest.mark.parametrize(
    "text", ['{"a": NaN}', '{"a": [-Infinity]}', '{"a": 1e999}', "[]", "{", "9" * 5000, "[" * 9999]
)
def test_a_header_must_be_a_strict_json_object(text: str) -> None:
    with pytest.raises(wire.WireError):
        wire.unpack_header(text.encode())


@pytest.fixture
def fuzz_loop() -> Any:
    """hypothesis runs only synchronous functions, so these tests run their own event loop."""
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


@pytest.fixture
def fuzz_machine(fuzz_loop: asyncio.AbstractEventLoop) -> Any:
    host = NamespaceHost()
    yield fuzz_loop.run_until_complete(host.create(BUILT_IN, {"main.py": b"x = 1\n"}))
    fuzz_loop.run_until_complete(host.close())
