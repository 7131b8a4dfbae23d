"""Hosts for tests: each is a container of its own as far as files, processes and its name go.

A host has its own mount and process namespaces: an empty /tmp, which hides all directories of the others and of the
test, and its own home below it. Killing its first process kills everything on it at once, as a lost host would.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

# $1, $2: directories that the node sees too (the socket of PostgreSQL; this repository). The rest is the command.
INSIDE = """
mount --rbind /tmp /mnt && mount -t tmpfs tmpfs /tmp && mkdir /tmp/home
for seen in "$1" "$2"; do
  case "$seen" in /tmp/*) mkdir -p "$seen" && mount --rbind "/mnt${seen#/tmp}" "$seen" ;; esac
done
umount -l /mnt
export HOME=/tmp/home
shift 2; exec "$@"
"""
REPOSITORY = Path(__file__).parents[2]
NAMED = 'hostname "$0" && echo ready && exec sleep infinity'


@dataclass
class Host:
    log: Path
    process: subprocess.Popen[bytes]

    @property
    def first(self) -> int:
        """The pid of its first process, as this process sees it."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(children[0])

    def run(self, *command: str, **options: object) -> subprocess.Popen[str]:
        """Start a command on the host."""
        enter = ["nsenter", "-t", str(self.first), "-m", "-p", "-u", "env", "HOME=/tmp/home", *command]
        return subprocess.Popen(enter, text=True, start_new_session=True, **options)  # type: ignore[call-overload,no-any-return]

    def signal(self, number: int) -> None:
        """Send a signal to all processes but the first."""
        first = self.first
        space = os.readlink(f"/proc/{first}/ns/pid")
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if os.readlink(entry / "ns" / "pid") == space and int(entry.name) != first:
                    os.kill(int(entry.name), number)

    def kill(self) -> None:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, IndexError):
            os.kill(self.first, signal.SIGKILL)
        self.process.wait(60)


def need_hosts() -> None:
    if os.getuid() != 0 or shutil.which("unshare") is None or shutil.which("nsenter") is None:
        pytest.skip("hosts with files of their own need root, unshare and nsenter")


def start_host(
    command: Sequence[str], seen: Path, log: Path, environment: Mapping[str, str], *options: str
) -> subprocess.Popen[bytes]:
    """Start a host whose first process is `command`. `options`: those of unshare."""
    unshare = ["unshare", "-m", "-p", *options, "--fork", "--mount-proc", "--kill-child"]
    return subprocess.Popen(
        [*unshare, "bash", "-c", INSIDE, "bash", str(seen), str(REPOSITORY), *command],
        stdout=log.open("wb"),
        stderr=subprocess.STDOUT,
        env={**os.environ, **environment},
        start_new_session=True,
    )


@contextlib.contextmanager
def named_host(name: str, directory: Path, seen: Path) -> Iterator[Host]:
    """A host with a name of its own, on which nothing runs yet."""
    need_hosts()
    log = directory / f"{name}.log"
    host = Host(log, start_host(["bash", "-c", NAMED, name], seen, log, {}, "-u"))
    try:
        while b"ready" not in log.read_bytes():
            assert host.process.poll() is None, log.read_text()
            time.sleep(0.05)
        yield host
    finally:
        host.kill()
