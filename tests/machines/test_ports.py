"""Connections over one virtio port, both ends: the guest's is a thread here, and the port a pair of sockets."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import threading
from collections.abc import AsyncIterator, Iterator

import pytest

from rollmill.machines.guest.frames import WireError
from rollmill.machines.qemu.ports import Ports
from rollmill.machines.qemu.streams import CONNECT, CREDIT, DATA, MARK_BYTES, MOST, NUMBER, WINDOW, Forwarder, Streams


@contextlib.contextmanager
def _guest(port: socket.socket, mark: bytes) -> Iterator[None]:
    def run() -> None:
        with contextlib.suppress(OSError, WireError):
            Forwarder(port.fileno(), mark).run()

    thread = threading.Thread(target=run)
    thread.start()
    yield
    thread.join(10)
    assert not thread.is_alive()


@contextlib.asynccontextmanager
async def _ports() -> AsyncIterator[Ports]:
    ours, theirs = socket.socketpair()
    mark = secrets.token_bytes(MARK_BYTES)
    with ours, theirs:
        theirs.send(b"\x01half a frame of a machine that was saved")  # what is before the mark is dropped
        ours.send(b"\x05" * 20)
        with _guest(theirs, mark):
            ports = Ports(ours, mark)
            try:
                yield ports
            finally:
                ports.close()
                ours.shutdown(socket.SHUT_RDWR)


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.close()


async def test_connections_reach_the_owner_and_do_not_hold_each_other_up() -> None:
    async with _ports() as ports:
        unread, unread_port = await ports.listen()
        listener, port = await ports.listen()
        stuck = socket.create_connection(("127.0.0.1", unread_port))
        stuck.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                stuck.send(b"x" * 65536)  # nobody reads it
                await asyncio.sleep(0)
        data = secrets.token_bytes(1 << 20)

        async def exchange() -> None:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(data)
            writer.write_eof()  # half closed: the answer still comes
            assert await reader.read() == data
            writer.close()
            await writer.wait_closed()

        async with await asyncio.start_server(_echo, sock=listener):
            for _ in range(2):
                await asyncio.gather(*(exchange() for _ in range(20)))
        while True:  # the owner has closed its socket: the port closes too
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.close()
            except ConnectionRefusedError:
                break
            except ConnectionResetError:  # it closed at this moment
                pass
            await asyncio.sleep(0.01)
        stuck.close()
        unread.close()


async def test_more_connections_than_there_are_places_are_closed() -> None:
    async with _ports() as ports:
        listener, port = await ports.listen()
        listener.setblocking(False)
        clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(MOST + 1)]
        loop = asyncio.get_running_loop()
        accepted = [(await loop.sock_accept(listener))[0] for _ in range(MOST)]
        for client in clients:
            client.setblocking(False)
        ended = [asyncio.create_task(loop.sock_recv(client, 1)) for client in clients]
        done, _ = await asyncio.wait(ended, return_when=asyncio.FIRST_COMPLETED)
        assert [task.result() for task in done] == [b""]
        for connection in accepted:
            connection.close()
        assert await asyncio.gather(*ended) == [b""] * len(clients)
        for client in clients:
            client.close()
        listener.close()


@pytest.mark.parametrize("frame", ["garbage", "too much", "credit", "twice", "short", "flood"])
async def test_a_hostile_guest_closes_its_own_ports_only(frame: str) -> None:
    files = set(os.listdir("/proc/self/fd"))
    ours, theirs = socket.socketpair()
    mark = secrets.token_bytes(MARK_BYTES)
    ports = Ports(ours, mark)
    listening = asyncio.create_task(ports.listen())
    await asyncio.sleep(0)
    guest = Streams(theirs.fileno(), mark, lambda kind, number, data: None)
    guest.send(17, 1, NUMBER.pack(4242))
    guest.flush()
    listener, port = await listening
    assert port == 4242
    guest.send(CONNECT, 7, NUMBER.pack(1))
    match frame:
        case "garbage":
            guest.send(99, 0, b"xxxx")
        case "too much":
            for _ in range(WINDOW // 16384 + 1):  # more than the socket of an owner who does not read takes
                guest.send(DATA, 7, b"x" * 16384)
            for _ in range(40):
                guest.send(DATA, 7, b"x" * 65535)
        case "credit":
            guest.send(CREDIT, 7, NUMBER.pack(5))
        case "twice":
            guest.send(CONNECT, 7, NUMBER.pack(1))
        case "short":
            guest.send(CONNECT, 8, b"x")
        case "flood":
            for _ in range(100_000):  # of connections to a port that does not exist, and never reads the answers
                guest.send(CONNECT, 9, NUMBER.pack(3))
    theirs.setblocking(True)
    sending = asyncio.create_task(asyncio.to_thread(theirs.sendall, guest._outgoing))
    if frame == "flood":
        await sending
        assert not ports.closed
        ports.close()
    while not ports.closed:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    ours.close()
    await asyncio.wait([sending])
    sending.exception()
    listener.close()
    guest.close()
    theirs.close()
    assert set(os.listdir("/proc/self/fd")) <= files
