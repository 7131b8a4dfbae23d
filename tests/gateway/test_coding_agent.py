"""A coding agent from the npm registry, unmodified: it works against the gateway, and its tokens are recorded exactly.

Qwen Code is one package of plain JavaScript without dependencies, so it runs on Arm and x86-64. It needs Node 20 or
newer. Telemetry, usage statistics and updates are off by its settings.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.gateway.conftest import Mill
from tests.gateway.npm import installed, node, run
from tests.gateway.test_agents import Stage

pytestmark = pytest.mark.slow
VERSION = "0.15.10"  # the last one for Node 20
NODE = 20  # the oldest that this version runs on, as its package says
PACKAGE = "@qwen-code/qwen-code"
SETTINGS = {
    "telemetry": {"enabled": False},
    "privacy": {"usageStatisticsEnabled": False},
    "general": {"enableAutoUpdate": False},
}


@pytest.fixture
async def qwen(record_property: Callable[[str, object], None]) -> Path:
    """The agent's program. It is installed once; the install runs no script of any package. The report says which Node
    runs it."""
    version = await node()
    record_property("node", version)
    assert version[0] >= NODE, f"Qwen Code {VERSION} needs Node {NODE} or newer, this is {version}"
    modules = await installed(f"qwen-code-{VERSION}", f"{PACKAGE}@{VERSION}", optional=False)
    assert json.loads((modules / PACKAGE / "package.json").read_text())["engines"]["node"] == f">={NODE}.0.0"
    return modules / ".bin" / "qwen"


@pytest.mark.parametrize("dialect", ["openai", "anthropic"])
async def test_qwen_code_solves_a_task(mill: Mill, tmp_path: Path, qwen: Path, dialect: str) -> None:
    home, work = tmp_path / "home", tmp_path / "work"
    (home / ".qwen").mkdir(parents=True)
    work.mkdir()
    (home / ".qwen" / "settings.json").write_text(json.dumps(SETTINGS))
    file = str(work / "a.py")
    stage = Stage(
        mill,
        [("write_file", {"file_path": file, "content": "x = 1\n"})],
        [("read_file", {"file_path": file}), ("run_shell_command", {"command": "ls", "is_background": False})],
        "Done.",
    )
    door, key = await stage.open()
    model = {
        "OPENAI_BASE_URL": f"{door.url}/v1",
        "OPENAI_API_KEY": key,
        "ANTHROPIC_BASE_URL": door.url,
        "ANTHROPIC_API_KEY": key,
    }
    env = {"PATH": os.environ["PATH"], "HOME": str(home), "NO_COLOR": "1", **model}
    options = ("--auth-type", dialect, "--model", "rollmill", "--yolo")
    output = await run(qwen, *options, "--prompt", "Write a.py.", env=env, cwd=work)
    assert "Done." in output
    assert (work / "a.py").read_text() == "x = 1\n"
    trajectory = await door.seal("a")
    stage.check(trajectory, "start")
    assert [message["role"] for message in trajectory.messages[-4:]] == ["assistant", "tool", "tool", "assistant"]
