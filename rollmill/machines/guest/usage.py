"""Counts the memory and the processes of a machine, in pid 1. Where a control group counts memory, only sockets.

It adds up the private memory of every command (pages that forks share count for each of them), all files, and for each
open file and socket the most that its buffers can hold. The filter of system calls (seccomp.py) refuses other kinds of
memory, and /dev/zero cannot be mapped (root.py). Control groups of version 1 do not count what TCP sockets hold.
"""

from __future__ import annotations

import os
from typing import Literal, NamedTuple

_PAGE = os.sysconf("SC_PAGE_SIZE")
_PIPE_BYTES = 16 * _PAGE  # the kernel's default; the filter refuses to change it
# net.core.rmem_default + wmem_default. agent.py bounds TCP at less, and the filter ignores requests for more.
_SOCKET_BYTES = 2 * 212992


class Watchdog(NamedTuple):
    processes: int
    memory: int
    counted: bool  # a control group bounds the memory of processes and files
    sockets: int  # an open /proc/net/sockstat; agent.py hides its name
    interval_s: float  # between two counts
    places: tuple[str, ...]  # directories whose file systems are in memory

    def exceeded(self) -> Literal["memory", "processes"] | None:
        commands = [int(name) for name in os.listdir("/proc") if name.isdigit() and name != "1"]
        if len(commands) > self.processes:
            return "processes"
        used = int(os.pread(self.sockets, 256, 0).split()[2]) * _SOCKET_BYTES  # "sockets: used 3\nTCP: …"
        if not self.counted:
            used += sum(map(_private, commands)) + self._files() + sum(map(_open_files, commands)) * _PIPE_BYTES
        return "memory" if used > self.memory else None

    def _files(self) -> int:
        status = [os.statvfs(directory) for directory in self.places]
        return sum((each.f_blocks - each.f_bfree) * each.f_frsize for each in status)


def _private(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/statm", "rb") as statm:
            _, resident, shared, *_ = statm.read().split()
            return (int(resident) - int(shared)) * _PAGE
    except (OSError, ValueError):
        return 0  # it has just ended


def _open_files(pid: int) -> int:
    """The number of open files without the standard streams: the directory's size. Before Linux 6.2 the size is 0;
    such kernels bound the pipes of a user at 64 MiB."""
    try:
        return max(os.stat(f"/proc/{pid}/fd").st_size - 3, 0)
    except OSError:
        return 0
