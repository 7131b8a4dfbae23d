"""The command harness: real programs in real machines, against a real HTTP server that plays the model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web
from aiohttp.test_utils import unused_port

from rollmill.environments.harness import HarnessResult
from rollmill.environments.harnesses.command import CommandConfig, CommandHarness
from rollmill.environments.task import Task
from rollmill.errors import HarnessError, TaskError
from rollmill.machines.images.image import BUILT_IN
from rollmill.machines.namespace.client import NamespaceHost, NamespaceMachine
from rollmill.types import Sampling
from tests.environments.harnesses.test_coding import ScriptedModel

pytestmark = pytest.mark.asyncio(loop_scope="module")

SAMPLING = Sampling(temperature=0.7, top_p=0.9, max_tokens=50, seed=100)
# An agent as others write it: it knows two environment variables and the OpenAI wire format.
ASK = """
import json, os, sys, urllib.request, urllib.error
def ask(path="/chat/completions", key=None, **body):
    key = os.environ["OPENAI_API_KEY"] if key is None else key
    headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
    data = json.dumps({"model": "any", "messages": [{"role": "user", "content": "hi"}], **body}).encode()
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + path, data if body is not None else None, headers)
    try:
        with urllib.request.urlopen(request, timeout=50) as answer: return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error: return error.code, error.read().decode()
"""


def text(content: str) -> dict[str, Any]:
    return {"finish_reason": "stop", "message": {"role": "assistant", "content": content}}


@pytest_asyncio.fixture(loop_scope="module")
async def model() -> AsyncIterator[ScriptedModel]:
    model = ScriptedModel()
    server = model.server()
    await server.start_server()
    model.url = str(server.make_url("/v1"))
    yield model
    await server.close()


async def play(
    model: ScriptedModel, machine: NamespaceMachine, program: str, instruction: str = "do it", **settings: Any
) -> HarnessResult:
    argv = settings.pop("argv", ("python", "-c", ASK + program))
    harness = CommandHarness(CommandConfig(argv=argv, **settings))
    try:
        return await harness.run(
            Task("t", instruction), machine, base_url=model.url, api_key="session-key", sampling=SAMPLING
        )
    finally:
        await harness.close()


async def test_a_program_finds_its_model_and_leaves_its_work(model: ScriptedModel, machine: NamespaceMachine) -> None:
    model.answers = [text("x = 1\n"), text("y = 2\n")]
    program = "for n in range(2): open(f'{n}.py', 'w').write(json.loads(ask()[1])['choices'][0]['message']['content'])"
    result = await play(model, machine, program)
    assert (result.stop, result.turns) == ("done", 2) and result.note == "exit code 0"
    assert [await machine.read(f"{n}.py") for n in range(2)] == [b"x = 1\n", b"y = 2\n"]
    assert set(model.keys) == {"Bearer session-key"}


async def test_the_run_decides_how_answers_are_sampled(model: ScriptedModel, machine: NamespaceMachine) -> None:
    model.answers = [text("a")] * 3
    program = (
        "ask(temperature=0, top_p=0.1, seed=7, max_completion_tokens=9999, stop=['x'])\n"
        "ask(max_tokens=5, n=1, unknown='field')\nask(max_tokens='many', stream=True)"
    )
    await play(model, machine, program)
    asked = [(each["temperature"], each["top_p"], each["seed"], each["max_tokens"]) for each in model.requests]
    assert asked == [(0.7, 0.9, 101, 50), (0.7, 0.9, 102, 5), (0.7, 0.9, 103, 50)]
    assert "max_completion_tokens" not in model.requests[0] and model.requests[0]["stop"] == ["x"]
    assert model.requests[1]["unknown"] == "field" and model.requests[2]["stream"] is True


async def test_a_program_may_speak_anthropic(model: ScriptedModel, machine: NamespaceMachine) -> None:
    model.answers = [text("a")]
    program = """
url, key = os.environ["ANTHROPIC_BASE_URL"] + "/v1/messages", os.environ["ANTHROPIC_API_KEY"]
data = json.dumps({"model": "claude", "max_tokens": 9, "messages": []}).encode()
urllib.request.urlopen(urllib.request.Request(url, data, {"x-api-key": key}), timeout=50)
"""
    result = await play(model, machine, program)
    assert (result.stop, result.turns) == ("done", 1), result
    (asked,) = model.requests
    assert (asked["model"], asked["max_tokens"], asked["seed"]) == ("rollmill", 9, 101)


@pytest.mark.parametrize("how", ["{instruction}", "{instruction_file}", ""])
async def test_the_instruction_arrives_whole(model: ScriptedModel, machine: NamespaceMachine, how: str) -> None:
    instruction = "fix 'it'; $(touch /work/run) `id` {instruction_file} \"\n\u20ac"
    read = {"{instruction}": "sys.argv[1]", "{instruction_file}": "open(sys.argv[1]).read()", "": "sys.stdin.read()"}
    program = f"import sys; open('got', 'w').write({read[how]})"
    result = await play(model, machine, "", instruction, argv=("python", "-c", program, *([how] if how else [])))
    assert result.stop == "done", result
    assert (await machine.read("got")).decode() == instruction
    with pytest.raises(FileNotFoundError):
        await machine.read("run")  # no shell read it


async def test_an_instruction_that_is_no_argument(model: ScriptedModel, machine: NamespaceMachine) -> None:
    for instruction in ("x" * 200_000, "a\0b"):
        with pytest.raises(TaskError, match="NUL"):
            await play(model, machine, "", instruction, argv=("true", "{instruction}"))


async def test_whatever_a_program_does_is_graded(model: ScriptedModel, machine: NamespaceMachine) -> None:
    never = await play(model, machine, "print('I gave up')")
    assert (never.stop, never.turns) == ("done", 0)
    assert "never got an answer" in never.note and never.note.endswith("I gave up")
    failed = await play(model, machine, "open('half', 'w').write('work'); sys.exit('out of ideas')")
    assert (failed.stop, failed.turns) == ("error", 0) and "exit code 1" in failed.note
    assert await machine.read("half") == b"work"
    garbage = await play(model, machine, "os.write(1, bytes(range(256)) * 4096); os.kill(os.getpid(), 11)")
    assert garbage.stop == "error" and "exit code -11" in garbage.note and len(garbage.note) < 800
    missing = await play(model, machine, "", argv=("no-such-agent",))
    assert missing.stop == "error" and "exit code 127" in missing.note
    hungry = await play(model, machine, "x = []\nwhile True: x.append(bytearray(1 << 20))")
    assert hungry.stop == "error"


async def test_only_chat_completions_are_forwarded(model: ScriptedModel, machine: NamespaceMachine) -> None:
    program = (
        "got = [ask(path)[0] for path in ('/../sessions', '/../health', '/../metrics', '/completions', '//x', '/')]\n"
        "got += [ask(key=key)[0] for key in ('', 'wrong', 'production')]\n"
        "got += [ask(messages='x' * 2000)[0]]\n"
        "open('got', 'w').write(repr(got))"
    )
    result = await play(model, machine, program, max_request_bytes=1024)
    assert (result.stop, result.turns) == ("done", 0), result
    assert await machine.read("got") == repr([404] * 6 + [401] * 3 + [413]).encode()
    assert model.requests == []


async def test_nonsense_is_refused_and_the_model_still_answers(model: ScriptedModel, machine: NamespaceMachine) -> None:
    model.answers = [text("fine")]
    program = (
        "import socket\n"
        "from urllib.parse import urlsplit\n"
        "port = urlsplit(os.environ['OPENAI_BASE_URL']).port\n"
        "key = os.environ['OPENAI_API_KEY']\n"
        "head = f'POST /v1/chat/completions HTTP/1.1\\r\\nHost: x\\r\\nAuthorization: Bearer {key}\\r\\n'.encode()\n"
        "bodies = (b'[1]', b'null', b'[' * 100_000, b'{', b'\\xff', b'{\"a\": ' + b'9' * 5000 + b'}')\n"
        "sent = [b'\\x00' * 70000, b'GET / HTTP/9\\r\\n\\r\\n', head + b'X: ' + b'y' * 70000,\n"
        "        head + b'Content-Encoding: gzip\\r\\nContent-Length: 4\\r\\n\\r\\nabcd',\n"
        "        *(head + b'Content-Length: %d\\r\\n\\r\\n' % len(body) + body for body in bodies)]\n"
        "for data in sent:\n"
        "    s = socket.create_connection(('127.0.0.1', port), timeout=20)\n"
        "    try: s.sendall(data); print(s.recv(100).split(b'\\r')[0])\n"
        "    except OSError as error: print(error)\n"
        "print(ask()[0])"
    )
    result = await play(model, machine, program)
    assert (result.stop, result.turns) == ("done", 1) and result.note.endswith("200"), result
    assert result.note.count("400 Bad Request") == 10, result.note


async def test_a_flood_of_requests_ends_the_episode(model: ScriptedModel, machine: NamespaceMachine) -> None:
    model.answers = [text("again")] * 20
    result = await play(model, machine, "while True: ask()", max_turns=5)
    assert (result.stop, result.turns) == ("max_turns", 5) and len(model.requests) == 5
    result = await play(model, machine, "while True: ask('/elsewhere')", max_turns=5)
    assert (result.stop, result.turns) == ("max_turns", 0)
    idle = (
        "import socket\nfrom urllib.parse import urlsplit\n"
        "address = '127.0.0.1', urlsplit(os.environ['OPENAI_BASE_URL']).port\nheld = []\n"
        "while True:\n    try: held.append(socket.create_connection(address, 1))\n    except OSError: pass"
    )
    result = await play(model, machine, idle, max_turns=30)
    assert result.stop in ("max_turns", "error")
    assert await machine.exec(["true"]) is not None


async def test_a_program_that_outlives_its_episode_is_killed(host: NamespaceHost, model: ScriptedModel) -> None:
    machine = await host.create(BUILT_IN)
    waiting = asyncio.Event()

    async def never(request: web.Request) -> web.Response:
        waiting.set()
        await asyncio.Event().wait()
        raise AssertionError

    app = web.Application()
    app.router.add_post("/v1/chat/completions", never)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    port = unused_port()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    slow = ScriptedModel()
    slow.url = f"http://127.0.0.1:{port}/v1"
    program = (
        "open('begun', 'w').write('yes')\nos.fork() or os.setsid()\n"
        "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "while True: ask()"
    )
    episode = asyncio.create_task(play(slow, machine, program))
    await waiting.wait()
    episode.cancel()
    with pytest.raises(asyncio.CancelledError):  # the model was there: the time is the agent's
        await episode
    assert await machine.read("begun") == b"yes"  # what it left is graded
    listed = await machine.exec(
        ["python", "-c", "import os; print(len([p for p in os.listdir('/proc') if p.isdigit()]))"]
    )
    assert listed.output == b"2\n"
    await machine.close()
    await runner.cleanup()


@pytest.mark.parametrize("status", [503, 401, 0])
async def test_a_model_that_stays_away_is_an_infrastructure_failure(
    model: ScriptedModel, machine: NamespaceMachine, status: int
) -> None:
    model.answers = [web.json_response({"error": {"message": "no engine"}}, status=status) for _ in range(99) if status]
    away = model
    if status == 0:
        away = ScriptedModel()
        away.url = f"http://127.0.0.1:{unused_port()}/v1"
    with pytest.raises(HarnessError, match=str(status or "cannot be reached")):
        await play(away, machine, "ask()\nwhile True: pass", request_deadline_s=0.3)


async def test_a_gateway_that_restarts_is_waited_for(model: ScriptedModel, machine: NamespaceMachine) -> None:
    model.answers = [web.json_response({}, status=503), web.json_response({}, status=502), text("back")]
    result = await play(model, machine, "print(ask()[0])")
    assert (result.stop, result.turns) == ("done", 1) and result.note.endswith("200")
    model.answers = [web.json_response({"error": {"message": "too long"}}, status=400)]
    result = await play(model, machine, "print(ask())")
    assert (result.stop, result.turns) == ("done", 0) and "too long" in result.note  # its own fault: it reads why


async def test_time_that_is_over_while_the_model_samples_is_the_programs(
    model: ScriptedModel, machine: NamespaceMachine
) -> None:
    """Also if an earlier attempt at the same answer failed."""
    model.answers = [web.json_response({}, status=503), asyncio.Future()]
    episode = asyncio.create_task(play(model, machine, "ask()"))
    await model.sampling.wait()
    episode.cancel()
    with pytest.raises(asyncio.CancelledError):
        await episode


async def test_an_answer_may_take_longer_than_the_gateway_may_be_away(
    model: ScriptedModel, machine: NamespaceMachine
) -> None:
    model.answers = [asyncio.sleep(0.5, text("late"))]
    result = await play(model, machine, "print(ask()[0])", request_deadline_s=0.2)
    assert (result.stop, result.turns) == ("done", 1) and result.note.endswith("200")
