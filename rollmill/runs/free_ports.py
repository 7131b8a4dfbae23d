"""Ports that the processes of a run and its services listen on."""

from __future__ import annotations

import contextlib
import errno
import secrets
import socket
from collections.abc import Iterator

from rollmill.errors import ConfigError

PORTS = range(10_000, 32_768)


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Ports of `host` that nobody listens on now. A run keeps them, so a restarted process has the same address.

    They are below the range that the kernel uses for outgoing connections, so that no client takes one meanwhile.
    """
    found: list[int] = []
    while len(found) < count:
        port = secrets.choice(PORTS)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with contextlib.suppress(OSError), socket.socket(family) as probe:
            probe.bind((host, port))
            if port not in found:
                found.append(port)
    return found


def is_free(host: str, port: int) -> bool:
    """Whether nobody listens there now."""
    try:
        _hold(host, port).close()
    except OSError:
        return False
    return True


@contextlib.contextmanager
def held_port(host: str, port: int | None, default: int | None = None) -> Iterator[int]:
    """The port asked for; otherwise `default`, or another one if that is taken. Raises ConfigError if it is taken.

    Until the block ends, no other process gets it: two services that start at the same time do not meet on one port.
    Only a server of this user that asks for it with `reuse_port` can listen there.
    """
    try:
        holder = _hold(host, port or default or free_ports(1)[0])
    except OSError as error:
        if port is not None or error.errno != errno.EADDRINUSE:  # another port would not help
            raise ConfigError(
                f"cannot listen on {host}:{port or default}: {error.strerror}", hint="choose another --port or --host"
            ) from None
        holder = _hold(host, free_ports(1)[0])
    with holder:
        yield holder.getsockname()[1]


def _hold(host: str, port: int) -> socket.socket:
    """A socket that has the port and does not listen."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    holder = socket.socket(family)
    try:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # old connections do not matter
        holder.bind((host, port))
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)  # from here on it is in everyone's way,
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # except the server it is held for
    except BaseException:
        holder.close()
        raise
    return holder
