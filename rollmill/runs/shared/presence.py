"""Who drives a run, told through the run's store: for commands on any host that reaches the store.

cluster/supervisor.json   {"where", "since"}: rewritten every RENEW_S, and counts for LEASE_S by the store's clock
cluster/stop.json         somebody asked the supervisor to stop
"""

from __future__ import annotations

import json
import time

from rollmill.errors import ObjectMissing
from rollmill.storage.objects import Objects
from rollmill.weights.reading.leases import store_time

RENEW_S = 5.0
LEASE_S = 30.0
LONGEST = 1000  # characters of `where`
_SUPERVISOR, _STOP = "cluster/supervisor.json", "cluster/stop.json"


class Presence:
    def __init__(self, objects: Objects) -> None:
        self._objects = objects

    def renew(self, where: str, since: float) -> None:
        self._objects.put(_SUPERVISOR, json.dumps({"where": where, "since": since}).encode())

    def leave(self) -> None:
        self._objects.delete(_SUPERVISOR)

    def where(self) -> str | None:
        """Where the supervisor is, in words; None if none drives the run."""
        written = self._objects.modified(_SUPERVISOR)
        if written is None or store_time(self._objects, "cluster") > written + LEASE_S:
            return None
        said = self.said()
        if said is None:  # it has just left
            return None
        try:
            began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(said[1]))
        except (ValueError, OverflowError, OSError):
            return None
        return f"{said[0]}, since {began}"

    def said(self) -> tuple[str, float] | None:
        """Who said last that it drives the run, and since when, however long ago; None if nobody does."""
        try:
            tree = json.loads(self._objects.get(_SUPERVISOR))
            return str(tree["where"])[:LONGEST], float(tree["since"])
        except (ObjectMissing, ValueError, LookupError, TypeError, OverflowError):
            return None

    def ask_to_stop(self) -> None:
        self._objects.put(_STOP, b"{}")

    def asked_to_stop(self) -> bool:
        return self._objects.head(_STOP) is not None

    def forget_stop(self) -> None:
        self._objects.delete(_STOP)
