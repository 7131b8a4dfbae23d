"""What keeps one role process on a node of a cluster, whatever the cluster is. It lives in a process that the cluster
keeps alive (on Ray an actor), and needs nothing of the node but its address. Those of one node share a fork server.

Logs and events go to the run's store every few seconds; the directory on the node is a cache. A new engine waits for
this module to be imported, so it imports little.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rollmill.errors import StorageError
from rollmill.launch.fork_server import Child, ForkServer
from rollmill.runs.exits import STOP_PATIENCE_S, last_words
from rollmill.runs.free_ports import free_ports
from rollmill.runs.shared.outbox import Outbox
from rollmill.storage.objects import Objects

SEND_S = 2.0  # between two sendings of new logs and events
NODE = "ROLLMILL_NODE_ADDRESS"  # environment variable of a supervisor's process: the address of its node


class NodeProcess:
    """One role process on its node."""

    def __init__(self, run_id: str, store: str, name: str, scratch: str, node_address: Callable[[], str]) -> None:
        self._address = node_address()
        self._name, self._directory = name, Path(scratch).expanduser() / run_id
        for folder in ("events", "logs"):
            (self._directory / folder).mkdir(parents=True, exist_ok=True)
        # nodes may share the directory
        self._fork_server = ForkServer(self._directory / f"fork-server-{self._address}")
        self._child: Child | None = None
        self._doing: str | None = None
        self._refused: str | None = None  # why the process could not be started
        files = (f"events/{name}.jsonl", f"logs/{name}.log")
        self._outbox, self._sending = Outbox(Objects.open(store), self._directory, files), threading.Lock()
        threading.Thread(target=self._send_forever, daemon=True).start()

    def meeting(self) -> tuple[str, int]:
        """An address of this node where ranks can meet."""
        return self._address, free_ports(1, self._address)[0]

    def begin(
        self,
        doing: str,
        role: str,
        handed: Mapping[str, Any],
        arguments: Sequence[str],
        environment: Mapping[str, str],
        again: bool,
    ) -> None:
        """Start the process, unless it does this already. `again`: start it anyway."""
        if self._child is not None and self._doing == doing and not again:
            return
        self.end()
        self._doing = doing
        try:
            self._child = self._fork_server.start(
                role,
                {**handed, "path": str(self._directory), "host": self._address},
                arguments,
                name=f"rollmill {self._name} {self._directory}",
                environment=environment,
                log=self._directory / "logs" / f"{self._name}.log",
            )
        except (OSError, subprocess.SubprocessError) as error:  # nobody waits for this method: `poll` tells
            self._refused = f"no fork server on node {self._address}: {error}"

    def poll(self) -> tuple[str | None, int | None, str]:
        """What it does (None: nothing yet on this node), its exit code, and the end of its log if it has failed."""
        if self._refused is not None:
            return self._doing, 1, self._refused
        code = self._child.poll() if self._child is not None else None
        return self._doing, code, last_words(self._directory / "logs", self._name) if code else ""

    def end(self, patience_s: float = STOP_PATIENCE_S) -> None:
        if self._child is not None:
            self._child.signal(signal.SIGTERM)
            if self._child.wait(patience_s) is None:
                self._child.signal(signal.SIGKILL)
                self._child.wait(STOP_PATIENCE_S)
        self._child = self._doing = self._refused = None
        self._send()

    def _send_forever(self) -> None:
        while True:
            time.sleep(SEND_S)
            self._send()

    def _send(self) -> None:
        with self._sending, contextlib.suppress(StorageError):  # the store does not answer now: next time
            self._outbox.send()
