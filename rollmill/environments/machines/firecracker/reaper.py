"""Ends the jailed guests of a process that was killed, and deletes their files.

The kernel forgets the signal for a parent's death when the jailer changes the user. So each host has a small process
beside it, this file: it reads a pipe that ends with the host, whatever ends the host. If this process is killed as
well, the next host finds the directory, whose lock nobody holds any more.

    python -I reaper.py DIRECTORY    waits for the end of its input

Only the standard library: it starts in a moment, and takes little memory.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_PREFIX, _LOCK = "fc-", "lock"
_TRIES, _PAUSE_S = 500, 0.02


def claim(parent: str | None) -> tuple[Path, int]:
    """A new directory for jails, and its lock: an open file. First deletes what killed hosts have left in `parent`."""
    reap_abandoned(Path(parent or tempfile.gettempdir()))
    while True:
        directory = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        lock = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if _take(lock):
            return directory, lock
        os.close(lock)  # another host took it for abandoned in this moment


def watch(directory: Path) -> subprocess.Popen[bytes]:
    """Start the process that waits for the end of this one. Close its input and wait for it once all guests ended."""
    argv = [sys.executable, "-I", str(Path(__file__).resolve()), str(directory)]
    return subprocess.Popen(argv, stdin=subprocess.PIPE, cwd="/", start_new_session=True)


def reap_abandoned(parent: Path) -> None:
    for path in parent.glob(f"{_PREFIX}*/{_LOCK}"):
        with contextlib.suppress(OSError):  # of another user, or gone in this moment
            lock = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                if os.fstat(lock).st_uid == os.geteuid() and _take(lock):
                    reap(path.parent)
            finally:
                os.close(lock)


def reap(directory: Path) -> None:
    """Kill every process whose root is a jail in `directory`, and delete the directory."""
    for _ in range(_TRIES):
        jails = {_identity(str(jail)) for jail in directory.glob("*/*/root")} - {None}
        found = [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _root_of(pid) in jails]
        if not found:
            break
        for pid in found:
            _kill(pid, jails)
        time.sleep(_PAUSE_S)
    shutil.rmtree(directory, ignore_errors=True)


def _kill(pid: int, jails: set[tuple[int, int] | None]) -> None:
    with contextlib.suppress(OSError):
        pidfd = os.pidfd_open(pid)
        try:
            if _root_of(pid) in jails:  # still the same process
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        finally:
            os.close(pidfd)


def _root_of(pid: int) -> tuple[int, int] | None:
    return _identity(f"/proc/{pid}/root")


def _identity(path: str) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _take(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError:
        return False


if __name__ == "__main__":
    sys.stdin.buffer.read()
    reap(Path(sys.argv[1]))
