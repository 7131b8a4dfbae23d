"""Harbor's environment, made of a machine. Imported by Harbor (`harbor` 0.25, Python 3.12 or newer), never by Rollmill.

    environment:
      import_path: rollmill.environments.harbor.environment:RollmillEnvironment
      kwargs:
        build: {egress: [pypi.org]}   # how the task's Dockerfile is built (machines/oci/build_image.py: BuildConfig)
        image: oci:shop.tar           # a machine image instead of what the Dockerfile builds
        machine: {memory_mb: 4096}    # a [machine] section; default namespace
        offline: true                 # run tasks without network though they ask for one

Commands run as the image's USER, whoever Harbor asks for.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities
from harbor.models.task.config import NetworkMode, NetworkPolicy

from rollmill.config import validate_config
from rollmill.environments.tasks.benchmark_folder import Environment, promise
from rollmill.kinds import build as build_kind
from rollmill.machines.background_shell import BackgroundShell
from rollmill.machines.machine import MachineHost, MachineSection
from rollmill.machines.oci.build_image import BuildConfig

_SIZED = ("namespace", "qemu")  # kinds with memory_mb and disk_mb


class RollmillEnvironment(BaseEnvironment):
    def __init__(
        self,
        *args: Any,
        image: str | None = None,
        build: dict[str, Any] | None = None,
        machine: dict[str, Any] | None = None,
        offline: bool = False,
        **kwargs: Any,
    ) -> None:
        self._image = image
        self._build = validate_config(BuildConfig, build or {}, "build of the environment")
        self._section: dict[str, Any] = {"kind": "namespace", **(machine or {})}
        self._offline = offline
        self._host: MachineHost | None = None
        self._shell: BackgroundShell | None = None
        super().__init__(*args, **kwargs)

    @staticmethod
    def type() -> str:
        return "rollmill"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        listed = self._section["kind"] == "namespace"  # its machines have a proxy for names on a list
        return EnvironmentCapabilities(
            disable_internet=True,
            network_allowlist=listed,
            network_allowlist_hostnames=listed,
            network_allowlist_wildcard_hostnames=listed,
        )

    def validate_network_policy_support(self, network_policy: NetworkPolicy | None = None) -> None:
        policy = network_policy or self._network_policy
        if policy.network_mode == NetworkMode.PUBLIC and not self._offline:
            raise ValueError(
                "the task asks for a public network, which Rollmill's machines do not have. Set network_mode to "
                "no-network or allowlist in its [environment], or run it without one: offline=true"
            )
        super().validate_network_policy_support(policy)

    def _validate_definition(self) -> None:
        """TaskError: there is no Dockerfile and no image; tasks of several containers do not work in one machine."""
        config = self.task_env_config
        given = {name: getattr(config, name) for name in ("docker_image", "workdir", "build_timeout_sec")}
        name = self.environment_dir.parent.name
        self._image = self._image or promise(name, self.environment_dir, Environment(**given), self._build)

    async def start(self, force_build: bool) -> None:
        """Start a machine. Its image is built if the same folder was not built before."""
        section = self._section
        if section["kind"] in _SIZED:
            config = self.task_env_config
            wanted = {"memory_mb": config.memory_mb, "disk_mb": config.storage_mb}
            section = {**{key: value for key, value in wanted.items() if value}, **section}
        if self._network_policy.network_mode == NetworkMode.ALLOWLIST:
            section = {**section, "egress": list(self._network_policy.allowed_hosts)}
        self._host = await _hosts.open(section)
        try:
            assert self._image is not None
            created = await self._host.create(self._image)
            where = await created.exec(["sh", "-c", "pwd -P"])
            self._shell = BackgroundShell(created, where.output.decode().strip())
            await self._shell.start()
            await self.ensure_dirs(self._mount_targets(writable_only=True))
            await self._upload_environment_dir_after_start()
        except BaseException:
            await self.stop(delete=True)
            raise

    async def stop(self, delete: bool) -> None:
        shell, host, self._shell, self._host = self._shell, self._host, None, None
        if shell is not None:
            await shell.machine.close()
        if host is not None:
            await _hosts.close(host)

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        try:
            done = await self._running().exec(command, cwd, self._merge_env(env), timeout_sec)
        except TimeoutError:
            raise RuntimeError(f"Command timed out after {timeout_sec} seconds") from None
        return ExecResult(stdout=done.stdout, stderr=done.stderr, return_code=done.exit_code)

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        await self._running().upload_file(Path(source_path), target_path)

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        await self._running().upload_dir(Path(source_dir), target_dir)

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        await self._running().download_file(source_path, Path(target_path))

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        await self._running().download_dir(source_dir, Path(target_dir))

    def _running(self) -> BackgroundShell:
        if self._shell is None:
            raise RuntimeError("the environment has not been started")
        return self._shell


class _Hosts:
    """One machine host per event loop and settings, for all environments of this process. The last one closes it."""

    def __init__(self) -> None:
        self._open: dict[tuple[int, str], MachineHost] = {}
        self._users: dict[tuple[int, str], int] = {}

    async def open(self, section: dict[str, Any]) -> MachineHost:
        key = (id(asyncio.get_running_loop()), json.dumps(section, sort_keys=True))
        if key not in self._open:
            self._open[key] = build_kind(MachineSection.model_validate(section))
        self._users[key] = self._users.get(key, 0) + 1
        return self._open[key]

    async def close(self, host: MachineHost) -> None:
        key = next(key for key, each in self._open.items() if each is host)
        self._users[key] -= 1
        if not self._users[key]:
            del self._open[key], self._users[key]
            await host.close()


_hosts = _Hosts()
