"""The filter decides the same on both architectures. The kernel runs only one of them, so here it is interpreted."""

from __future__ import annotations

import errno
import os
import struct
from types import SimpleNamespace

import pytest

from rollmill.machines.guest import seccomp

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
ALLOW, REFUSE, MISSING = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
IGNORE = 0x00050000  # does nothing, and succeeds


def decide(program: bytes, architecture: int, number: int, *arguments: int) -> int:
    data = struct.pack("=IIQ6Q", number, architecture, 0, *arguments, *[0] * (6 - len(arguments)))
    steps = [struct.unpack("=HBBI", program[at : at + 8]) for at in range(0, len(program), 8)]
    at = loaded = 0
    while True:
        code, if_true, if_false, value = steps[at]
        at += 1
        if code == 0x06:
            return int(value)
        if code == 0x20:
            loaded = struct.unpack_from("=I", data, value)[0]
        else:
            holds = {0x15: loaded == value, 0x35: loaded >= value, 0x45: bool(loaded & value)}[code]
            at += if_true if holds else if_false


# name: (x86-64, aarch64, arguments, decision with a control group for memory, and without)
CALLS = {
    "getpid": (39, 172, (), ALLOW, ALLOW),
    "prlimit64 on oneself": (302, 261, (0, 7), ALLOW, ALLOW),
    "prlimit64 on pid 1": (302, 261, (1, 7), REFUSE, REFUSE),
    "prlimit64 on pid 1, upper half set": (302, 261, (1 | 1 << 32, 7), REFUSE, REFUSE),
    "setpriority on oneself": (141, 140, (0, 0, 5), ALLOW, ALLOW),
    "setpriority on pid 1": (141, 140, (0, 1, 5), REFUSE, REFUSE),
    "setpriority on a user": (141, 140, (2, 0, 5), REFUSE, REFUSE),
    "sched_setscheduler on pid 1": (144, 119, (1, 0), REFUSE, REFUSE),
    "sched_setaffinity on oneself": (203, 122, (0, 8), ALLOW, ALLOW),
    "sched_setattr on pid 1": (314, 274, (1, 0), REFUSE, REFUSE),
    "ioprio_set": (251, 30, (1, 1, 0), REFUSE, REFUSE),
    "ptrace": (101, 117, (16, 1), REFUSE, REFUSE),
    "process_vm_writev": (311, 271, (1,), REFUSE, REFUSE),
    "kcmp": (312, 272, (1, 1), REFUSE, REFUSE),
    "pidfd_open": (434, 434, (1,), REFUSE, REFUSE),
    "pidfd_getfd": (438, 438, (3, 0), REFUSE, REFUSE),
    "clone": (56, 220, (17,), ALLOW, ALLOW),
    "clone with a namespace": (56, 220, (0x10000000 | 17,), REFUSE, REFUSE),
    "io_setup": (206, 0, (128,), MISSING, MISSING),
    "memfd_create of huge pages": (319, 279, (1, 4), REFUSE, REFUSE),
    "memfd_secret": (447, 447, (), REFUSE, REFUSE),
    "clone3": (435, 435, (), MISSING, MISSING),
    "socket, unix": (41, 198, (1, 1), ALLOW, ALLOW),
    "socket, vsock": (41, 198, (40, 1), REFUSE, REFUSE),
    "socketpair, unix": (53, 199, (1, 1), ALLOW, ALLOW),
    "socketpair, tipc": (53, 199, (30, 1), REFUSE, REFUSE),
    "socketpair, netlink, interfaces": (53, 199, (16, 3, 0), REFUSE, REFUSE),
    "socket, netlink, interfaces": (41, 198, (16, 3, 0), ALLOW, ALLOW),
    "socket, netlink, devices": (41, 198, (16, 3, 15), REFUSE, REFUSE),
    "socket, netlink, netfilter": (41, 198, (16, 3, 12), REFUSE, REFUSE),
    "syslog": (103, 116, (3,), REFUSE, REFUSE),
    "prlimit64, reads the limit of core files": (302, 261, (0, 4, 0, 1 << 40), ALLOW, ALLOW),
    "prlimit64, sets it": (302, 261, (0, 4, 5), IGNORE, IGNORE),
    "prlimit64, sets it from a high address": (302, 261, (0, 4, 1 << 32), IGNORE, IGNORE),
    "prlimit64, sets it for pid 1": (302, 261, (1, 4, 5), REFUSE, REFUSE),
    "prlimit64, sets another": (302, 261, (0, 7, 5), ALLOW, ALLOW),
    "setrlimit, core files": (160, 164, (4, 5), IGNORE, IGNORE),
    "setrlimit, open files": (160, 164, (7, 5), ALLOW, ALLOW),
    "socket, TCP": (41, 198, (2, 1, 6), ALLOW, ALLOW),
    "socket, UDP over IPv6": (41, 198, (10, 2, 0), ALLOW, ALLOW),
    "socket, SCTP": (41, 198, (2, 1, 132), REFUSE, REFUSE),
    "socket, MPTCP over IPv6": (41, 198, (10, 1, 262), REFUSE, REFUSE),
    "setsockopt, size of a buffer": (54, 208, (3, 1, 8), IGNORE, IGNORE),
    "setsockopt, reuse of an address": (54, 208, (3, 1, 2), ALLOW, ALLOW),
    "setsockopt, no delay": (54, 208, (3, 6, 1), ALLOW, ALLOW),
    "setsockopt, a layer on TCP": (54, 208, (3, 6, 31), REFUSE, REFUSE),
    "setsockopt, IPv6 only": (54, 208, (3, 41, 26), ALLOW, ALLOW),
    "mmap, private": (9, 222, (0, 4096, 3, 0x22), ALLOW, ALLOW),
    "mmap, a file, shared": (9, 222, (0, 4096, 3, 0x01), ALLOW, ALLOW),
    "mmap, anonymous, shared": (9, 222, (0, 4096, 3, 0x21), ALLOW, REFUSE),
    "mmap, huge pages": (9, 222, (0, 4096, 3, 0x40022), REFUSE, REFUSE),
    "memfd_create": (319, 279, (), ALLOW, REFUSE),
    "shmget": (29, 194, (), ALLOW, REFUSE),
    "vmsplice": (278, 75, (), ALLOW, REFUSE),
    "fcntl, close on exec": (72, 25, (3, 2, 1), ALLOW, ALLOW),
    "fcntl, size of a pipe": (72, 25, (3, 1031, 1 << 20), ALLOW, REFUSE),
}


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_decisions(machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(machine=machine))
    column, architecture = list(ARCHITECTURES).index(machine), ARCHITECTURES[machine]
    counted, uncounted = seccomp.build(memory_counted=True), seccomp.build(memory_counted=False)
    for name, (*numbers, arguments, with_group, without) in CALLS.items():
        number = numbers[column]
        assert decide(counted, architecture, number, *arguments) == with_group, name
        assert decide(uncounted, architecture, number, *arguments) == without, name
    assert decide(counted, 0x40000003, 20) == REFUSE  # a 32-bit call
    assert decide(counted, architecture, 0x40000000 | 39) == REFUSE  # an x32 call


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_calls_without_a_rule_are_allowed(machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every number is searched for, also those next to a number that has a rule."""
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(machine=machine))
    column, architecture = list(ARCHITECTURES).index(machine), ARCHITECTURES[machine]
    program = seccomp.build(memory_counted=False)
    ruled = set(seccomp._rules(column, memory_counted=False))
    refused = {number for number in range(480) if decide(program, architecture, number, *[1] * 6) != ALLOW}
    assert refused <= ruled
    denied = {numbers[column] for numbers in [*seccomp._DENIED.values(), *seccomp._UNCOUNTED.values()]}
    assert denied <= refused


def test_an_unknown_architecture_has_no_filter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(machine="riscv64"))
    assert seccomp.build(memory_counted=False) == b""
