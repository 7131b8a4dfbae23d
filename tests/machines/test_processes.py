"""Processes with handles: they survive commands, end when they are stopped, and are held to the machine's limits."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys

import pytest

from rollmill.machines.images.image import BUILT_IN
from rollmill.machines.machine import Process, ProcessState
from rollmill.machines.namespace.client import NamespaceHost, NamespaceMachine
from tests.machines.conftest import run_python
from tests.machines.test_attacks import ATTACKS, state_of
from tests.machines.test_containment import wait_for_processes

pytestmark = pytest.mark.asyncio(loop_scope="module")

_COUNT = "import os; print(len([p for p in os.listdir('/proc') if p.isdigit()]))"
_SERVER = (
    "import socket\nserver = socket.create_server(('127.0.0.1', 4000)); print('up', flush=True)\n"
    "while True:\n    s, _ = server.accept(); s.sendall(b'hello'); s.close(); print('served', flush=True)\n"
)


# a process that gets its limits late, in an interpreter without threads
_LATE = """
import os, resource, time
from rollmill.machines.guest import run_command as command
from rollmill.machines.guest import processes as process
def late(confinement, user=None):
    time.sleep(0.3)
    for which, value in confinement.rlimits.items(): resource.setrlimit(which, (value, value))
def never(confinement, user=None):
    raise OSError("no such user")
def lowered(confinement, user=None):
    for which in process.COMMAND_MARK: resource.setrlimit(which, (0, 0))
order = command.Order(["sleep", "60"], "/", {}, b"", 1.0, 100)
for command._confine in (late, never, lowered):
    processes = process.Processes()
    number = processes.start(order, command.Confinement({}, None, warm=False), None)
    started = processes.get(number)
    print(process._mark_of(started.pid) == started.mark, started.exit_code)
    if started.exit_code is None:
        os.kill(started.pid, 9)
        os.waitpid(started.pid, 0)
    try: processes.stop(number)
    except RuntimeError: print("refused")  # not in a machine: it would look through the processes of this host
"""


async def test_a_process_is_marked_before_the_next_command_begins() -> None:
    """Otherwise a command that ends first takes it for something that it left running, and kills it."""
    done = subprocess.run(  # noqa: ASYNC221  the process itself lives longer than this
        [sys.executable, "-c", _LATE], capture_output=True, text=True, check=True, timeout=40
    )
    assert done.stdout == "True None\nrefused\nFalse 126\nrefused\nFalse None\nrefused\n"


# commands that fail before they begin, in an interpreter without threads
_FAILING = """
import os
from rollmill.machines.guest import run_command as command
def refuse(*_): raise OSError("no user namespaces")
command._confine, command._call_root = lambda *_: None, refuse
os.dup2(os.open("/dev/null", os.O_RDONLY), command.GROUP)  # like the group of a machine that is gone: nobody enters it
order, confinement = command.Order(["true"], "/", {}, b"", 1.0, 100), command.Confinement({}, None, warm=False)
begun = command._begin(order, confinement._replace(apart=True))
ready = command.Ready.make(confinement).begin(order._replace(user="root"))
for pid, reading in (begun, ready): print(os.waitpid(pid, 0)[1] >> 8, os.read(reading, 100))
"""


async def test_a_command_that_cannot_begin_says_why() -> None:
    done = subprocess.run([sys.executable, "-c", _FAILING], capture_output=True, text=True, check=True)  # noqa: ASYNC221
    assert done.stdout == "126 b'true: [Errno 9] Bad file descriptor\\n'\n126 b'true: no user namespaces\\n'\n"
    assert not done.stderr, "it is in the output of the command, not of pid 1"


async def until(process: Process, words: bytes) -> ProcessState:
    async with asyncio.timeout(60):
        while words not in (state := await process.state()).output and state.exit_code is None:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    return state


# a survivor that lowers its limits to those of each process in turn
_FORGE = """
import os, resource, time
def limits(pid):
    rows = {}
    for line in open(f"/proc/{pid}/limits"):
        rows[line[:26].strip()] = line[26:].split()[1] if line[26:].strip() else ""
    return rows
NAMES = {5: "Max resident set", 10: "Max file locks", 12: "Max msgqueue size", 11: "Max pending signals"}
for other in [int(p) for p in os.listdir("/proc") if p.isdigit() and p not in ("1", str(os.getpid()))]:
    wanted = limits(other)
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            for which, name in NAMES.items():
                hard = -1 if wanted[name] == "unlimited" else int(wanted[name])
                try: resource.setrlimit(which, (hard, hard))
                except (OSError, ValueError): pass
            time.sleep(600)
        os._exit(0)
time.sleep(0.3)
"""


async def test_no_process_can_give_itself_the_mark_of_another_one(any_host: NamespaceHost) -> None:
    machine = await any_host.create(BUILT_IN)
    servers = [await machine.start(["sleep", "600"]) for _ in range(3)]
    await run_python(machine, _FORGE)
    assert await run_python(machine, _COUNT) == str(1 + len(servers) + 1), "pid 1, the servers and the one that counts"
    forger = await machine.start(["python", "-c", _FORGE + "time.sleep(600)"])
    await asyncio.gather(*(server.stop() for server in (*servers, forger)))
    await run_python(machine, "pass")  # what gave up its own mark ends with the next command
    assert await run_python(machine, _COUNT) == "2"
    await machine.close()


async def test_a_server_survives_commands_until_it_is_stopped(any_host: NamespaceHost) -> None:
    machine = await any_host.create(BUILT_IN)
    server = await machine.start(["python", "-c", _SERVER], env={"X": "1"})
    assert (await until(server, b"up")).exit_code is None
    ask = "import socket; print(socket.create_connection(('127.0.0.1', 4000), 20).recv(9))"
    for _ in range(2):
        assert await run_python(machine, ask) == "b'hello'"
    await machine.write("f", b"x")
    assert await machine.read("f") == b"x"
    state = await until(server, b"served\nserved")
    assert (state.exit_code, state.output, state.truncated) == (None, b"up\nserved\nserved\n", False)
    stopped = await server.stop()
    assert (stopped.exit_code, stopped.stopped) == (-signal.SIGKILL, None) and stopped == await server.stop()
    assert await server.state() == stopped
    assert (await machine.exec(["python", "-c", ask])).exit_code == 1
    assert await run_python(machine, _COUNT) == "2"
    await machine.close()


async def test_leftovers_of_a_command_end_and_started_processes_stay(any_host: NamespaceHost) -> None:
    """Also daemons, which left their session and their parent, on both sides."""
    machine = await any_host.create(BUILT_IN)
    daemon = (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork(): os._exit(0)\n    time.sleep(600)\n"
    )
    one = await machine.start(["python", "-c", daemon + "os.wait(); time.sleep(600)"])
    other = await machine.start(["sh", "-c", "sleep 600 & wait"])
    async with asyncio.timeout(60):  # 2 of each tree, pid 1 and the one that counts
        while await run_python(machine, _COUNT) != "6":  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    await machine.exec(["python", "-c", daemon])
    assert await run_python(machine, _COUNT) == "6"
    await one.stop()
    assert await run_python(machine, _COUNT) == "4"
    assert (await other.state()).exit_code is None
    await other.stop()
    assert await run_python(machine, _COUNT) == "2"
    await machine.close()


async def test_ends_and_output_are_told(machine: NamespaceMachine) -> None:
    process = await machine.start(["sh", "-c", "cat; exit 3"], stdin=b"words\n")
    state = await until(process, b"never")
    assert (state.exit_code, state.output) == (3, b"words\n")
    process = await machine.start(["no-such-program"])
    assert (await until(process, b"never")).exit_code == 127
    loud = await machine.start(["python", "-c", "for n in range(99999): print(n)"], max_output=1000)
    state = await until(loud, b"99998\n")
    assert state.truncated and state.output.startswith(b"0\n1\n") and b"bytes cut]" in state.output
    assert len(state.output) < 1100
    for wrong in ([], ["a\0b"], "sh"):
        with pytest.raises((OSError, AssertionError)):
            assert (await until(await machine.start(wrong), b"never")).exit_code == 0


async def test_handles_are_bounded(machine: NamespaceMachine) -> None:
    kept = []
    with pytest.raises(OSError, match="temporarily unavailable"):
        for _ in range(99):
            kept.append(await machine.start(["true"]))
    await kept[0].stop()
    assert (await until(await machine.start(["true"]), b"never")).exit_code == 0


async def test_the_limits_hold_while_no_command_runs(any_host: NamespaceHost) -> None:
    machine = await any_host.create(BUILT_IN)
    bystander = await machine.start(["sleep", "600"])
    # one process: of several, the kernel may end another than the one that is waited for
    hungry = await machine.start(["python", "-c", "import time\nx = b'x' * (480 << 20)\ntime.sleep(600)"])
    async with asyncio.timeout(60):
        while (state := await hungry.state()).exit_code is None:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    assert state.exit_code != 0
    await bystander.stop()
    await hungry.stop()
    forks = await machine.start(["python", "-c", ATTACKS["fork bomb that leaves the session"]])
    await asyncio.sleep(0.2)
    await forks.stop()
    assert await run_python(machine, _COUNT) == "2"
    await machine.close()


async def test_processes_end_with_their_machine(host: NamespaceHost) -> None:
    machine = await host.create(BUILT_IN)
    await machine.start(["sleep", "98765.4321"])
    await wait_for_processes("98765.4321", 1)
    await machine.close()
    await wait_for_processes("98765.4321", 0)


@pytest.mark.slow
async def test_an_attack_by_a_process_changes_nothing_or_ruins_its_own_machine(any_host: NamespaceHost) -> None:
    bystander = await any_host.create(BUILT_IN, {"main.py": b"x = 1\n"})
    fresh = await state_of(bystander)
    some = asyncio.Semaphore(6)

    async def attack_once(name: str, attack: str) -> None:
        async with some:
            machine = await any_host.create(BUILT_IN, {"main.py": b"x = 1\n"})
            process = await machine.start(["python", "-c", attack], max_output=2000)
            await asyncio.sleep(0.3)
            for path in ("main.py", "absent"):
                with contextlib.suppress(OSError):
                    await machine.read(path)
            await process.stop()
            assert await state_of(machine) in (fresh, b""), name
            await machine.close()

    await asyncio.gather(*(attack_once(name, attack) for name, attack in ATTACKS.items()))
    assert await state_of(bystander) == fresh
