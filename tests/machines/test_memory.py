"""Memory is bounded even without a control group, for every kind of memory that a command can take."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rollmill.machines.images.image import BUILT_IN
from rollmill.machines.namespace.client import NamespaceHost
from tests.machines.conftest import CONFIG, run_python

pytestmark = pytest.mark.asyncio(loop_scope="module")

# Each defines take(), which holds one more MiB without increasing the size of its process.
KINDS = {
    "memfd": "def take(): os.write(os.memfd_create('m'), MIB)",
    "memfd, mapped": (
        "def take():\n"
        "    file = os.memfd_create('m'); os.write(file, MIB)\n"
        "    held.append(mmap.mmap(file, len(MIB))); os.close(file)"
    ),
    "System V shared memory": (
        "libc.shmat.restype = ctypes.c_void_p\n"
        "def take():\n"
        "    segment = libc.shmget(0, 1 << 20, 0o1600)\n"
        "    if segment < 0: raise OSError\n"
        "    at = ctypes.c_void_p(libc.shmat(segment, None, 0)); ctypes.memset(at, 1, 1 << 20); libc.shmdt(at)"
    ),
    "shared mapping": (
        "def take():\n"
        "    memory = mmap.mmap(-1, 1 << 20); memory.write(MIB); memory.madvise(mmap.MADV_DONTNEED)\n"
        "    held.append(memory)"
    ),
    "mapping of /dev/zero": (
        "def take():\n"
        "    with open('/dev/zero', 'r+b', buffering=0) as zero: memory = mmap.mmap(zero.fileno(), 1 << 20)\n"
        "    memory.write(MIB); memory.madvise(mmap.MADV_DONTNEED); held.append(memory)"
    ),
    "POSIX shared memory": (
        "def take():\n"
        "    name = f'/dev/shm/{len(held)}'; held.append(open(name, 'wb', buffering=0)); os.remove(name)\n"
        "    assert held[-1].write(MIB) == len(MIB)"
    ),
    "pipes": (
        "def take():\n"
        "    for _ in range(16):\n"
        "        pipe = os.pipe(); held.append(pipe); os.set_blocking(pipe[1], False); os.write(pipe[1], MIB)\n"
        "    if len(held) % 64 == 0: os.fork() or held.clear()"
    ),
    "large pipes": (
        "def take():\n"
        "    pipe = os.pipe(); held.append(pipe); fcntl.fcntl(pipe[1], 1031, 1 << 20)\n"
        "    os.set_blocking(pipe[1], False); os.write(pipe[1], MIB)"
    ),
    "sockets": (
        "def take():\n"
        "    for _ in range(5):\n"
        "        pair = socket.socketpair(); held.append(pair); pair[0].setblocking(False)\n"
        "        try:\n"
        "            while True: pair[0].send(MIB[:4096])\n"
        "        except BlockingIOError: pass\n"
        "    if len(held) % 50 == 0: os.fork() or held.clear()"
    ),
    "message queues": (
        "def take():\n"
        "    for _ in range(64):\n"
        "        queue = libc.msgget(0, 0o1600)\n"
        "        if queue < 0: raise OSError\n"
        "        if libc.msgsnd(queue, bytes([1] * 8000), 7900, 0) < 0: raise OSError\n"
        "        libc.msgsnd(queue, bytes([1] * 8000), 7900, 0)"
    ),
    "semaphores": ("def take():\n    if libc.semget(0, 16384, 0o1600) < 0: raise OSError"),
    "pages given to a pipe": (
        "class Part(ctypes.Structure): _fields_ = [('at', ctypes.c_void_p), ('size', ctypes.c_size_t)]\n"
        "def take():\n"
        "    pipe = os.pipe(); held.append(pipe); memory = ctypes.create_string_buffer(MIB, len(MIB))\n"
        "    part = Part(ctypes.addressof(memory), 65536)\n"
        "    for _ in range(16):\n"
        "        if libc.vmsplice(pipe[1], ctypes.byref(part), 1, 2) < 0: raise OSError"
    ),
    "processes": "def take(): os.fork() or [held.append(MIB + b'x'), time.sleep(60)]",
}
_PROGRAM = """
import ctypes, fcntl, mmap, os, socket, time
libc = ctypes.CDLL(None)
MIB = b"x" * (1 << 20)
held = []
{kind}
for taken in range(360):
    try:
        take()
    except Exception as error:
        print(taken, "MiB, then", repr(error))
        break
else:
    print(360, "MiB")
time.sleep(0.5)
"""


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
async def test_every_kind_of_memory_is_counted_or_refused(any_host: NamespaceHost, kind: str) -> None:
    machine = await any_host.create(BUILT_IN)
    result = await machine.exec(["python", "-c", _PROGRAM.format(kind=kind)], timeout_s=30)
    if result.stopped not in ("memory", "processes"):  # fewer processes are allowed than the memory limit has MiB
        assert result.stopped is None and int(result.output.split()[0]) < CONFIG.memory_mb, result
    assert await run_python(machine, "print(6 * 7)") == "42"
    await machine.close()


async def test_a_command_out_of_memory_never_takes_pid_one_with_it(host: NamespaceHost) -> None:
    """What its open files hold is freed a moment after the kernel has killed it, and pid 1 needs memory meanwhile. In
    one group with its commands pid 1 was the next to be killed, for 2 to 3 of 100 such commands."""
    if "memory" not in host.limits["control_groups"] or Path("/sys/fs/cgroup/cgroup.controllers").exists():
        pytest.skip("no control groups of version 1 here")
    bomb = "import os\nfor _ in range(360): os.write(os.memfd_create('m'), b'x' * (1 << 20))"

    async def burst() -> None:
        for _ in range(8):
            machine = await host.create(BUILT_IN)
            assert (await machine.exec(["python", "-c", bomb], timeout_s=30)).stopped == "memory"
            assert (await machine.exec(["true"])).exit_code == 0
            await machine.close()

    await asyncio.gather(*(burst() for _ in range(4)))
    machine = await host.create(BUILT_IN)
    assert await run_python(machine, "print(open('/proc/self/cgroup').read().count('memory:/user.slice'))") == "1"
    await machine.close()


async def test_ordinary_programs_stay_below_the_limit(bare_host: NamespaceHost) -> None:
    """A pool of processes, shared files, a few pipes and sockets stay far below the limit."""
    program = (
        "import asyncio, multiprocessing, socket, subprocess\n"
        "from multiprocessing import shared_memory\n"
        "memory = shared_memory.SharedMemory(create=True, size=1 << 20); memory.buf[:] = b'x' * (1 << 20)\n"
        "memory.close(); memory.unlink()\n"
        "pairs = [socket.socketpair() for _ in range(8)]\n"
        "with multiprocessing.Pool(4) as pool: print(sum(pool.map(abs, range(100))))\n"
        "print(subprocess.run(['sh', '-c', 'dd if=/dev/zero bs=1k count=4 status=none | wc -c'],"
        " capture_output=True, text=True).stdout)\n"
        "async def main():\n"
        "    process = await asyncio.create_subprocess_exec('sleep', '0.3')\n"
        "    return await process.wait()\n"
        "print(asyncio.run(main()))"
    )
    machine = await bare_host.create(BUILT_IN)
    result = await machine.exec(["python", "-c", program], timeout_s=60)
    assert result.output.split() == [b"4950", b"4096", b"0"], result
    await machine.close()
