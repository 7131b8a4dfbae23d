"""Launcher: starts, watches and stops the roles of a run. `[cluster] kind` names one; implementations in `launchers/`.

    supervisor (supervise.py)  ──►  Launcher  ──►  role processes: on this host, or anywhere in a cluster

The supervisor decides what has to run; a launcher knows where. `local` has the supervisor in the process of the command
itself, `ray` on a node of the cluster.
"""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from rollmill import telemetry
from rollmill.backoff import Backoff

if TYPE_CHECKING:
    from rollmill.runs.run import RunConfig, RunDirectory

MAX_RESTARTS = 5  # of one role; after that a restart will not help either
STEADY_S = 600.0  # a role that ran this long starts with a fresh count of restarts
FINAL = 3  # exit code of a role process: a restart will not help, its log says why
TERMINATED = 128 + signal.SIGTERM  # exit code of a role process: it was asked to stop before its work was done


@dataclass
class Role:
    """What a launcher was asked to start: one process, or several ranks that start and end together. `ended`: all
    exited with 0, the work is done. A service never ends by itself: whenever it exits it is restarted."""

    name: str
    arguments: tuple[str, ...]
    threads: int
    service: bool
    ranks: int
    started_at: float = 0.0
    backoff: Backoff = field(default_factory=lambda: Backoff(0.2, 3.0))  # counts the restarts
    ended: bool = False

    def may_restart(self, code: int) -> bool:
        """Whether a restart after this exit code may help."""
        if time.monotonic() - self.started_at > STEADY_S:
            self.backoff.reset()
        return code != FINAL and self.backoff.failures < MAX_RESTARTS

    def wait_for_restart(self, code: int) -> None:
        """Record one more restart, and sleep before it."""
        pause = self.backoff.failed()
        telemetry.emit("restart", target=self.name, exit_code=code, restarts=self.backoff.failures)
        time.sleep(pause)


class Launcher(Protocol):
    """The roles of one run."""

    def start(self, role: str, *arguments: str, threads: int = 1, service: bool = False, ranks: int = 1) -> None:
        """Start a role: one process, or `ranks` that start and end together. A service never ends by itself."""
        ...

    def rescale(self, run: RunDirectory) -> None:
        """The run has other engines from now on. Ends those that it has no more, and those that must move to another
        GPU; the caller starts what is missing. Raises ConfigError before anything ends if there are too few GPUs."""
        ...

    def running(self) -> list[str]:
        """The roles that were started and have not ended."""
        ...

    def ended(self, role: str) -> bool:
        """Whether a role's work is done."""
        ...

    def watch(self) -> None:
        """Look at every role once, and restart those that died. Raises RollmillError if one cannot be kept alive."""
        ...

    def stop_roles(self) -> None:
        """Stop all roles. Others may be started afterwards."""
        ...

    def stop(self) -> None: ...


class Cluster(Protocol):
    """What `[cluster] kind = …` names. Constructed with its settings."""

    elsewhere: bool
    """Whether the supervisor lives in the cluster. Otherwise it is the command itself."""

    def check(self, config: RunConfig) -> None:
        """Raises ConfigError if the run cannot be started there."""
        ...

    def open(self, run: RunDirectory) -> Launcher:
        """Called by the supervisor, where it runs."""
        ...

    def submit(self, run: RunDirectory) -> None:
        """Start a supervisor that outlives this process, unless one drives the run already."""
        ...

    def collect(self, run: RunDirectory) -> str | None:
        """Bring new events and logs into the run's directory. Returns where the supervisor is; None if none drives the
        run."""
        ...

    def halt(self, run: RunDirectory) -> None:
        """Ask the supervisor to stop. It stops all roles that it started, and then releases the run's lock."""
        ...
