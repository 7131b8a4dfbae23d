"""TCP connections that notice within 30 s that the other host is gone.

A host that loses its power or its network sends no reset. A client that waits for a long answer would otherwise wait
until its own time limit.
"""

from __future__ import annotations

import socket
from typing import Any

import aiohttp

from rollmill.tls import own_context

_IDLE_S, _INTERVAL_S, _PROBES = 15, 5, 3
# per option the names that systems have for it; one that the system does not know is left out
_OPTIONS = (
    (("TCP_KEEPIDLE", "TCP_KEEPALIVE"), _IDLE_S),
    (("TCP_KEEPINTVL",), _INTERVAL_S),
    (("TCP_KEEPCNT",), _PROBES),
    (("TCP_USER_TIMEOUT",), 1000 * (_IDLE_S + _INTERVAL_S * _PROBES)),  # ms: for data that nobody acknowledges
)


def keepalive_connector(**settings: Any) -> aiohttp.TCPConnector:
    """A connector for any number of connections. `settings` are those of TCPConnector. HTTPS: see tls.py."""
    return aiohttp.TCPConnector(
        **{"limit": 0, "socket_factory": _open_socket, "ssl": own_context() or True, **settings}
    )


def _open_socket(address: tuple[Any, ...]) -> socket.socket:
    family, kind, protocol, *_ = address
    opened = socket.socket(family=family, type=kind, proto=protocol)
    notice_lost_host(opened)
    return opened


def notice_lost_host(connection: socket.socket) -> None:
    """Sets the options of a TCP socket, which may be connected already."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for names, value in _OPTIONS:
        option = next((getattr(socket, name) for name in names if hasattr(socket, name)), None)
        if option is not None:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
