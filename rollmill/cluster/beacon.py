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

from rollmill.cluster.naming import describe_run
from rollmill.cluster.outbox import Outbox, bring
from rollmill.cluster.presence import LEASE_S, RENEW_S, Presence
from rollmill.cluster.run import RunDirectory
from rollmill.errors import RollmillError, StorageError
from rollmill.storage.objects import Objects

LOOK_S = 2.0


class Beacon(contextlib.AbstractContextManager["Beacon"]):
    """Held by the supervisor. A store that does not answer delays what it tells, and stops nothing."""

    def __init__(self, run: RunDirectory) -> None:
        self._run, self._objects = run, Objects.open(run.home_store)
        self._presence, self._since, self._renewed = Presence(self._objects), time.time(), float("-inf")
        self._outbox = Outbox(self._objects, run.path, _files(run))
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True, name="beacon")

    def __enter__(self) -> Beacon:
        """Raises RollmillError if another host drives the run."""
        if (where := driven_elsewhere(self._run)) is not None:
            raise RollmillError(
                f"{self._run.home_store} is driven by {where}",
                hint=f"`rollmill stop {self._run.home_store}` stops it; a lost host is forgotten after {LEASE_S:.0f} s",
            )
        with contextlib.suppress(StorageError):
            describe_run(self._run)
            self._presence.forget_stop()
            self._tell()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        with contextlib.suppress(StorageError):
            self._send()
            self._presence.forget_stop()
            self._presence.leave()

    def _follow(self) -> None:
        asked = False
        while not self._ended.wait(LOOK_S):
            with contextlib.suppress(StorageError):  # the store does not answer now
                self._send()
                self._tell()
                if not asked and self._presence.asked_to_stop():
                    asked = True  # once: a second signal would end the clean-up
                    os.kill(os.getpid(), signal.SIGTERM)

    def _tell(self) -> None:
        if time.monotonic() - self._renewed > RENEW_S:
            self._presence.renew(f"process {os.getpid()} on {socket.gethostname()}", self._since)
            self._renewed = time.monotonic()

    def _send(self) -> None:
        self._outbox.add(_files(self._run))
        self._outbox.send()


def driven_elsewhere(run: RunDirectory) -> str | None:
    """Who drives the run on another host, in words. Brings its logs and events, unless the directory has its own: then
    this host has driven it. None if nobody does, or if the store does not answer."""
    if run.config.store is None:
        return None
    try:
        objects = Objects.open(run.home_store)
        where = Presence(objects).where()
        if not (run.path / "locks" / "supervisor").exists():
            bring(objects, run.path)
    except StorageError:
        return None
    here = f" on {socket.gethostname()}, since "  # a process of this host that was killed: its lock is free
    return None if where is None or here in where else where


def _files(run: RunDirectory) -> list[str]:
    found = [*run.events.glob("*.jsonl"), *run.logs.glob("*.log")]
    return [str(path.relative_to(run.path)) for path in found]
