"""Agents made with the frameworks of PyPI, unmodified, against the gateway with a scripted engine: wire and record.

They live in environments of their own, build/frameworks-…, with the versions of frameworks.txt and frameworks_more.txt:
no single one can hold them all.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.conftest import Mill
from tests.gateway.npm import CACHE, run
from tests.gateway.test_agents import Stage

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent
QUIET = {"NO_COLOR": "1", "OPENAI_AGENTS_DISABLE_TRACING": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
FRAMEWORKS = (
    "langchain_openai",
    "langchain_responses",
    "langchain_anthropic",
    "openai_agents",
    "pydantic_ai",
)
MORE = (
    "pydantic_ai_anthropic",
    "llama_index",
    "inspect_ai",
)


@pytest.fixture
async def python() -> Path:
    return await interpreter("frameworks.txt")


async def interpreter(packages: str, python: str = sys.executable) -> Path:
    """The interpreter of an environment, made with `python`. The packages are installed once."""
    wanted = HERE / packages
    version = await asyncio.to_thread(subprocess.check_output, [python, "-c", "import sys; print(sys.version, end='')"])
    mark = hashlib.blake2b(wanted.read_bytes() + version, digest_size=6).hexdigest()
    place = CACHE.parent / f"frameworks-{mark}"
    CACHE.parent.mkdir(parents=True, exist_ok=True)
    with place.with_suffix(".lock").open("w") as lock:  # tests run side by side
        await asyncio.to_thread(fcntl.flock, lock, fcntl.LOCK_EX)
        if not (place / "complete").exists():
            shutil.rmtree(place, ignore_errors=True)
            await run(python, "-m", "venv", place)
            options = ("-q", "--no-deps", "--no-input", "--disable-pip-version-check")
            await run(place / "bin" / "python", "-m", "pip", "install", *options, "-r", wanted)
            (place / "complete").touch()
    return place / "bin" / "python"


def environment(home: Path) -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "HOME": str(home), **QUIET}


@pytest.mark.parametrize("framework", [*FRAMEWORKS, *MORE])
async def test_a_framework_calls_its_tools(mill: Mill, tmp_path: Path, framework: str) -> None:
    python = await interpreter("frameworks_more.txt" if framework in MORE else "frameworks.txt")
    two: list[tuple[str, dict[str, Any]]] = [("bash", {"command": "cat a"}), ("bash", {"command": "pwd"})]
    stage = Stage(mill, [("bash", {"command": "ls"})], two, "Done.")
    door, key = await stage.open()
    program = HERE / "frameworks.py"
    output = await run(python, program, framework, door.url, key, env=environment(tmp_path), cwd=tmp_path)
    assert output.split() == ["Done."]
    trajectory = await door.seal("a")
    stage.check(trajectory, "start")
    assert [message["role"] for message in trajectory.messages[-4:]] == ["assistant", "tool", "tool", "assistant"]


async def test_instructor(mill: Mill, tmp_path: Path) -> None:
    """It forces a call, and asks again with the error if the arguments do not fit."""
    wrong, right = ("Looked", {"files": 1}), ("Looked", {"files": ["a.py"]})
    stage = Stage(mill, [wrong], [right])
    door, key = await stage.open()
    python = await interpreter("frameworks_more.txt")
    program = HERE / "frameworks.py"
    output = await run(python, program, "instructor", door.url, key, env=environment(tmp_path), cwd=tmp_path)
    assert output.split() == ["a.py"]
    stage.check(await door.seal("a"), "start")


async def test_smolagents(mill: Mill, tmp_path: Path, python: Path) -> None:
    """It answers by a tool, and writes the history anew: calls and results become texts."""
    stage = Stage(mill, [("bash", {"command": "ls"})], [("final_answer", {"answer": "Done."})])
    door, key = await stage.open()
    program = HERE / "frameworks.py"
    output = await run(python, program, "smolagents", door.url, key, env=environment(tmp_path), cwd=tmp_path)
    assert output.split() == ["Done."]
    stage.check(await door.seal("a"), "start", "edit")


async def test_a_client_generated_from_the_openapi_document_sends_everything(
    mill: Mill, tmp_path: Path, python: Path
) -> None:
    stage = Stage(mill, [("tool_4", {"value": "x"})], "Done.")
    door, key = await stage.open()
    async with door.http.get(f"{door.url}/openapi.json") as response:
        (tmp_path / "openapi.json").write_text(json.dumps(await response.json()))
    client = tmp_path / "rollmill_client"
    options = ("--path", tmp_path / "openapi.json", "--output-path", client, "--meta", "none")
    await run(python.with_name("openapi-python-client"), "generate", *options, env=environment(tmp_path))
    env = {**environment(tmp_path), "PYTHONPATH": str(tmp_path)}
    output = await run(python, HERE / "generated_client.py", door.url, key, env=env)
    assert output.split() == ["Done."]
    trajectory = await door.seal("a")
    stage.check(trajectory, "start")
    assert [message["role"] for message in trajectory.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert len(trajectory.provenance["tools"]) == 5
