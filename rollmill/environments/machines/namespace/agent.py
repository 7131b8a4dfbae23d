"""Pid 1 of a machine: locks itself in, then serves files and commands to the client, one request at a time.

It runs as the machine's only, unprivileged user. Commands cannot trace it (not dumpable), kill it (the kernel shields
pid 1 from signals of its own tree) or speak for it (its socket is closed in them).

    request                                    reply
    {"op": "exec", "argv", "cwd", "env", …}    {"exit_code", "truncated", "stopped", "seconds"} + output
    {"op": "read", "path", "max_bytes"}        {} + contents
    {"op": "write", "files": [[path, size]…]}  {}
    {"op": "snapshot", "max_bytes"}            {} + tar
    {"op": "restore"} + tar                    {}
    what fails because of the machine's own contents: {"errno": number, "path": …}; anything else: {"error": text}
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import socket
from typing import Any, NamedTuple, NoReturn

from rollmill.environments.machines.namespace import command, files, kernel, layout, seccomp, wire


class Limits(NamedTuple):
    """Of one machine; bytes and counts."""

    memory: int
    disk: int
    processes: int
    open_files: int
    count_processes: bool  # whether the kernel counts this machine's processes apart from everybody else's
    filter: bytes  # of system calls; empty for none


def main(connection: socket.socket, limits: Limits) -> NoReturn:
    """The life of a machine, in the process that was just cloned for it."""
    try:
        connection = _keep_only(connection)
        if connection.recv(1):  # the host has mapped our identity
            _lock_in(limits)
            connection.sendall(wire.pack({"ready": True}))
            _serve(connection, limits)
    except BrokenPipeError:
        pass
    except Exception as error:
        connection.sendall(wire.pack({"error": f"{type(error).__name__}: {error}"}))
    finally:
        os._exit(0)


def _keep_only(connection: socket.socket) -> socket.socket:
    """Close every file of the host but our own socket."""
    kept = os.dup2(connection.detach(), 3, inheritable=False)
    kernel.close_from(kept + 1)
    nothing = os.open("/dev/null", os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nothing, standard)
    os.close(nothing)
    return socket.socket(fileno=kept)


def _lock_in(limits: Limits) -> None:
    """From here on this process is nobody. The order matters: each step still has the rights it needs."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # with Python's handler a command could interrupt pid 1
    os.setsid()
    os.umask(0o022)
    with contextlib.suppress(PermissionError):  # without root the groups must stay; they open nothing in here
        os.setgroups([])
    os.setresgid(layout.USER_ID, layout.USER_ID, layout.USER_ID)
    os.setresuid(layout.USER_ID, layout.USER_ID, layout.USER_ID)
    flags = kernel.MS_NOSUID | kernel.MS_NODEV
    options = f"size={limits.disk},nr_inodes=16384"
    kernel.mount("tmpfs", layout.WORK, "tmpfs", flags, f"{options},mode=755")
    kernel.mount("tmpfs", layout.TEMPORARY, "tmpfs", flags, f"{options},mode=1777")
    kernel.mount("proc", "/proc", "proc", flags | kernel.MS_NOEXEC)
    kernel.sethostname("machine")
    _bound(limits)
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    kernel.drop_capabilities()
    if limits.filter:
        seccomp.install(limits.filter)
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
    os.chdir(layout.WORK)


def _bound(limits: Limits) -> None:
    bounds = {
        # twice: address space is not memory, and what is really used is counted by the control group or the watchdog
        resource.RLIMIT_AS: 2 * limits.memory,
        resource.RLIMIT_FSIZE: limits.disk,
        resource.RLIMIT_NOFILE: limits.open_files,
        resource.RLIMIT_CORE: 0,
    }
    if limits.count_processes:
        bounds[resource.RLIMIT_NPROC] = limits.processes
    for which, value in bounds.items():
        _, hard = resource.getrlimit(which)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(which, (value, value))


def _serve(connection: socket.socket, limits: Limits) -> None:
    while request := wire.receive(connection):
        header, body = request
        try:
            reply, data = _answer(connection, limits, header, body)
        except OSError as error:
            reply, data = {"errno": error.errno or errno.EIO, "path": error.filename}, b""
            if header["op"] == "exec":  # what a command causes ends up in its result: this failed before it began
                reply = {"error": f"no command could be started: {error}"}
        except MemoryError:
            reply, data = {"errno": errno.ENOMEM}, b""
        connection.sendall(wire.pack(reply, data))


def _answer(
    connection: socket.socket, limits: Limits, header: dict[str, Any], body: bytes
) -> tuple[dict[str, Any], bytes]:
    match header["op"]:
        case "exec":
            order = command.Order(
                argv=header["argv"],
                cwd=header["cwd"],
                env=header["env"],
                stdin=body,
                timeout_s=header["timeout_s"],
                max_output=header["max_output"],
            )
            return command.run(order, connection, limits.memory, limits.processes)
        case "read":
            return {}, files.read(header["path"], header["max_bytes"])
        case "write":
            files.write_all(header["files"], body)
        case "snapshot":
            return {}, files.pack_directory(layout.WORK, header["max_bytes"])
        case "restore":
            files.unpack_directory(layout.WORK, body)
        case unknown:
            raise OSError(errno.ENOSYS, f"unknown request {unknown!r}")
    return {}, b""
