"""The supervisor of a run on a node of a cluster, whatever the cluster is: a process that drives the run, and what
keeps it alive. It needs nothing of the node but its address; its log and events go to the run's store.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rollmill.backoff import Backoff
from rollmill.errors import StorageError
from rollmill.launch.launcher import FINAL, MAX_RESTARTS, STEADY_S
from rollmill.launch.launchers.node_process import NODE
from rollmill.launch.parent_death import SUPERVISOR
from rollmill.launch.role_inputs import take
from rollmill.runs.exits import describe_exit
from rollmill.runs.shared.outbox import Outbox
from rollmill.runs.shared.presence import RENEW_S, Presence
from rollmill.storage.objects import Objects

STOPPED = 130  # exit code of a supervisor: it was asked to stop
SUPERVISE = "from rollmill.launch.supervise import drive_given; drive_given()"


class Supervisor:
    """Keeps the process alive that drives a run, and says in the run's store that it does."""

    def __init__(
        self,
        handed: dict[str, Any],
        scratch: str,
        node_address: Callable[[], str],
        cluster_address: Callable[[], str],
        leave: Callable[[], None],
    ) -> None:
        self._address, self._environment, self._exit = node_address(), {"RAY_ADDRESS": cluster_address()}, leave
        self._directory = Path(scratch).expanduser() / handed["id"]
        (self._directory / "logs").mkdir(parents=True, exist_ok=True)
        self._handed = {**handed, "path": str(self._directory), "host": self._address}
        objects = Objects.open(take(self._handed).home_store)
        self._presence, self._since, self._renewed = Presence(objects), time.time(), float("-inf")
        self._outbox = Outbox(objects, self._directory, ("events/supervisor.jsonl", "logs/supervisor.log"))
        self._backoff, self._started_at, self._told_to_stop = Backoff(0.5, 10.0), 0.0, False
        self._tell()
        self._process = self._start()
        threading.Thread(target=self._tend, daemon=True).start()

    def ready(self) -> None:
        """Returns when it has started."""

    def _start(self) -> subprocess.Popen[bytes]:
        """Start the process with SIGTERM blocked, so that none is lost while it imports: `drive` lets it in."""
        self._started_at, self._told_to_stop = time.monotonic(), False
        environment = {**os.environ, SUPERVISOR: str(os.getpid()), NODE: self._address}
        with (self._directory / "logs" / "supervisor.log").open("ab") as log, _blocked(signal.SIGTERM):
            log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} the run is driven from node {self._address}\n".encode())
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", SUPERVISE],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**environment, **self._environment},
            )
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin:
            process.stdin.write(json.dumps(self._handed).encode())
        return process

    def _tend(self) -> None:
        """Until the run ends: restart the process if it dies, and stop it if somebody asks."""
        while True:
            time.sleep(1.0)
            code = self._process.poll()
            if code in (0, FINAL, STOPPED):
                break
            if code is not None and not self._restart(code):
                break
            with contextlib.suppress(StorageError):  # the store does not answer now
                self._outbox.send()
                self._tell()
                if not self._told_to_stop and self._presence.asked_to_stop():
                    self._process.terminate()  # once per process: a second one would end its clean-up
                    self._told_to_stop = True
        self._leave()

    def _restart(self, code: int) -> bool:
        """Start the process again. Returns False if it has died too often."""
        if time.monotonic() - self._started_at > STEADY_S:
            self._backoff.reset()
        if self._backoff.failures >= MAX_RESTARTS:
            with (self._directory / "logs" / "supervisor.log").open("a") as log:
                print(f"the supervisor {describe_exit(code)} {MAX_RESTARTS + 1} times: it is given up", file=log)
            return False
        time.sleep(self._backoff.failed())
        self._process = self._start()
        return True

    def _tell(self) -> None:
        if time.monotonic() - self._renewed > RENEW_S:
            self._presence.renew(f"a supervisor on node {self._address}", self._since)
            self._renewed = time.monotonic()

    def _leave(self) -> None:
        with contextlib.suppress(StorageError):
            self._outbox.send()
            self._presence.forget_stop()  # not before: a supervisor that is lost while it stops leaves it to the next
            self._presence.leave()
        self._exit()


@contextlib.contextmanager
def _blocked(number: signal.Signals) -> Iterator[None]:
    """Block a signal for this thread. A process that it starts meanwhile keeps it blocked."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
