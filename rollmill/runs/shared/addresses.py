"""Where the gateways of a run are: `gateway`, and with `gateway.replicas` also `gateway-2` …

On one host each has a port that the run keeps. In a cluster it may be on any node, and on another one when its node is
lost. So it writes its URL into the run's store when it starts, and whoever cannot reach it looks there again. On the
same node it keeps its port: the agents of its open sessions know no other.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Callable
from dataclasses import replace
from urllib.parse import urlsplit

from rollmill.errors import StorageError
from rollmill.runs.free_ports import PORTS, free_ports, is_free
from rollmill.runs.run import RunDirectory

_URL = re.compile(r"https?://[^/?#@\s]{1,300}")


def key_of(role: str) -> str:
    """The object in which a gateway says its URL."""
    return f"cluster/{role}.json"


def find_gateway(run: RunDirectory, role: str = "gateway") -> str | None:
    """The URL of a gateway of the run; None if it has not said it yet, or if the store does not answer now."""
    if role in run.ports:
        return run.url(role)
    try:
        url = json.loads(run.objects().get(key_of(role)))["url"]
    except (StorageError, ValueError, LookupError, TypeError):
        return None
    return url if isinstance(url, str) and _URL.fullmatch(url) else None


def gateway_finders(run: RunDirectory) -> list[Callable[[], str | None]]:
    """For each gateway of the run a function that says where it is now."""
    return [functools.partial(find_gateway, run, role) for role in run.config.gateways]


def any_gateway(run: RunDirectory) -> Callable[[], str | None]:
    """A function that says where a gateway is, and where another one is when it is called again: the first may be
    away."""
    turns = itertools.cycle(gateway_finders(run))
    return lambda: next(turns)()


def announce_gateway(run: RunDirectory, role: str = "gateway") -> RunDirectory:
    """The run with a port for this gateway on this host. If the run keeps none, the URL is written into its store."""
    if role in run.ports:
        return run
    run = replace(run, ports={**run.ports, role: _port_before(run, role) or free_ports(1, run.host)[0]})
    run.objects().put(key_of(role), json.dumps({"url": run.url(role)}).encode())
    return run


def _port_before(run: RunDirectory, role: str) -> int | None:
    """The port that this gateway had, if that was on this host, its sessions are still here, and the port is free."""
    url = find_gateway(run, role)
    if url is None or not (run.path / role).is_dir():
        return None
    try:
        port = urlsplit(url).port
    except ValueError:
        return None
    if port is None or port not in PORTS or replace(run, ports={role: port}).url(role) != url:
        return None
    return port if is_free(run.host, port) else None
