"""A system-call filter for everything inside a machine.

The namespaces already hide the host; this takes away the calls whose only use inside would be to attack the shared
kernel, and the socket families that a network namespace does not confine (vsock reaches the hypervisor).
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

from rollmill.environments.machines.namespace import kernel

# name: (x86-64, aarch64)
_DENIED = {
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
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
    "open_by_handle_at": (304, 265),
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
}
_CLONE = (56, 220)
_CLONE3 = (435, 435)
_SOCKET = (41, 198)
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
    | 0x02000000  # CLONE_NEWCGROUP
)
_SOCKET_FAMILIES = (1, 2, 10, 16)  # unix, inet, inet6, netlink: all of them confined by the network namespace

# classic BPF, as in linux/filter.h; offsets into struct seccomp_data
_LOAD, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENT_0_AT = 0, 4, 16
_ALLOW = 0x7FFF0000
_REFUSE = 0x00050000
_MODE_FILTER = 2


def install(program: bytes) -> None:
    """Filter this process and all it will ever start. Needs no_new_privs; cannot be undone."""
    instructions = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("@HP", len(program) // 8, ctypes.addressof(instructions))
    kernel.prctl(kernel.PR_SET_SECCOMP, _MODE_FILTER, ctypes.create_string_buffer(header, len(header)))


def build() -> bytes:
    """The filter for this architecture; empty where we do not know its system calls."""
    machine = os.uname().machine
    if machine not in _ARCHITECTURES:
        return b""
    column = _ARCHITECTURES.index(machine)
    denied = sorted(numbers[column] for numbers in _DENIED.values())
    refuse = _step(_RETURN, _REFUSE | errno.EPERM)
    allow = _step(_RETURN, _ALLOW)
    steps = [
        _step(_LOAD, _ARCHITECTURE_AT),
        _step(_JUMP_EQUAL, _AUDIT_ARCH[machine], skip_if_true=1),
        refuse,  # 32-bit calls have other numbers
        _step(_LOAD, _NUMBER_AT),
        _step(_JUMP_AT_LEAST, _X32_BIT, skip_if_false=1),
        refuse,
        # clone3's flags lie behind a pointer a filter cannot follow; told it does not exist, libc falls back to clone
        _step(_JUMP_EQUAL, _CLONE3[column], skip_if_false=1),
        _step(_RETURN, _REFUSE | errno.ENOSYS),
        _step(_JUMP_EQUAL, _CLONE[column], skip_if_false=4),
        _step(_LOAD, _ARGUMENT_0_AT),
        _step(_JUMP_ANY_BIT, _NAMESPACE_FLAGS, skip_if_false=1),
        refuse,
        allow,
        _step(_JUMP_EQUAL, _SOCKET[column], skip_if_false=len(_SOCKET_FAMILIES) + 3),
        _step(_LOAD, _ARGUMENT_0_AT),
        *(
            _step(_JUMP_EQUAL, family, skip_if_true=len(_SOCKET_FAMILIES) - index)
            for index, family in enumerate(_SOCKET_FAMILIES)
        ),
        refuse,
        allow,
    ]
    for number in denied:
        steps += [_step(_JUMP_EQUAL, number, skip_if_false=1), refuse]
    return b"".join([*steps, allow])


def _step(code: int, value: int, skip_if_true: int = 0, skip_if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, skip_if_true, skip_if_false, value)
