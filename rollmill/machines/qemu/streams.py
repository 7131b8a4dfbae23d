"""Many connections over one virtio port. The same code is at both ends of it: in the guest, where `Forwarder` opens
ports, and on the host (ports.py).

    frame     kind, number, length + data
    DATA      bytes of a connection
    CREDIT    as many bytes of it were taken: the other end may send as many more
    END       no more bytes will come from this end; the other direction goes on
    CLOSE     the connection is broken: nothing more in either direction
    LISTEN, UNLISTEN      from the host: open or close a port of the guest's loopback address, by number
    LISTENING + the port  from the guest, or 0: there is none
    CONNECT + a port      from the guest: a connection to it, which gets this number

No end sends more than WINDOW bytes of a connection that were not taken, so a connection that nobody reads holds up no
other one, and what an end has to keep is bounded.

A machine that was restored may have half a frame in its port. So each end first sends a mark of random bytes, and
drops everything that arrives before the other end's mark.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
from collections.abc import Callable

from rollmill.machines.guest.frames import WireError

DATA, CREDIT, END, CLOSE = 1, 2, 3, 4
LISTEN, LISTENING, UNLISTEN, CONNECT = 16, 17, 18, 19
_BACKLOG = 16
NUMBER = struct.Struct("!I")
MOST = 64  # connections at once
MARK_BYTES = 32
WINDOW = 1 << 16
_FRAME = struct.Struct("!BIH")
_PIECE = 1 << 14  # bytes that are moved at a time
_MOST_OUTGOING = 2 * MOST * WINDOW


class _Stream:
    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.waiting = bytearray()  # from the other end, for the connection
        self.room = WINDOW  # bytes that the other end still takes
        self.taken = 0  # bytes that the connection took, without CREDIT yet
        self.ended_here = False  # the connection has no more bytes for the other end
        self.ended_there = False
        self.shut = False  # the connection knows that the other end has ended
        self.events = 0  # that are waited for


class Streams:
    """One end. Call `step` whenever the open file `fileno()` is readable, or let it wait."""

    def __init__(self, port: int, mark: bytes, control: Callable[[int, int, bytes], None]) -> None:
        os.set_blocking(port, False)
        self._port = port
        self._control = control
        self._mark: bytes | None = mark  # until the other end's was received
        self._incoming = bytearray()
        self._outgoing = bytearray(mark)
        self._streams: dict[int, _Stream] = {}
        self._numbers: dict[int, int] = {}  # open file of a connection → its number
        self._listeners: dict[int, Callable[[], None]] = {}  # by open file
        self._epoll = select.epoll()
        self._epoll.register(port, select.EPOLLIN | select.EPOLLOUT)

    def fileno(self) -> int:
        return self._epoll.fileno()

    def step(self, wait_s: float | None = 0.0) -> None:
        """Handle what is ready. WireError: the other end sent no frames. OSError: it is gone."""
        for file, events in self._epoll.poll(wait_s):
            if file == self._port:
                self._receive(events)
            elif file in self._listeners:
                self._listeners[file]()
            elif file in self._numbers:
                self._use(self._numbers[file], events)
        self.flush()

    def add_listener(self, listener: socket.socket, accept: Callable[[], None]) -> None:
        self._listeners[listener.fileno()] = accept
        self._epoll.register(listener, select.EPOLLIN)

    def remove_listener(self, listener: socket.socket) -> None:
        del self._listeners[listener.fileno()]
        self._epoll.unregister(listener)

    def add(self, number: int, connection: socket.socket) -> None:
        """Carry a connection. WireError if there is one with this number."""
        if number in self._streams:
            connection.close()
            raise WireError(f"connection {number} exists")
        connection.setblocking(False)
        self._streams[number] = _Stream(connection)
        self._numbers[connection.fileno()] = number
        self._watch(self._streams[number])

    @property
    def full(self) -> bool:
        return len(self._streams) >= MOST

    def send(self, kind: int, number: int, data: bytes = b"") -> None:
        self._outgoing += _FRAME.pack(kind, number, len(data)) + data
        if len(self._outgoing) > _MOST_OUTGOING:
            raise WireError("the other end does not read")

    def flush(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._outgoing:
                del self._outgoing[: os.write(self._port, self._outgoing[:_PIECE])]
        self._epoll.modify(self._port, select.EPOLLIN | (select.EPOLLOUT if self._outgoing else 0))

    def close(self) -> None:
        """Close all connections; the port and listeners are their owner's."""
        for stream in self._streams.values():
            stream.connection.close()
        self._streams.clear()
        self._numbers.clear()
        self._epoll.close()

    def _receive(self, events: int) -> None:
        if not events & ~select.EPOLLOUT:
            return
        try:
            data = os.read(self._port, _PIECE)
        except BlockingIOError:
            return
        if not data:
            raise ConnectionResetError("the other end is gone")
        self._incoming += data
        if self._mark is not None and not self._find_mark(self._mark):
            return
        while len(self._incoming) >= _FRAME.size:
            kind, number, length = _FRAME.unpack_from(self._incoming)
            if len(self._incoming) < _FRAME.size + length:
                return
            data = bytes(self._incoming[_FRAME.size : _FRAME.size + length])
            del self._incoming[: _FRAME.size + length]
            self._handle(kind, number, data)

    def _find_mark(self, mark: bytes) -> bool:
        place = self._incoming.find(mark)
        if place < 0:
            del self._incoming[: -len(mark)]
            return False
        del self._incoming[: place + len(mark)]
        self._mark = None
        return True

    def _handle(self, kind: int, number: int, data: bytes) -> None:
        if kind not in (DATA, CREDIT, END, CLOSE):
            return self._control(kind, number, data)
        stream = self._streams.get(number)
        if stream is None:
            return  # it was closed here while this was under way
        if kind == DATA:
            if stream.ended_there or len(stream.waiting) + stream.taken + len(data) > WINDOW:
                raise WireError(f"connection {number}: more bytes than were asked for")
            stream.waiting += data
        elif kind == CREDIT:
            stream.room += NUMBER.unpack(data)[0] if len(data) == NUMBER.size else WINDOW
            if stream.room > WINDOW:
                raise WireError(f"connection {number}: more bytes were taken than sent")
        elif kind == END:
            stream.ended_there = True
        if kind == CLOSE:
            self._remove(number)
        else:
            self._use(number, select.EPOLLOUT)

    def _use(self, number: int, events: int) -> None:
        """Move bytes of a connection in the directions that are ready."""
        stream = self._streams[number]
        try:
            if events & ~select.EPOLLOUT and not stream.ended_here and stream.room:
                self._read(number, stream)
            self._write(number, stream)
        except OSError:  # the connection is broken
            self.send(CLOSE, number)
            self._remove(number)
            return
        if stream.ended_here and stream.shut:
            self._remove(number)
        else:
            self._watch(stream)

    def _read(self, number: int, stream: _Stream) -> None:
        try:
            data = stream.connection.recv(min(stream.room, _PIECE))
        except BlockingIOError:
            return
        stream.room -= len(data)
        stream.ended_here = not data
        self.send(DATA if data else END, number, data)

    def _write(self, number: int, stream: _Stream) -> None:
        with contextlib.suppress(BlockingIOError):
            while stream.waiting:
                sent = stream.connection.send(stream.waiting[:_PIECE])
                del stream.waiting[:sent]
                stream.taken += sent
        if stream.taken and (not stream.waiting or stream.taken >= WINDOW // 4):
            self.send(CREDIT, number, NUMBER.pack(stream.taken))
            stream.taken = 0
        if stream.ended_there and not stream.waiting and not stream.shut:
            stream.connection.shutdown(socket.SHUT_WR)
            stream.shut = True

    def _watch(self, stream: _Stream) -> None:
        """Wait for what can be done. A connection of which nothing is wanted is not watched: it may have ended."""
        wanted = select.EPOLLIN if stream.room and not stream.ended_here else 0
        wanted |= select.EPOLLOUT if stream.waiting else 0
        if wanted != stream.events:
            if stream.events:
                self._epoll.unregister(stream.connection)
            if wanted:
                self._epoll.register(stream.connection, wanted)
            stream.events = wanted

    def _remove(self, number: int) -> None:
        stream = self._streams.pop(number)
        del self._numbers[stream.connection.fileno()]
        if stream.events:
            self._epoll.unregister(stream.connection)
        stream.connection.close()


class Forwarder:
    """A process of the guest, beside `init`: it carries connections to the host as a user without rights, and commands
    do not see it."""

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
