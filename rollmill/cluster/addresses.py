"""Where the gateway of a run is.

On one host it has a port that the run keeps. In a cluster it may be on any node, and on another one when its node is
lost. So it writes its URL into the run's store when it starts, and whoever cannot reach it looks there again.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace

from rollmill.cluster.ports import free_ports
from rollmill.cluster.run import RunDirectory
from rollmill.errors import StorageError
from rollmill.storage.objects import Objects

KEY = "cluster/gateway.json"
_URL = re.compile(r"https?://[^/?#@\s]{1,300}")


def find_gateway(run: RunDirectory) -> str | None:
    """The URL of the run's gateway; None if it has not said it yet, or if the store does not answer now."""
    if "gateway" in run.ports:
        return run.url("gateway")
    try:
        url = json.loads(Objects.open(run.home_store).get(KEY))["url"]
    except (StorageError, ValueError, LookupError, TypeError):
        return None
    return url if isinstance(url, str) and _URL.fullmatch(url) else None


def announce_gateway(run: RunDirectory) -> RunDirectory:
    """The run with a port for its gateway on this host. If the run keeps none, the URL is written into its store."""
    if "gateway" in run.ports:
        return run
    run = replace(run, ports={**run.ports, "gateway": free_ports(1, run.host)[0]})
    Objects.open(run.home_store).put(KEY, json.dumps({"url": run.url("gateway")}).encode())
    return run
