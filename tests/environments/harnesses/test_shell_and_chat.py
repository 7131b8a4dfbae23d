"""The shell and chat harnesses against a real HTTP server that plays a scripted model, in real machines."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from rollmill.environments.harness import HarnessResult
from rollmill.environments.harnesses.chat import ChatConfig, ChatHarness
from rollmill.environments.harnesses.shell import ShellConfig, ShellHarness
from rollmill.environments.task import Task
from rollmill.machines.images.image import BUILT_IN
from rollmill.machines.namespace.client import NamespaceHost, NamespaceMachine
from rollmill.types import Sampling
from tests.environments.harnesses.test_coding import ScriptedModel, call

pytestmark = pytest.mark.asyncio(loop_scope="module")
DONE = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


@pytest_asyncio.fixture(loop_scope="module")
async def model() -> AsyncIterator[ScriptedModel]:
    model = ScriptedModel()
    server = model.server()
    await server.start_server()
    model.url = str(server.make_url("/v1"))
    yield model
    await server.close()


async def play(harness: Any, model: ScriptedModel, machine: NamespaceMachine, task: Task) -> HarnessResult:
    try:
        return await harness.run(task, machine, base_url=model.url, api_key="key", sampling=Sampling(seed=1))
    finally:
        await harness.close()


async def shell(
    model: ScriptedModel, machine: NamespaceMachine, *commands: str, **settings: Any
) -> tuple[HarnessResult, list[str]]:
    model.answers = [call("bash", command=command) for command in commands]
    result = await play(ShellHarness(ShellConfig(**settings)), model, machine, Task("t", "do it"))
    return result, model.results


async def test_a_shell_keeps_its_directory_and_variables(model: ScriptedModel, machine: NamespaceMachine) -> None:
    commands = [
        "mkdir -p a/b && cd a && export NAME='two words' X=$'line\\nline'",
        'cd b; pwd; echo "$NAME"',
        "echo text > file; exit 3",
        'pwd; cat file; echo "$X"; false',
        DONE,
    ]
    result, texts = await shell(model, machine, *commands)
    assert (result.stop, result.turns, result.tool_calls, result.bad_tool_calls) == ("done", 5, 5, 0)
    assert texts == [
        "exit code 0",
        "/work/a/b\ntwo words\nexit code 0",
        "exit code 3",
        "/work/a/b\ntext\nline\nline\nexit code 1",
    ]
    assert model.requests[0]["messages"][0]["role"] == "system"
    assert [tool["function"]["name"] for tool in model.requests[0]["tools"]] == ["bash"]


async def test_limits_and_faults_are_answered(model: ScriptedModel, machine: NamespaceMachine) -> None:
    commands = [
        "cd /tmp; while true; do :; done",
        "pwd",
        "yes | head -c 1000000",
        "rm -f /tmp/.shell_*; cd /; if",
        "mkdir gone; cd gone; rmdir /work/gone",
        "echo still here",
        "echo \0",
        "x" * 200_000,
        DONE,
    ]
    result, texts = await shell(model, machine, *commands, tool_timeout_s=2.0, max_tool_output=200)
    assert (result.stop, result.bad_tool_calls) == ("done", 2)
    assert texts[0] == "stopped: time limit" and texts[1] == "/work\nexit code 0"
    assert "characters cut]" in texts[2] and texts[2].endswith("exit code 0") and len(texts[2]) < 260
    assert "syntax error" in texts[3]
    assert texts[5].endswith("still here\nexit code 0")
    assert texts[6:] == ["error wrong arguments"] * 2


async def test_a_shell_has_longer_in_a_slow_machine(
    model: ScriptedModel, host: NamespaceHost, slow_commands: list[dict[str, Any]]
) -> None:
    machine = await host.create(BUILT_IN)
    assert (await shell(model, machine, "true", DONE, tool_timeout_s=2.5))[1] == ["exit code 0"]
    assert [command["timeout_s"] for command in slow_commands] == [50.0, 50.0]
    await machine.close()


async def test_a_shell_ends_with_an_answer_or_its_turns(model: ScriptedModel, machine: NamespaceMachine) -> None:
    result, texts = await shell(model, machine, "true", f"echo first; {DONE}", max_turns=2)
    assert (result.stop, result.turns) == ("max_turns", 2) and texts == ["exit code 0"]
    model.answers = [call("read", path="x"), {"finish_reason": "stop", "message": {"content": "no"}}]
    result = await play(ShellHarness(), model, machine, Task("t", "do it"))
    assert (result.stop, result.bad_tool_calls) == ("answer", 1) and model.results == ["error no such tool"]


BLOCKS = "Here:\n\n```python\nx = 1\n```\n\nor\n\n```\ny = 2\n```\n"


@pytest.mark.parametrize(
    ("answer", "submission", "files"),
    [
        (BLOCKS, ("main.py",), {"main.py": b"x = 1\n", "answer.txt": BLOCKS.encode()}),
        ("x = 1", ("main.py",), {"main.py": b"x = 1"}),
        ("42", ("answer.txt",), {"answer.txt": b"42"}),
        ("half \ud800", (), {"answer.txt": b"half ?"}),
        (None, ("answer.txt",), {"answer.txt": b""}),
        (["odd"], ("answer.txt",), {"answer.txt": b""}),
        ("```python\ncut off", ("main.py",), {"main.py": b"```python\ncut off"}),
    ],
)
async def test_an_answer_is_handed_in_as_a_file(
    model: ScriptedModel, machine: NamespaceMachine, answer: Any, submission: tuple[str, ...], files: dict[str, bytes]
) -> None:
    model.answers = [{"finish_reason": "stop", "message": {"role": "assistant", "content": answer}}]
    task = Task("t", "what is it", submission=submission)
    result = await play(ChatHarness(ChatConfig(system_prompt="be short")), model, machine, task)
    assert result == HarnessResult("answer", 1, 0)
    assert {path: await machine.read(path) for path in files} == files
    request = model.requests[-1]
    assert [message["content"] for message in request["messages"]] == ["be short", "what is it"]
    assert "tools" not in request


async def test_an_answer_that_is_cut_short_or_does_not_fit(model: ScriptedModel, machine: NamespaceMachine) -> None:
    message = {"role": "assistant", "content": "x" * (17 << 20)}
    model.answers = [{"finish_reason": "length", "message": message}]
    result = await play(ChatHarness(), model, machine, Task("t", "?"))
    assert result == HarnessResult("length", 1, 0)
