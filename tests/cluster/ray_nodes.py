"""Ray nodes for tests: each is a container of its own as far as files and processes go, with an address of its own.

A node has its own mount and process namespaces: an empty /tmp, which hides all directories of the others and of the
test, and its own home below it. Killing its first process kills everything on it at once, as a lost host would.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.processes import free_port

PATIENCE_S = 240.0  # against hangs only
WORKER_PORTS = 20_000  # Ray refuses an address among those that it gives to its workers
# $1: a directory that the node sees too (the socket of PostgreSQL). The rest is the command.
INSIDE = """
mount --bind "$1" /mnt && mount -t tmpfs tmpfs /tmp && mkdir -p "$1" /tmp/home && mount --bind /mnt "$1"
export HOME=/tmp/home
shift; exec "$@"
"""
QUICK = {  # a node that does not answer is lost after about two seconds, not after half a minute
    "RAY_health_check_initial_delay_ms": "500",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "10000",
    "RAY_health_check_failure_threshold": "4",
    "RAY_worker_niceness": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "OMP_NUM_THREADS": "1",
}


@dataclass
class Node:
    address: str
    log: Path
    process: subprocess.Popen[bytes]

    @property
    def first(self) -> int:
        """The pid of its first process, as this process sees it."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(children[0])

    def run(self, *command: str, **options: object) -> subprocess.Popen[str]:
        """Start a command on the node."""
        enter = ["nsenter", "-t", str(self.first), "-m", "-p", "env", "HOME=/tmp/home", *command]
        return subprocess.Popen(enter, text=True, start_new_session=True, **options)  # type: ignore[call-overload,no-any-return]

    def kill(self) -> None:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, IndexError):
            os.kill(self.first, signal.SIGKILL)
        self.process.wait(60)


@dataclass
class Nodes:
    directory: Path
    seen: Path
    environment: Mapping[str, str]
    port: int = field(default_factory=lambda: next(port for port in iter(free_port, None) if port > WORKER_PORTS))
    alive: list[Node] = field(default_factory=list)
    started: int = 0

    @property
    def address(self) -> str:
        return f"127.0.0.2:{self.port}"

    @property
    def head(self) -> Node:
        return self.alive[0]

    def start(self, *options: str) -> Node:
        """Start one more node; the first one is the head."""
        self.started += 1
        own = f"127.0.0.{self.started + 1}"
        which = ["--head", f"--port={self.port}", "--include-dashboard=false"]
        if self.alive:
            which = [f"--address={self.address}"]
        ray = [str(Path(sys.executable).parent / "ray"), "start", "--block", f"--node-ip-address={own}"]
        ray += ["--disable-usage-stats", "--include-log-monitor=false", "--object-store-memory=80000000"]
        log = self.directory / f"node-{self.started}.log"
        unshare = ["unshare", "-m", "-p", "--fork", "--mount-proc", "--kill-child"]
        process = subprocess.Popen(
            [*unshare, "bash", "-c", INSIDE, "bash", str(self.seen), *ray, *which, *options],
            stdout=log.open("wb"),
            stderr=subprocess.STDOUT,
            env={**os.environ, **QUICK, **self.environment},
            start_new_session=True,
        )
        node = Node(own, log, process)
        self.alive.append(node)
        return node

    def wait(self, nodes: Sequence[Node]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        for node in nodes:
            while b"Ray runtime started" not in node.log.read_bytes():
                assert node.process.poll() is None and time.monotonic() < deadline, node.log.read_text()
                time.sleep(0.1)

    def lose(self, address: str) -> None:
        """Kill everything on a node."""
        node = next(node for node in self.alive if node.address == address)
        self.alive.remove(node)
        node.kill()


@contextlib.contextmanager
def ray_nodes(directory: Path, seen: Path, environment: Mapping[str, str]) -> Iterator[Nodes]:
    pytest.importorskip("ray")
    if os.getuid() != 0 or shutil.which("unshare") is None or shutil.which("nsenter") is None:
        pytest.skip("nodes with files of their own need root, unshare and nsenter")
    nodes = Nodes(directory, seen, environment)
    try:
        yield nodes
    finally:
        for node in reversed(nodes.alive):
            node.kill()
