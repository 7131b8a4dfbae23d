"""A coding agent from the npm registry, unmodified: it works against the gateway, and its tokens are recorded exactly.

Qwen Code is one package of plain JavaScript without dependencies, so it runs on Arm and x86-64. It needs Node 20 or
newer. Telemetry, usage statistics and updates are off by its settings.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.gateway.conftest import Mill
from tests.gateway.test_agents import Stage

pytestmark = pytest.mark.slow
VERSION = "0.15.10"  # the last one for Node 20
NODE = 20  # the oldest that this version runs on, as its package says
PACKAGE = "@qwen-code/qwen-code"
CACHE = Path(__file__).parents[2] / "build" / "npm" / f"qwen-code-{VERSION}"
SETTINGS = {
    "telemetry": {"enabled": False},
    "privacy": {"usageStatisticsEnabled": False},
    "general": {"enableAutoUpdate": False},
}


async def run(*argv: str | Path, env: dict[str, str] | None = None, cwd: Path | None = None) -> str:
    pipe = asyncio.subprocess.PIPE
    nothing = asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(*argv, env=env, cwd=cwd, stdin=nothing, stdout=pipe, stderr=pipe)
    output, errors = await process.communicate()
    assert process.returncode == 0, (output + errors).decode(errors="replace")[-2000:]
    return output.decode()


@pytest.fixture
async def qwen(record_property: Callable[[str, object], None]) -> Path:
    """The agent's program. It is installed once; the install runs no script of any package. The report says which Node
    runs it."""
    version = (await run("node", "--version")).strip()
    print(f"Node {version}")
    record_property("node", version)
    assert int(version[1:].split(".")[0]) >= NODE, f"Qwen Code {VERSION} needs Node {NODE} or newer, this is {version}"
    if not CACHE.exists():
        CACHE.parent.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(dir=CACHE.parent))
        options = ("--ignore-scripts", "--omit=optional", "--no-audit", "--no-fund", "--loglevel=error")
        await run("npm", "install", "--prefix", fresh, *options, f"{PACKAGE}@{VERSION}")
        try:
            fresh.rename(CACHE)
        except OSError:  # another test process was faster
            shutil.rmtree(fresh)
    package = json.loads((CACHE / "node_modules" / PACKAGE / "package.json").read_text())
    assert (package["version"], package["engines"]["node"]) == (VERSION, f">={NODE}.0.0")
    return CACHE / "node_modules" / ".bin" / "qwen"


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
