"""One Firecracker process and its guest. It has what qemu/vm.py's Vm has; here is what differs."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import secrets
import shutil
import subprocess
import tempfile
import time
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from rollmill.errors import MachineError
from rollmill.machines.firecracker import launch
from rollmill.machines.firecracker.api import Api
from rollmill.machines.firecracker.channel import Channel
from rollmill.machines.firecracker.launch import FirecrackerParts
from rollmill.machines.qemu.launch import Started
from rollmill.machines.qemu.relay import PORTS
from rollmill.machines.qemu.vm import Vm

_VSOCK, _KERNEL, _INITRD, _STATE, _MEMORY = "v.sock", "kernel", "initrd", "state", "memory"
_ARGUMENTS = "reboot=k panic=-1 quiet rootfstype=ramfs rdinit=/init mitigations=off audit=0"
_CONNECT_S = 30.0
_FIRST_USER, _USERS = 0x70040000, 1 << 16  # above those of QEMU's processes
_users = itertools.count(secrets.randbelow(_USERS))


class SavedFiles:
    """A guest in two files. They are deleted when nobody refers to them."""

    def __init__(self, directory: Path, stood_still_s: float) -> None:
        self.directory = directory
        self.stood_still_s = stood_still_s
        self.close = weakref.finalize(self, shutil.rmtree, directory, ignore_errors=True)


@dataclass(frozen=True)
class _Ends:
    """What Vm uses of a started process."""

    process: subprocess.Popen[bytes]
    init: object
    ports: object


class FirecrackerVm(Vm):
    def __init__(self, parts: FirecrackerParts, directory: Path, *, template: bool) -> None:
        self._identifier = f"vm-{secrets.token_hex(6)}"
        self._directory = directory
        self._root = launch.jail_root(parts, self._identifier, directory)
        self._root.mkdir(parents=True, mode=0o700)
        self._user = _FIRST_USER + next(_users) % _USERS
        self._jailed = parts.jailer is not None
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  closed by `end`
        self.process = subprocess.Popen(
            launch.command(parts, self._identifier, directory, self._user),
            cwd=self._root,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env={"PATH": os.defpath},
            start_new_session=True,
        )
        self._channels = [Channel() for _ in PORTS]
        self.agent = self._channels[0].socket
        self._started = cast(Started, _Ends(self.process, self._channels[1].socket, self._channels[2].socket))
        self._api = Api(self._root / "api.sock")
        self.template = template
        self._paused = False
        self._asking_init = asyncio.Lock()
        self._ended: int | None = None

    @classmethod
    async def boot_files(
        cls, parts: FirecrackerParts, directory: Path, kernel: Path, initrd: Path, memory_mb: int, within_s: float
    ) -> FirecrackerVm:
        """Start a template."""
        vm = cls(parts, directory, template=True)
        try:
            vm._give(kernel, _KERNEL)
            vm._give(initrd, _INITRD)
            await vm._api.wait()
            await vm._api.configure(
                kernel=_KERNEL, initrd=_INITRD, arguments=_ARGUMENTS, memory_mb=memory_mb, vsock=_VSOCK
            )
            await vm._api.start()
            await vm._connect(within_s)
            await asyncio.get_running_loop().sock_sendall(vm.agent, b"g")  # what the agent waits for
        except BaseException as error:
            raise await vm.failed(error) from error
        return vm

    @classmethod
    async def restore_files(cls, parts: FirecrackerParts, directory: Path, saved: SavedFiles) -> FirecrackerVm:
        """A machine with the saved state. It runs; `renew` it before anyone uses it."""
        vm = cls(parts, directory, template=False)
        try:
            vm._give(saved.directory / _STATE, _STATE)
            vm._give(saved.directory / _MEMORY, _MEMORY)
            await vm._api.wait()
            await vm._api.load(state=_STATE, memory=_MEMORY)
            await vm._connect(_CONNECT_S)
        except BaseException as error:
            raise await vm.failed(error) from error
        return vm

    async def save(self) -> SavedFiles:  # type: ignore[override]
        """Save the state. The guest stands still meanwhile and then goes on; a template ends."""
        for channel in self._channels:
            await channel.disconnect()
        began = time.monotonic()
        if not self._paused:
            await self._api.pause()
        for name in (_STATE, _MEMORY):  # a restored guest maps the files it came from: new ones take their names
            (self._root / name).unlink(missing_ok=True)
        await self._api.save(state=_STATE, memory=_MEMORY)
        kept = Path(tempfile.mkdtemp(prefix="saved-", dir=self._directory))
        for name in (_STATE, _MEMORY):
            os.rename(self._root / name, kept / name)
            (kept / name).chmod(0o444)
        saved = SavedFiles(kept, time.monotonic() - began)
        if self.template:
            await self.end()
            return saved
        if not self._paused:
            await self._api.resume()
            await self._connect(_CONNECT_S)
        return saved

    async def pause(self) -> None:
        await self._api.pause()
        self._paused = True

    async def resume(self) -> None:
        await self._api.resume()
        self._paused = False
        if self._channels[0].disconnected:  # it was saved while it was paused
            await self._connect(_CONNECT_S)

    async def end(self) -> int:
        """End the process; safe to repeat. Returns its exit code."""
        if self._ended is None:
            if self.process.poll() is None:
                self.process.kill()
            code = await asyncio.to_thread(self.process.wait)
            if self._ended is None:
                self._ended = code
                await self._api.close()
                for channel in self._channels:
                    await channel.close()
                for channel in self._channels[1:]:
                    channel.socket.close()
                self._log.close()
                await asyncio.to_thread(shutil.rmtree, self._root.parent if self._jailed else self._root, True)
        return self._ended

    def words(self) -> str:
        """The end of what Firecracker and the guest's console have printed."""
        if self._ended is not None:
            return ""
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), 4096, max(size - 4096, 0)).decode("utf-8", "replace").strip()[-600:]

    async def _connect(self, within_s: float) -> None:
        for channel, port in zip(self._channels, PORTS, strict=True):
            await channel.connect(self._root / _VSOCK, port, within_s=within_s)

    def _give(self, source: Path, name: str) -> None:
        """Let the process see a file: a link where it is on the same file system."""
        target = self._root / name
        with contextlib.suppress(OSError):
            os.link(source, target)
            return
        try:
            shutil.copyfile(source, target)
            target.chmod(0o444)
        except OSError as error:
            raise MachineError(f"{source} cannot be given to Firecracker: {error}") from None
