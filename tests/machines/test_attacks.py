"""Attacks on a machine from one of its commands. None of them is an infrastructure failure.

After each attack the machine either works as before or is ruined. A ruined machine ends its commands with
`stopped="machine"` and its files are not found, so that the episode is graded. MachineError means failures of the host.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Awaitable, Callable

import pytest

from rollmill.environments.episode import Episode
from rollmill.environments.rewards.calls import Calls, CallsConfig
from rollmill.environments.task import Task
from rollmill.errors import MachineError
from rollmill.machines import agent_machine
from rollmill.machines.images.image import BUILT_IN
from rollmill.machines.namespace.client import NamespaceHost, NamespaceMachine
from tests.machines.conftest import run_python

pytestmark = pytest.mark.asyncio(loop_scope="module")

_LIBC = "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
_LIMITS = "(resource.RLIMIT_NOFILE, resource.RLIMIT_AS, resource.RLIMIT_NPROC, resource.RLIMIT_FSIZE)"
_TRY_FORK = "    try: child = os.fork()\n    except OSError: child = -1\n"

ATTACKS = {
    "limits of pid 1": (
        f"import resource\nfor which in {_LIMITS}:\n"
        "    for pid in (1, 0):\n"
        "        try: resource.prlimit(pid, which, (1 << 24, 1 << 24) if which == resource.RLIMIT_AS else (3, 3))\n"
        "        except OSError: pass\n"
    ),
    "limits of pid 1 by the bare call": _LIBC
    + (
        "limit = (ctypes.c_uint64 * 2)(0, 0)\n"
        "number = 302 if os.uname().machine == 'x86_64' else 261\n"
        "for which in range(16): libc.syscall(number, 1, which, limit, None)\n"
    ),
    "limits of its own": f"import resource\nfor which in {_LIMITS}: resource.setrlimit(which, (0, 0))\n",
    "signals to pid 1": (
        "import os, signal\nfor number in range(1, 65):\n    try: os.kill(1, number)\n    except OSError: pass\n"
    ),
    "kills everything": "import os, signal\nos.kill(-1, signal.SIGKILL)\nos.kill(0, signal.SIGKILL)\n",
    "stops everything": (
        "import os, signal\nos.fork()\nos.fork()\nos.kill(-1, signal.SIGSTOP)\nos.kill(os.getpid(), signal.SIGSTOP)\n"
    ),
    "priorities": _LIBC
    + (
        "for which in range(3):\n    for who in (0, 1): libc.setpriority(which, who, 19)\n"
        "x86 = os.uname().machine == 'x86_64'\n"
        "for number in ((142, 144, 203, 314, 251) if x86 else (118, 119, 122, 274, 30)):\n"
        "    libc.syscall(number, 1, ctypes.create_string_buffer(64), ctypes.create_string_buffer(64), 0)\n"
        "try: open('/proc/1/oom_score_adj', 'w').write('1000')\n"
        "except OSError: pass\n"
    ),
    "reads and writes pid 1": _LIBC
    + (
        "x86 = os.uname().machine == 'x86_64'\n"
        "calls = (101, 310, 311, 312, 434, 438, 424) if x86 else (117, 270, 271, 272, 434, 438, 424)\n"
        "for number in calls:\n    print(libc.syscall(number, 1, 1, 0, 0, 0, 0))\n"
        "for name in ('mem', 'oom_score_adj', 'comm', 'clear_refs', 'coredump_filter', 'autogroup', 'sched'):\n"
        "    try: open(f'/proc/1/{name}', 'r+b').write(b'1')\n"
        "    except OSError: pass\n"
    ),
    "fork bomb": "import os\nwhile True:\n" + _TRY_FORK,
    "fork bomb that leaves the session": ("import os\nwhile True:\n" + _TRY_FORK + "    if child == 0: os.setsid()\n"),
    "threads": (
        "import threading, time\ntry:\n"
        "    while True: threading.Thread(target=time.sleep, args=(60,)).start()\n"
        "except RuntimeError: time.sleep(60)\n"
    ),
    "memory": "held = []\nwhile True: held.append(bytearray(1 << 20))\n",
    "memory of many processes": "import os\nfor _ in range(5):\n" + _TRY_FORK + "held = b'x' * (30 << 20)\nos.fork()\n",
    "open files": (
        "import os\nfor _ in range(4):\n"
        + _TRY_FORK
        + "held = []\ntry:\n    while True: held += os.pipe()\nexcept OSError: import time; time.sleep(1)\n"
    ),
    "fills the disk": (
        "for folder in ('/work', '/tmp'):\n"
        "    for size in (1 << 20, 1 << 12, 1):\n"
        "        try:\n"
        "            for n in range(10 ** 6): open(f'{folder}/{size}-{n}', 'wb').write(b'x' * size)\n"
        "        except OSError: pass\n"
    ),
    "fills the disk with a deleted file": (
        "import os, time\nf = open('gone', 'wb')\nos.remove('gone')\ntry:\n"
        "    while True: f.write(b'x' * 65536)\n"
        "except OSError: time.sleep(60)\n"
    ),
    "locks its directories": "import os\nos.chmod('main.py', 0)\nos.chmod('/work', 0)\nos.chmod('/tmp', 0)\n",
    "deletes everything": "import os\nos.system('rm -rf --no-preserve-root / 2>/dev/null')\n",
    "deletes python": "import os, sys\nos.system('rm -f /opt/bin/python* /opt/python/bin/* /usr/bin/python*')\n",
    "unmounts": _LIBC
    + "for path in (b'/work', b'/tmp', b'/proc', b'/proc/1', b'/'): libc.umount2(path, 2), libc.umount2(path, 8)\n",
    "leaves its root": _LIBC + "libc.chroot(b'/tmp'), libc.unshare(0x10000000), libc.setns(0, 0)\nos.chdir('/tmp')\n",
    "a directory for a file": "import os\nos.remove('main.py')\nos.mkdir('main.py')\n",
    "a pipe for a file": "import os\nos.remove('main.py')\nos.mkfifo('main.py')\n",
    "a loop for a file": "import os\nos.remove('main.py')\nos.symlink('main.py', 'main.py')\n",
    "pid 1's file for a file": "import os\nos.remove('main.py')\nos.symlink('/proc/self/mem', 'main.py')\n",
    "names that are no text": "import os\nfor n in range(128, 256): os.mkdir(bytes([n, 10, n]))\n",
    "directories without end": "import os\ntry:\n    while True: os.mkdir('d'), os.chdir('d')\nexcept OSError: pass\n",
    "output without end": "import os\nwhile True: os.write(1, b'\\xff\\x00' * 32768)\n",
    "no output at all": "import os, time\nos.close(0), os.close(1), os.close(2)\ntime.sleep(60)\n",
    "eats its own output": (
        "import os\npipe = os.open('/proc/self/fd/1', os.O_RDONLY)\nos.write(1, b'x' * 999)\nos.read(pipe, 999)\n"
    ),
    "never ends": "while True: pass\n",
    "ends by a signal": "import os\nos.kill(os.getpid(), 9)\n",
    "interprocess memory": _LIBC
    + (
        "x86 = os.uname().machine == 'x86_64'\n"
        "shmget, msgget, semget, memfd = (29, 68, 64, 319) if x86 else (194, 186, 190, 279)\n"
        "for _ in range(64):\n"
        "    libc.syscall(shmget, 0, 1 << 20, 0o1600), libc.syscall(msgget, 0, 0o1600)\n"
        "    libc.syscall(semget, 0, 8, 0o1600), libc.syscall(memfd, b'm', 0)\n"
    ),
}


_STATE = (
    "import os, resource\n"
    "names = [name for name in dir(resource) if name.startswith('RLIMIT_')]\n"
    "print([resource.getrlimit(getattr(resource, name)) for name in names], os.getpriority(os.PRIO_PROCESS, 0),"
    " sorted(os.sched_getaffinity(0)), os.getuid(), os.listdir('/opt/bin'), os.umask(0),"
    " len([name for name in os.listdir('/proc') if name.isdigit()]))"
)


async def state_of(machine: NamespaceMachine) -> bytes:
    """The state that the next command sees; empty for a ruined machine."""
    result = await machine.exec(["python", "-c", _STATE], cwd="/", timeout_s=60)
    if result.stopped == "machine":
        with pytest.raises(FileNotFoundError):
            await machine.read("main.py")
        with pytest.raises(FileNotFoundError):
            await machine.write("main.py", b"x")
        return b""
    assert result.exit_code == 0, result
    return result.output


async def each_attack(act: Callable[[str], Awaitable[None]]) -> None:
    """Runs several at the same time: most of them only wait for their time limit."""
    some = asyncio.Semaphore(6)

    async def one(name: str, attack: str) -> None:
        async with some:
            try:
                await act(attack)
            except Exception as error:
                error.add_note(f"attack: {name}")
                raise

    await asyncio.gather(*(one(name, attack) for name, attack in ATTACKS.items()))


async def test_an_attack_changes_nothing_or_ruins_the_attackers_own_machine(any_host: NamespaceHost) -> None:
    bystander = await any_host.create(BUILT_IN, {"main.py": b"x = 1\n"})
    fresh = await state_of(bystander)

    async def attack_once(attack: str) -> None:
        machine = await any_host.create(BUILT_IN, {"main.py": b"x = 1\n"})
        await machine.exec(["python", "-c", attack], timeout_s=1.0, max_output=2000)
        assert await state_of(machine) in (fresh, b"")
        with contextlib.suppress(OSError):  # no submission
            assert isinstance(await machine.read("main.py"), bytes)
        await machine.close()

    await each_attack(attack_once)
    assert await state_of(bystander) == fresh
    assert await bystander.read("main.py") == b"x = 1\n"


@pytest.mark.slow
async def test_an_attack_in_the_grading_machine_is_graded(any_host: NamespaceHost) -> None:
    grading = {"kind": "calls", "module": "main.py", "function": "f", "cases": [[[1], 7290183645]]}
    task = Task("t", "fix", image=BUILT_IN, files={"main.py": b""}, submission=("main.py",), grading=grading)
    grader = Calls(CallsConfig(timeout_s=1.0))

    async def grade(attack: str) -> None:
        assert (await grader.grade(Episode(task, {"main.py": attack.encode()}, any_host))).value == 0.0

    await each_attack(grade)


async def test_a_process_may_change_its_own_limits(any_host: NamespaceHost) -> None:
    """Programs lower their own limits and priority, and pin themselves to a processor."""
    machine = await any_host.create(BUILT_IN)
    program = (
        "import os, resource\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (20, 20))\n"
        "resource.prlimit(0, resource.RLIMIT_CPU, (9, 9))\n"
        "os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, 0))\n"
        "os.sched_setaffinity(0, os.sched_getaffinity(0))\n"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    assert await run_python(machine, program) == "(20, 20)"
    assert (await machine.exec(["nice", "true"])).output == b""
    await machine.close()


async def test_a_supervisor_that_does_not_answer_is_an_infrastructure_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    host = NamespaceHost()
    try:
        machine = await host.create(BUILT_IN)
        assert (await machine.exec(["true"])).exit_code == 0
        assert host._process is not None
        monkeypatch.setattr(agent_machine, "GRACE_S", 1.0)
        os.kill(host._process.pid, signal.SIGSTOP)
        machine._connection.shutdown(2)  # the machine is lost, and nobody knows why
        with pytest.raises(MachineError, match="does not answer either"):
            await machine.exec(["true"])
        with pytest.raises(MachineError):
            await machine.read("main.py")
        os.kill(host._process.pid, signal.SIGCONT)
    finally:
        await host.close()
