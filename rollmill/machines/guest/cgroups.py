"""Limits memory and processes of a whole machine, and gives each machine the same share of the processor, where this
user may write control groups.

Slots are made once and reused: a slot belongs to one machine at a time. Both versions of control groups work. The slots
lie below the nearest ancestor of our own group that lets us create groups with these controllers.

A command that the kernel kills for memory frees its open files a moment after its memory. Whoever needs a page in that
moment is the next to be killed, pid 1 too. So commands are in a group of their own below their slot's, and only they
are killed when it is full. On version 1 a process that moves itself there takes no lock of the whole system. Version 2
has no such way: there pid 1 shares the group of its commands.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from typing import NamedTuple

_ROOT = "/sys/fs/cgroup"
_UNIFIED = ""  # the controller name of version 2, as /proc/self/cgroup has it
_LIMIT_FILES = {"memory": ("memory.limit_in_bytes", "memory.max"), "pids": ("pids.max", "pids.max")}  # version 1, 2
_SHARE = "cpu"  # the controller; a group has one share unless something is written
_SHARE_FILES, _ONE_SHARE, _MOST_SHARES = ("cpu.shares", "cpu.weight"), (1024, 100), 100  # version 1, 2
_EVENT_FILES = ("memory.oom_control", "memory.events")  # version 1, 2
_COMMANDS = "user.slice"  # the name that commands see
_OWN = 16 << 20  # bytes of memory of pid 1 and its cloner, beside what commands may use

ENTER = b"0"  # the process that writes it


class Slot(NamedTuple):
    """The groups of one machine. On version 2 `directory` goes to clone; on version 1 the child is moved in."""

    directory: int | None
    members: list[int]  # open cgroup.procs files
    events: int | None = None  # an open file of the kernel, with the count of processes that it killed for memory
    commands: int | None = None  # an open file: a process that writes ENTER to it enters the group of commands

    def memory_kills(self) -> int:
        """How often the kernel has killed a process of this slot because its memory was used up. Commands that have a
        group of their own are not counted."""
        if self.events is None:
            return 0
        words = os.pread(self.events, 4096, 0).split()
        return int(words[words.index(b"oom_kill") + 1]) if b"oom_kill" in words else 0

    def add(self, pid: int) -> None:
        for file in self.members:
            os.write(file, str(pid).encode())


class Groups(NamedTuple):
    """Open directories in which slots are made. They stay usable after the host has left this file system."""

    name: str
    parents: dict[str, int]  # controller -> directory; version 2 has one directory for all controllers
    limits: dict[str, int]  # controller -> its limit
    apart: bool = True  # commands have a group of their own, on version 1

    @property
    def controllers(self) -> list[str]:
        if _UNIFIED not in self.parents:
            return sorted(self.parents)
        return sorted([*_LIMIT_FILES, *([_SHARE] if _divides(self.parents[_UNIFIED]) else [])])

    def make_slot(self, number: int) -> Slot:
        """OSError: the kernel refuses, or this process may not open more files. Then nothing of it stays open."""
        opened: list[int] = []
        try:
            self._share_among(number + 1)
            if _UNIFIED in self.parents:
                return self._make_unified(number, opened)
            return self._make_divided(number, opened)
        except OSError:
            for file in opened:
                os.close(file)
            raise

    def _share_among(self, slots: int) -> None:
        """All slots together have a share for each: with one alone, a busy host would starve all of them."""
        version = int(_UNIFIED in self.parents)
        parent = self.parents.get(_UNIFIED if version else _SHARE)
        if parent is not None:
            with contextlib.suppress(OSError):
                shares = _ONE_SHARE[version] * min(slots, _MOST_SHARES)
                _write_at(parent, _SHARE_FILES[version], str(shares))

    def _make_unified(self, number: int, opened: list[int]) -> Slot:
        directory = _make_directory(self.parents[_UNIFIED], f"m{number}")
        opened.append(directory)
        for controller, (_, file) in _LIMIT_FILES.items():
            _write_at(directory, file, str(self.limits[controller]))
        with contextlib.suppress(OSError):  # not every kernel counts swap
            _write_at(directory, "memory.swap.max", "0")
        return Slot(directory, [], os.open(_EVENT_FILES[1], os.O_RDONLY, dir_fd=directory))

    def _make_divided(self, number: int, opened: list[int]) -> Slot:
        members, events, commands = [], None, None
        for controller, parent in self.parents.items():
            directory = _make_directory(parent, f"m{number}")
            try:
                own = _OWN if self.apart and controller == "memory" else 0
                if controller in self.limits:
                    _write_at(directory, _LIMIT_FILES[controller][0], str(self.limits[controller] + own))
                members.append(os.open("cgroup.procs", os.O_WRONLY, dir_fd=directory))
                opened.append(members[-1])
                if controller == "memory":
                    events = os.open(_EVENT_FILES[0], os.O_RDONLY, dir_fd=directory)
                    opened.append(events)
                    if self.apart:
                        commands = self._make_commands(directory)
                        opened.append(commands)
            finally:
                os.close(directory)
        return Slot(None, members, events, commands)

    def _make_commands(self, slot: int) -> int:
        directory = _make_directory(slot, _COMMANDS)
        try:
            _write_at(directory, _LIMIT_FILES["memory"][0], str(self.limits["memory"]))
            return os.open("tasks", os.O_WRONLY | os.O_CLOEXEC, dir_fd=directory)
        finally:
            os.close(directory)

    def remove(self) -> None:
        """Remove the groups. A group that still has a dying process in it stays; it is harmless."""
        for parent in self.parents.values():
            names = [name for name in os.listdir(parent) if name[:1] == "m" and name[1:].isdigit()]
            for name in [*(f"{name}/{_COMMANDS}" for name in names), *names, f"../{self.name}"]:
                with contextlib.suppress(OSError):
                    os.rmdir(name, dir_fd=parent)


def find(memory: int, processes: int) -> Groups | None:
    """Groups for our machines; None if the kernel or the permissions do not allow any."""
    # a process of another pid namespace, in another container for example, may have the same pid
    name = f"rollmill-{os.getpid()}-{os.stat('/proc/self/ns/pid').st_ino}"
    limits = {"memory": memory, "pids": processes + 1}  # and the cloner
    own = _own_groups()
    if _UNIFIED in own:
        mount = _ROOT if os.path.exists(f"{_ROOT}/cgroup.controllers") else f"{_ROOT}/unified"
        directory = _nearest(mount, own[_UNIFIED], name, unified=True)
        if directory is not None:
            return Groups(name, {_UNIFIED: directory}, limits)
    parents = {}
    for controller in (*_LIMIT_FILES, _SHARE):
        if controller in own:
            directory = _nearest(f"{_ROOT}/{controller}", own[controller], name, unified=False)
            if directory is not None:
                parents[controller] = directory
    return Groups(name, parents, limits) if parents else None


def _own_groups() -> dict[str, str]:
    """Returns controller -> path of the group of this process."""
    groups = {}
    with contextlib.suppress(OSError), open("/proc/self/cgroup") as lines:
        for line in lines:
            _, controllers, path = line.rstrip("\n").split(":", 2)
            groups.update(dict.fromkeys(controllers.split(","), path))
    return groups


def _nearest(mount: str, own: str, name: str, *, unified: bool) -> int | None:
    """Creates a directory below the nearest ancestor of `own` that allows these controllers, and opens it."""
    ancestor = own
    while True:
        above = mount + ancestor.rstrip("/")
        _sweep(above)
        with contextlib.suppress(OSError):  # left by one that had our process id: `_sweep` sees a process with it
            _remove_unlocked(f"{above}/{name}")
        with contextlib.suppress(OSError):
            directory = _make_locked(f"{above}/{name}")
            try:
                if unified:
                    _write_at(directory, "cgroup.subtree_control", "+memory +pids")
                    with contextlib.suppress(OSError):  # it is not always delegated
                        _write_at(directory, "cgroup.subtree_control", f"+{_SHARE}")
                return directory
            except OSError:
                os.close(directory)
                os.rmdir(f"{above}/{name}")
        if ancestor == "/":
            return None
        ancestor = os.path.dirname(ancestor)


def _make_locked(path: str) -> int:
    """Create and open a directory that others do not sweep while this process, or who gets the open file, is alive."""
    while True:
        with contextlib.suppress(OSError):  # a killed owner had this name: pid and namespace may come again after it
            _remove_unlocked(path)
        os.mkdir(path)
        with contextlib.suppress(FileNotFoundError):  # somebody swept it before it was locked
            directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(directory, fcntl.LOCK_EX)
            if os.path.exists(path):
                return directory
            os.close(directory)


def sweep() -> None:
    """Remove the groups of machine hosts that were killed, wherever `find` may have made them."""
    own = _own_groups()
    mounts = [(f"{_ROOT}/{controller}", own[controller]) for controller in (*_LIMIT_FILES, _SHARE) if controller in own]
    if _UNIFIED in own:
        mounts += [(_ROOT, own[_UNIFIED]), (f"{_ROOT}/unified", own[_UNIFIED])]
    for mount, path in mounts:
        while path != "/":
            _sweep(mount + path)
            path = os.path.dirname(path)
        _sweep(mount)


def _sweep(directory: str) -> None:
    """A group with a dying process in it stays until the next time. One whose owner is not seen here may be of another
    pid namespace: it is locked while that lives."""
    with contextlib.suppress(OSError):
        for name in os.listdir(directory):
            owner = name.removeprefix("rollmill-")
            if owner != name and not os.path.exists(f"/proc/{owner.partition('-')[0]}"):
                with contextlib.suppress(OSError):
                    _remove_unlocked(f"{directory}/{name}")


def _remove_unlocked(path: str) -> None:
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(directory), os.stat(path)):
            return  # it was removed before it was locked, and the path is another one's now
        groups = [entry.path for entry in os.scandir(path) if entry.is_dir()]
        for group in [*(f"{group}/{_COMMANDS}" for group in groups), *groups, path]:
            with contextlib.suppress(OSError):
                os.rmdir(group)
    finally:
        os.close(directory)


def _divides(directory: int) -> bool:
    """Whether groups below a version 2 group have shares."""
    file = os.open("cgroup.subtree_control", os.O_RDONLY, dir_fd=directory)
    try:
        return _SHARE.encode() in os.read(file, 4096).split()
    finally:
        os.close(file)


def _make_directory(parent: int, name: str) -> int:
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, dir_fd=parent)
    return os.open(name, os.O_RDONLY | os.O_DIRECTORY, dir_fd=parent)


def _write_at(directory: int, name: str, text: str) -> None:
    file = os.open(name, os.O_WRONLY, dir_fd=directory)
    try:
        os.write(file, text.encode())
    finally:
        os.close(file)
