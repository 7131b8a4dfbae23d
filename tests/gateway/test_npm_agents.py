"""OpenCode, Cline and pi, unmodified, against the gateway with a scripted engine: the wire and the record.

The native programs in their npm packages are run directly, so Node's version matters to pi only.
"""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from typing import Any

import pytest

from rollmill.types import Trajectory
from tests.gateway.conftest import Mill
from tests.gateway.npm import installed, run
from tests.gateway.test_agents import Stage

pytestmark = pytest.mark.slow
OPENCODE, CLINE, PI = "1.18.33", "3.0.65", "0.73.1"
MACHINE = {"x86_64": "x64", "aarch64": "arm64"}[platform.machine()]
QUIET = {"PATH": os.environ["PATH"], "NO_COLOR": "1", "CLINE_TELEMETRY": "0", "PI_OFFLINE": "1"}
QUIET |= {
    "OPENCODE_DISABLE_MODELS_FETCH": "1",
    "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
    "OPENCODE_DISABLE_AUTOUPDATE": "1",
}
Places = tuple[Path, Path]


@pytest.fixture
def places(tmp_path: Path) -> Places:
    """An agent's home and its work directory."""
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    work.mkdir()
    return home, work


def write(path: Path, tree: Any) -> None:
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(tree))


def check(stage: Stage, trajectory: Trajectory, *last: str) -> None:
    stage.check(trajectory, "start")
    assert [message["role"] for message in trajectory.messages[-len(last) :]] == list(last)


async def test_opencode_solves_a_task(mill: Mill, places: Places) -> None:
    home, work = places
    calls = [
        ("bash", {"command": command, "description": "Run"}) for command in ("echo 'x = 1' > a.py", "cat a.py", "ls")
    ]
    stage = Stage(mill, calls[:1], calls[1:], "Done.")
    door, key = await stage.open()
    options = {"baseURL": f"{door.url}/v1", "apiKey": key}
    provider = {"npm": "@ai-sdk/openai-compatible", "options": options, "models": {"rollmill": {"name": "rollmill"}}}
    config = {"provider": {"mill": provider}, "permission": "allow", "share": "disabled"}
    write(home / ".config" / "opencode" / "opencode.json", config)
    modules = await installed(f"opencode-{OPENCODE}", f"opencode-ai@{OPENCODE}")
    program = modules / f"opencode-linux-{MACHINE}" / "bin" / "opencode"
    # with a title it does not ask the model for one
    argv = ("run", "--model", "mill/rollmill", "--title", "x", "Write a.py.")
    assert "Done." in await run(program, *argv, env={**QUIET, "HOME": str(home)}, cwd=work)
    assert (work / "a.py").read_text() == "x = 1\n"
    check(stage, await door.seal("a"), "assistant", "tool", "tool", "assistant")


async def test_cline_solves_a_task(mill: Mill, places: Places) -> None:
    home, work = places
    look = [("run_commands", {"commands": ["cat a.py"]}), ("run_commands", {"commands": ["ls"]})]
    ended = [("submit_and_exit", {"summary": "The file is written.", "verified": True})]
    stage = Stage(mill, [("run_commands", {"commands": ["echo 'x = 1' > a.py"]})], look, ended)
    door, key = await stage.open()
    modules = await installed(f"cline-{CLINE}", f"cline@{CLINE}")
    program, env = modules / ".bin" / "cline", {**QUIET, "HOME": str(home)}
    model = ("--provider", "openai-compatible", "--modelid", "rollmill", "--apikey", key, "--baseurl", f"{door.url}/v1")
    await run(program, "auth", *model, env=env, cwd=work)
    assert "The file is written." in await run(program, "--yolo", "Write a.py.", env=env, cwd=work)
    assert (work / "a.py").read_text() == "x = 1\n"
    check(stage, await door.seal("a"), "assistant", "tool", "tool", "assistant")


@pytest.mark.parametrize("api", ["openai-completions", "openai-responses", "anthropic-messages"])
async def test_pi_solves_a_task(mill: Mill, places: Places, api: str) -> None:
    home, work = places
    look = [("read", {"path": "a.py"}), ("bash", {"command": "ls"})]
    stage = Stage(mill, [("bash", {"command": "echo 'x = 1' > a.py"})], look, "Done.")
    door, key = await stage.open()
    url = door.url if api == "anthropic-messages" else f"{door.url}/v1"
    provider = {"baseUrl": url, "api": api, "apiKey": "MILL_KEY", "models": [{"id": "rollmill"}]}
    write(home / ".pi" / "agent" / "models.json", {"providers": {"mill": provider}})
    modules = await installed(f"pi-{PI}", f"@mariozechner/pi-coding-agent@{PI}")
    argv = ("--provider", "mill", "--model", "rollmill", "-p", "Write a.py.")
    env = {**QUIET, "HOME": str(home), "MILL_KEY": key}
    assert "Done." in await run(modules / ".bin" / "pi", *argv, env=env, cwd=work)
    assert (work / "a.py").read_text() == "x = 1\n"
    check(stage, await door.seal("a"), "assistant", "tool", "tool", "assistant")
