"""Codex, unmodified, against the gateway with a scripted engine: the wire and the record. It runs its tools itself."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.conftest import Door, Mill
from tests.gateway.npm import installed, run
from tests.gateway.serve import LIVE
from tests.gateway.test_agents import PNG, Stage

pytestmark = pytest.mark.slow
VERSION = "0.169.0"
CONFIG = """
model = "{model}"
model_provider = "mill"
[model_providers.mill]
name = "mill"
base_url = "{url}/v1"
env_key = "MILL_KEY"
wire_api = "responses"
"""


class Codex:
    def __init__(self, program: Path, home: Path, work: Path) -> None:
        self.program, self.home, self.work = program, home, work

    async def __call__(self, door: Door, key: str, *argv: str, model: str = "rollmill") -> str:
        (self.home / ".codex").mkdir(parents=True, exist_ok=True)
        (self.home / ".codex" / "config.toml").write_text(CONFIG.format(url=door.url, model=model))
        self.work.mkdir(exist_ok=True)
        env = {"PATH": os.environ["PATH"], "HOME": str(self.home), "MILL_KEY": key}
        options = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
        return await run(self.program, "exec", *options, *argv, env=env, cwd=self.work)


@pytest.fixture
async def codex(tmp_path: Path) -> Codex:
    modules = await installed(f"codex-{VERSION}", f"@openai/codex@{VERSION}")
    return Codex(modules / ".bin" / "codex", tmp_path / "home", tmp_path / "work")


def call(command: str) -> tuple[str, dict[str, Any]]:
    return "exec_command", {"cmd": command}


async def test_codex_solves_a_task(mill: Mill, codex: Codex) -> None:
    stage = Stage(mill, [call("echo 'x = 1' > a.py")], [call("cat a.py"), call("ls")], "Done.")
    door, key = await stage.open()
    assert "Done." in await codex(door, key, "Write a.py.")
    assert (codex.work / "a.py").read_text() == "x = 1\n"
    trajectory = await door.seal("a")
    stage.check(trajectory, "start")
    assert [message["role"] for message in trajectory.messages[-4:]] == ["assistant", "tool", "tool", "assistant"]
    names = [tool["function"]["name"] for tool in trajectory.provenance["tools"]]
    assert "multi_agent_v1__spawn_agent" in names, "tools in a namespace are served"
    metrics = await door.metrics()
    assert 'dropped_tools_total{dialect="openai_responses",tool="web_search"} 3' in metrics
    assert 'ignored_fields_total{dialect="openai_responses",field="client_metadata"} 3' in metrics


async def test_an_image_in_a_result_does_not_end_the_conversation(mill: Mill, codex: Codex) -> None:
    codex.work.mkdir()
    (codex.work / "a.png").write_bytes(PNG)
    stage = Stage(mill, [("view_image", {"path": str(codex.work / "a.png")})], "I cannot see it.")
    door, key = await stage.open()
    assert "I cannot see it." in await codex(door, key, "Look at a.png.")
    trajectory = await door.seal("a")
    stage.check(trajectory, "start")
    assert trajectory.messages[-2]["content"].startswith("<image content omitted")


async def test_a_sub_agent_of_codex_belongs_to_the_conversation_that_called_it(mill: Mill, codex: Codex) -> None:
    task = "Look around in this directory and name every file that you find in it."
    stage = Stage(mill, [("multi_agent_v1__spawn_agent", {"message": task})], "There is no file.", "Done.")
    door, key = await stage.open()
    await codex(door, key, "Ask somebody to look around.")
    trajectory = await door.seal("a")
    assert [segment.cause for segment in trajectory.segments] == ["start", "sub_agent"]


async def test_conversations_of_codex_with_one_opening_stay_apart(mill: Mill, codex: Codex) -> None:
    """Each names itself. Its next turn continues it, although another one has the same history."""
    stage = Stage(mill, "Yes.", "Yes.", "More.", "More.")
    door, _ = await stage.open()
    for _ in range(2):
        await codex(door, LIVE, "Say yes.")
    await codex(door, LIVE, "resume", "--last", "Say more.")
    assert await door.sessions() == 3, "that of the stage, and two of Codex"
    assert "ambiguous_histories_total 0" in await door.metrics()
