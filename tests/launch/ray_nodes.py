"""Ray nodes for tests: each on a host of its own (hosts.py), with an address of its own.

The head keeps what it knows in a redis-server outside of all nodes, if there is one: then it too may be lost.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.launch.hosts import Host, need_hosts, start_host
from tests.processes import free_port

PATIENCE_S = 240.0  # against hangs only
WORKER_PORTS = 20_000  # Ray refuses an address among those that it gives to its workers
QUICK = {  # a node that does not answer is lost after about two seconds, not after half a minute
    "RAY_health_check_initial_delay_ms": "500",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "10000",
    "RAY_health_check_failure_threshold": "4",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "300",  # nodes wait that long for a lost head
    "RAY_raylet_start_wait_time_s": "200",  # on a busy host half a minute is not enough for a node to start
    "RAY_prestart_worker_first_driver": "0",  # Ray would start a worker per CPU that nobody needs
    "RAY_enable_worker_prestart": "0",
    "RAY_worker_niceness": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "OMP_NUM_THREADS": "1",
}


@dataclass
class Node(Host):
    address: str


@dataclass
class Nodes:
    directory: Path
    seen: Path
    environment: Mapping[str, str]
    redis: str  # HOST:PORT; empty: a lost head forgets everything
    port: int = field(default_factory=lambda: next(port for port in iter(free_port, None) if port > WORKER_PORTS))
    alive: list[Node] = field(default_factory=list)  # the head first
    started: int = 0

    @property
    def address(self) -> str:
        return f"127.0.0.2:{self.port}"

    @property
    def head(self) -> Node:
        return self.alive[0]

    def start_head(self) -> Node:
        """Start the head, also again after it was lost: its address stays the same."""
        options = ["--head", f"--port={self.port}", "--include-dashboard=false", "--num-cpus=0"]
        node = self._start("127.0.0.2", options, {"RAY_REDIS_ADDRESS": self.redis} if self.redis else {})
        self.alive.insert(0, node)
        return node

    def start_worker(self) -> Node:
        node = self._start(f"127.0.0.{self.started + 2}", [f"--address={self.address}", "--num-cpus=8"], {})
        self.alive.append(node)
        return node

    def _start(self, own: str, options: Sequence[str], environment: Mapping[str, str]) -> Node:
        self.started += 1
        ray = [str(Path(sys.executable).parent / "ray"), "start", "--block", f"--node-ip-address={own}"]
        ray += ["--disable-usage-stats", "--include-log-monitor=false", "--object-store-memory=80000000"]
        log = self.directory / f"node-{self.started}.log"
        command = [*ray, "--labels=region=home", *options]
        process = start_host(command, self.seen, log, {**QUICK, **self.environment, **environment})
        return Node(log, process, own)

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
def redis_server(directory: Path) -> Iterator[str]:
    """Yields its address; empty if none is installed."""
    program = shutil.which("redis-server")
    if program is None:
        yield ""
        return
    port, log = free_port(), directory / "redis.log"
    options = ["--bind", "127.0.0.1", "--port", str(port), "--save", "", "--dir", str(directory)]
    process = subprocess.Popen([program, *options], stdout=log.open("wb"), stderr=subprocess.STDOUT)
    try:
        while b"Ready to accept connections" not in log.read_bytes():
            assert process.poll() is None, log.read_text()
            time.sleep(0.05)
        yield f"127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def ray_nodes(directory: Path, seen: Path, environment: Mapping[str, str]) -> Iterator[Nodes]:
    """A head and two workers, in the region `home`."""
    pytest.importorskip("ray")
    need_hosts()
    with redis_server(directory) as redis:
        nodes = Nodes(directory, seen, environment, redis)
        try:
            nodes.wait([nodes.start_head()])
            nodes.wait([nodes.start_worker() for _ in range(2)])
            yield nodes
        finally:
            for node in reversed(nodes.alive):
                node.kill()
