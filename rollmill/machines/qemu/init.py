"""The first process of a guest: sets it up, starts the agent, then renews the guest's identity when it is asked.

It runs inside the guest and imports only the standard library and the agent. It has two virtio ports: requests about
files and commands go to the agent (guest/agent.py), in a process of its own that has given up its rights. Requests
to this process come from the host alone:

    {"op": "renew", "time_ns", "restored", "mac"} + random bytes   {}: the bytes are in the entropy pool, the clock is
                                                         set, and eth0 has this address if one is given
    {"op": "ports"} + mark                               {}: a process carries connections over the third port
    {"op": "ping"}                                       {}
    {"op": "loops", "count"}                             {}, once it has run so many loops
    {"op": "hold"}                                       {}: no other process runs until the next request

A state is saved while the guest is held, so the processes of every copy wait for its `renew`. A guest that was
`restored` has no ports: the other end of its connections is not there.

When the agent ends, the guest is switched off.

A guest of an OCI image has two disks: the image's layers, and what the machine writes. The agent enters a root that is
made of them (guest/image_root.py). This process stays where it is and uses nothing of the image.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import gc
import json
import os
import select
import shutil
import signal
import socket
import struct
import sys
import time
from typing import Any, NoReturn

from rollmill.machines.guest import agent, image_root, layout
from rollmill.machines.guest import frames as wire
from rollmill.machines.guest import linux as kernel
from rollmill.machines.guest import run_command as command
from rollmill.machines.qemu.streams import Forwarder

AGENT_PORT, INIT_PORT, PORTS_PORT = "/dev/vport0p1", "/dev/vport0p2", "/dev/vport0p3"
_IMAGE_DISK, _OWN_DISK = "/dev/vda", "/dev/vdb"  # in the order in which launch.py names them
_TUNING = {
    # one request for what would be eight: emulated guests read twice as fast
    f"/sys/block/{_IMAGE_DISK[5:]}/queue/read_ahead_kb": b"1024",
    f"/sys/block/{_OWN_DISK[5:]}/queue/read_ahead_kb": b"1024",
    # programs are on a disk: a command that takes all memory would have them read again and again, and not be ended
    "/sys/kernel/mm/lru_gen/enabled": b"y",
    "/sys/kernel/mm/lru_gen/min_ttl_ms": b"1000",
}
_NOBODY = 65534
_RNDADDENTROPY, _RNDRESEEDCRNG = 0x40085203, 0x5207
_FINIT_MODULE = {"aarch64": 273, "x86_64": 313}
_POWER_OFF = 0x4321FEDC
_CLONE_NEWTIME = 0x80
_UP_S = 953_117  # eleven days
_DUMMY, _INTERFACE, _ADDRESS = "dummy0", "eth0", bytes([10, 0, 0, 15])
_SIOCSIFFLAGS, _SIOCSIFADDR, _SIOCSIFNETMASK, _SIOCSIFNAME, _SIOCSIFHWADDR = 0x8914, 0x8916, 0x891C, 0x8923, 0x8924
_IFF_UP, _IFF_BROADCAST, _ETHERNET = 1, 2, 1
_libc = ctypes.CDLL(None, use_errno=True)


def main() -> NoReturn:
    try:
        _run()
    except BaseException as error:
        os.write(2, f"init: {type(error).__name__}: {error}\n".encode())
    finally:
        os.sync()
        _libc.reboot(_POWER_OFF)
        while True:
            signal.pause()


def _run() -> None:
    with open(f"{layout.CODE}/facts.json") as file:
        facts: dict[str, Any] = json.load(file)
    _mount()
    for path in facts["modules"]:
        _load_module(path)
    port = _open_port(INIT_PORT)
    _set_up_interface()
    _allow_holding()
    plan = agent.Plan.of(_limits(facts["limits"], facts["image"]))
    _become_plain(facts)
    users = None if plan.image is None else _prepare_image(plan)
    _look_older()
    started = _start_agent(plan, users)
    _serve(port, started)


def _mount() -> None:
    flags = kernel.MS_NOSUID | kernel.MS_NOEXEC
    for kind, place in (("devtmpfs", "/dev"), ("proc", "/proc"), ("sysfs", "/sys")):
        kernel.mount(kind, place, kind, flags | (kernel.MS_NODEV if kind != "devtmpfs" else 0))
    os.mkdir("/dev/pts")
    links = {"fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2", "shm": layout.TEMPORARY}
    for name, target in links.items():
        if not os.path.lexists(f"/dev/{name}"):
            os.symlink(target, f"/dev/{name}")


def _load_module(path: str) -> None:
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        number = ctypes.c_long(_FINIT_MODULE[os.uname().machine])
        if _libc.syscall(number, file, b"", 0) < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), path)
    finally:
        os.close(file)


def _open_port(path: str) -> int:
    while True:
        try:
            return os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:  # the port appears a moment after its module was loaded, and its name before it works
            if error.errno not in (errno.ENOENT, errno.ENXIO):
                raise
        time.sleep(0.002)


def _allow_holding() -> None:
    """Without this, the kernel takes the processor from `_hold` for a moment in each second."""
    with contextlib.suppress(OSError):  # some kernels have no such setting
        setting = os.open("/proc/sys/kernel/sched_rt_runtime_us", os.O_WRONLY | os.O_CLOEXEC)
        os.write(setting, b"-1")
        os.close(setting)


def _set_up_interface() -> None:
    """An interface with an address and nothing behind it, as a computer has one. Without routes: whoever wants to
    reach something is told at once that it cannot. With IPv6, the address of the template would stay visible."""
    if not os.path.exists(f"/sys/class/net/{_DUMMY}"):
        return  # a kernel without it
    _configure(_DUMMY, _SIOCSIFNAME, _INTERFACE.encode())
    setting = os.open(f"/proc/sys/net/ipv6/conf/{_INTERFACE}/disable_ipv6", os.O_WRONLY | os.O_CLOEXEC)
    os.write(setting, b"1")
    os.close(setting)
    _configure(_INTERFACE, _SIOCSIFADDR, struct.pack("HH4s", socket.AF_INET, 0, _ADDRESS))
    _configure(_INTERFACE, _SIOCSIFNETMASK, struct.pack("HH4s", socket.AF_INET, 0, b"\xff" * 4))
    _configure(_INTERFACE, _SIOCSIFFLAGS, struct.pack("H", _IFF_UP | _IFF_BROADCAST))


def _configure(interface: str, operation: int, value: bytes) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, operation, struct.pack("16s24s", interface.encode(), value))


def _look_older() -> None:
    """For processes that begin from here on, the guest has been up for days, as servers are: a time namespace."""
    if _libc.unshare(_CLONE_NEWTIME) < 0:
        return  # a kernel without it
    offsets = os.open("/proc/self/timens_offsets", os.O_WRONLY | os.O_CLOEXEC)
    os.write(offsets, b"monotonic %d 0\nboottime %d 0\n" % (_UP_S, _UP_S))
    os.close(offsets)


def _limits(given: dict[str, int], image: list[Any] | None) -> agent.Limits:
    """The guest has a kernel of its own, and memory that nobody else uses: no filter, and no other count of memory."""
    facts: dict[str, Any] = {"own_user": True, "memory_counted": True, "count_processes": True, "filter": None}
    if image is not None:
        facts |= {"image": image_root.ImageRoot(*image), "disk_device": _OWN_DISK}
    return agent.Limits(**{**given, **facts, "own_kernel": True})


def _prepare_image(plan: agent.Plan) -> int:
    """Mount the layers, and import nothing from here on. Returns an open user namespace with the image's users."""
    assert plan.image is not None
    for path, value in _TUNING.items():
        with contextlib.suppress(OSError):  # not every kernel has all of them
            setting = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
            os.write(setting, value)
            os.close(setting)
    os.mkdir(layout.LAYERS)
    kernel.mount(_IMAGE_DISK, layout.LAYERS, "squashfs", kernel.MS_RDONLY | kernel.MS_NOSUID | kernel.MS_NODEV)
    users = image_root.make_users(plan.watchdog.processes)
    image_root.live_in(plan.image.root)
    return users


def _leave_first_root() -> None:
    """Have a mount as the root that can be left: the kernel lets nobody leave its first file system."""
    kernel.mount("/", "/mnt", None, kernel.MS_BIND | kernel.MS_REC)
    os.chdir("/mnt")
    kernel.mount(".", "/", None, kernel.MS_MOVE)
    os.chroot(".")


def _become_plain(facts: dict[str, Any]) -> None:
    """What programs inherit: no trace of this code, and the environment of commands."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.umask(0o022)
    os.environ.clear()
    os.environ.update(facts["environment"])
    sys.path = [path for path in sys.path if path not in (layout.CODE, "")]
    for place in (layout.CODE, facts["modules_directory"]):
        shutil.rmtree(place)
    os.unlink("/init")
    os.mkdir(layout.CODE)
    if facts["packages"]:
        sys.path.append(layout.PACKAGES)
        os.environ["PYTHONPATH"] = layout.PACKAGES
    for name in [name for name in sys.modules if name.partition(".")[0] == __name__.partition(".")[0]]:
        del sys.modules[name]
    gc.collect()
    gc.freeze()


def _start_agent(plan: agent.Plan, users: int | None) -> int:
    """Start the agent as the first process of its own process namespace. Returns its pidfd."""
    connection = _open_port(AGENT_PORT)
    pid, pidfd = kernel.clone(kernel.CLONE_NEWPID | kernel.CLONE_NEWNS | kernel.CLONE_NEWIPC)
    if pid == 0:
        nothing = os.open("/dev/null", os.O_RDWR)
        for standard in (0, 1, 2):
            os.dup2(nothing, standard)
        agent.keep_only(connection, None, users)
        if users is not None:
            _leave_first_root()
        agent.prepare(plan)
        if os.read(agent.CONNECTION, 1):  # the host is there
            agent.main(agent.CONNECTION, plan)  # never returns
        os._exit(0)
    os.close(connection)
    return pidfd


def _serve(port: int, agent_pidfd: int) -> None:
    entropy = os.open("/dev/urandom", os.O_WRONLY | os.O_CLOEXEC)
    poll = select.poll()
    poll.register(port, select.POLLIN)
    poll.register(agent_pidfd, select.POLLIN)
    forwarder: int | None = None
    held = False
    while True:
        ready = dict(poll.poll(0 if held else None))  # while it holds the guest, this process never sleeps
        if agent_pidfd in ready:
            return
        if not ready.get(port, 0) & select.POLLIN:
            if not held:
                time.sleep(0.005)  # nobody is connected at this moment
            continue
        request = wire.receive(port)
        if request is None:
            continue
        header, body = request
        if header["op"] == "renew":
            _renew(entropy, header["time_ns"], body)
            if "mac" in header and os.path.exists(f"/sys/class/net/{_INTERFACE}"):
                address = struct.pack("H6s", _ETHERNET, bytes.fromhex(header["mac"]))
                _configure(_INTERFACE, _SIOCSIFHWADDR, address)
        if held or header["op"] == "hold":
            held = header["op"] == "hold"
            _hold(held)
        if header["op"] == "loops":
            run_loops(header["count"])
        if header["op"] == "ports" or header.get("restored"):
            _end_forwarder(forwarder)
            forwarder = None
        if header["op"] == "ports":
            forwarder = _start_forwarder(body)
        wire.send(port, wire.pack({"id": header.get("id")}))


def run_loops(count: int) -> int:
    """Runs on the host too: the difference tells how much slower the guest is."""
    total = 0
    for number in range(50000 * count):
        total += number * number % 7
    return total


def _hold(held: bool) -> None:
    """Keep the guest's one processor for this process, which does not sleep then: no other process runs. None of them
    notices, as it would a signal or a freezer, which interrupt its system calls."""
    policy, priority = (os.SCHED_FIFO, 1) if held else (os.SCHED_OTHER, 0)
    os.sched_setscheduler(0, policy, os.sched_param(priority))


def _start_forwarder(mark: bytes) -> int:
    """Start the process that carries connections. Returns its process id."""
    port = _open_port(PORTS_PORT)
    pid = os.fork()
    if pid == 0:
        try:
            os.dup2(port, 3)
            kernel.close_from(4)
            os.setgroups([])
            os.setresgid(_NOBODY, _NOBODY, _NOBODY)
            os.setresuid(_NOBODY, _NOBODY, _NOBODY)
            kernel.set_capabilities(command.NO_CAPABILITIES)
            Forwarder(3, mark).run()
        finally:
            os._exit(1)
    os.close(port)
    return pid


def _end_forwarder(pid: int | None) -> None:
    if pid is not None:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _renew(entropy: int, now_ns: int, random: bytes) -> None:
    """Entropy that no other copy of this guest has, used from the next random number on; and the time."""
    pool = struct.pack("ii", 8 * len(random), len(random)) + random
    fcntl.ioctl(entropy, _RNDADDENTROPY, pool)
    fcntl.ioctl(entropy, _RNDRESEEDCRNG)
    time.clock_settime_ns(time.CLOCK_REALTIME, now_ns)
