"""Processes that keep running between commands, in pid 1: start, state, stop.

A process and everything it starts carry a mark: the hard limits of two resources that the kernel does not use. Children
inherit them, and a process can lower a hard limit but not raise it. The more one half of a mark is, the less the other
is, so no mark can be reached from another one, and none from that of commands, whose halves are both the least. So pid
1 can end the descendants of one process and leave the others alone, also those that left their session or lost their
parent. A process that lowers a half of its own mark only loses its protection.

Output goes to a file without a name, in the machine's temporary directory. It counts as its disk, and nobody has to
read it while the process runs. What a process writes to its terminal, pid 1 moves there.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from rollmill.machines.guest import layout, terminal
from rollmill.machines.guest import run_command as command

MOST = 32  # processes of one machine that run or whose output is still kept
_HALVES = {10: b"Max file locks", resource.RLIMIT_RSS: b"Max resident set"}  # 10: RLIMIT_LOCKS
_LEAST, _PROCESSES = 1 << 40, 1 << 20  # of a half of a mark; that one machine may start, one after the other
COMMAND_MARK = dict.fromkeys(_HALVES, _LEAST)  # as limits
_CHUNKS = 16  # of a terminal's output that are moved at once, so that a flood holds nothing up
_PASSES = 4  # a tree that still has new processes after this many starts them faster than they are killed


Mark = tuple[int, ...]


class Process:
    def __init__(self, pid: int, mark: Mark, output: int, max_output: int, pty: int | None) -> None:
        self.pid = pid
        self.mark = mark
        self.output = output  # an open file
        self.pty = pty  # our end of its terminal, while it has one
        self.max_output = max_output
        self.exit_code: int | None = None
        self.stopped: str | None = None  # the limit that ended it

    def take_output(self) -> None:
        """Move what it wrote to its terminal into its output. What does not fit on the disk is lost."""
        for _ in range(_CHUNKS):
            data = None if self.pty is None else terminal.read(self.pty)
            if data is None:
                return
            if not data:
                return self.close_terminal()
            with contextlib.suppress(OSError):
                os.write(self.output, data)

    def close_terminal(self) -> None:
        if self.pty is not None:
            os.close(self.pty)
            self.pty = None

    def its_terminal(self) -> int:
        """OSError if it has none, or has closed it."""
        if self.pty is None:
            raise OSError(errno.ENOTTY, os.strerror(errno.ENOTTY))
        return self.pty

    def state(self) -> tuple[dict[str, Any], bytes]:
        self.take_output()
        size = os.fstat(self.output).st_size
        half = self.max_output // 2
        data = os.pread(self.output, size if size <= self.max_output else half, 0)
        if size > self.max_output:
            cut = f"\n[… {size - 2 * half} bytes cut]\n".encode()
            data += cut + os.pread(self.output, half, size - half)
        truncated = size > self.max_output
        return {"exit_code": self.exit_code, "truncated": truncated, "stopped": self.stopped}, data


class Processes:
    """All processes of a machine that were started and not yet forgotten."""

    def __init__(self, outputs: int | None = None) -> None:
        """`outputs`: an open directory for what processes print; else it is in layout.TEMPORARY."""
        self._outputs = outputs
        self._by_id: dict[int, Process] = {}
        self._started = 0

    def running(self) -> bool:
        """Whether one may be running: only what was reaped is known to have ended."""
        return any(process.exit_code is None for process in self._by_id.values())

    def start(
        self,
        order: command.Order,
        confinement: command.Confinement,
        open_terminal: Callable[[int, int], tuple[int, int]],
    ) -> int:
        self._started += 1
        mark = (_LEAST + self._started, _LEAST + _PROCESSES - self._started)
        if len(self._by_id) >= MOST or self._started >= _PROCESSES:
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        flags = os.O_TMPFILE | os.O_RDWR | os.O_APPEND | os.O_CLOEXEC
        place = layout.TEMPORARY if self._outputs is None else "."
        output = os.open(place, flags, 0o600, dir_fd=self._outputs)
        ours, its = None, output
        try:
            if order.pty is not None:
                ours, its = open_terminal(*order.pty)
            marked = {**confinement.rlimits, **dict(zip(_HALVES, mark, strict=True))}
            pid = command.start(order, confinement._replace(rlimits=marked), its)
        except BaseException:
            for file in {output, its} if ours is None else {output, its, ours}:
                os.close(file)
            raise
        _wait_for_mark(pid, mark)  # a command that ends before would take it for something that it left running
        if ours is not None:
            os.close(its)
            terminal.write(ours, order.stdin)
        self._by_id[self._started] = Process(pid, mark, output, order.max_output, ours)
        return self._started

    def terminals(self) -> list[int]:
        return [process.pty for process in self._by_id.values() if process.pty is not None]

    def take_output(self) -> None:
        for process in self._by_id.values():
            process.take_output()

    def get(self, identifier: int) -> Process:
        self.reap()
        try:
            return self._by_id[identifier]
        except KeyError:
            raise OSError(errno.ESRCH, os.strerror(errno.ESRCH)) from None

    def stop(self, identifier: int) -> tuple[dict[str, Any], bytes]:
        """End a process and everything it started, and forget it. Returns its last state."""
        process = self.get(identifier)
        self._end(lambda mark: mark == process.mark)
        reply, data = process.state()
        process.close_terminal()
        os.close(process.output)
        del self._by_id[identifier]
        return reply, data

    def stop_all(self, limit: str) -> None:
        """A limit of the machine was reached: everything ends, in one call that no tree can outrun."""
        for process in self._by_id.values():
            process.stopped = process.stopped or (limit if process.exit_code is None else None)
        self._kill_everything()

    def end_command(self, pid: int, limit: str | None) -> int:
        """End what a command left running, and nothing that was started here. Returns the wait status of `pid`.

        If a limit of the machine ended the command, nobody knows who reached it: then everything ends.
        """
        if not self.running():
            return command.end_all(pid)
        for which in [-1, pid] if limit in ("memory", "processes") else [pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(which, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        if limit in ("memory", "processes"):
            self.stop_all(limit)
        own = {process.mark for process in self._by_id.values()}
        self._end(lambda mark: mark not in own)
        return status

    def _end(self, chosen: Callable[[Mark], bool]) -> None:
        """Kill every process whose mark is `chosen`. A tree that outruns this takes all others with it."""
        command.check_first()
        killed: set[int] = set()
        passes = 0
        while passes < _PASSES:
            found = {pid for pid in _pids() if chosen(_mark_of(pid))}
            if not found:
                return
            passes += bool(found - killed)  # a killed process needs a moment to end
            for pid in found - killed:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            killed |= found
            self.reap()
            time.sleep(0.001)
        self._kill_everything()

    def _kill_everything(self) -> None:
        """As `command.end_all`: one call kills all, again until none is left."""
        command.check_first()
        while _pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
            self.reap()
            time.sleep(0.001)

    def reap(self) -> None:
        """Take note of what has ended, orphans included."""
        by_pid = {process.pid: process for process in self._by_id.values()}
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid in by_pid:
                    by_pid[pid].exit_code = os.waitstatus_to_exitcode(status)


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and name != "1"]


def _wait_for_mark(pid: int, mark: Mark) -> None:
    """Returns once a process has its mark, or a lower one that it gave itself, or has ended without one."""
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if (found := _mark_of(pid)) and all(half <= most for half, most in zip(found, mark, strict=True)):
            return
        time.sleep(0.0005)


def _mark_of(pid: int) -> Mark:
    """The mark of a process; empty if it has ended."""
    try:
        with open(f"/proc/{pid}/limits", "rb") as limits:
            lines = limits.readlines()
        hard = [next(line.split()[-2] for line in lines if line.startswith(name)) for name in _HALVES.values()]
        return tuple(sys.maxsize if half == b"unlimited" else int(half) for half in hard)
    except (OSError, ValueError, StopIteration):
        return ()
