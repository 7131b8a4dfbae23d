"""A system-call filter for every command of a machine.

The namespaces already hide the host. The filter refuses calls that a command could only use

- to attack the shared kernel,
- to reach out of the network namespace (vsock reaches the hypervisor),
- to load seldom used parts of the kernel's network (protocols besides TCP and UDP, layers on top of TCP, netlink
  besides the one that lists interfaces),
- to read the kernel's log, or to have a crash handled by a program of the host,
- to take what the kernel has once for the whole host (requests of asynchronous I/O, huge pages),
- to act on pid 1 or on another command (limits, priorities, memory, open files), or
- to hold memory that nobody counts (only where the machine has no control group for memory).
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from typing import NamedTuple

from rollmill.machines.guest import linux as kernel

# name: (x86-64, aarch64)
_DENIED = {
    # other processes
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
    "kcmp": (312, 272),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "pidfd_send_signal": (424, 424),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "ioprio_set": (251, 30),
    # mounts and namespaces
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "unshare": (272, 97),
    "setns": (308, 268),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "open_tree_attr": (467, 467),
    "open_by_handle_at": (304, 265),
    # the kernel itself
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "syslog": (103, 116),
    "fanotify_init": (300, 262),
    "memfd_secret": (447, 447),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
}
# Allowed on the caller itself: the first argument is a process id, and 0 means "me".
_ONLY_ON_SELF = {
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274),
}
# Memory that belongs to no process: the watchdog, which adds up processes and files, would not see it.
_UNCOUNTED = {
    "memfd_create": (319, 279),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    "vmsplice": (278, 75),
}
_IO_SETUP = (206, 0)
_MEMFD_CREATE = _UNCOUNTED["memfd_create"]
_CLONE = (56, 220)
_CLONE3 = (435, 435)
_SOCKET = (41, 198)
_SOCKETPAIR = (53, 199)
_SETSOCKOPT = (54, 208)
_SETPRIORITY = (141, 140)
_PRLIMIT64 = (302, 261)
_SETRLIMIT = (160, 164)
_MMAP = (9, 222)
_FCNTL = (72, 25)
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_ARCHITECTURES = tuple(_AUDIT_ARCH)
_X32_BIT = 0x40000000

_NAMESPACE_FLAGS = (
    kernel.CLONE_NEWNS
    | kernel.CLONE_NEWUTS
    | kernel.CLONE_NEWIPC
    | kernel.CLONE_NEWUSER
    | kernel.CLONE_NEWPID
    | kernel.CLONE_NEWNET
    | kernel.CLONE_NEWCGROUP
)
# all of these are confined by the network namespace
_LOCAL_FAMILIES, _INET_FAMILIES = (1,), (2, 10)  # unix; inet, inet6
_NETLINK, _NETLINK_ROUTE = 16, 0
_INET_PROTOCOLS = (0, 6, 17)  # the default, TCP, UDP
_SOL_SOCKET, _SO_SNDBUF, _SO_RCVBUF = 1, 7, 8
_SOL_TCP, _TCP_ULP = 6, 31
_MAP_SHARED, _MAP_ANONYMOUS, _MAP_HUGETLB = 0x01, 0x20, 0x40000
_MFD_HUGETLB = 0x04
_F_SETPIPE_SZ = 1031
_RLIMIT_CORE = 4

# classic BPF, as in linux/filter.h; offsets into struct seccomp_data
_LOAD, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16
_RETURN_ALLOW, _RETURN_ERRNO = 0x7FFF0000, 0x00050000
_MODE_FILTER = 2
_LINEAR = 4  # numbers that are compared one by one at the end of the search


class Filter(NamedTuple):
    """A filter in the form that the kernel reads, so that a command installs it with one call."""

    instructions: ctypes.Array[ctypes.c_char]
    header: ctypes.Array[ctypes.c_char]  # points to the instructions


def prepare(program: bytes) -> Filter | None:
    """None: there is no filter for this architecture."""
    if not program:
        return None
    instructions = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("@HP", len(program) // 8, ctypes.addressof(instructions))
    return Filter(instructions, ctypes.create_string_buffer(header, len(header)))


def install(filter: Filter) -> None:
    """Filter this process and every process that it starts. Needs no_new_privs; cannot be undone."""
    kernel.prctl(kernel.PR_SET_SECCOMP, _MODE_FILTER, ctypes.addressof(filter.header))


def build(*, memory_counted: bool) -> bytes:
    """The filter for this architecture; empty if its system calls are not known here.

    `memory_counted`: a control group counts all memory of the machine, so shared memory is allowed.
    """
    machine = os.uname().machine
    if machine not in _ARCHITECTURES:
        return b""
    column = _ARCHITECTURES.index(machine)
    start = [
        _step(_LOAD, _ARCHITECTURE_AT),
        _step(_JUMP_EQUAL, _AUDIT_ARCH[machine], skip_if_true=1),
        _REFUSE,  # 32-bit calls have other numbers
        _step(_LOAD, _NUMBER_AT),
        _step(_JUMP_AT_LEAST, _X32_BIT, skip_if_false=1),
        _REFUSE,
    ]
    return b"".join([*start, *_search(sorted(_rules(column, memory_counted).items()))])


def _rules(column: int, memory_counted: bool) -> dict[int, list[bytes]]:
    """The rule of each system call that is not simply allowed, by its number."""
    rules = {
        # programs do without it: many kernels are built so
        _IO_SETUP: [_step(_RETURN, _RETURN_ERRNO | errno.ENOSYS)],
        _MEMFD_CREATE: [_argument(1), *_refuse_any_bit(_MFD_HUGETLB), _ALLOW],
        # a filter cannot follow the pointer to clone3's flags; if told that clone3 does not exist, libc uses clone
        _CLONE3: [_step(_RETURN, _RETURN_ERRNO | errno.ENOSYS)],
        _CLONE: [_argument(0), *_refuse_any_bit(_NAMESPACE_FLAGS), _ALLOW],
        _SOCKET: _socket_rule(),
        # the kernel loads the family before it says that it has no pairs
        _SOCKETPAIR: [_argument(0), *_allow_if_equal(*_LOCAL_FAMILIES), _REFUSE],
        _SETSOCKOPT: _option_rule(),
        # setpriority(PRIO_PROCESS = 0, 0 = me): what `nice` does
        _SETPRIORITY: [*_refuse_unless_zero(0), *_refuse_unless_zero(1), _ALLOW],
        _MMAP: _mmap_rule(memory_counted),
        _PRLIMIT64: [*_refuse_unless_zero(0), _argument(1), *_on(_RLIMIT_CORE, _ignore_unless_null(2)), _ALLOW],
        _SETRLIMIT: [_argument(0), *_on(_RLIMIT_CORE, [_IGNORE]), _ALLOW],
    }
    rules |= {numbers: [*_refuse_unless_zero(0), _ALLOW] for numbers in _ONLY_ON_SELF.values()}
    rules |= {numbers: [_REFUSE] for numbers in _DENIED.values()}
    if not memory_counted:
        rules |= {numbers: [_REFUSE] for numbers in _UNCOUNTED.values()}
        rules[_FCNTL] = [_argument(1), *_refuse_if_equal(_F_SETPIPE_SZ), _ALLOW]
    return {numbers[column]: rule for numbers, rule in rules.items()}


def _search(rules: list[tuple[int, list[bytes]]]) -> list[bytes]:
    """A binary search for the number of the call. The kernel tries all numbers when a filter is installed, for every
    command, so a chain of comparisons would be slow."""
    if len(rules) <= _LINEAR:
        return [*(step for number, rule in rules for step in _on(number, rule)), _ALLOW]
    middle = len(rules) // 2
    lower, upper = _search(rules[:middle]), _search(rules[middle:])
    return [_step(_JUMP_AT_LEAST, rules[middle][0], skip_if_true=len(lower)), *lower, *upper]


def _socket_rule() -> list[bytes]:
    inet = [_argument(2), *_allow_if_equal(*_INET_PROTOCOLS), _REFUSE]
    each = [step for family in _INET_FAMILIES for step in _on(family, inet)]
    each += _on(_NETLINK, [_argument(2), *_allow_if_equal(_NETLINK_ROUTE), _REFUSE])
    return [_argument(0), *_allow_if_equal(*_LOCAL_FAMILIES), *each, _REFUSE]


def _option_rule() -> list[bytes]:
    """A wish for larger buffers is ignored: usage.py counts on their default sizes."""
    ignore = [step for option in (_SO_SNDBUF, _SO_RCVBUF) for step in _on(option, [_IGNORE])]
    of_sockets = [_argument(2), *ignore, _ALLOW]
    of_tcp = [_argument(2), *_refuse_if_equal(_TCP_ULP), _ALLOW]
    return [_argument(1), *_on(_SOL_SOCKET, of_sockets), *_on(_SOL_TCP, of_tcp), _ALLOW]


def _mmap_rule(memory_counted: bool) -> list[bytes]:
    """Huge pages come from a pool that no control group counts."""
    rule = [_argument(3), *_refuse_any_bit(_MAP_HUGETLB)]
    if not memory_counted:
        rule += [_step(_JUMP_ANY_BIT, _MAP_ANONYMOUS, skip_if_true=1), _ALLOW, *_refuse_any_bit(_MAP_SHARED)]
    return [*rule, _ALLOW]


def _on(number: int, rule: list[bytes]) -> list[bytes]:
    """`rule` decides this system call; it must return on every path. Otherwise the call's number stays loaded."""
    return [_step(_JUMP_EQUAL, number, skip_if_false=len(rule)), *rule]


def _argument(index: int) -> bytes:
    """Load the low half of an argument. The kernel reads no more of an int."""
    return _step(_LOAD, _ARGUMENTS_AT + 8 * index)


def _refuse_any_bit(bits: int) -> list[bytes]:
    return [_step(_JUMP_ANY_BIT, bits, skip_if_false=1), _REFUSE]


def _refuse_if_equal(value: int) -> list[bytes]:
    return [_step(_JUMP_EQUAL, value, skip_if_false=1), _REFUSE]


def _refuse_unless_zero(argument: int) -> list[bytes]:
    return [_argument(argument), _step(_JUMP_EQUAL, 0, skip_if_true=1), _REFUSE]


def _ignore_unless_null(argument: int) -> list[bytes]:
    """Ignore the call if a pointer is given. Both halves are looked at: memory may be mapped at any address."""
    halves = (_ARGUMENTS_AT + 8 * argument, _ARGUMENTS_AT + 8 * argument + 4)
    each = [step for at in halves for step in (_step(_LOAD, at), _step(_JUMP_EQUAL, 0, skip_if_true=1), _IGNORE)]
    return [*each, _ALLOW]


def _allow_if_equal(*values: int) -> list[bytes]:
    return [step for value in values for step in (_step(_JUMP_EQUAL, value, skip_if_false=1), _ALLOW)]


def _step(code: int, value: int, skip_if_true: int = 0, skip_if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, skip_if_true, skip_if_false, value)


_ALLOW = _step(_RETURN, _RETURN_ALLOW)
_REFUSE = _step(_RETURN, _RETURN_ERRNO | errno.EPERM)
_IGNORE = _step(_RETURN, _RETURN_ERRNO | 0)  # the call does nothing and succeeds
