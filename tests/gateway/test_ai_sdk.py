"""Vercel's AI SDK, unmodified, against the gateway with a scripted engine: the wire and the record.

Its OpenAI provider speaks the responses format, and refers to stored items.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gateway.conftest import Mill
from tests.gateway.npm import installed, run
from tests.gateway.test_agents import Stage

pytestmark = pytest.mark.slow
VERSION = "7.0.173"
PACKAGES = (f"ai@{VERSION}", "@ai-sdk/openai@4.0.118", "@ai-sdk/anthropic@4.0.104", "zod@4.6.7")
PROGRAM = Path(__file__).with_name("ai_sdk.mjs")


@pytest.mark.parametrize("how", ["whole", "stream"])
@pytest.mark.parametrize("provider", ["responses", "chat", "anthropic"])
async def test_the_ai_sdk_takes_several_steps(mill: Mill, tmp_path: Path, provider: str, how: str) -> None:
    modules = await installed(f"ai-sdk-{VERSION}", *PACKAGES)
    (tmp_path / "node_modules").symlink_to(modules)
    (tmp_path / PROGRAM.name).write_bytes(PROGRAM.read_bytes())  # imports are looked for beside the file
    calls = [("bash", {"command": "ls"})], [("bash", {"command": "cat a"}), ("bash", {"command": "pwd"})]
    stage = Stage(mill, *calls, "Done.", "More.")
    door, key = await stage.open()
    output = await run("node", tmp_path / PROGRAM.name, provider, f"{door.url}/v1", key, how)
    assert output.split() == ["Done.", "More."]
    trajectory = await door.seal("a")
    stage.check(trajectory, "start")
    roles = [message["role"] for message in trajectory.messages[-6:]]
    assert roles == ["assistant", "tool", "tool", "assistant", "user", "assistant"]
