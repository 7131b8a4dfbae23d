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
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_PREFIX, _LOCK = "fc-", "lock"
_TRIES, _PAUSE_S = 500, 0.02
Identity = tuple[int, int]  # of a directory: device and inode


def claim(parent: str | None) -> tuple[Path, int]:
    """A new directory for jails, and its lock: an open file. First deletes what killed hosts have left in `parent`."""
    reap_abandoned(Path(parent or tempfile.gettempdir()))
    while True:
        directory = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        lock = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if _take(lock) and (directory / _LOCK).exists():
            return directory, lock
        os.close(lock)  # another host took it for abandoned in this moment, and deletes it or has done so


def watch(directory: Path) -> subprocess.Popen[bytes]:
    """Start the process that waits for the end of this one. Close its input and wait for it once all guests ended."""
    argv = [sys.executable, "-I", str(Path(__file__).resolve()), str(directory)]
    return subprocess.Popen(argv, stdin=subprocess.PIPE, cwd="/", start_new_session=True)


def reap_abandoned(parent: Path) -> None:
    for directory in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # it has no lock, or is gone in this moment
            if not _is_own(directory):
                continue
            lock = os.open(directory / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                if _take(lock):
                    reap(directory)
            finally:
                os.close(lock)


def _is_own(path: Path) -> bool:
    """A directory of this user. Others may write to `parent`: what is theirs, or a link, could name any process."""
    status = path.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()


def reap(directory: Path) -> None:
    """Kill every process whose root is a jail in `directory`, and delete the directory."""
    for _ in range(_TRIES):
        jails = _jails(directory)
        found = [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _root_of(pid) in jails]
        if not found:
            break
        for pid in found:
            _kill(pid, jails)
        time.sleep(_PAUSE_S)
    shutil.rmtree(directory, ignore_errors=True)


def _jails(directory: Path) -> set[Identity]:
    found = [_identity(jail) for jail in directory.glob("*/*/root") if jail.is_dir() and not jail.is_symlink()]
    return {identity for identity in found if identity is not None}


def _kill(pid: int, jails: set[Identity]) -> None:
    with contextlib.suppress(OSError):
        pidfd = os.pidfd_open(pid)
        try:
            if _root_of(pid) in jails:  # still the same process
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        finally:
            os.close(pidfd)


def _root_of(pid: int) -> Identity | None:
    return _identity(f"/proc/{pid}/root")


def _identity(path: str | Path) -> Identity | None:
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
