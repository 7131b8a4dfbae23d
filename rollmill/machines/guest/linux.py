"""Linux calls that Python's standard library lacks (os.unshare needs 3.12). Names are those of the manual."""

from __future__ import annotations

import _socket  # not socket: its Python part costs a machine more time than the call
import contextlib
import ctypes
import fcntl
import os
import signal
import struct
from collections.abc import Iterator

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
CLONE_NEWCGROUP = 0x02000000
CLONE_PIDFD = 0x00001000
CLONE_PARENT = 0x00008000
CLONE_INTO_CGROUP = 0x200000000

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_MOVE, MS_REC, MS_PRIVATE = 4096, 8192, 16384, 1 << 18
MNT_DETACH = 2
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV, MOUNT_ATTR_NOEXEC = 1, 2, 4, 8

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_SECCOMP = 22
PR_SET_NO_NEW_PRIVS = 38

CAP_CHOWN, CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, CAP_FOWNER, CAP_FSETID = 0, 1, 2, 3, 4
CAP_KILL, CAP_SETGID, CAP_SETUID, CAP_SYS_ADMIN = 5, 6, 7, 21

# these numbers are the same on every architecture; for older calls we use the C library
_SYS_OPEN_TREE = 428
_SYS_MOVE_MOUNT = 429
_SYS_CLONE3 = 435
_SYS_CLOSE_RANGE = 436
_SYS_MOUNT_SETATTR = 442
_AT_FDCWD = -100
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1
_AT_RECURSIVE = 0x8000
_AT_EMPTY_PATH = 0x1000
_OPEN_TREE_CLONE, _OPEN_TREE_CLOEXEC = 1, os.O_CLOEXEC
_MOVE_MOUNT_F_EMPTY_PATH = 4
_MOUNT_ATTR_IDMAP = 0x00100000
_RAISE_LOOPBACK = struct.pack("16sH22x", b"lo", _IFF_UP)
_CAPABILITY_HEADER = ctypes.create_string_buffer(struct.pack("=Ii", 0x20080522, 0))  # version 3, this process

# PyDLL keeps the interpreter lock during a call. Without the lock, the child of a clone could not run Python.
_libc = ctypes.PyDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_libc.prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
# Found once, here: what is found in a machine is found again in each of them.
_mount, _capset, _sethostname = _libc.mount, _libc.capset, _libc.sethostname
_close_range = getattr(_libc, "close_range", None)  # in new C libraries
if _close_range is not None:
    _close_range.argtypes = [ctypes.c_uint, ctypes.c_uint, ctypes.c_int]
_before_fork, _after_fork_in_child = ctypes.pythonapi.PyOS_BeforeFork, ctypes.pythonapi.PyOS_AfterFork_Child
_CLONE3, _CLONE3_SIZE = ctypes.c_long(_SYS_CLONE3), ctypes.c_size_t(88)


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def _syscall(number: int, what: str, *arguments: object) -> int:
    return _check(_libc.syscall(ctypes.c_long(number), *arguments), what)


def unshare(flags: int) -> None:
    _check(_libc.unshare(flags), "unshare")


def clone(flags: int, cgroup: int | None = None) -> tuple[int, int]:
    """Fork into new namespaces, and into a cgroup (an open version 2 directory). (pid, pidfd), or (0, -1) in the child.

    One clone instead of fork, unshare, fork: the child is pid 1 of its own tree from its first instruction.

    What Python does around a fork is left out: it is for other threads, and there are none. Each page of memory that it
    writes to would be copied. `as_after_fork` does it later.
    """
    pidfd = ctypes.c_int(-1)
    flags |= CLONE_PIDFD | (CLONE_INTO_CGROUP if cgroup is not None else 0)
    arguments = (flags, ctypes.addressof(pidfd), 0, 0, signal.SIGCHLD, 0, 0, 0, 0, 0, cgroup or 0)
    buffer = ctypes.create_string_buffer(struct.pack("=11Q", *arguments))
    pid = _libc.syscall(_CLONE3, buffer, _CLONE3_SIZE)
    if pid < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"clone3: {os.strerror(number)}")
    return (pid, pidfd.value) if pid else (0, -1)


def clone_arguments(flags: int = 0, *, sibling: bool = False) -> ctypes.Array[ctypes.c_char]:
    """For `fork`. Made once, because they are needed often. `sibling`: the new process is a child of our parent."""
    flags, end_signal = (flags | CLONE_PARENT, 0) if sibling else (flags, signal.SIGCHLD)
    return ctypes.create_string_buffer(struct.pack("=11Q", flags, 0, 0, 0, end_signal, 0, 0, 0, 0, 0, 0))


_FORK = clone_arguments()


def fork(arguments: ctypes.Array[ctypes.c_char] = _FORK) -> int:
    """As os.fork, without what Python does around it; see `clone`."""
    return _check(_libc.syscall(_CLONE3, arguments, _CLONE3_SIZE), "clone3")


def as_after_fork() -> None:
    """What Python does in the child of a fork: programs may rely on it, `random` for example."""
    _before_fork()
    _after_fork_in_child()


def close_from(first: int, last: int = 0xFFFFFFFF) -> None:
    """Close all files from `first` on. os.closerange is slow where Python was built for an older C library."""
    if _close_range is not None:
        _check(_close_range(first, last, 0), "close_range")
    else:
        _syscall(_SYS_CLOSE_RANGE, "close_range", first, ctypes.c_uint(last), 0)


def mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    arguments = (source.encode(), target.encode(), kind.encode() if kind else None, ctypes.c_ulong(flags))
    _check(_mount(*arguments, options.encode() or None), f"mount {kind or 'bind'} {target}")


def restrict_mount(target: str, attributes: int, *, recursive: bool = False) -> None:
    """Add attributes such as read-only. mount(2) cannot do that for a whole tree, nor where other flags are locked."""
    buffer = ctypes.create_string_buffer(struct.pack("=4Q", attributes, 0, 0, 0))
    flags = ctypes.c_uint(_AT_RECURSIVE if recursive else 0)
    what = f"mount_setattr {target}"
    _syscall(_SYS_MOUNT_SETATTR, what, _AT_FDCWD, target.encode(), flags, buffer, ctypes.c_size_t(32))


def unmount(target: str, flags: int = MNT_DETACH) -> None:
    """With `flags` 0: EBUSY while anything in it is open or a working directory."""
    _check(_libc.umount2(target.encode(), flags), f"umount {target}")


def copy_mount(path: str) -> int:
    """An open file: a second mount of what is mounted at `path`, or of a directory in it. `place_mount` attaches it."""
    flags = ctypes.c_uint(_OPEN_TREE_CLONE | _OPEN_TREE_CLOEXEC)
    return _syscall(_SYS_OPEN_TREE, f"open_tree {path}", _AT_FDCWD, path.encode(), flags)


def place_mount(mount: int, target: str) -> None:
    flags = ctypes.c_uint(_MOVE_MOUNT_F_EMPTY_PATH)
    _syscall(_SYS_MOVE_MOUNT, f"move_mount {target}", mount, b"", _AT_FDCWD, target.encode(), flags)


def map_owners(mount: int, user_namespace: int) -> None:
    """Show the files of a mount that is not attached yet as if they belonged to users of that namespace."""
    buffer = ctypes.create_string_buffer(struct.pack("=4Q", _MOUNT_ATTR_IDMAP, 0, 0, user_namespace))
    flags = ctypes.c_uint(_AT_EMPTY_PATH)
    _syscall(_SYS_MOUNT_SETATTR, "mount_setattr (owners)", mount, b"", flags, buffer, ctypes.c_size_t(32))


def enter_mounts(namespace: int) -> None:
    """Enter a mount namespace, an open file. Root and working directory become its root."""
    _check(_libc.setns(namespace, CLONE_NEWNS), "setns")


def enter_users(namespace: int) -> None:
    """Enter a user namespace, an open file, with all rights in it."""
    _check(_libc.setns(namespace, CLONE_NEWUSER), "setns")


def pivot_root(new: str, old: str) -> None:
    _check(_libc.pivot_root(new.encode(), old.encode()), "pivot_root")


def prctl(option: int, value: int, address: int = 0) -> None:
    if _libc.prctl(option, value, address, 0, 0) < 0:
        _check(-1, f"prctl {option}")


def capability_sets(*kept: int) -> ctypes.Array[ctypes.c_char]:
    """For `set_capabilities`. Made once: every machine and every command sets its capabilities."""
    mask = sum(1 << capability for capability in kept)
    return ctypes.create_string_buffer(struct.pack("=6I", mask, mask, 0, 0, 0, 0))  # effective, permitted, inheritable


def set_capabilities(sets: ctypes.Array[ctypes.c_char]) -> None:
    """Drop every capability that is not in `sets`. With no_new_privs no later exec brings one back."""
    _check(_capset(_CAPABILITY_HEADER, sets), "capset")


def get_capabilities() -> ctypes.Array[ctypes.c_char]:
    sets = ctypes.create_string_buffer(24)
    _check(_libc.capget(_CAPABILITY_HEADER, sets), "capget")
    return sets


@contextlib.contextmanager
def files_as(user: int, *capabilities: int, group: int | None = None) -> Iterator[None]:
    """Handle files as a user, with no other effective capabilities than these, for a while. The group has the same
    number, unless `group` is given."""
    before = get_capabilities()
    _, permitted, inheritable, _, permitted_high, inheritable_high = struct.unpack("=6I", before.raw)
    effective = sum(1 << capability for capability in capabilities)
    sets = struct.pack("=6I", effective, permitted, inheritable, 0, permitted_high, inheritable_high)
    try:
        _libc.setfsgid(user if group is None else group)
        _libc.setfsuid(user)  # it also drops effective capabilities
        set_capabilities(ctypes.create_string_buffer(sets))
        yield
    finally:
        _libc.setfsuid(0)
        _libc.setfsgid(0)
        set_capabilities(before)


def version() -> tuple[int, ...]:
    """The kernel's, as two numbers."""
    return tuple(int(part) for part in os.uname().release.split("-")[0].split(".")[:2])


def has_capability(capability: int) -> bool:
    with open("/proc/self/status") as status:
        effective = next(line for line in status if line.startswith("CapEff:"))
    return bool(int(effective.split()[1], 16) >> capability & 1)


def sethostname(name: str) -> None:
    _check(_sethostname(name.encode(), ctypes.c_size_t(len(name))), "sethostname")


def raise_loopback() -> None:
    """Bring up the loopback device of this network namespace."""
    any_socket = _socket.socket(_socket.AF_UNIX, _socket.SOCK_DGRAM)
    fcntl.ioctl(any_socket.fileno(), _SIOCSIFFLAGS, _RAISE_LOOPBACK)
    any_socket.close()
