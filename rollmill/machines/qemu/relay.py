"""Connects the host to the guest's agent over sockets that do not survive a restore (vsock). Runs inside the guest.

The agent and `init` have one end of a socket pair each, which stays. This process listens, and copies bytes between the
latest connection of the host and that end. When a connection breaks, it waits for the next one.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
from collections.abc import Mapping, Sequence

PORTS = (1001, 1002, 1003)  # of vsock: the agent, `init`, connections of programs
_BYTES = 1 << 16


def start(names: Sequence[str]) -> Mapping[str, int]:
    """Fork the relay. Returns an open file for each name, in the order of PORTS."""
    listeners, inner, outer = [], [], []
    for port in PORTS:
        listener = socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)
        listener.bind((socket.VMADDR_CID_ANY, port))
        listener.listen(4)
        listeners.append(listener)
        here, there = socket.socketpair()
        inner.append(here)
        outer.append(there)
    if os.fork() == 0:
        try:
            for each in outer:
                each.close()
            Relay(listeners, inner).run()
        finally:
            os._exit(1)
    for each in (*listeners, *inner):
        each.close()
    return dict(zip(names, (each.detach() for each in outer), strict=True))


class Relay:
    """One channel per listener: what its latest connection sends goes to the inner socket, and back."""

    def __init__(self, listeners: Sequence[socket.socket], inner: Sequence[socket.socket]) -> None:
        self._inner = inner
        self._outer: list[socket.socket | None] = [None] * len(inner)
        self._selector = selectors.DefaultSelector()
        for number, listener in enumerate(listeners):
            self._selector.register(listener, selectors.EVENT_READ, (self._accept, number))

    def run(self) -> None:
        while True:
            for key, _ in self._selector.select():
                action, number = key.data
                with contextlib.suppress(KeyError):  # an earlier event of this round closed it
                    action(key.fileobj, number)

    def _accept(self, listener: socket.socket, number: int) -> None:
        connection, _ = listener.accept()
        self._drop(number)  # the host has come back: what it had before is gone
        self._outer[number] = connection
        self._selector.register(connection, selectors.EVENT_READ, (self._carry_in, number))
        self._selector.register(self._inner[number], selectors.EVENT_READ, (self._carry_out, number))

    def _carry_in(self, connection: socket.socket, number: int) -> None:
        try:
            data = connection.recv(_BYTES)
        except OSError:
            data = b""
        if data and self._outer[number] is connection:
            self._inner[number].sendall(data)
        else:
            self._drop(number)

    def _carry_out(self, inner: socket.socket, number: int) -> None:
        data = inner.recv(_BYTES)
        connection = self._outer[number]
        if not data:
            os._exit(0)  # the guest ends
        try:
            if connection is not None:
                connection.sendall(data)
        except OSError:
            self._drop(number)

    def _drop(self, number: int) -> None:
        connection, self._outer[number] = self._outer[number], None
        if connection is not None:
            self._selector.unregister(connection)
            self._selector.unregister(self._inner[number])
            connection.close()
