"""Firecracker's HTTP API: one Unix socket per process. Tests hold it to the contract that the project publishes."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp

from rollmill.errors import MachineError

_ANSWER_S = 60.0  # a snapshot writes all memory of the guest
_START_S = 30.0  # until the socket is there
_MOST_BYTES = 1 << 16


class Api:
    def __init__(self, socket: Path) -> None:
        self._socket = socket
        self._session = aiohttp.ClientSession(
            connector=aiohttp.UnixConnector(str(socket)), timeout=aiohttp.ClientTimeout(total=_ANSWER_S)
        )

    async def wait(self) -> str:
        """Wait until the process answers. Returns its version."""
        try:
            async with asyncio.timeout(_START_S):
                while not await self._listens():  # noqa: ASYNC110  another process does it
                    await asyncio.sleep(0.002)
        except TimeoutError:
            raise MachineError("Firecracker did not open its socket") from None
        return str((await self._ask("GET", "/version")).get("firecracker_version"))

    async def _listens(self) -> bool:
        """The file of a socket is there a moment before anyone listens at it."""
        try:
            _, writer = await asyncio.open_unix_connection(self._socket)
        except (FileNotFoundError, ConnectionRefusedError):
            return False
        writer.close()
        return True

    async def configure(
        self, *, kernel: str, initrd: str, arguments: str, memory_mb: int, vsock: str, processors: int = 1
    ) -> None:
        """What the guest boots and has. Paths are as the process sees them."""
        boot = {"kernel_image_path": kernel, "initrd_path": initrd, "boot_args": arguments}
        await self._ask("PUT", "/boot-source", boot)
        await self._ask("PUT", "/machine-config", {"vcpu_count": processors, "mem_size_mib": memory_mb})
        await self._ask("PUT", "/vsock", {"guest_cid": 3, "uds_path": vsock})

    async def start(self) -> None:
        await self._ask("PUT", "/actions", {"action_type": "InstanceStart"})

    async def pause(self) -> None:
        await self._ask("PATCH", "/vm", {"state": "Paused"})

    async def resume(self) -> None:
        await self._ask("PATCH", "/vm", {"state": "Resumed"})

    async def save(self, *, state: str, memory: str) -> None:
        """Write a paused guest to two files."""
        await self._ask("PUT", "/snapshot/create", {"snapshot_path": state, "mem_file_path": memory})

    async def load(self, *, state: str, memory: str) -> None:
        """Restore a guest and let it run. Its memory is mapped privately: machines share unwritten pages."""
        backend = {"backend_type": "File", "backend_path": memory}
        await self._ask("PUT", "/snapshot/load", {"snapshot_path": state, "mem_backend": backend, "resume_vm": True})

    async def close(self) -> None:
        await self._session.close()

    async def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """MachineError says what Firecracker refused, in its own words."""
        try:
            async with self._session.request(method, f"http://localhost{path}", json=body) as response:
                data = await response.content.read(_MOST_BYTES)
                if response.status == 204:
                    return {}
                found = _parse(data)
                if response.status == 200:
                    return found
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise MachineError(f"Firecracker does not answer to {method} {path}: {error!r}") from None
        why = found.get("fault_message", f"status {response.status}")
        raise MachineError(f"Firecracker refuses {method} {path}: {str(why)[:500]}")


def _parse(data: bytes) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {}
