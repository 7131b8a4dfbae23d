"""No machine sees an inode of another machine or of the host: locks and watches on what all share stay in a machine."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from rollmill.machines.images.image import BUILT_IN
from rollmill.machines.machine import Process
from rollmill.machines.namespace.client import NamespaceHost, NamespaceMachine
from tests.machines.conftest import run_python
from tests.machines.test_processes import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

# a few files and directories of every mount that a machine did not make itself
_SHARED = """
import fcntl, os, struct, sys
places = {line.split()[4] for line in open("/proc/self/mountinfo")}
places -= {"/work", "/tmp", "/home/user", "/dev/pts", *(p for p in places if p.startswith("/proc"))}
paths = sorted(places | {"/etc", "/etc/passwd", "/home", "/dev", "/dev/null", "/usr/bin", sys.executable})
for place in list(paths):
    if os.path.isdir(place):
        paths += [entry.path for entry in os.scandir(place) if entry.is_file(follow_symlinks=False)][:5]
if not DEVICES:
    paths = [path for path in paths if path[:5] != "/dev/"]
opened = {}
for path in paths:
    try: opened[path] = os.open(path, os.O_RDONLY)
    except OSError: pass
"""
_HOLD = """
for file in opened.values():
    fcntl.flock(file, fcntl.LOCK_EX)
    try: fcntl.lockf(file, fcntl.LOCK_SH)
    except OSError: pass  # directories and devices cannot be locked so
assert len(opened) > 10
print("ready", flush=True)
import time
time.sleep(60)
"""
_FIND = """
found = []
for path, file in opened.items():
    try: fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError: found.append(path)
    try: answer = fcntl.fcntl(file, fcntl.F_GETLK, struct.pack("hhqqi", fcntl.F_WRLCK, 0, 0, 0, 0) + bytes(4))
    except OSError: continue
    if struct.unpack_from("h", answer)[0] != fcntl.F_UNLCK: found.append("lockf " + path)
print(found)
"""
_WATCH = """
import ctypes, select, time
libc = ctypes.CDLL(None)
watch = libc.inotify_init()
for path in opened:
    assert libc.inotify_add_watch(watch, path.encode(), 0xfff) > 0
for file in opened.values(): os.close(file)
while select.select([watch], [], [], 0)[0]: os.read(watch, 4096)
print("ready", flush=True)
while not os.path.exists("/work/end"): time.sleep(0.01)
ready = select.select([watch], [], [], 0)[0]
print(len(os.read(watch, 4096)) if ready else 0)
"""
_TOUCH = """
for path in opened:
    try: (os.listdir if os.path.isdir(path) else lambda path: open(path, "rb").read(64))(path)
    except OSError: pass
"""


@pytest_asyncio.fixture(loop_scope="module")
async def pair(any_host: NamespaceHost) -> AsyncIterator[tuple[NamespaceMachine, NamespaceMachine]]:
    if not any_host.limits["private_files"]:
        pytest.skip("this kernel does not give slots files of their own")
    made = (await any_host.create(BUILT_IN), await any_host.create(BUILT_IN))
    yield made
    await asyncio.gather(*(machine.close() for machine in made))


def _program(machine: NamespaceMachine, text: str) -> str:
    return _SHARED.replace("DEVICES", str(machine.host.limits["private_devices"])) + text


async def _begin(machine: NamespaceMachine, program: str) -> Process:
    process = await machine.start(["python", "-c", _program(machine, program)])
    await until(process, b"ready\n")
    return process


async def test_a_lock_on_a_shared_file_is_seen_by_no_other_machine(
    pair: tuple[NamespaceMachine, NamespaceMachine],
) -> None:
    holder, other = pair
    await _begin(holder, _HOLD)
    assert await run_python(other, _program(other, _FIND)) == "[]"
    assert len(await run_python(holder, _program(holder, _FIND))) > 200, "within a machine locks work as ever"


async def test_a_watch_on_a_shared_file_sees_no_other_machine_and_not_the_host(
    pair: tuple[NamespaceMachine, NamespaceMachine],
) -> None:
    watcher, other = pair
    process = await _begin(watcher, _WATCH)
    await run_python(other, _program(other, _TOUCH))
    await asyncio.to_thread(subprocess.run, ["sh", "-c", "ls /usr/bin; head -c1 /usr/bin/*"], capture_output=True)
    await watcher.write("end", b"")  # by the machine's first process, which opens nothing that is shared
    assert (await until(process, b"\n0\n")).output == b"ready\n0\n"


async def test_no_path_of_the_host_is_told(machine: NamespaceMachine) -> None:
    mounted = await run_python(machine, "print(open('/proc/self/mountinfo').read())")
    assert "/root/" not in mounted and "ext4" not in mounted, mounted
