"""A machine at the start of a task: its image, files, programs and symbolic links; or a folder where none is needed."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import posixpath
from collections.abc import Iterable, Mapping, Sequence
from typing import cast

from rollmill.environments.harness import Harness
from rollmill.environments.task import Needs, Task, WholeDiff
from rollmill.errors import MachineError, TaskError
from rollmill.machines.lasting import LastingMachine
from rollmill.machines.machine import WORK, Capabilities, Machine, MachineHost

_LARGEST_FILE = 1 << 20  # that is read of a folder, in bytes
_APPLY_S = 20.0  # in a machine where no submitted code has run
_LINK = 'mkdir -p -- "$(dirname -- "$1")" && ln -sfn -- "$2" "$1"'


async def create_machine(machines: MachineHost, task: Task, files: Mapping[str, bytes] | None = None) -> Machine:
    """A machine with the files of the task, and `files` over them. Errors as with `MachineHost.create`."""
    machine = await machines.create(task.image, task.files)
    try:
        if task.needs is not None:
            await meet(machine, task, task.needs)
        await for_all(machine, ["chmod", "a+x", "--"], task.executable)
        await make_links(machine, task.links)
        await write_over(machine, files or {}, task.links)
    except OSError as error:
        await machine.close()
        raise TaskError(f"task {task.id}: its grading files cannot be written: {error}") from None
    except BaseException:
        await machine.close()
        raise
    return LastingMachine(machine) if task.processes else machine


async def meet(machine: Machine, task: Task, needs: Needs) -> None:
    """TaskError names what a task asks for and its machine does not have, or that it is not healthy."""
    able = machine.capabilities
    for field, asked, given, setting in (
        ("cpus", needs.cpus, os.cpu_count(), "a host with more processors"),
        ("memory_mb", needs.memory_mb, able.memory_mb, f"[machine] memory_mb = {needs.memory_mb}"),
        ("storage_mb", needs.storage_mb, able.disk_mb, f"[machine] disk_mb = {needs.storage_mb}"),
    ):
        if asked and given and asked > given:
            where = f"task {task.id}: {needs.file}: environment.{field} is {asked:g}, and its machine has {given:g}"
            raise TaskError(where, hint=setting)
    if needs.network is not None and (other := set(needs.network) ^ set(able.egress)):
        where = f"task {task.id}: {needs.file}: environment.network_mode and allowed_hosts: {', '.join(sorted(other))}"
        hint = f"[machine] egress = {json.dumps(list(needs.network))}"
        raise TaskError(f"{where} are not what its machine reaches", hint=hint)
    for number in range(needs.health_tries if needs.health is not None else 0):
        assert needs.health is not None
        result = await machine.exec(["sh", "-c", needs.health], timeout_s=needs.health_timeout_s * able.slowdown)
        if result.exit_code == 0 and result.stopped is None:
            return
        if number == needs.health_tries - 1:
            where = f"task {task.id}: {needs.file}: environment.healthcheck.command failed {needs.health_tries} times"
            raise TaskError(f"{where}: {result.output[-300:]!r}", hint="ENTRYPOINT and CMD of an image are not run")
        await asyncio.sleep(needs.health_pause_s)


async def write_over(
    machine: Machine, files: Mapping[str, bytes], links: Iterable[str], failure: type[Exception] = MachineError
) -> None:
    """Write files. A file replaces a link at its path: writing would follow the link."""
    await for_all(machine, ["rm", "-f", "--"], sorted(files.keys() & set(links)), failure)
    for path, data in files.items():
        await machine.write(path, data)


async def make_links(machine: Machine, links: Mapping[str, str], failure: type[Exception] = MachineError) -> None:
    """Make symbolic links, path → target. What is at the path must not be a directory."""
    pairs = [word for pair in links.items() for word in pair]
    await for_all(machine, ["-n", "2", "sh", "-c", _LINK, "-"], pairs, failure)


async def for_all(
    machine: Machine, command: list[str], words: Sequence[str], failure: type[Exception] = MachineError
) -> None:
    """Run a command with words behind it, by `xargs`, in a machine where no submitted code has run.

    Raises `failure` if the command fails, MachineError if a limit stopped it.
    """
    if not words:
        return
    stdin = "\0".join(words).encode()
    timeout_s = _APPLY_S * machine.capabilities.slowdown
    result = await machine.exec(["xargs", "-0", *command], stdin=stdin, timeout_s=timeout_s)
    if result.stopped is not None:
        raise MachineError(f"{' '.join(command)} was stopped in a clean machine by the limit {result.stopped!r}")
    if result.exit_code != 0:
        raise failure(f"{' '.join(command)} failed in a clean machine: {result.output[-500:]!r}")


def stays_inside(path: str, target: str) -> bool:
    """Whether a link at `path` leads to a place in the work directory, as far as its text tells."""
    reached = posixpath.normpath(posixpath.join(WORK, posixpath.dirname(path), target))
    return 0 < len(target) < 4096 and target.isprintable() and (reached == WORK or reached.startswith(f"{WORK}/"))


class Folder:
    """A folder in memory instead of a machine, for a harness that runs no command (`wants_machine = False`): the files
    of a task, and what the harness writes over them. It can read, write and close. Grading has machines as always."""

    capabilities = Capabilities(kernel="shared", snapshot="none")

    def __init__(self, task: Task) -> None:
        self.image = task.image
        self._files = {_place(path): data for path, data in task.files.items()}

    async def read(self, path: str, *, max_bytes: int = _LARGEST_FILE) -> bytes:
        data = self._files.get(_place(path))
        if data is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        if len(data) > max_bytes:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), path)
        return data

    async def write(self, path: str, data: bytes) -> None:
        self._files[_place(path)] = data

    async def close(self) -> None: ...


def folder_for(harness: Harness, task: Task) -> Machine | None:
    """A folder, if the harness needs no more and the task hands in named files."""
    if harness.wants_machine or isinstance(task.submission, WholeDiff):
        return None
    return cast(Machine, Folder(task))


def _place(path: str) -> str:
    return posixpath.normpath(posixpath.join(WORK, path))
