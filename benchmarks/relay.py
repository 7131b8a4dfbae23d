"""A slow, far link in user space: a TCP relay with delay and limited bandwidth, for tests and benchmarks.

Each direction is one link shared by all connections: a piece waits for its turn, occupies the link for size /
bandwidth, and arrives half a round trip later. A new connection waits one round trip before its first byte, like a
handshake. If a receiver does not read, bytes stay in bounded queues and then with the sender. Not modelled: losses,
and TCP's slow start and congestion control across the link.

`Relay` runs in a thread of this process, `RelayProcess` in a process of its own. A cut link is silent: nothing is
closed and nothing arrives; bytes in flight arrive when the link is restored. `cut(drop=True)` also closes all
connections, and refuses new ones.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Self

PIECE = 64 << 10
_HORIZON_SECONDS = 0.01  # how far ahead the link may be booked: compensates for the coarse clock
_SMALLEST_WINDOW = 256 << 10
_KERNEL_BUFFER = 256 << 10  # bytes a sender can hand over at once


class _Direction:
    """One direction of the link: when it is free again, and how many bytes it has carried."""

    def __init__(self, bytes_per_second: float, delay: float) -> None:
        self.bytes_per_second, self.delay = bytes_per_second, delay
        # one connection alone can fill the link, and one whose receiver sleeps holds no more than this
        self.window = max(_SMALLEST_WINDOW, int(2 * bytes_per_second * delay))
        self.carried = 0
        self._free_at = 0.0
        self._turn = asyncio.Lock()  # first come, first served: shares the link fairly

    async def turn(self) -> None:
        """Wait until the link has room for another piece."""
        async with self._turn:
            ahead = self._free_at - asyncio.get_running_loop().time()
            if ahead > _HORIZON_SECONDS:
                await asyncio.sleep(ahead - _HORIZON_SECONDS / 2)

    def carry(self, size: int) -> float:
        """Books the link for a piece. Returns when it arrives at the far end."""
        now = asyncio.get_running_loop().time()
        self._free_at = max(now, self._free_at) + size / self.bytes_per_second
        self.carried += size
        return self._free_at + self.delay


class _Pipe:
    """One direction of one connection: reads, waits its turn, and writes when the bytes have arrived."""

    def __init__(self, direction: _Direction, up: asyncio.Event, not_before: float) -> None:
        self._direction, self._up, self._not_before = direction, up, not_before
        self._queue: collections.deque[tuple[float, bytes]] = collections.deque()
        self._queued = 0
        self._changed = asyncio.Event()

    async def run(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._take_in(reader))
            tasks.create_task(self._give_out(writer))

    async def _take_in(self, reader: asyncio.StreamReader) -> None:
        while True:
            while self._queued >= self._direction.window:
                self._changed.clear()
                await self._changed.wait()
            await self._direction.turn()
            data = await reader.read(PIECE)
            await self._up.wait()
            arrives = max(self._direction.carry(len(data)), self._not_before + self._direction.delay)
            self._queue.append((arrives, data))
            self._queued += len(data)
            self._changed.set()
            if not data:
                return

    async def _give_out(self, writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        while True:
            while not self._queue:
                self._changed.clear()
                await self._changed.wait()
            arrives, data = self._queue.popleft()
            await asyncio.sleep(max(arrives - loop.time(), 0))
            await self._up.wait()
            self._queued -= len(data)
            self._changed.set()
            if not data:
                return writer.write_eof()
            writer.write(data)
            await writer.drain()


class Link:
    """The relay itself, inside a running event loop."""

    def __init__(self, to: tuple[str, int], mbit: float, rtt_ms: float) -> None:
        self._to, self._rtt = to, rtt_ms / 1000
        self.outward = _Direction(mbit * 1e6 / 8, self._rtt / 2)
        self.homeward = _Direction(mbit * 1e6 / 8, self._rtt / 2)
        self.connections = 0
        self._up = asyncio.Event()
        self._up.set()
        self._dropping = False
        self._open: set[asyncio.StreamWriter] = set()

    async def listen(self, port: int = 0) -> asyncio.Server:
        listener = socket.create_server(("127.0.0.1", port), backlog=128)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _KERNEL_BUFFER)
        return await asyncio.start_server(self._connected, sock=listener, limit=PIECE)

    def cut(self, drop: bool = False) -> None:
        self._up.clear()
        self._dropping = drop
        if drop:
            for writer in list(self._open):
                writer.transport.abort()

    def restore(self) -> None:
        self._dropping = False
        self._up.set()

    async def _connected(self, near: asyncio.StreamReader, near_writer: asyncio.StreamWriter) -> None:
        if self._dropping:
            return near_writer.transport.abort()
        self.connections += 1
        established = asyncio.get_running_loop().time() + self._rtt
        writers = [near_writer]
        self._open.add(near_writer)
        try:
            far, far_writer = await asyncio.open_connection(*self._to, limit=PIECE)
            writers.append(far_writer)
            self._open.add(far_writer)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(_Pipe(self.outward, self._up, established).run(near, far_writer))
                tasks.create_task(_Pipe(self.homeward, self._up, established).run(far, near_writer))
        except (OSError, ExceptionGroup):
            pass  # one side disconnected, so the other is closed
        finally:
            for writer in writers:
                self._open.discard(writer)
                with contextlib.suppress(OSError, RuntimeError):
                    writer.close()


class Relay:
    """A link in a thread of this process. `port` is where to connect instead of `to`."""

    def __init__(self, to: tuple[str, int], mbit: float = 200.0, rtt_ms: float = 120.0, port: int = 0) -> None:
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(to, mbit, rtt_ms, port), daemon=True)
        self._thread.start()
        if not self._ready.wait(10):
            raise RuntimeError("the relay did not start")

    @property
    def connections(self) -> int:
        """Number of connections so far."""
        return self._link.connections

    @property
    def carried(self) -> tuple[int, int]:
        """Bytes sent to the far end, and bytes received from it."""
        return self._link.outward.carried, self._link.homeward.carried

    def cut(self, drop: bool = False) -> None:
        self._call(lambda: self._link.cut(drop))

    def restore(self) -> None:
        self._call(lambda: self._link.restore())

    def close(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(10)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(self, action: Callable[[], None]) -> None:
        async def act() -> None:
            action()

        asyncio.run_coroutine_threadsafe(act(), self._loop).result(10)

    def _serve(self, to: tuple[str, int], mbit: float, rtt_ms: float, port: int) -> None:
        async def serve() -> None:
            self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
            self._link = Link(to, mbit, rtt_ms)
            server = await self._link.listen(port)
            self.port = server.sockets[0].getsockname()[1]
            self._ready.set()
            await self._stop.wait()
            server.close()

        asyncio.run(serve())  # also ends open connections


class RelayProcess:
    """The same in a process of its own, so that it does not share this interpreter."""

    def __init__(self, to: tuple[str, int], mbit: float = 200.0, rtt_ms: float = 120.0) -> None:
        command = [sys.executable, "-m", "benchmarks.relay", *map(str, (*to, mbit, rtt_ms))]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())

    def cut(self, drop: bool = False) -> None:
        self._say("drop" if drop else "cut")

    def restore(self) -> None:
        self._say("restore")

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _say(self, word: str) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(word + "\n")
        self._process.stdin.flush()
        self._process.stdout.readline()  # it answers when it is done


def main() -> None:
    """The other side of RelayProcess: ends with its standard input."""
    host, port, mbit, rtt_ms = sys.argv[1:]
    with Relay((host, int(port)), float(mbit), float(rtt_ms)) as relay:
        actions = {"cut": relay.cut, "drop": lambda: relay.cut(drop=True), "restore": relay.restore}
        print(relay.port, flush=True)
        for line in sys.stdin:
            actions[line.strip()]()
            print(flush=True)


if __name__ == "__main__":
    main()
