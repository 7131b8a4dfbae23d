"""Runs one of Harbor's agents for one episode (`harbor` 0.24 or newer, Python 3.12). Run by program.py.

The order is {"agent": NAME or module:Class, "options", "place": an empty directory}. The requests:

    {"check": true}                              is the agent there?
    {"instruction", "base_url", "api_key"}       play; the answer is {"raised": what the agent raised, or none}

What it asks Rollmill for, about the machine:

    {"exec": COMMAND, "cwd", "env", "timeout_s"}     {"stdout", "stderr", "exit_code"}
    {"write": PATH, "data": BASE64, "executable"}
    {"read": PATH}   {"pack": DIRECTORY}             base64 of the file; of a tar
"""

from __future__ import annotations

import base64
import contextlib
import io
import os
import shlex
import tarfile
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

_LARGEST = 16 << 20  # bytes of a file


@contextlib.asynccontextmanager
async def opened(order: dict[str, Any]) -> AsyncIterator[Callable[[dict[str, Any]], Awaitable[Any]]]:
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it is downloaded
    from harbor.agents.factory import AgentFactory
    from harbor.models.trial.config import AgentConfig

    config = AgentConfig(name=order["agent"], model_name="openai/rollmill", kwargs=order["options"])

    async def answer(request: dict[str, Any]) -> Any:
        if "check" in request:
            return AgentFactory.get_agent_class_from_config(config).__name__
        url, key = request["base_url"], request["api_key"]
        os.environ |= {"OPENAI_BASE_URL": url, "OPENAI_API_BASE": url, "OPENAI_API_KEY": key}
        return await play(config, Path(order["place"]), request)

    yield answer


async def play(config: Any, place: Path, request: dict[str, Any]) -> dict[str, Any]:
    """What `setup` raises is not the model's doing, and so passes."""
    from harbor.agents.factory import AgentFactory
    from harbor.models.agent.context import AgentContext

    environment = make_environment(place, request["call"])
    logs = environment.trial_paths.agent_dir
    logs.mkdir(parents=True)
    agent = AgentFactory.create_agent_from_config(config, logs_dir=logs)
    await agent.setup(environment)
    try:
        await agent.run(request["instruction"], environment, AgentContext())
    except Exception as error:
        return {"raised": f"{type(error).__name__}: {error}"[-2000:]}
    return {"raised": None}


def make_environment(place: Path, call: Callable[[Any], Awaitable[Any]]) -> Any:
    from harbor.environments.base import BaseEnvironment
    from harbor.models.task.config import EnvironmentConfig
    from harbor.models.trial.paths import TrialPaths

    class Environment(Machine, BaseEnvironment): ...

    made = Environment(place, "rollmill", "rollmill", TrialPaths(place), EnvironmentConfig())
    made.call = call
    return made


class Machine:
    """What Harbor's BaseEnvironment leaves open. Commands run as the image's USER, whoever Harbor asks for."""

    call: Callable[[Any], Awaitable[Any]]

    @staticmethod
    def type() -> str:
        return "rollmill"

    def _validate_definition(self) -> None: ...

    async def start(self, force_build: bool) -> None: ...

    async def stop(self, delete: bool) -> None: ...

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: float | None = None,
        user: str | int | None = None,
    ) -> Any:
        from harbor.environments.base import ExecResult

        merged = self._merge_env(env) or {}  # type: ignore[attr-defined]  # of BaseEnvironment
        limit = None if timeout_sec is None else float(timeout_sec)
        done = await self.call({"exec": command, "cwd": cwd, "env": merged, "timeout_s": limit})
        return ExecResult(stdout=done["stdout"], stderr=done["stderr"], return_code=done["exit_code"])

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        source = Path(source_path)
        if source.stat().st_size > _LARGEST:
            raise OSError(f"{source} has more than {_LARGEST} bytes")
        data = base64.b64encode(source.read_bytes()).decode()
        executable = bool(source.stat().st_mode & 0o100)
        await self.call({"write": str(target_path), "data": data, "executable": executable})

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        await self.exec(f"mkdir -p -- {shlex.quote(str(target_dir))}")
        for path in sorted(Path(source_dir).rglob("*")):
            if path.is_file():
                await self.upload_file(path, f"{target_dir}/{path.relative_to(source_dir).as_posix()}")

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        Path(target_path).parent.mkdir(parents=True, exist_ok=True)
        Path(target_path).write_bytes(base64.b64decode(await self.call({"read": str(source_path)})))

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        from harbor.environments.base import transfer_tar_filter

        packed = base64.b64decode(await self.call({"pack": str(source_dir)}))
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            archive.extractall(target_dir, filter=transfer_tar_filter)  # noqa: S202  keeps inside, without devices
