"""Who drives a run, told through the run's store: for commands on any host that reaches the store.

cluster/supervisor.json   {"where", "since"}: rewritten every RENEW_S, and counts for LEASE_S by the store's clock
cluster/stop.json         somebody asked the supervisor to stop
"""

from __future__ import annotations

import json
import time

from rollmill.errors import StorageError
from rollmill.storage.objects import Objects
from rollmill.weights.reading.leases import store_time

RENEW_S = 5.0
LEASE_S = 30.0
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
        try:
            tree = json.loads(self._objects.get(_SUPERVISOR))
            began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(float(tree["since"])))
            return f"{str(tree['where'])[:300]}, since {began}"
        except (StorageError, ValueError, LookupError, TypeError, OverflowError):  # it has just left, or is damaged
            return None

    def ask_to_stop(self) -> None:
        self._objects.put(_STOP, b"{}")

    def asked_to_stop(self) -> bool:
        return self._objects.head(_STOP) is not None

    def forget_stop(self) -> None:
        self._objects.delete(_STOP)
