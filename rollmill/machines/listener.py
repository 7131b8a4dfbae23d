"""A listening socket without a name. Whoever carries connections into this process connects to it by an open file."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Callable

_BACKLOG = 256


class Listener(socket.socket):
    """Tells when it is closed."""

    on_close: Callable[[], None] | None = None

    def close(self) -> None:
        super().close()
        on_close, self.on_close = self.on_close, None
        if on_close is not None:
            on_close()


def make_listener() -> tuple[Listener, int]:
    """A listening Unix socket whose name is deleted at once, and an open file by which this process can connect."""
    listener = Listener(socket.AF_UNIX)
    try:
        with tempfile.TemporaryDirectory() as directory:
            folder = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                path = f"/proc/self/fd/{folder}/port"  # the name of a socket must be short
                listener.bind(path)
                listener.listen(_BACKLOG)
                return listener, os.open(path, os.O_PATH | os.O_CLOEXEC)
            finally:
                os.close(folder)
    except BaseException:
        listener.close()
        raise


def connect(name: int) -> socket.socket | None:
    """A connection to a listener of `make_listener`; None if its owner closed it or cannot keep up."""
    connection = socket.socket(socket.AF_UNIX)
    connection.setblocking(False)
    try:
        connection.connect(f"/proc/self/fd/{name}")
    except OSError:
        connection.close()
        return None
    return connection
