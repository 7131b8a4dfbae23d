"""The loopback network of a machine: the one port that its owner opens, and nothing else."""

from __future__ import annotations

import asyncio
import os
import signal
import socket

import pytest

from rollmill.machines.agent_machine import AgentMachine
from rollmill.machines.images.image import BUILT_IN
from rollmill.machines.namespace.client import NamespaceHost, NamespaceMachine
from tests.machines.conftest import CONFIG, run_python
from tests.machines.test_containment import parent_of, processes_with, wait_for_processes

pytestmark = pytest.mark.asyncio(loop_scope="module")

_CONNECT = "import socket\ns = socket.create_connection(('127.0.0.1', {port}), timeout=20)\n"


async def test_a_program_reaches_the_owner_of_the_port(any_host: NamespaceHost) -> None:
    machine = await any_host.create(BUILT_IN)
    listener, port = await machine.listen()

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write((await reader.readline()).upper())
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(echo, sock=listener):
        program = _CONNECT.format(port=port) + "s.sendall(b'hello\\n'); print(s.makefile().readline())"
        assert await run_python(machine, program) == "HELLO"
    program = "import socket\ntry: socket.create_connection(('127.0.0.1', {port}))\nexcept OSError as e: print(e.errno)"
    assert await run_python(machine, program.format(port=port)) == "111"  # closed: refused
    await machine.close()


async def test_nothing_else_is_reachable(host: NamespaceHost, machine: NamespaceMachine) -> None:
    """Not another port of the host, not another machine, not the same port from outside."""
    other = await host.create(BUILT_IN)
    listener, port = await machine.listen()
    with listener, socket.create_server(("127.0.0.1", 0)) as outside, socket.create_server(("0.0.0.0", 0)) as anywhere:
        ports = [outside.getsockname()[1], anywhere.getsockname()[1]]
        address = socket.gethostbyname(socket.gethostname())
        program = (
            "import socket\n"
            f"for address in [('127.0.0.1', p) for p in {ports}] + [({address!r}, {ports[1]}), ('10.0.0.1', 80),"
            f" ('169.254.169.254', 80), ('::1', {ports[1]}), ('1.1.1.1', 53)]:\n"
            "    try: socket.create_connection(address, timeout=2); print('connected', address)\n"
            "    except OSError: pass\n"
            "    family = socket.AF_INET6 if ':' in address[0] else socket.AF_INET\n"
            "    try: socket.socket(family, socket.SOCK_DGRAM).sendto(b'x', address)\n"
            "    except OSError: pass\n"
        )
        assert await run_python(machine, program) == ""
        program = _CONNECT.format(port=port)
        assert (await other.exec(["python", "-c", program])).exit_code == 1
        with socket.socket() as client:
            assert client.connect_ex(("127.0.0.1", port)) != 0
        for server in (outside, anywhere):
            server.settimeout(0)
            with pytest.raises(BlockingIOError):
                server.accept()
    await other.close()


async def test_the_port_ends_with_the_machine(host: NamespaceHost) -> None:
    machine = await host.create(BUILT_IN)
    listener, port = await machine.listen()
    connecting = asyncio.create_task(
        machine.exec(["python", "-c", _CONNECT.format(port=port) + "s.recv(1)"], timeout_s=60)
    )
    listener.setblocking(False)
    connection, _ = await asyncio.get_running_loop().sock_accept(listener)
    connection.setblocking(False)
    ended = asyncio.create_task(asyncio.get_running_loop().sock_recv(connection, 1))
    await machine.close()
    assert await ended == b""  # its processes are gone, so its connections are
    with pytest.raises(Exception, match="machine"):
        await connecting
    connection.close()
    listener.close()


async def test_a_cancelled_command_ends_at_once(machine: NamespaceMachine) -> None:
    listener, port = await machine.listen()
    listener.setblocking(False)
    program = _CONNECT.format(port=port) + "while True: pass"
    running = asyncio.create_task(machine.exec(["python", "-c", program], timeout_s=600))
    connection, _ = await asyncio.get_running_loop().sock_accept(listener)  # it has begun
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    async with asyncio.timeout(60):
        assert await run_python(machine, "print(1)") == "1"
    for _ in range(20):  # whether the command has begun or ended, replies stay in step with requests
        running = asyncio.create_task(machine.exec(["true"]))
        await asyncio.sleep(0)
        running.cancel()
        await machine.write("f", b"x")
        assert await machine.read("f") == b"x"
        assert (await machine.exec(["echo", "2"])).output == b"2\n"
    connection.close()
    listener.close()


async def test_a_machine_that_ignores_a_cancelled_command_is_ruined(
    host: NamespaceHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long the command was allowed to run: what it did is graded, and soon."""
    machine = await host.create(BUILT_IN)
    running = asyncio.create_task(machine.exec(["sleep", "54321.9876"], timeout_s=86400))
    await wait_for_processes("54321.9876", 1)
    (command,) = processes_with("54321.9876")
    os.kill(parent_of(command), signal.SIGSTOP)  # pid 1, as if the command had found a way
    monkeypatch.setattr(AgentMachine, "_grace_s", 1.0)
    running.cancel()
    with pytest.raises(FileNotFoundError):
        await machine.read("main.py")
    monkeypatch.undo()
    await machine.close()


# Each holds memory in the kernel's buffers, which no process owns.
_HOLDERS = {
    "unread connections": (
        "import socket\nserver = socket.create_server(('127.0.0.1', 0), backlog=4096)\nheld = []\n"
        "for _ in range(400):\n"
        "    client = socket.create_connection(server.getsockname()); client.setblocking(False)\n"
        "    try:\n        while True: client.send(b'x' * 65536)\n"
        "    except BlockingIOError: pass\n"
        "    client.close() if {close} else held.append(client)\n"
    ),
    "datagrams": (
        "import socket\nheld = []\nsender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
        "for _ in range(600):\n"
        "    held.append(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)); held[-1].bind(('127.0.0.1', 0))\n"
        "    for _ in range(100): sender.sendto(b'x' * 60000, held[-1].getsockname())\n"
        "    if len(held) == 200 and __import__('os').fork(): import time; time.sleep(60)\n"
        "    if len(held) == 200: held.clear()\n"
    ),
}


@pytest.mark.parametrize("holder", ["unread connections", "orphaned connections", "datagrams"])
async def test_memory_of_connections_is_counted(any_host: NamespaceHost, holder: str) -> None:
    machine = await any_host.create(BUILT_IN)
    program = _HOLDERS.get(holder, _HOLDERS["unread connections"]).replace("{close}", str("orphaned" in holder))
    result = await machine.exec(["python", "-c", program + "print('held')\nimport time; time.sleep(60)"], timeout_s=60)
    # by the watchdog, or fewer files may be open than the memory limit allows sockets
    assert result.stopped in ("memory", "processes") or b"Too many open files" in result.output, result
    assert await run_python(machine, "print(6 * 7)") == "42"
    await machine.close()


async def test_buffers_stay_at_their_default_sizes(machine: NamespaceMachine) -> None:
    program = (
        "import socket\nsizes = []\n"
        "for family, kind in ((socket.AF_INET, socket.SOCK_STREAM), (socket.AF_UNIX, socket.SOCK_STREAM)):\n"
        "    s = socket.socket(family, kind)\n"
        "    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):\n"
        "        before = s.getsockopt(socket.SOL_SOCKET, option)\n"
        "        s.setsockopt(socket.SOL_SOCKET, option, 1 << 24)\n"
        "        sizes.append(s.getsockopt(socket.SOL_SOCKET, option) == before)\n"
        "print(sizes, [open(f'/proc/sys/net/ipv4/{n}').read().split()[2] for n in ('tcp_rmem', 'tcp_wmem')])"
    )
    assert await run_python(machine, program) == "[True, True, True, True] ['131072', '131072']"
    assert CONFIG.memory_mb << 20 > 64 * 2 * 212992  # an ordinary program's sockets fit


async def test_seldom_used_protocols_are_refused(machine: NamespaceMachine) -> None:
    program = (
        "import socket\n"
        "for protocol in (132, 33, 262, 136):\n"  # SCTP, DCCP, MPTCP, UDP-Lite
        "    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET):\n"
        "        try: socket.socket(socket.AF_INET, kind, protocol); print('opened', protocol)\n"
        "        except PermissionError: pass\n"
        "server = socket.create_server(('127.0.0.1', 0)); s = socket.create_connection(server.getsockname())\n"
        "try: s.setsockopt(socket.IPPROTO_TCP, 31, b'tls'); print('tls')\n"
        "except PermissionError: pass\n"
        "try: open('/proc/sys/net/ipv4/tcp_rmem', 'w').write('1 1 1'); print('wrote')\n"
        "except OSError: pass\n"
    )
    assert await run_python(machine, program) == ""
