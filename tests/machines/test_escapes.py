"""Ways out of a namespace machine that its kernel might leave open: calls, devices, files, and what all users share.

Every attempt runs as a command of a machine. It must fail, or have no effect outside the machine.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import socket
from pathlib import Path

import pytest

from rollmill.machines.images.image import BUILT_IN
from rollmill.machines.namespace.client import NamespaceHost
from tests.machines.conftest import run_python

pytestmark = pytest.mark.asyncio(loop_scope="module")

# Prints a JSON object: the error of each attempt, or null if it had none. Numbers of calls: x86-64, aarch64.
_ATTEMPTS = r"""
import ctypes, errno, fcntl, json, os, socket, time
libc, column, found = ctypes.CDLL(None, use_errno=True), os.uname().machine != 'x86_64', {}
room = ctypes.create_string_buffer(4096)
def attempt(name, action):
    try:
        action()
        found[name] = None
    except OSError as error:
        found[name] = errno.errorcode.get(error.errno, str(error.errno))
def call(name, numbers, *arguments):
    def action():
        ctypes.set_errno(0)
        if libc.syscall(ctypes.c_long(numbers[column]), *arguments) < 0:
            raise OSError(ctypes.get_errno(), '')
    attempt(name, action)
def writes(path, data=b'1'):
    def action():
        file = os.open(path, os.O_WRONLY)
        try: os.write(file, data)
        finally: os.close(file)
    attempt('writes ' + path, action)
call('io_uring', (425, 425), 8, room)
call('userfaultfd', (323, 282), 1)
call('add_key', (248, 217), b'user', b'x', b'y', 1, ctypes.c_int(-3))
call('bpf', (321, 280), 0, room, 128)
call('perf_event_open', (298, 241), room, 0, -1, -1, 0)
call('syslog', (103, 116), 3, room, 4096)
call('setns', (308, 268), os.open('/proc/self/ns/mnt', 0), 0)
call('swapon', (167, 224), b'/work/x', 0)
call('acct', (163, 89), b'/work/x')
call('reboot', (169, 142), 0xfee1dead, 672274793, 0, 0)
call('sethostname', (170, 161), b'x', 1)
call('fanotify_init', (300, 262), 0x200, 0)
call('rt_sigqueueinfo to pid 1', (129, 138), 1, 9, room)
call('mounts a control group', (165, 40), b'cgroup', b'/tmp', b'cgroup', 0, b'memory')
attempt('abstract socket of the host', lambda: socket.socket(socket.AF_UNIX).connect('\0rollmill-escapes-%d'))
for protocol in range(1, 23):
    attempt('netlink %%d' %% protocol, lambda: socket.socket(16, socket.SOCK_RAW, protocol))
for family, kind in ((17, 3), (38, 5), (40, 1), (44, 3), (2, 3)):
    attempt('socket of family %%d' %% family, lambda: socket.socket(family, kind))
for name in ('kernel/core_pattern', 'kernel/hostname', 'vm/drop_caches', 'vm/overcommit_memory', 'net/ipv4/ip_forward',
             'net/core/somaxconn', 'user/max_user_namespaces', 'user/max_inotify_instances', 'kernel/ns_last_pid'):
    writes('/proc/sys/' + name)
for name in ('/proc/sysrq-trigger', '/proc/self/uid_map', '/proc/self/oom_score_adj', '/proc/self/timens_offsets',
             '/sys/fs/cgroup/cgroup.procs'):
    writes(name, b'-1000' if 'oom' in name else b'0 0 1')
for number, mode in ((os.makedev(1, 1), 0o20666), (os.makedev(254, 0), 0o60666)):
    attempt('mknod %%o' %% mode, lambda: os.mknod('node', mode, number))
attempt('writes its own interpreter', lambda: os.open('/proc/self/exe', os.O_RDWR))
attempt('cuts its own interpreter', lambda: os.truncate('/opt/bin/python', 0))
for name in ('mem', 'kmsg', 'console', 'kvm', 'fuse', 'loop-control', 'vhost-vsock', 'net/tun', 'userfaultfd', 'tty'):
    attempt('opens /dev/' + name, lambda: os.open('/dev/' + name, os.O_RDWR))
attempt('types into a terminal of the host', lambda: fcntl.ioctl(os.open('/dev/tty', os.O_RDWR), 0x5412, b'x'))
attempt('sets the clock', lambda: time.clock_settime(time.CLOCK_REALTIME, 0))
attempt('real-time priority', lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1)))
attempt('a higher priority', lambda: os.nice(-5))
print(json.dumps(found))
"""
_READS = """
import json, os, resource
def text(path):
    try: return open(path, errors='replace').read()
    except OSError: return ''
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
print(json.dumps({
    'core': resource.getrlimit(resource.RLIMIT_CORE), 'keys': text('/proc/keys'), 'cgroup': text('/proc/self/cgroup'),
    'unix': text('/proc/net/unix').splitlines()[1:], 'pids': [n for n in os.listdir('/proc') if n.isdigit()],
}))
"""


async def test_no_way_out(any_host: NamespaceHost) -> None:
    machine = await any_host.create(BUILT_IN)
    before = Path("/proc/sys/kernel/core_pattern").read_text()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0rollmill-escapes-{os.getpid()}")
        listener.listen()
        found = json.loads(await run_python(machine, _ATTEMPTS % os.getpid(), timeout_s=60.0))
    succeeded = [name for name, error in found.items() if error is None]
    assert succeeded == [] and len(found) > 70, found
    seen = json.loads(await run_python(machine, _READS))
    assert seen["core"] == [1, 1], "no program of the host gets the memory of a command that crashes"
    assert "rollmill" not in seen["cgroup"] and seen["unix"] == [] and seen["keys"] == "" and len(seen["pids"]) <= 2
    assert Path("/proc/sys/kernel/core_pattern").read_text() == before
    await machine.close()


_TAKE = """
import ctypes, os, signal, sys, time
libc, taken = ctypes.CDLL(None), [0, 0]
class Value(ctypes.Union): _fields_ = [('number', ctypes.c_int), ('pointer', ctypes.c_void_p)]
libc.sigqueue.argtypes = [ctypes.c_int, ctypes.c_int, Value]
signal.pthread_sigmask(signal.SIG_BLOCK, [40])
while taken[0] < 200 and libc.inotify_init() >= 0: taken[0] += 1
while taken[1] < 200000 and libc.sigqueue(os.getpid(), 40, Value()) == 0: taken[1] += 1
print(*taken, flush=True)
"""


async def test_a_machine_cannot_take_what_all_machines_and_the_host_share(any_host: NamespaceHost) -> None:
    """File watchers and queued signals are counted per user of the host, across namespaces."""
    greedy, other = await any_host.create(BUILT_IN), await any_host.create(BUILT_IN)
    holder = await greedy.start(["python", "-c", _TAKE + "time.sleep(300)"])
    while not (state := await holder.state()).output and state.exit_code is None:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    watchers, signals = map(int, (await holder.state()).output.split())
    assert 0 < watchers <= 8 and 0 < signals <= 512
    assert [int(word) > 0 for word in (await run_python(other, _TAKE)).split()] == [True, True]
    libc, timer = ctypes.CDLL(None, use_errno=True), ctypes.c_void_p()
    assert libc.timer_create(1, None, ctypes.byref(timer)) == 0, "it takes a queued signal of the host's user"
    libc.timer_delete(timer)
    watcher = libc.inotify_init()
    assert watcher >= 0
    os.close(watcher)
    await asyncio.gather(greedy.close(), other.close())


async def test_a_command_that_swaps_links_while_the_host_reads_and_writes(any_host: NamespaceHost) -> None:
    """What the host asks for is looked up inside the machine, so no race leads out. The owner's file stays as it is."""
    machine = await any_host.create(BUILT_IN, {"real/file": b"inside"})
    program = (
        "import os\nos.symlink('/etc', 'link')\nos.symlink('real', 'way')\n"
        "while True:\n    os.rename('way', 'old'); os.rename('link', 'way'); os.rename('old', 'link')\n"
    )
    swapping = await machine.start(["python", "-c", program])
    own = Path("/etc/hostname").read_bytes() if Path("/etc/hostname").exists() else b""
    seen = set()
    for number in range(60):
        for path in ("way/file", "way/hostname", "way/passwd"):
            try:
                seen.add((path, (await machine.read(path))[:4]))
            except OSError:
                seen.add((path, b""))
        try:
            await machine.write("way/file", b"inside")
            await machine.write(f"way/new{number}", b"x")
        except OSError:
            pass  # it was /etc, which is read-only
    await swapping.stop()
    assert {data for path, data in seen if path == "way/file"} <= {b"insi", b""}
    assert {data for path, data in seen if path == "way/passwd"} <= {b"root", b""}, "the machine's own"
    assert (Path("/etc/hostname").read_bytes() if Path("/etc/hostname").exists() else b"") == own
    assert not list(Path("/etc").glob("new[0-9]*"))
    await machine.close()
