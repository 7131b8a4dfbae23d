"""What a launcher starts on a node of a cluster, whatever the cluster is: the keeper of one role process, and the
supervisor of a run. Both live in a process that the cluster keeps alive, and need nothing of the node but its address.

Their logs and events go to the run's store every few seconds; the directory on the node is a cache.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rollmill.backoff import Backoff
from rollmill.cluster.handed import take
from rollmill.cluster.launcher import FINAL, MAX_RESTARTS, STEADY_S, STOP_PATIENCE_S
from rollmill.cluster.launchers.local import describe_exit, last_words
from rollmill.cluster.nursery import SUPERVISOR, Child, Nursery, end_with_parent
from rollmill.cluster.outbox import Outbox, bring
from rollmill.cluster.ports import free_ports
from rollmill.cluster.presence import RENEW_S, Presence
from rollmill.errors import RollmillError, StorageError
from rollmill.storage.objects import Objects

SEND_S = 2.0  # between two sendings of new logs and events
STOPPED = 130  # exit code of a supervisor: it was asked to stop
SUPERVISE = "from rollmill.cluster.launchers.keeper import supervise; supervise()"
NODE = "ROLLMILL_NODE_ADDRESS"  # environment variable of a supervisor's process: the address of its node


class Keeper:
    """One role process on its node."""

    def __init__(self, run_id: str, store: str, name: str, scratch: str, node_address: Callable[[], str]) -> None:
        self._address = node_address()
        self._name, self._directory = name, Path(scratch).expanduser() / run_id
        for folder in ("events", "logs"):
            (self._directory / folder).mkdir(parents=True, exist_ok=True)
        self._nursery = Nursery()
        self._child: Child | None = None
        self._doing: str | None = None
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
        self._child = self._nursery.start(
            role,
            {**handed, "path": str(self._directory), "host": self._address},
            arguments,
            name=f"rollmill {self._name} {self._directory}",
            environment=environment,
            log=self._directory / "logs" / f"{self._name}.log",
        )
        self._doing = doing

    def poll(self) -> tuple[str | None, int | None, str]:
        """What it does (None: nothing yet on this node), its exit code, and the end of its log if it has failed."""
        code = self._child.poll() if self._child is not None else None
        return self._doing, code, last_words(self._directory / "logs", self._name) if code else ""

    def end(self, patience_s: float = STOP_PATIENCE_S) -> None:
        if self._child is not None:
            self._child.signal(signal.SIGTERM)
            if self._child.wait(patience_s) is None:
                self._child.signal(signal.SIGKILL)
                self._child.wait(STOP_PATIENCE_S)
        self._child = self._doing = None
        self._send()

    def _send_forever(self) -> None:
        while True:
            time.sleep(SEND_S)
            self._send()

    def _send(self) -> None:
        with self._sending, contextlib.suppress(StorageError):  # the store does not answer now: next time
            self._outbox.send()


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


def supervise() -> None:
    """The process of a supervisor: drives the run that it is handed on stdin, and writes its report."""
    from rollmill.cluster.drive import drive
    from rollmill.cluster.prepare import need_tokenizer
    from rollmill.cluster.report import report_run

    end_with_parent()
    run = take(json.load(sys.stdin))
    objects = Objects.open(run.home_store)
    try:
        drive(run)
        everything = replace(run, path=run.path / "report", service_of=run.path)  # events of all nodes
        time.sleep(SEND_S)  # the supervisor's own last ones are on their way
        bring(objects, everything.path)
        need_tokenizer(run)
        report_run(everything)
    except KeyboardInterrupt:
        sys.exit(STOPPED)
    except RollmillError as error:
        print(error, file=sys.stderr)
        sys.exit(FINAL)
