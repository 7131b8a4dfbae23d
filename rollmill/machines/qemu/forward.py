"""Ports in a guest: a process there listens on the loopback address, and carries connections to the host.

It runs inside the guest, beside `init`, as a user without rights. Commands do not see it. The host asks for ports:

    host → guest   LISTEN, number of the port     guest → host   LISTENING + the port, or 0: there is none
                   UNLISTEN                                      CONNECT, number of the connection + that of the port
"""

from __future__ import annotations

import socket

from rollmill.machines.qemu.streams import NUMBER, Streams

LISTEN, LISTENING, UNLISTEN, CONNECT = 16, 17, 18, 19
_BACKLOG = 16


class Forwarder:
    def __init__(self, port: int, mark: bytes) -> None:
        self._streams = Streams(port, mark, self._control)
        self._listeners: dict[int, socket.socket] = {}
        self._connections = 0

    def run(self) -> None:
        while True:
            self._streams.step(None)

    def _control(self, kind: int, number: int, data: bytes) -> None:
        if kind == LISTEN:
            self._streams.send(LISTENING, number, NUMBER.pack(self._listen(number)))
        elif kind == UNLISTEN and number in self._listeners:
            listener = self._listeners.pop(number)
            self._streams.remove_listener(listener)
            listener.close()

    def _listen(self, number: int) -> int:
        try:
            listener = socket.create_server(("127.0.0.1", 0), backlog=_BACKLOG)
        except OSError:  # commands may have used up memory, or all ports
            return 0
        listener.setblocking(False)
        self._listeners[number] = listener
        self._streams.add_listener(listener, lambda: self._accept(number, listener))
        port: int = listener.getsockname()[1]
        return port

    def _accept(self, number: int, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except OSError:  # whoever connected is gone
            return
        if self._streams.full:
            connection.close()
            return
        self._connections += 1
        self._streams.send(CONNECT, self._connections, NUMBER.pack(number))
        self._streams.add(self._connections, connection)
