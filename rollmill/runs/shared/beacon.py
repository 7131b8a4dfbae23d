"""A run that a process of this host drives, told through its store: for commands on other hosts.

While the run is driven, its store says who drives it (presence.py) and gets its logs and events (outbox.py). Whoever
reaches the store may ask for a stop. A run whose store is a directory needs none of this: its directory tells.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time

from rollmill.errors import RollmillError, StorageError
from rollmill.runs.opening import describe_run, need_index
from rollmill.runs.run import RunDirectory
from rollmill.runs.shared.outbox import Outbox, bring
from rollmill.runs.shared.presence import LEASE_S, LONGEST, RENEW_S, Presence

LOOK_S = 2.0
_FAILURES = (RollmillError, OSError)  # the store does not answer now, or a file cannot be read: the next look may


class Beacon(contextlib.AbstractContextManager["Beacon"]):
    """Held by the supervisor. A store that does not answer delays what it tells, and stops nothing. A supervisor that
    was away for so long that another host has taken the run over is stopped: two must not drive it."""

    def __init__(self, run: RunDirectory) -> None:
        self._run, self._objects = run, run.objects()
        self._presence, self._since = Presence(self._objects), time.time()
        self._name = f"process {os.getpid()}{_place(run)}"[:LONGEST]
        self._told = self._asked = False
        self._renewed = self._looked = float("-inf")
        self._successor: str | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True, name="beacon")

    def __enter__(self) -> Beacon:
        """Raises RollmillError if another host drives the run, or has its index."""
        if (where := driven_elsewhere(self._run)) is not None:
            raise RollmillError(
                f"{self._run.home_store} is driven by {where}",
                hint=f"`rollmill stop {self._run.home_store}` stops it; a lost host is forgotten after {LEASE_S:.0f} s",
            )
        need_index(self._run)
        self._outbox = Outbox(self._objects, self._run.path, _files(self._run))  # what was brought is not sent again
        with contextlib.suppress(*_FAILURES):
            self._look()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        with contextlib.suppress(*_FAILURES):
            self._send()
            if self._successor is None:
                self._presence.forget_stop()
                self._presence.leave()
        if self._successor is not None:
            raise RollmillError(
                f"{self._run.home_store} is driven by {self._successor} now: this process has stopped",
                hint=f"it took over because this one told nothing for {LEASE_S:.0f} s, or began at the same time",
            )

    def _follow(self) -> None:
        while not self._ended.wait(LOOK_S):
            with contextlib.suppress(*_FAILURES):
                self._look()
                self._send()

    def _send(self) -> None:
        self._outbox.add(_files(self._run))
        self._outbox.send(self._look)

    def _look(self) -> None:
        """Says who drives the run, and looks whether this process should stop. Called often."""
        now = time.monotonic()
        if now - self._looked < LOOK_S or self._successor is not None or self._ended.is_set():
            return
        self._looked = now
        if now - self._renewed > RENEW_S:
            self._successor = self._other()
            if self._successor is None:
                self._tell()
                self._renewed = now
        if not self._asked and (self._successor is not None or self._presence.asked_to_stop()):
            self._asked = True  # once: a second signal would end the clean-up
            os.kill(os.getpid(), signal.SIGTERM)

    def _other(self) -> str | None:
        """Who else drives the run by now. Once the store knows us, whoever has written there since took it over."""
        if not self._told:
            return _elsewhere(self._run, self._presence)
        said = self._presence.said()
        return None if said is None or said == (self._name, self._since) else said[0]

    def _tell(self) -> None:
        self._presence.renew(self._name, self._since)
        if not self._told:
            describe_run(self._run)
            self._presence.forget_stop()  # it was meant for an earlier one
            self._told = True


def driven_elsewhere(run: RunDirectory) -> str | None:
    """Who drives the run on another host, in words. Brings what other hosts have sent of its logs and events. None if
    nobody does, or if the store does not answer."""
    if run.config.store is None:
        return None
    where = None
    with contextlib.suppress(StorageError):
        objects = run.objects()
        where = _elsewhere(run, Presence(objects))
        bring(objects, run.path)
    return where


def _elsewhere(run: RunDirectory, presence: Presence) -> str | None:
    """As `driven_elsewhere`. A process that drove it from this directory was killed: its lock is free."""
    where = presence.where()
    return None if where is None or f"{_place(run)}, since " in where else where


def _place(run: RunDirectory) -> str:
    return f" on {socket.gethostname()}, in {run.path.resolve()}"


def _files(run: RunDirectory) -> list[str]:
    found = [*run.events.glob("*.jsonl"), *run.logs.glob("*.log")]
    return [str(path.relative_to(run.path)) for path in found]
