"""Tries whether CRIU can save a namespace machine with its processes. `rollmill machines doctor` shows the answer.

No machine offers it. Where this was tried (CRIU 3.17.1, Linux 6.18), CRIU does not save machines: their namespaces
belong to a user namespace of their own, and their first process is a fork of the machine host, which has files mapped
from mounts that are not in its own namespace. It saves processes of other users only with CAP_SYS_RESOURCE, which root
of a container may lack.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from rollmill.environments.machines.images import BUILT_IN
from rollmill.environments.machines.namespace import kernel
from rollmill.environments.machines.namespace.client import NamespaceHost
from rollmill.errors import RollmillError

_DUMP_S = 30.0
_MARK = "process-snapshot"
# CRIU reports these and goes on
_HARMLESS = ("exited, status", "RLIMIT_NOFILE", "Dumping FAILED")


async def try_process_snapshot() -> str:
    """What came of saving a real machine with a running process, in one sentence."""
    program = shutil.which("criu", path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin")
    if program is None:
        return "CRIU is not installed"
    if os.geteuid() != 0:
        return "CRIU needs root"
    if not kernel.has_capability(kernel.CAP_SYS_RESOURCE):
        return "CRIU needs CAP_SYS_RESOURCE to save processes of other users, and root does not have it here"
    host = NamespaceHost()
    try:
        machine = await host.create(BUILT_IN, {_MARK: b""})
        await machine.start(["sleep", "600"])
        return await asyncio.to_thread(_dump, program, _first_process(host))
    except (RollmillError, OSError) as error:
        return f"it could not be tried: {error}"
    finally:
        await host.close()


def _first_process(host: NamespaceHost) -> str:
    """Pid 1 of the machine that has the mark, as this host numbers it."""
    assert host._process is not None
    children = Path(f"/proc/{host._process.pid}/task/{host._process.pid}/children").read_text().split()
    return next(pid for pid in children if Path(f"/proc/{pid}/root/work/{_MARK}").exists())


def _dump(program: str, pid: str) -> str:
    with tempfile.TemporaryDirectory() as directory:
        options = ["--leave-running", "--manage-cgroups=ignore", "-v1", "-D", directory, "-o", "log"]
        if shutil.which("iptables-restore") is None:
            options += ["--network-lock", "nftables"]  # by its library
        try:
            done = subprocess.run(
                [program, "dump", "-t", pid, *options], capture_output=True, timeout=_DUMP_S, check=False
            )
        except subprocess.TimeoutExpired:
            return f"CRIU did not end within {_DUMP_S:.0f} s"
        if done.returncode == 0:
            return "CRIU saved a machine, but no machine restores such a state yet"
        log = Path(directory, "log")
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    errors = [line.partition("): ")[2] or line for line in lines if not any(word in line for word in _HARMLESS)]
    ended = f"ended by signal {-done.returncode}" if done.returncode < 0 else f"exit code {done.returncode}"
    return f"CRIU refuses to save a machine ({ended}): {'; '.join(errors[-2:]) or 'no reason given'}"
