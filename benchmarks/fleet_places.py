"""Where runs of benchmarks.fleet live: a real S3 server (moto), and a Ray cluster of one node."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from rollmill.runs.free_ports import free_ports

KEYS = {"AWS_ALLOW_HTTP": "true", "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_REGION": "us-east-1"}


@contextlib.contextmanager
def s3() -> Iterator[str]:
    """A moto server. Yields the URL of a prefix in a bucket."""
    [port] = free_ports(1)
    server = subprocess.Popen(
        [str(Path(sys.executable).parent / "moto_server"), "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        for _ in range(600):
            with contextlib.suppress(OSError):
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
                connection.request("PUT", "/fleet")
                connection.getresponse()
                break
            time.sleep(0.1)
        os.environ.update({**KEYS, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"})
        yield "s3://fleet/runs"
    finally:
        server.kill()
        server.wait()


@contextlib.contextmanager
def ray_node() -> Iterator[str]:
    """A Ray cluster of one node: this host. Yields its address."""
    port = next(port for port in free_ports(50) if port > 20_000)  # Ray gives lower ones to its workers
    program = str(Path(sys.executable).parent / "ray")
    settings = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0", "RAY_raylet_start_wait_time_s": "300"}
    environment = {**os.environ, **settings, "PYTHONPATH": os.getcwd()}
    options = ["--num-cpus=8", "--include-dashboard=false", "--include-log-monitor=false", "--block"]
    with tempfile.TemporaryFile() as log:
        node = subprocess.Popen(
            [program, "start", "--head", f"--port={port}", "--node-ip-address=127.0.0.2", *options],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        try:
            while b"Ray runtime started" not in os.pread(log.fileno(), 1 << 20, 0):
                if node.poll() is not None:
                    raise SystemExit(f"Ray does not start: {os.pread(log.fileno(), 1 << 20, 0).decode()}")
                time.sleep(0.2)
            yield f"127.0.0.2:{port}"
        finally:
            import ray

            ray.shutdown()  # a driver whose cluster has ended aborts the process, and nobody sees why
            with contextlib.suppress(ProcessLookupError):
                os.killpg(node.pid, signal.SIGTERM)
            node.wait()
