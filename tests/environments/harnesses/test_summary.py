"""Summaries in the harnesses, against a real HTTP server that plays a scripted model, in real machines."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web

from rollmill.demo.coding import CodingConfig, CodingHarness
from rollmill.environments.harness import HarnessResult
from rollmill.environments.harnesses.chat import ChatConfig, ChatHarness
from rollmill.environments.harnesses.shell import ShellConfig, ShellHarness
from rollmill.environments.harnesses.summary import SummaryConfig, derived_threshold, resumed
from rollmill.environments.task import Task
from rollmill.machines.namespace.client import NamespaceMachine
from rollmill.types import Sampling
from tests.environments.harnesses.test_coding import ScriptedModel, call

pytestmark = pytest.mark.asyncio(loop_scope="module")
OVERFLOW = {"error": {"code": "context_length_exceeded", "message": "too long"}}
SHORT = SummaryConfig(request="sum up", resume=" [{number}] {summary}")


class CountingModel(ScriptedModel):
    """Tells the tokens of its answers, and its window at /models."""

    def __init__(self) -> None:
        super().__init__()
        self.window: Any = 100
        self.causes: list[str | None] = []

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.causes.append(request.headers.get("x-rollmill-cause"))
        self.requests.append(await request.json())
        answer: Any = self.answers.pop(0)
        return web.json_response(answer, status=400 if "error" in answer else 200)

    async def models(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"data": [{"id": "other"}, {"id": "rollmill", "max_model_len": self.window}]})

    def server(self) -> Any:
        server = super().server()
        server.app.router.add_get("/v1/models", self.models)
        return server

    @property
    def asked(self) -> list[str]:
        """The last message of every request."""
        return [request["messages"][-1]["content"] for request in self.requests]


@pytest_asyncio.fixture(loop_scope="module")
async def model() -> AsyncIterator[CountingModel]:
    model = CountingModel()
    server = model.server()
    await server.start_server()
    model.url = str(server.make_url("/v1"))
    yield model
    await server.close()


def says(choice: dict[str, Any], total: int, completion: int = 1) -> dict[str, Any]:
    return {"choices": [choice], "usage": {"total_tokens": total, "completion_tokens": completion}}


def text(content: Any, finish: str = "stop") -> dict[str, Any]:
    return {"finish_reason": finish, "message": {"role": "assistant", "content": content}}


async def play(harness: Any, model: CountingModel, machine: NamespaceMachine, instruction: Any = "do it") -> Any:
    try:
        sampling = Sampling(seed=1, max_tokens=10)
        return await harness.run(Task("t", instruction), machine, base_url=model.url, api_key="key", sampling=sampling)
    finally:
        await harness.close()


async def test_a_shell_goes_on_from_its_summaries(model: CountingModel, machine: NamespaceMachine) -> None:
    model.answers = [
        says(call("bash", command="echo one"), 64),  # 15 characters of result count as 5 tokens
        says(call("bash", command="export X=two"), 67),
        says(text("first half"), 90),
        says(call("bash", command="echo $X"), 81),
        says(text(None), 95),
        says(call("bash", command="echo three"), 20),
        says(text("all done"), 30),
    ]
    result = await play(
        ShellHarness(ShellConfig(system_prompt="be calm", max_tool_output=30, summaries=SHORT)), model, machine
    )
    assert result == HarnessResult("answer", 7, 4)
    assert model.asked == [
        "do it",
        "one\nexit code 0",
        "sum up",
        "do it [1] first half",
        "sum up",
        "do it [2] ",
        "three\nexit code 0",
    ]
    assert model.causes == [None, None, None, "summary", None, "summary", None]
    assert [len(request["messages"]) for request in model.requests] == [2, 4, 7, 2, 5, 2, 4]
    assert model.requests[4]["messages"][3]["content"] == "two\nexit code 0", "the machine knows nothing of contexts"
    assert len({request["seed"] for request in model.requests}) == 7
    assert all(request["tools"] for request in model.requests), "the summary extends the context it is about"


async def test_a_result_that_fills_the_window_is_cut(model: CountingModel, machine: NamespaceMachine) -> None:
    await machine.write("long.txt", b"x" * 1500)
    model.answers = [
        says(call("read", path="long.txt"), 20),
        OVERFLOW,
        says(text("it is long"), 90),
        says(call("done"), 20),
    ]
    assert (await play(CodingHarness(CodingConfig(summaries=SHORT)), model, machine)).stop == "done"
    assert [len(request["messages"]) for request in model.requests] == [1, 4, 4, 1]
    assert model.asked[1:] == ["sum up", "sum up", "do it [1] it is long"]
    harness = CodingHarness(CodingConfig(summaries=SHORT.model_copy(update={"at": 1000})))  # more than there is
    model.requests.clear()
    model.answers = [
        says(call("read", path="long.txt"), 20),
        OVERFLOW,
        says(text("read long.txt"), 90),
        says(call("read", path="long.txt"), 20),
        says(text("half an answer", "length"), 100, completion=3),
        says(text("read it twice"), 90),
        says(call("done"), 20),
    ]
    result = await play(harness, model, machine)
    assert (result.stop, result.turns) == ("done", 7)
    assert [each["messages"][-1]["content"] for each in model.requests[2::3]] == ["sum up", "sum up"]
    for request in model.requests[2::3]:
        result_text = request["messages"][-2]["content"]
        assert request["messages"][-2]["role"] == "tool" and len(result_text) < 150 and "cut]" in result_text
    assert model.asked[-1] == "do it [2] read it twice"


@pytest.mark.parametrize(
    "answers",
    [
        [OVERFLOW],  # the task itself does not fit
        [says(text("endless", "length"), 50, completion=10)],  # the answer is too long, not the context
        [says(call("list"), 90), OVERFLOW],  # not even the request for a summary fits
        [says(call("list"), 20), OVERFLOW],  # and there is nothing to cut
    ],
)
async def test_what_summaries_cannot_help(model: CountingModel, machine: NamespaceMachine, answers: list[Any]) -> None:
    model.answers = list(answers)
    assert (
        await play(CodingHarness(CodingConfig(max_tool_output=2000, summaries=SHORT)), model, machine)
    ).stop == "length"
    assert model.answers == []


@pytest.mark.parametrize("window", [None, "100", 100])
async def test_the_threshold_follows_the_window(model: CountingModel, machine: NamespaceMachine, window: Any) -> None:
    """A server that does not tell its window: then only a full context is summarised, or what `at` says."""
    model.window = window
    model.answers = [says(call("list"), 90), says(text("end"), 95), says(call("done"), 20)]
    result = await play(CodingHarness(CodingConfig(max_tool_output=2000, summaries=SHORT)), model, machine)
    assert model.asked[1] == ("sum up" if window == 100 else "no files"), result
    model.answers = [says(call("list"), 90), says(text("end"), 95), says(call("done"), 20)]
    harness = CodingHarness(CodingConfig(summaries=SHORT.model_copy(update={"at": 90})))
    assert (await play(harness, model, machine)).stop == "done" and model.asked[-1] == "do it [1] end"
    assert [derived_threshold(*each) for each in ((8192, 1024, 3000), (100, 40, 60), (None, 1, 1))] == [5144, 25, None]


async def test_most_summaries_and_turns_bound_an_episode(model: CountingModel, machine: NamespaceMachine) -> None:
    settings = SHORT.model_copy(update={"at": 1, "most": 1})
    model.answers = [says(call("list"), 50), says(text("a"), 60), says(call("list"), 50), says(call("done"), 60)]
    result = await play(CodingHarness(CodingConfig(summaries=settings)), model, machine)
    assert (result.stop, result.turns) == ("done", 4) and model.asked[-1] == "no files"
    model.answers = [says(call("list"), 50), says(text("a"), 60), says(call("list"), 50)]
    harness = CodingHarness(CodingConfig(summaries=SHORT.model_copy(update={"at": 1}), max_turns=3))
    assert (await play(harness, model, machine)).stop == "max_turns"


async def test_a_chat_answer_that_is_cut_goes_on(model: CountingModel, machine: NamespaceMachine) -> None:
    cut = text("first I think of", "length")
    model.answers = [says(cut, 40, 10), says(text("thought"), 50), says(text("42"), 30)]
    result = await play(ChatHarness(ChatConfig(summaries=SHORT)), model, machine)
    assert result == HarnessResult("answer", 3, 0) and await machine.read("answer.txt") == b"42"
    assert model.asked == ["do it", "sum up", "do it [1] thought"] and model.causes == [None, None, "summary"]
    assert model.requests[1]["messages"][1] == cut["message"]
    settings = SHORT.model_copy(update={"most": 1})
    model.answers = [says(cut, 40, 10), says(text("thought"), 50), says(cut, 40, 10)]
    assert await play(ChatHarness(ChatConfig(summaries=settings)), model, machine) == HarnessResult("length", 3, 0)


async def test_a_summary_joins_the_last_user_message() -> None:
    user, agent = {"role": "user", "content": "do it"}, {"role": "assistant", "content": "yes"}
    assert resumed([agent, user], " {number}: {summary}", "{number}", 3)[1]["content"] == "do it 3: {number}"
    assert resumed([user, agent], "\n\n{summary}", "so far", 1)[2] == {"role": "user", "content": "so far"}
    parts = {"role": "user", "content": [{"type": "text", "text": "do it"}]}
    assert resumed([parts], "{summary}", "so far", 1) == [parts, {"role": "user", "content": "so far"}]
