"""The whole diff of a work directory: what an agent changed, added and deleted in it.

Both the agent's machine and a clean one pack their work directory (`Machine.pack`); the archives are compared here. The
agent's archive is untrusted: it may be huge, damaged, or name files anywhere. Only regular files with a plain relative
path and symbolic links that stay in the work directory are kept. What is larger than the task's limits is refused as a
whole, since half a change is none.
"""

from __future__ import annotations

import asyncio
import errno
import io
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from rollmill.environments.task import Task, WholeDiff
from rollmill.environments.task_machine import create_machine, stays_inside
from rollmill.environments.tasks.jsonl import check_path
from rollmill.errors import MachineError, TaskError
from rollmill.machines.machine import WORK, Machine, MachineHost
from rollmill.machines.oci.tar import ArchiveError, Entry, Tar

PACK_S = 20.0  # an agent whose work directory takes longer to pack hands in nothing
_MAX_ARCHIVE = 1 << 27  # bytes
_MOST_ENTRIES = 100_000
_LEFT_OUT = frozenset({".git", "__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache"})


@dataclass(frozen=True)
class Diff:
    files: dict[str, bytes] = field(default_factory=dict)  # changed and new ones
    deleted: list[str] = field(default_factory=list)
    executable: list[str] = field(default_factory=list)  # of `files`
    links: dict[str, str] = field(default_factory=dict)  # changed and new ones: path → target
    refused: str | None = None


@dataclass(frozen=True)
class _Tree:
    files: dict[str, bytes]
    executable: set[str]
    links: dict[str, str]

    @property
    def paths(self) -> set[str]:
        return self.files.keys() | self.links.keys()


class _Refused(Exception):
    """The archive cannot be used."""


async def take_diff(machine: Machine, task: Task, limits: WholeDiff, clean: MachineHost) -> Diff:
    """The diff between a machine's work directory and the one the task starts with."""
    try:
        packed = await _pack(machine)
    except OSError as error:
        return Diff(refused=f"the work directory could not be packed: {error}")
    fresh = await create_machine(clean, task)
    try:
        before = await asyncio.to_thread(_read, await _pack(fresh))
    except (OSError, _Refused) as error:
        if isinstance(error, OSError) and error.errno == errno.ENOSYS:
            raise TaskError(f"task {task.id}: {error.strerror}", hint="a whole diff needs sh and tar") from None
        raise MachineError(f"the files of task {task.id} cannot be packed: {error}") from None
    finally:
        await fresh.close()
    try:
        return await asyncio.to_thread(_compare, before, packed, limits)
    except _Refused as error:
        return Diff(refused=str(error))


async def _pack(machine: Machine) -> bytes:
    limit_s = PACK_S * machine.capabilities.slowdown
    return await machine.pack(WORK, max_bytes=_MAX_ARCHIVE, timeout_s=limit_s, whole=False)


def _compare(before: _Tree, packed: bytes, limits: WholeDiff) -> Diff:
    after = _read(packed)
    changed = {path: data for path, data in after.files.items() if before.files.get(path) != data}
    modes = after.executable ^ before.executable
    changed |= {path: after.files[path] for path in modes if path in after.files}
    links = {path: target for path, target in after.links.items() if before.links.get(path) != target}
    deleted = sorted(before.paths - after.paths)
    count = len(changed) + len(links) + len(deleted)
    if count > limits.max_files:
        raise _Refused(f"{count} files changed; a hand-in has at most {limits.max_files}")
    size = sum(map(len, changed.values()))
    if size > limits.max_bytes:
        raise _Refused(f"the changed files have {size} bytes; a hand-in has at most {limits.max_bytes}")
    executable = sorted(after.executable & changed.keys())
    return Diff(dict(sorted(changed.items())), deleted, executable, dict(sorted(links.items())))


def _read(packed: bytes) -> _Tree:
    """The files and links of an archive."""
    files: dict[str, bytes] = {}
    links: dict[str, str] = {}
    executable: set[str] = set()
    size = 0
    tar = Tar(io.BytesIO(packed), most_bytes=_MAX_ARCHIVE, most_entries=_MOST_ENTRIES)
    try:
        for entry in tar:
            path = _path(entry.name)
            if path is not None and entry.kind == "link" and stays_inside(path, entry.target):
                links[path] = entry.target
            data = _contents(tar, entry, files)
            if path is None or data is None:
                continue
            size += len(data)  # a link repeats its file
            if size > _MAX_ARCHIVE:
                raise _Refused(f"the files have more than {_MAX_ARCHIVE >> 20} MiB")
            files[path] = data
            if entry.mode & 0o100:
                executable.add(path)
    except ArchiveError as error:
        raise _Refused(f"the work directory could not be packed: {str(error)[:200]}") from None
    kept = {path: data for path, data in files.items() if _is_kept(path)}
    return _Tree(kept, executable & kept.keys(), {path: target for path, target in links.items() if _is_kept(path)})


def _is_kept(path: str) -> bool:
    return not _LEFT_OUT & set(PurePosixPath(path).parts) and not path.endswith(".pyc")


def _contents(tar: Tar, entry: Entry, files: dict[str, bytes]) -> bytes | None:
    """None for what is no regular file. A hard link is the file that came before it."""
    if entry.kind == "hard link":
        linked = _path(entry.target)
        return None if linked is None else files.get(linked)
    return tar.read() if entry.kind == "file" else None


def _path(name: str) -> str | None:
    """None for a name that leaves the work directory, is not UTF-8 or has control characters."""
    try:
        return check_path(name)
    except ValueError:
        return None
