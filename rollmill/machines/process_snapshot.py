"""Tries whether CRIU can save a namespace machine with its processes and restore it. `rollmill machines doctor` shows
the answer.

No machine offers it yet. Where this was tried (CRIU 3.17.1, Linux 6.18), CRIU does not save machines: their namespaces
belong to a user namespace of their own, and their first process is a fork of the machine host, which has files mapped
from mounts that are not in its own namespace. It saves processes of other users only with CAP_SYS_RESOURCE, which root
of a container may lack.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from rollmill.errors import RollmillError
from rollmill.machines.guest import linux as kernel
from rollmill.machines.images.image import BUILT_IN
from rollmill.machines.namespace.client import NamespaceHost

_LIMIT_S = 30.0  # of one call of CRIU, and for a restored process to go on
_COUNT = "process-snapshot"  # the file that the saved process writes to again and again
_GOES_ON = f"while :; do echo >> {_COUNT}; sleep 0.02; done"
# CRIU reports these and goes on
_HARMLESS = ("exited, status", "RLIMIT_NOFILE", "Dumping FAILED", "Restoring FAILED", "-save", "execvp(")


class Tried(NamedTuple):
    works: bool
    words: str  # what came of it, in one sentence
    restore_s: float = 0.0  # if it works


async def try_process_snapshot() -> Tried:
    """Save a real machine with a running process, and restore it. It works if that process goes on."""
    program = shutil.which("criu", path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin")
    if program is None:
        return Tried(False, "CRIU is not installed")
    if os.geteuid() != 0:
        return Tried(False, "CRIU needs root")
    host = NamespaceHost()
    try:
        machine = await host.create(BUILT_IN, {_COUNT: b""})
        await machine.start(["sh", "-c", _GOES_ON])
        tried = await asyncio.to_thread(_save_and_restore, program, _first_process(host))
    except (RollmillError, OSError) as error:
        return Tried(False, f"it could not be tried: {error}")
    finally:
        await host.close()
    if not tried.works and not kernel.has_capability(kernel.CAP_SYS_RESOURCE):
        lacks = "CRIU needs CAP_SYS_RESOURCE to save processes of other users, and root does not have it here"
        return Tried(False, f"{lacks}; {tried.words}")
    return tried


def _first_process(host: NamespaceHost) -> str:
    """Pid 1 of the machine that has the file, as this host numbers it."""
    assert host._process is not None
    children = Path(f"/proc/{host._process.pid}/task/{host._process.pid}/children").read_text().split()
    return next(pid for pid in children if Path(f"/proc/{pid}/root/work/{_COUNT}").exists())


def _save_and_restore(program: str, pid: str) -> Tried:
    with tempfile.TemporaryDirectory() as directory:
        began = time.monotonic()
        if why := _criu(program, "dump", directory, ["-t", pid]):
            return Tried(False, f"CRIU refuses to save a machine {why}")
        saved = time.monotonic()
        written = Path(directory, "pid")
        try:
            if why := _criu(program, "restore", directory, ["-d", "--pidfile", str(written)]):
                return Tried(False, f"CRIU saved a machine and cannot restore it {why}")
            restored = time.monotonic()
            if not _goes_on(written.read_text().strip()):
                return Tried(False, "CRIU restored a machine whose process does not go on")
        finally:
            with contextlib.suppress(OSError, ValueError):
                os.kill(int(written.read_text()), signal.SIGKILL)
        words = f"CRIU saved a machine in {saved - began:.2f} s and restored it in {restored - saved:.2f} s"
        return Tried(True, words, restored - saved)


def _criu(program: str, operation: str, directory: str, options: list[str]) -> str | None:
    """Why CRIU did not do it; None if it did."""
    options = [*options, "--manage-cgroups=ignore", "-v1", "-D", directory, "-o", f"{operation}.log"]
    if shutil.which("iptables-restore") is None:
        options += ["--network-lock", "nftables"]  # by its library
    try:
        done = subprocess.run([program, operation, *options], capture_output=True, timeout=_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"within {_LIMIT_S:.0f} s"
    if done.returncode == 0:
        return None
    log = Path(directory, f"{operation}.log")
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    errors = [line.partition("): ")[2] or line for line in lines if not any(word in line for word in _HARMLESS)]
    ended = f"ended by signal {-done.returncode}" if done.returncode < 0 else f"exit code {done.returncode}"
    return f"({ended}): {'; '.join(errors[-2:]) or 'no reason given'}"


def _goes_on(pid: str) -> bool:
    """Whether the restored process still writes to its file."""
    file, deadline = Path(f"/proc/{pid}/root/work/{_COUNT}"), time.monotonic() + _LIMIT_S
    before = file.stat().st_size
    while time.monotonic() < deadline:
        if file.stat().st_size > before:
            return True
        time.sleep(0.02)
    return False
