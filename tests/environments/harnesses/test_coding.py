"""The coding harness against a real HTTP server that plays a scripted model, in a real machine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web
from aiohttp.test_utils import TestServer, unused_port

from rollmill.demo.coding import CodingConfig, CodingHarness
from rollmill.environments.task import Task
from rollmill.errors import HarnessError
from rollmill.machines.images.image import BUILT_IN
from rollmill.machines.namespace.client import NamespaceHost, NamespaceMachine
from rollmill.types import Sampling

pytestmark = pytest.mark.asyncio(loop_scope="module")

TEST = """
from main import f
if f(3) != 4:
    print("fail f(3) =", f(3), "not 4")
    raise SystemExit(1)
print("ok")
"""
FILES = {"main.py": b"def f(x):\n    return x\n", "test.py": TEST.encode()}
TASK = Task("t", "fix main.py", image=BUILT_IN, files=FILES)

Answer = dict[str, Any] | web.Response | Awaitable[dict[str, Any]]  # an awaitable: the model takes its time


def call(name: str, arguments: Any = None, **fields: Any) -> dict[str, Any]:
    text = arguments if isinstance(arguments, str) else json.dumps(fields)
    function = {"name": name, "arguments": text}
    message = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c", "type": "function", "function": function}],
    }
    return {"finish_reason": "tool_calls", "message": message}


class ScriptedModel:
    """Returns its answers in turn, and remembers the requests."""

    def __init__(self) -> None:
        self.answers: list[Answer] = []
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str] = []
        self.causes: list[str | None] = []  # that new contexts declare
        self.url = ""
        self.sampling = asyncio.Event()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(await request.json())
        self.keys.append(request.headers["Authorization"])
        self.causes.append(request.headers.get("x-rollmill-cause"))
        answer = self.answers.pop(0)
        if isinstance(answer, Awaitable):
            self.sampling.set()
            answer = await answer
        return web.json_response({"choices": [answer]}) if isinstance(answer, dict) else answer

    @property
    def results(self) -> list[str]:
        """The tool results sent to the model, in order."""
        return [message["content"] for message in self.requests[-1]["messages"] if message["role"] == "tool"]

    def server(self) -> TestServer:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self.handle)
        app.router.add_post("/v1/messages", self.handle)
        return TestServer(app)


@pytest_asyncio.fixture(loop_scope="module")
async def model() -> AsyncIterator[ScriptedModel]:
    model = ScriptedModel()
    server = model.server()
    await server.start_server()
    model.url = str(server.make_url("/v1"))
    yield model
    await server.close()


@pytest_asyncio.fixture(loop_scope="module")
async def make_harness() -> AsyncIterator[Callable[..., CodingHarness]]:
    made: list[CodingHarness] = []

    def make(**settings: Any) -> CodingHarness:
        made.append(CodingHarness(CodingConfig(**settings)))
        return made[-1]

    yield make
    for harness in made:
        await harness.close()


@pytest_asyncio.fixture(loop_scope="module")
async def repository(host: NamespaceHost) -> AsyncIterator[NamespaceMachine]:
    machine = await host.create(BUILT_IN, TASK.files)
    yield machine
    await machine.close()


async def play(
    harness: CodingHarness, model: ScriptedModel, machine: NamespaceMachine, sampling: Sampling | None = None
) -> Any:
    sampling = sampling or Sampling()
    return await harness.run(TASK, machine, base_url=model.url, api_key="secret", sampling=sampling)


Make = Callable[..., CodingHarness]


async def test_one_episode(make_harness: Make, model: ScriptedModel, repository: NamespaceMachine) -> None:
    model.answers = [
        call("list"),
        call("read", path="main.py"),
        call("run"),
        call("edit", path="main.py", line=2, text="return x + 1"),
        call("run"),
        call("write", path="notes/why.txt", content="off by one"),
        call("done"),
    ]
    result = await play(make_harness(), model, repository, Sampling(temperature=0.5, max_tokens=32, seed=7))
    assert (result.stop, result.turns, result.tool_calls, result.bad_tool_calls) == ("done", 7, 7, 0)
    texts = ["main.py\ntest.py", "1 def f(x):\n2     return x", "fail f(3) = 3 not 4", "ok", "ok", "ok"]
    assert model.results == texts
    assert await repository.read("main.py") == b"def f(x):\n    return x + 1\n"
    assert await repository.read("notes/why.txt") == b"off by one"
    first, second = model.requests[:2]
    assert first["messages"] == [{"role": "user", "content": "fix main.py"}]
    assert (first["temperature"], first["max_tokens"], first["seed"]) == (0.5, 32, 8)
    assert second["seed"] == 9 and first["tools"][0]["function"]["name"] == "list"
    # the history is sent back exactly as it came: the gateway extends its tokens by it
    assert second["messages"][1] == call("list")["message"]
    assert set(model.keys) == {"Bearer secret"}


async def test_bad_calls_are_answered_and_counted(
    make_harness: Make, model: ScriptedModel, repository: NamespaceMachine
) -> None:
    await repository.exec(["sh", "-c", "mkdir folder; head -c 2000000 /dev/zero > big; chmod 400 test.py"])
    model.answers = [
        call("read", "path: main.py"),
        call("dance", "{}"),
        call("edit", path="main.py", line="two", text=""),
        call("read", path="absent.py"),
        call("read", path="../../etc/shadow"),
        call("read", path="folder"),
        call("read", path="big"),
        call("edit", path="main.py", line=9, text="x"),
        call("write", path="/usr/bin/python", content="x"),
        call("write", path="test.py", content="x"),
        {"finish_reason": "tool_calls", "message": {"role": "assistant", "tool_calls": [{}]}},
        {"finish_reason": "stop", "message": {"role": "assistant", "content": "I give up"}},
    ]
    result = await play(make_harness(max_turns=20), model, repository)
    assert (result.stop, result.tool_calls, result.bad_tool_calls) == ("answer", 11, 11)
    assert model.results == [
        "error not json",
        "error no such tool",
        "error wrong arguments",
        "error no such file",
        "error no such file",
        "error is a directory",
        "error too large",
        "error no such line",
        "error not allowed",
        "error not allowed",
        "error no such tool",
    ]


async def test_limits_on_turns_answers_time_and_output(
    make_harness: Make, model: ScriptedModel, repository: NamespaceMachine
) -> None:
    harness = make_harness(max_turns=3, tool_timeout_s=0.3, max_tool_output=100)
    loop = call("write", path="test.py", content="while True: print('x' * 50)")
    model.answers = [loop, call("run"), call("read", path="test.py")]
    result = await play(harness, model, repository)
    assert (result.stop, result.turns) == ("max_turns", 3)
    flood = model.results[1]
    assert "characters cut]" in flood and flood.endswith("error time limit") and len(flood) < 140
    model.answers = [{**call("done"), "finish_reason": "length"}]
    assert (await play(harness, model, repository)).stop == "length"
    overflow = {"error": {"code": "context_length_exceeded", "message": "too long"}}
    model.answers = [call("list"), web.json_response(overflow, status=400)]
    result = await play(harness, model, repository)
    assert (result.stop, result.turns, result.tool_calls) == ("length", 2, 1)


async def test_a_gateway_that_restarts_is_waited_for(
    make_harness: Make, model: ScriptedModel, repository: NamespaceMachine
) -> None:
    model.answers = [web.Response(status=503), web.Response(status=502, text="<html>"), call("done")]
    assert (await play(make_harness(), model, repository)).stop == "done"


async def test_time_that_is_over_while_the_model_samples_is_the_agents(
    make_harness: Make, model: ScriptedModel, repository: NamespaceMachine
) -> None:
    """Also if an earlier attempt at the same answer failed."""
    model.answers = [web.Response(status=503), asyncio.Future()]
    episode = asyncio.create_task(play(make_harness(), model, repository))
    await model.sampling.wait()
    episode.cancel()
    with pytest.raises(asyncio.CancelledError):
        await episode


async def test_an_answer_may_take_longer_than_the_gateway_may_be_away(
    make_harness: Make, model: ScriptedModel, repository: NamespaceMachine
) -> None:
    model.answers = [asyncio.sleep(0.5, call("done"))]
    assert (await play(make_harness(request_deadline_s=0.2), model, repository)).stop == "done"


async def test_a_gateway_that_stays_down_fails_the_harness(
    make_harness: Make, model: ScriptedModel, repository: NamespaceMachine
) -> None:
    model.url = f"http://127.0.0.1:{unused_port()}/v1"
    with pytest.raises(HarnessError, match=r"cannot be reached[\s\S]*hint: is the gateway running"):
        await play(make_harness(request_deadline_s=0.3), model, repository)


@pytest.mark.parametrize(
    "answer",
    [
        web.json_response({"error": {"message": "bad key"}}, status=401),
        web.json_response({"choices": []}),
        web.Response(text="not json"),
    ],
    ids=["refused", "no choice", "no json"],
)
async def test_a_model_that_refuses_fails_the_harness(
    make_harness: Make, model: ScriptedModel, repository: NamespaceMachine, answer: web.Response
) -> None:
    model.answers = [answer]
    with pytest.raises(HarnessError):
        await play(make_harness(), model, repository)


async def test_tools_have_longer_in_a_slow_machine(
    model: ScriptedModel, make_harness: Make, host: NamespaceHost, slow_commands: list[dict[str, Any]]
) -> None:
    machine = await host.create(BUILT_IN, TASK.files)
    model.answers = [call("list"), call("run"), call("done")]
    assert (await play(make_harness(tool_timeout_s=2.5), model, machine)).stop == "done"
    assert [command["timeout_s"] for command in slow_commands] == [50.0, 50.0]
    await machine.close()
