"""The remote harness against a real agent service on a socket, which asks a scripted model."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web
from aiohttp.test_utils import TestServer, unused_port

from rollmill.environments.harness import HarnessResult
from rollmill.environments.harnesses.remote import RemoteConfig, RemoteHarness
from rollmill.environments.task import Task
from rollmill.errors import ConfigError, HarnessError
from rollmill.machines.namespace.client import NamespaceMachine
from rollmill.types import Sampling
from tests.environments.harnesses.test_coding import ScriptedModel

pytestmark = pytest.mark.asyncio(loop_scope="module")
TASK = Task("t", "fix main.py", files={"main.py": b"x = \xff\n"}, submission=("main.py",))


def files(**contents: bytes) -> dict[str, str]:
    return {name.replace("_", "."): base64.b64encode(data).decode() for name, data in contents.items()}


class AgentService:
    """An agent as a user would serve it: it asks the model it is given and hands in the answer."""

    def __init__(self) -> None:
        self.episodes: dict[str, asyncio.Task[dict[str, Any]]] = {}
        self.begun: list[dict[str, Any]] = []
        self.calls: list[str] = []
        self.ended = asyncio.Event()
        self.url = ""
        self.lose_next: set[str] = set()  # methods whose next answer is lost
        self.forget = 0  # episodes to forget
        self.says: Any = None  # instead of the agent's own answer; a number is a status
        self.never_done = False

    def server(self) -> TestServer:
        app = web.Application(middlewares=[self.check])
        app.router.add_put("/agent/episodes/{id}", self.begin)
        app.router.add_get("/agent/episodes/{id}", self.tell)
        app.router.add_delete("/agent/episodes/{id}", self.end)
        return TestServer(app)

    @web.middleware
    async def check(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self.calls.append(request.method)
        if request.headers.get("Authorization") != "Bearer agent-token":
            return web.json_response({"error": "who are you?"}, status=401)
        response = await handler(request)
        if request.method in self.lose_next:
            self.lose_next.discard(request.method)
            assert request.transport is not None
            request.transport.abort()
        return response

    async def begin(self, request: web.Request) -> web.Response:
        identity = request.match_info["id"]
        if identity not in self.episodes:
            episode = await request.json()
            self.begun.append(episode)
            self.episodes[identity] = asyncio.create_task(self.agent(episode))
        return web.json_response({}, status=202)

    async def agent(self, episode: dict[str, Any]) -> dict[str, Any]:
        if self.never_done:
            await asyncio.Event().wait()
        model = episode["model"]
        headers = {"Authorization": f"Bearer {model['api_key']}"}
        body = {"messages": episode["messages"], **episode["sampling"]}
        async with aiohttp.ClientSession(headers=headers) as session:
            async with session.post(model["base_url"] + "/chat/completions", json=body) as response:
                content = (await response.json())["choices"][0]["message"]["content"]
        return {"state": "done", "files": files(main_py=content.encode()), "note": "all well"}

    async def tell(self, request: web.Request) -> web.StreamResponse:
        if self.forget:
            self.forget -= 1
            del self.episodes[request.match_info["id"]]
        if request.match_info["id"] not in self.episodes:
            return web.json_response({}, status=404)
        if self.says is not None:
            if isinstance(self.says, bytes):
                return web.Response(body=self.says)
            return web.json_response(self.says, status=self.says if isinstance(self.says, int) else 200)
        done, _ = await asyncio.wait([self.episodes[request.match_info["id"]]], timeout=0.01)
        return web.json_response(done.pop().result() if done else {"state": "running"})

    async def end(self, request: web.Request) -> web.Response:
        self.episodes.pop(request.match_info["id"], asyncio.create_task(asyncio.sleep(0))).cancel()
        self.ended.set()
        return web.json_response({})


@pytest_asyncio.fixture(loop_scope="module")
async def model() -> AsyncIterator[ScriptedModel]:
    model = ScriptedModel()
    server = model.server()
    await server.start_server()
    model.url = str(server.make_url("/v1"))
    model.answers = [{"finish_reason": "stop", "message": {"role": "assistant", "content": "x = 2\n"}}] * 9
    yield model
    await server.close()


@pytest_asyncio.fixture(loop_scope="module")
async def service(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[AgentService]:
    monkeypatch.setenv("AGENT_TOKEN", "agent-token")
    service = AgentService()
    server = service.server()
    await server.start_server()
    service.url = str(server.make_url("/agent"))
    yield service
    await server.close()


async def play(
    service: AgentService, model: ScriptedModel, machine: NamespaceMachine, task: Task = TASK, **settings: Any
) -> HarnessResult:
    config = {
        "url": service.url,
        "token_variable": "AGENT_TOKEN",
        "poll_s": 0.02,
        "request_deadline_s": 1.0,
        **settings,
    }
    harness = RemoteHarness(RemoteConfig(**config))
    try:
        return await harness.run(
            task, machine, base_url=model.url, api_key="session-key", sampling=Sampling(temperature=0.5, max_tokens=9)
        )
    finally:
        await harness.close()


async def test_an_agent_elsewhere_hands_in_its_files(
    service: AgentService, model: ScriptedModel, machine: NamespaceMachine
) -> None:
    result = await play(service, model, machine)
    assert (result.stop, result.note) == ("done", "all well")
    assert await machine.read("main.py") == b"x = 2\n"
    (episode,) = service.begun
    assert base64.b64decode(episode["files"]["main.py"]) == b"x = \xff\n" and episode["submission"] == ["main.py"]
    assert episode["messages"] == [{"role": "user", "content": "fix main.py"}] and "grading" not in episode
    assert model.keys == ["Bearer session-key"] and model.requests[0]["temperature"] == 0.5
    assert service.calls[-1] == "DELETE" and "session-key" not in episode["id"]


async def test_a_lost_answer_does_not_begin_an_episode_twice(
    service: AgentService, model: ScriptedModel, machine: NamespaceMachine
) -> None:
    service.lose_next = {"PUT", "GET"}
    assert (await play(service, model, machine)).stop == "done"
    assert len(service.begun) == 1 and service.calls.count("PUT") == 2 and len(model.requests) == 1


async def test_a_service_that_forgets_is_told_again(
    service: AgentService, model: ScriptedModel, machine: NamespaceMachine
) -> None:
    service.forget = 1
    assert (await play(service, model, machine)).stop == "done" and len(service.begun) == 2
    service.forget = 99
    with pytest.raises(HarnessError, match="forgets"):
        await play(service, model, machine)


@pytest.mark.parametrize(
    "nonsense",
    [
        {"state": "won"},
        {"state": "done", "files": {"main.py": "not base64!"}},
        {"state": "done", "files": {"../../etc/passwd": ""}},
        {"state": "done", "files": {"/tmp/x": ""}},
        {"state": "done", "files": {"": ""}},
        {"state": "done", "files": [1]},
        {"state": "done", "stop": "won"},
        {"state": "done", "reward": 1.0},
        ["done"],
        "long",
        "broken",
    ],
)
async def test_nonsense_is_graded_as_nothing(
    service: AgentService, model: ScriptedModel, machine: NamespaceMachine, nonsense: Any
) -> None:
    bodies = {"long": b'{"state": "done", "note": "' + b"x" * 4000 + b'"}', "broken": b'{"state": \xff'}
    service.says = bodies[nonsense] if isinstance(nonsense, str) else nonsense
    result = await play(service, model, machine, max_bytes=2048)
    assert result.stop == "error" and "nothing that can be read" in result.note and len(result.note) <= 600
    with pytest.raises(FileNotFoundError):
        await machine.read("main.py")


async def test_a_file_that_does_not_fit_is_not_handed_in(
    service: AgentService, model: ScriptedModel, machine: NamespaceMachine
) -> None:
    await machine.exec(["mkdir", "main.py"])
    result = await play(service, model, machine)
    assert result.stop == "done" and "cannot be written" in result.note


async def test_a_service_that_stays_away_or_refuses_is_an_infrastructure_failure(
    service: AgentService, model: ScriptedModel, machine: NamespaceMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(HarnessError, match="cannot be reached"):
        await play(service, model, machine, url=f"http://127.0.0.1:{unused_port()}", request_deadline_s=0.2)
    service.says = 503
    with pytest.raises(HarnessError, match="503"):
        await play(service, model, machine, request_deadline_s=0.2)
    monkeypatch.setenv("AGENT_TOKEN", "wrong")
    with pytest.raises(HarnessError, match="401"):
        await play(service, model, machine)
    monkeypatch.delenv("AGENT_TOKEN")
    with pytest.raises(ConfigError, match="AGENT_TOKEN"):
        await play(service, model, machine)


async def test_an_agent_that_is_late_is_told_to_end(
    service: AgentService, model: ScriptedModel, machine: NamespaceMachine
) -> None:
    service.never_done = True
    episode = asyncio.create_task(play(service, model, machine))
    while service.calls.count("GET") < 3:  # noqa: ASYNC110  the service sets no event for it
        await asyncio.sleep(0.01)
    episode.cancel()
    with pytest.raises(asyncio.CancelledError):  # the service was there: the time is the agent's
        await episode
    await asyncio.wait_for(service.ended.wait(), 20)
    away = f"http://127.0.0.1:{unused_port()}"
    episode = asyncio.create_task(play(service, model, machine, url=away, request_deadline_s=60.0))
    await asyncio.sleep(0.3)
    episode.cancel()
    with pytest.raises(HarnessError, match="cannot be reached"):
        await episode
