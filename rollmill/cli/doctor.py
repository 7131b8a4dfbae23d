"""`rollmill doctor`: what this machine has, what it lacks, and what to do about it."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import typer

from rollmill.errors import MachineError, RollmillError

if TYPE_CHECKING:
    from rollmill.machines.machine import MachineHost
    from rollmill.machines.probe import Probed

GIB = 1 << 30


class Check(NamedTuple):
    name: str
    status: Literal["ok", "warn", "missing"]
    found: str
    remedy: str = ""


def doctor() -> None:
    """Check what this machine has, what it lacks, and what to do about it.

    Looks at Python, torch, the GPU, memory, disk, isolated machines (it starts one of each kind) and
    databases. The exit code is 1 if something that Rollmill needs is missing. For example:

        rollmill doctor
    """
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    checks = [check for probe in PROBES for check in probe()]
    table = Table("", "check", "found", "remedy")
    marks = {"ok": "[green]ok[/]", "warn": "[yellow]warn[/]", "missing": "[red]missing[/]"}
    for check in checks:
        table.add_row(marks[check.status], *map(escape, (check.name, check.found, check.remedy)))
    Console().print(table)
    if any(check.status == "missing" for check in checks):
        raise typer.Exit(1)


def _python() -> list[Check]:
    version = ".".join(map(str, sys.version_info[:3]))
    if (3, 11) <= sys.version_info < (3, 14):
        return [Check("Python", "ok", version)]
    return [Check("Python", "missing", version, "install Python 3.11, 3.12 or 3.13")]


def _torch() -> list[Check]:
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return [Check("torch", "missing", "not installed", "`scripts/setup`, or `pip install 'torch>=2.11'`")]
    major, minor = (int(part) for part in version.split(".")[:2])
    if (major, minor) < (2, 11):
        return [Check("torch", "missing", version, "`pip install 'torch>=2.11'`")]
    return [Check("torch", "ok", version)]


def _gpu() -> list[Check]:
    """Asks torch in a process of its own: importing it takes seconds, and a broken driver may crash it."""
    if importlib.util.find_spec("torch") is None:
        return []
    ask = (
        "import torch; found = [torch.cuda.get_device_properties(n) for n in range(torch.cuda.device_count())]; "
        "print(', '.join(f'{each.name}, {each.total_memory / (1 << 30):.0f} GiB' for each in found))"
    )
    asked = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=False)
    found = asked.stdout.strip()
    if asked.returncode != 0:
        return [Check("GPU", "warn", (asked.stderr.strip().splitlines() or ["no answer"])[-1], "look at `nvidia-smi`")]
    if not found:
        there = Path("/dev/nvidia0").exists()
        remedy = "torch was built without CUDA, or for a newer driver" if there else ""
        return [Check("GPU", "warn" if there else "ok", "none: models compute on the CPU", remedy)]
    if importlib.util.find_spec("triton") is None:
        return [Check("GPU", "missing", found, "its kernels need triton: `pip install triton`, or set device = 'cpu'")]
    return [Check("GPU", "ok", found)]


def _processors() -> list[Check]:
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    remedy = "" if count >= 2 else "this works, but rollouts and training take turns: use 2 or more"
    return [Check("CPU threads", "ok" if count >= 2 else "warn", str(count), remedy)]


def _memory() -> list[Check]:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return [Check("memory", "warn", "unknown on this system", "4 GiB are enough for the demo")]
    sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.endswith("kB")}
    found = f"{sizes['MemAvailable'] / GIB:.1f} of {sizes['MemTotal'] / GIB:.1f} GiB free"
    if sizes["MemAvailable"] >= 3 * GIB:
        return [Check("memory", "ok", found)]
    return [Check("memory", "warn", found, "free some memory: the demo needs about 3 GiB")]


def _disk() -> list[Check]:
    free = shutil.disk_usage(Path.cwd()).free
    found = f"{free / GIB:.1f} GiB free here"
    if free >= 2 * GIB:
        return [Check("disk", "ok", found)]
    return [Check("disk", "warn", found, "free 2 GiB: runs are written below the current directory")]


def _machines() -> list[Check]:
    """Starts a real machine and runs a command in it: nothing else shows whether the kernel allows one."""
    import asyncio

    try:
        limits, milliseconds = asyncio.run(_try_machine())
    except MachineError as error:
        return [Check("machines (namespaces)", "missing", error.message, error.hint or "")]
    found = f"a command ran {milliseconds:.0f} ms after the request"
    identity = "each machine has its own user id" if limits["separate_users"] else "machines share your user id"
    forks = "forks share files" if limits["shared_forks"] else "forks copy files"
    checks = [Check("machines (namespaces)", "ok", f"{found}; {identity}; {forks}")]
    missing_groups = {"memory", "pids"} - set(limits["control_groups"])
    if missing_groups:
        remedy = (
            "enough for development; to get them, run as root or under `systemd-run --user --scope -p Delegate=yes`"
        )
        held_by = "rlimits and a watchdog" if limits["process_rlimit"] else "a watchdog alone (Linux 5.14 also counts)"
        found = f"no control group for {' and '.join(sorted(missing_groups))}: {held_by}"
        checks.append(Check("machine limits", "warn", found, remedy))
    else:
        groups = ", ".join(limits["control_groups"])
        checks.append(Check("machine limits", "ok", f"control groups ({groups}), rlimits, watchdog"))
    if not (limits["private_files"] and limits["private_devices"]):
        shared = "devices" if limits["private_files"] else "system files"
        remedy = "run as root on a kernel that allows overlays in namespaces"
        found = f"machines share the inodes of {shared}: locks and watches on them pass between machines"
        checks.append(Check("machine files", "warn", found, remedy))
    if not limits["seccomp"]:
        remedy = "Rollmill has filters for x86-64 and aarch64"
        checks.append(Check("system-call filter", "warn", f"none for {os.uname().machine}", remedy))
    return checks


async def _try_machine() -> tuple[dict[str, Any], float]:
    import asyncio

    from rollmill.machines.images.image import BUILT_IN
    from rollmill.machines.namespace.client import NamespaceHost

    host = NamespaceHost()
    try:
        await host.start()
        started = asyncio.get_running_loop().time()
        machine = await host.create(BUILT_IN)
        result = await machine.exec(["python", "-c", "print(6 * 7)"])
        seconds = asyncio.get_running_loop().time() - started
        await machine.close()
        if result.output != b"42\n":
            raise MachineError(f"Python does not work in a machine: {result.output.decode('utf-8', 'replace')[-300:]}")
        return host.limits, seconds * 1000
    finally:
        await host.close()


def _virtual_machines() -> list[Check]:
    """Boots one, which takes seconds, if everything that it needs is there."""
    found = probe_machines(["qemu"])["qemu"]
    if isinstance(found, str):
        why, _, remedy = found.partition("\nhint: ")
        return [Check("machines (qemu)", "warn", why, f'only for [machine] kind = "qemu": {remedy}')]
    text = f"a command ran {found.start_s:.1f} s after the request; {found.capabilities.slowdown:.0f} times slower"
    return [Check("machines (qemu)", "ok", text, f"without KVM: {found.why_no_kvm}" if found.why_no_kvm else "")]


def probe_machines(kinds: Sequence[str] = ("namespace", "qemu")) -> dict[str, Probed | str]:
    """Each kind of machine: what it can do, or why it does not work here."""
    import asyncio

    from rollmill.machines.namespace.client import NamespaceHost
    from rollmill.machines.probe import probe
    from rollmill.machines.qemu.host import QemuHost

    made: dict[str, Callable[[], MachineHost]] = {
        "namespace": NamespaceHost,
        "qemu": QemuHost,
    }

    async def attempt(kind: str) -> Probed | str:
        host = made[kind]()
        try:
            found = await probe(host)
            return replace(found, why_no_kvm=host.why_no_kvm) if isinstance(host, QemuHost) else found
        except (RollmillError, OSError) as error:
            return str(error)
        finally:
            await host.close()

    return {kind: asyncio.run(attempt(kind)) for kind in kinds}


def _databases() -> list[Check]:
    import sqlite3

    new_enough = sqlite3.sqlite_version_info >= (3, 35)
    remedy = "" if new_enough else "3.35 or newer is needed: use a newer Python build"
    checks = [Check("SQLite", "ok" if new_enough else "missing", sqlite3.sqlite_version, remedy)]
    if importlib.util.find_spec("psycopg"):
        checks.append(Check("PostgreSQL client", "ok", f"psycopg {importlib.metadata.version('psycopg')}"))
    else:
        remedy = "only for an index in PostgreSQL (`database`): `pip install 'rollmill[postgres]'`"
        checks.append(Check("PostgreSQL client", "warn", "not installed", remedy))
    return checks


def _git() -> list[Check]:
    path = shutil.which("git")
    if path is None:
        return [Check("git", "warn", "not found", "only for working on Rollmill itself: install git")]
    version = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout.strip()
    return [Check("git", "ok", version.removeprefix("git version "))]


PROBES: tuple[Callable[[], list[Check]], ...] = (
    _python,
    _torch,
    _gpu,
    _processors,
    _memory,
    _disk,
    _machines,
    _virtual_machines,
    _databases,
    _git,
)
