"""Claude Code, unmodified, against the gateway with a scripted engine: the wire and the record. Its tools are its own.

The native program of the npm package is run directly, so Node's version does not matter.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import pytest

from rollmill.training.rl.credit import credit_of
from tests.gateway.conftest import QUICK, Door, Mill
from tests.gateway.npm import installed, run
from tests.gateway.serve import LIVE
from tests.gateway.test_agents import PNG, Stage

pytestmark = pytest.mark.slow
VERSION = "2.1.327"
SUMMARY = """<analysis>
The user wants to look around in the directory.
</analysis>
<summary>
1. Primary request: the user asked to look around, and nothing was found.
2. Pending: nothing more to be done here.
</summary>"""


class Claude:
    def __init__(self, program: Path, home: Path, work: Path) -> None:
        self.program, self.home, self.work = program, home, work

    async def __call__(self, door: Door, key: str, *argv: str, model: str | None = "rollmill") -> str:
        env = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.home),
            "ANTHROPIC_BASE_URL": door.url,
            "ANTHROPIC_API_KEY": key,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_AUTOUPDATER": "1",
            "IS_SANDBOX": "1",  # it refuses to run everything as root otherwise
        }
        options = ["--dangerously-skip-permissions", *(["--model", model] if model else [])]
        return await run(self.program, "-p", *argv, *options, env=env, cwd=self.work)


@pytest.fixture
async def claude(tmp_path: Path) -> Claude:
    modules = await installed(f"claude-code-{VERSION}", f"@anthropic-ai/claude-code@{VERSION}")
    machine = {"x86_64": "x64", "aarch64": "arm64"}[platform.machine()]
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    work.mkdir()
    return Claude(modules / "@anthropic-ai" / f"claude-code-linux-{machine}" / "claude", home, work)


def bash(command: str) -> tuple[str, dict[str, Any]]:
    return "Bash", {"command": command, "description": "Run"}


async def test_claude_code_solves_a_task(mill: Mill, claude: Claude) -> None:
    file = claude.work / "a.py"
    write, read = ("Write", {"file_path": str(file), "content": "x = 1\n"}), ("Read", {"file_path": str(file)})
    stage = Stage(mill, [write], [read, bash("ls")], "Done.")
    door, key = await stage.open()
    assert "Done." in await claude(door, key, "Write a.py.")
    assert file.read_text() == "x = 1\n"
    trajectory = await door.seal("a")
    stage.check(trajectory, "start")
    assert [message["role"] for message in trajectory.messages[-4:]] == ["assistant", "tool", "tool", "assistant"]
    assert "x-anthropic-billing-header" not in str(trajectory.messages)


async def test_its_compaction_is_a_summary_and_earns_credit(mill: Mill, claude: Claude) -> None:
    stage = Stage(mill, [bash("ls")], "I see nothing here at all.", SUMMARY, "Done.")
    door, key = await stage.open()
    await claude(door, key, "Look.")
    await claude(door, key, "/compact", "--continue")
    await claude(door, key, "Go on.", "--continue")
    trajectory = await door.seal("a")
    # it asks for the summary without its last answer, which it keeps as it is
    stage.check(trajectory, "start", "edit", "summary")
    compacted, after = trajectory.segments[1:]
    assert after.parent is not None and after.parent[0] == compacted.id
    weights = credit_of(trajectory.segments, "path")
    assert all(weights[1][compacted.sampled] == 1.0), "the summary led to the outcome"


async def test_an_image_in_a_result_does_not_end_the_conversation(mill: Mill, claude: Claude) -> None:
    (claude.work / "a.png").write_bytes(PNG)
    stage = Stage(mill, [("Read", {"file_path": str(claude.work / "a.png")})], "I cannot see it.")
    door, key = await stage.open()
    assert "I cannot see it." in await claude(door, key, "Look at a.png.")
    trajectory = await door.seal("a")
    stage.check(trajectory, "start")
    assert "[Image removed" in trajectory.messages[-2]["content"]


async def test_a_deferred_tool_is_defined_where_it_is_found(mill: Mill, claude: Claude) -> None:
    found, search = ("ToolSearch", {"query": "select:WebSearch"}), ("WebSearch", {"query": "rollmill"})
    stage = Stage(mill, [found], [search], "Nothing found.")
    door, key = await stage.open()
    assert "Nothing found." in await claude(door, key, "Search the web.")
    trajectory = await door.seal("a")
    stage.check(trajectory, "start")
    results = [message["content"] for message in trajectory.messages if message["role"] == "tool"]
    assert '"name": "WebSearch"' in results[0] and '"query"' in results[0]
    assert "web_search is not supported" in results[1], "a search that nobody runs is no answer"


async def test_a_sub_agent_without_a_name_belongs_to_the_conversation(mill: Mill, claude: Claude) -> None:
    task = {"description": "look", "prompt": "Look.", "subagent_type": "general-purpose", "run_in_background": False}
    stage = Stage(mill, [("Agent", task)], [bash("ls")], "There is no file.", "Done.")
    door, key = await stage.open()
    assert "Done." in await claude(door, key, "Ask somebody to look around.")
    trajectory = await door.seal("a")
    stage.check(trajectory, "start", "sub_agent")
    assert trajectory.segments[1].parent is not None


async def test_its_default_model_is_served_by_an_alias_and_its_conversations_name_themselves(
    mill: Mill, claude: Claude
) -> None:
    stage = Stage(mill, "Yes.", "Yes.", "More.")
    config = QUICK.model_copy(update={"aliases": {"claude-*": "rollmill"}})
    door = await mill.gateway(await mill.engine(stage.engine), config=config)
    for _ in range(2):
        await claude(door, LIVE, "Say yes.", model=None)
    await claude(door, LIVE, "Say more.", "--continue", model=None)
    assert await door.sessions() == 2
    assert "ambiguous_histories_total 0" in await door.metrics()
