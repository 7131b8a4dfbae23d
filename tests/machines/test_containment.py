"""Whatever a command does is a result. The machine continues, and no process of the command is left."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import uuid
from pathlib import Path

import pytest

from rollmill.errors import MachineError
from rollmill.machines.images.image import BUILT_IN
from rollmill.machines.machine import ExecResult
from rollmill.machines.namespace.client import NamespaceHost, NamespaceMachine
from tests.machines.conftest import run_python

pytestmark = pytest.mark.asyncio(loop_scope="module")


def processes_with(marker: str) -> list[int]:
    """Processes of this host whose command line contains `marker`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if marker.encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


async def wait_for_processes(marker: str, count: int) -> None:
    async with asyncio.timeout(30):
        while len(processes_with(marker)) != count:  # noqa: ASYNC110  other processes set no event
            await asyncio.sleep(0.02)


async def assert_works(machine: NamespaceMachine) -> None:
    assert await run_python(machine, "print(6 * 7)") == "42"
    await machine.write("after", b"still here")
    assert await machine.read("after") == b"still here"


async def test_an_endless_command(machine: NamespaceMachine) -> None:
    result = await machine.exec(["python", "-c", "print('begun', flush=True)\nwhile True: pass"], timeout_s=0.3)
    assert (result.stopped, result.exit_code, result.output) == ("time", -signal.SIGKILL, b"begun\n")
    await assert_works(machine)


async def test_a_command_that_ignores_signals(machine: NamespaceMachine) -> None:
    result = await machine.exec(["sh", "-c", "trap '' TERM INT HUP; while :; do :; done"], timeout_s=0.3)
    assert result.stopped == "time"
    await assert_works(machine)


async def test_a_fork_bomb(machine: NamespaceMachine) -> None:
    program = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    result = await machine.exec(["python", "-c", program], timeout_s=0.7)
    assert result.stopped is not None
    await assert_works(machine)
    assert await run_python(machine, "import os; print(len([p for p in os.listdir('/proc') if p.isdigit()]))") == "2"


async def test_a_memory_bomb(machine: NamespaceMachine) -> None:
    program = "held = []\nwhile True: held.append(bytearray(1 << 20))"
    result = await machine.exec(["python", "-c", program], timeout_s=20)
    assert result.stopped == "memory" or (result.exit_code == 1 and b"MemoryError" in result.output)
    await assert_works(machine)


async def test_a_memory_bomb_of_many_processes(host: NamespaceHost, machine: NamespaceMachine) -> None:
    program = (
        "import os, time\n"
        "for _ in range(4): os.fork()\n"
        "held = b'x' * (40 << 20)\n"
        "print('held', flush=True)\n"
        "time.sleep(9)"
    )
    result = await machine.exec(["python", "-c", program], timeout_s=3)
    if "memory" in host.limits["control_groups"]:  # the kernel kills processes before they hold 640 MiB
        assert result.stopped is not None and result.output.count(b"held") < 10
    else:  # the machine ends them all as soon as it counts too much
        assert result.stopped == "memory"


async def test_a_hundred_megabytes_of_output(machine: NamespaceMachine) -> None:
    program = "import os\nprint('first', flush=True)\nfor _ in range(1600): os.write(1, b'x' * 65536)\nprint('last')"
    result = await machine.exec(["python", "-c", program], timeout_s=60, max_output=4000)
    assert result.truncated and result.exit_code == 0
    assert result.output.startswith(b"first\n") and result.output.endswith(b"last\n")
    assert b"bytes cut]" in result.output and len(result.output) < 4100


async def test_output_at_the_limit_is_whole(machine: NamespaceMachine) -> None:
    result = await machine.exec(["python", "-c", "print('y' * 9999)"], max_output=10000)
    assert (result.truncated, len(result.output)) == (False, 10000)


async def test_a_disk_filler(machine: NamespaceMachine) -> None:
    program = "n = 0\nwhile True:\n    open(f'/tmp/{n}', 'wb').write(b'x' * (1 << 20)); n += 1"
    result = await machine.exec(["python", "-c", program], timeout_s=20)
    assert b"No space left on device" in result.output
    result = await machine.exec(["python", "-c", "n = 0\nwhile True:\n    open(f'f{n}', 'w'); n += 1"], timeout_s=20)
    assert b"No space left on device" in result.output
    with pytest.raises(OSError, match="No space left"):
        await machine.write("more", b"x")
    await machine.exec(["sh", "-c", "rm -f f* /tmp/*"])
    await assert_works(machine)


async def test_a_file_larger_than_the_disk(machine: NamespaceMachine) -> None:
    result = await machine.exec(["python", "-c", "open('big', 'wb').truncate(1 << 40)"])
    assert result.exit_code != 0
    await assert_works(machine)


async def test_too_many_open_files(machine: NamespaceMachine) -> None:
    result = await machine.exec(["python", "-c", "held = [open('/dev/null') for _ in range(5000)]"])
    assert b"Too many open files" in result.output


async def test_no_process_outlives_its_command(machine: NamespaceMachine) -> None:
    daemon = (
        "import os, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0:\n"
        "        while True:\n"
        "            open('/work/main.py', 'w').write('overwritten')\n"
        "            time.sleep(0.01)\n"
        "    os._exit(0)\n"
        "time.sleep(0.2)"
    )
    await machine.exec(["python", "-c", daemon])
    await machine.write("main.py", b"mine")
    await asyncio.sleep(0.2)
    assert await machine.read("main.py") == b"mine"


async def test_a_command_cannot_end_or_trace_the_first_process(machine: NamespaceMachine) -> None:
    program = (
        "import ctypes, os, signal\n"
        "for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGSTOP, signal.SIGHUP):\n"
        "    try: os.kill(1, number)\n"
        "    except PermissionError: pass\n"
        "for name in ('mem', 'environ', 'maps', 'fd/0', 'fd/3', 'oom_score_adj', 'root', 'ns/pid'):\n"
        "    try: open(f'/proc/1/{name}', 'rb'); print('opened', name)\n"
        "    except FileNotFoundError: pass\n"
        "print(ctypes.CDLL(None).ptrace(16, 1, 0, 0), sorted(map(int, os.listdir('/proc/self/fd')))[:3])"
    )
    assert await run_python(machine, program) == "-1 [0, 1, 2]"
    await assert_works(machine)


async def _run_and_find_pid_1(machine: NamespaceMachine) -> tuple[asyncio.Task[ExecResult], int]:
    marker = uuid.uuid4().hex
    running = asyncio.create_task(machine.exec(["sh", "-c", f"sleep 1000; : {marker}"], timeout_s=1000))
    await wait_for_processes(marker, 1)
    [command] = processes_with(marker)
    return running, parent_of(command)


async def test_a_machine_destroyed_by_its_command_is_a_result_and_its_files_are_gone(any_host: NamespaceHost) -> None:
    """Pid 1 ends by itself, as if a command had found a way."""
    machine = await any_host.create(BUILT_IN, {"main.py": b"x"})
    running, _ = await _run_and_find_pid_1(machine)
    machine._connection.shutdown(socket.SHUT_WR)
    assert ((await running).stopped, (await running).exit_code) == ("machine", -9)
    assert (await machine.exec(["true"])).stopped == "machine"
    with pytest.raises(FileNotFoundError):
        await machine.read("main.py")
    await machine.close()


async def test_a_machine_that_someone_outside_kills_is_an_infrastructure_failure(any_host: NamespaceHost) -> None:
    """No command can kill pid 1. Whoever asks, and however often, is told the same."""
    machine = await any_host.create(BUILT_IN, {"main.py": b"x"})
    assert (await machine.exec(["sh", "-c", "kill -9 1; kill -9 -1"])).stopped != "machine"
    running, pid = await _run_and_find_pid_1(machine)
    os.kill(pid, signal.SIGKILL)
    for request in (running, machine.exec(["true"]), machine.read("main.py")):
        with pytest.raises(MachineError, match="someone killed its first process"):
            await request
    await machine.close()
    idle = await any_host.create(BUILT_IN)
    running, pid = await _run_and_find_pid_1(idle)
    running.cancel()
    assert (await idle.exec(["true"])).exit_code == 0
    os.kill(pid, signal.SIGKILL)
    while os.path.exists(f"/proc/{pid}"):  # noqa: ASYNC110  the machine host learns of it before anyone asks
        await asyncio.sleep(0.01)
    with pytest.raises(MachineError, match="someone killed its first process"):
        await idle.exec(["true"])
    await idle.close()


async def test_closing_a_machine_ends_everything_in_it(host: NamespaceHost) -> None:
    marker = uuid.uuid4().hex
    machine = await host.create(BUILT_IN)
    running = asyncio.create_task(machine.exec(["sh", "-c", f"sleep 1000; : {marker}"], timeout_s=1000))
    await wait_for_processes(marker, 1)
    await machine.close()
    assert processes_with(marker) == []
    running.cancel()


async def test_a_killed_client_takes_its_machines_with_it() -> None:
    marker = uuid.uuid4().hex
    script = (
        "import asyncio\n"
        "from rollmill.machines.namespace.client import NamespaceHost\n"
        "async def main():\n"
        f"    machine = await NamespaceHost().create({BUILT_IN!r})\n"
        f"    await machine.exec(['sh', '-c', 'sleep 1000; : {marker}'], timeout_s=1000)\n"
        "asyncio.run(main())\n"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", script, cwd=Path(__file__).parents[2])
    try:
        await wait_for_processes(marker, 2)  # the script itself and the command in its machine
    finally:
        process.kill()
        await process.wait()
    await wait_for_processes(marker, 0)
