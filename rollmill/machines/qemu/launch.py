"""Starts a QEMU process: its arguments, its rights, and the open files that it is handed."""

from __future__ import annotations

import itertools
import os
import secrets
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from rollmill.errors import MachineError
from rollmill.machines.qemu import ram
from rollmill.machines.qemu.parts import Parts

Accelerator = Literal["kvm", "tcg"]
KVM = Path("/dev/kvm")
_IF_PARENT_LIVES = '[ "$PPID" = "$0" ] && exec "$@"'
LOG_BYTES = 1 << 16  # of what QEMU and the guest's console print; the rest is lost
# user ids of QEMU processes: above every range that systems hand out, and above those of namespace machines
_FIRST_USER, _USERS = 0x70020000, 1 << 16
_users = itertools.count(secrets.randbelow(_USERS))  # two processes that start machines rarely share a user
_COMMAND_LINE = (
    "quiet rootfstype=ramfs rdinit=/init panic=-1 mitigations=off nokaslr kpti=off audit=0 cryptomgr.notests"
    # The same addresses in each process: QEMU translates a page of a program once, not once per process. And parts of
    # the kernel that nobody needs here are code that every machine would translate.
    " norandmaps lsm= psi=0 noautogroup cgroup_disable=memory cma=0"
)
_SANDBOX = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"
_PORT_NAME = "org.qemu.guest_agent"  # the usual name for such a port


class Shape(NamedTuple):
    """What must be the same when a state is saved and when it is restored."""

    parts: Parts
    accelerator: Accelerator
    memory_mb: int
    image_disk: Path | None = None  # of an OCI image; its machines have a disk of their own beside it


@dataclass(frozen=True)
class Started:
    """A QEMU process, and this side's ends of what it was handed. Its open files have the numbers that ours have."""

    process: subprocess.Popen[bytes]
    devices: int  # a file: the device state that is loaded, later the one that is saved
    incoming: int  # QEMU's second number for it, closed here: loading a state closes the file
    log: int
    agent: socket.socket
    init: socket.socket
    ports: socket.socket
    monitor: socket.socket


def start(shape: Shape, memory: int, initramfs: int | None, disk: int | None = None) -> Started:
    """Start QEMU on a memory file. With `initramfs`, it boots and writes there; else it waits for a device state.
    `disk`: for what it writes, if its image is on a disk.

    If it does not start, all these files are closed: MachineError.
    """
    sockets: list[socket.socket] = []
    kept, opened = [memory, *([] if disk is None else [disk])], list[int]()  # `opened` is closed here in any case
    try:
        for _ in range(4):
            ours, their = socket.socketpair()
            sockets.append(ours)
            opened.append(their.detach())
        theirs = opened[:4]
        kept.append(devices := ram.create(0, "devices"))
        kept.append(log := ram.create(LOG_BYTES, "log"))
        ram.seal(log, content=False)
        opened.append(incoming := os.dup(devices))
        kernel = preload = None
        if initramfs is not None:
            opened.append(kernel := os.open(shape.parts.kernel, os.O_RDONLY))
        if shape.parts.preload is not None:
            opened.append(preload := os.open(shape.parts.preload, os.O_RDONLY))
        arguments = [
            *_guard(shape),
            shape.parts.program,
            *_machine(shape, memory, theirs, booting=initramfs is not None),
        ]
        if shape.image_disk is not None and disk is not None:
            opened.append(image := os.open(shape.image_disk, os.O_RDONLY))
            arguments += _disk("image", image, read_only=True) + _disk("own", disk, read_only=False)
        if kernel is not None and initramfs is not None:
            line = f"console={shape.parts.architecture.console} {_COMMAND_LINE}"
            arguments += ["-kernel", _path(kernel), "-initrd", _path(initramfs), "-append", line]
        process = subprocess.Popen(
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=[*kept, *opened, *([] if initramfs is None else [initramfs])],
            env={"PATH": os.defpath} | ({} if preload is None else {"LD_PRELOAD": _path(preload)}),
            start_new_session=True,  # Ctrl-C reaches the dispatcher only
        )
    except OSError as error:
        for ours in sockets:
            ours.close()
        for file in kept:
            os.close(file)
        raise MachineError(f"QEMU did not start: {error}") from None
    finally:
        for file in opened:
            os.close(file)
    for ours in sockets:
        ours.setblocking(False)
    return Started(process, devices, incoming, log, *sockets)


def _path(file: int) -> str:
    """A name by which the process that has an open file can open it again, also where it may not read its directory."""
    return f"/proc/self/fd/{file}"


def guard(setpriv: str, *options: str) -> list[str]:
    """Words before a command: it ends with this process. The kernel signals only what is still to come, so the command
    does not begin if this process has already ended."""
    return [setpriv, "--pdeathsig", "KILL", *options, "--", "/bin/sh", "-c", _IF_PARENT_LIVES, str(os.getpid())]


def _guard(shape: Shape) -> list[str]:
    """QEMU dies with us and gets no new rights. If we are root, it is a user who owns nothing."""
    options = ["--no-new-privs"]
    if _has_own_user():
        user = str(_FIRST_USER + next(_users) % _USERS)
        group = KVM.stat().st_gid if shape.accelerator == "kvm" else 0
        groups = ["--groups", str(group)] if group else ["--clear-groups"]  # never that of root
        options += ["--reuid", user, "--regid", user, *groups]
    return guard(shape.parts.setpriv, *options)


def _disk(name: str, file: int, *, read_only: bool) -> list[str]:
    """A disk that ends with its machine: nothing waits until it is safe on the host's. If the host's is full, QEMU
    stops the guest."""
    options = "read-only=on" if read_only else "read-only=off,discard=unmap"
    node = f"driver=file,node-name={name},filename={_path(file)},locking=off,cache.no-flush=on,{options}"
    return ["-blockdev", node, "-device", f"virtio-blk-pci,drive={name}"]


def why_no_kvm() -> str | None:
    """Why QEMU cannot open KVM's device; None if it can. Whether KVM works, only a boot tells."""
    try:
        device = KVM.stat()
    except OSError:
        return f"there is no {KVM}"
    if not os.access(KVM, os.R_OK | os.W_OK):
        return f"this user may not open {KVM}"
    by_group, by_all = (device.st_mode & bits == bits for bits in (0o060, 0o006))
    if _has_own_user() and not by_all and not (by_group and device.st_gid != 0):
        remedy = f"chgrp kvm {KVM}; chmod 660 {KVM}"
        return f"only root may open {KVM}, and QEMU runs as a user of its own. It may with a group: {remedy}"
    return None


def _has_own_user() -> bool:
    return os.geteuid() == 0 and _may_use(_FIRST_USER + _USERS)


def _may_use(user: int) -> bool:
    """Whether this user id exists here. In a container there may be few."""
    ranges = [line.split() for line in Path("/proc/self/uid_map").read_text().splitlines()]
    return any(int(start) <= user < int(start) + int(length) for start, _, length in ranges)


def _machine(shape: Shape, memory: int, sockets: list[int], *, booting: bool) -> list[str]:
    arch, share = shape.parts.architecture, "on" if booting else "off"
    agent, init, ports, monitor = sockets
    accelerators = {"kvm": ("kvm", "host"), "tcg": ("tcg,thread=single,tb-size=128", arch.cpu)}
    accelerator, cpu = accelerators[shape.accelerator]
    size = f"{shape.memory_mb}M"
    words = f"-no-user-config -nodefaults -display none -no-reboot -sandbox {_SANDBOX} -smp 1 -m {size}".split()
    words += ["-M", f"{arch.machine},memory-backend=m0", "-accel", accelerator, "-cpu", cpu]
    words += ["-object", f"memory-backend-file,id=m0,size={size},mem-path={_path(memory)},share={share}"]
    words += ["-chardev", f"socket,id=monitor,fd={monitor}", "-mon", "chardev=monitor,mode=control"]
    words += ["-chardev", "stdio,id=console,signal=off" if booting else "null,id=console", "-serial", "chardev:console"]
    words += [word for table in arch.tables for word in ("-smbios", table)]
    words += ["-device", "virtio-serial-pci"]
    for number, (name, file) in enumerate((("agent", agent), ("init", init), ("ports", ports)), 1):
        words += ["-chardev", f"socket,id={name},fd={file}"]
        words += ["-device", f"virtserialport,nr={number},chardev={name},name={_PORT_NAME}.{number - 1}"]
    # a saved device state has no section that describes the machine
    words += ["-global", "migration.send-configuration=off"]
    return words if booting else [*words, "-S", "-incoming", "defer"]
