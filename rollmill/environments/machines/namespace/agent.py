"""Pid 1 of a machine: locks itself in, then serves files and commands to the client, one request at a time.

Commands cannot reach it. Where the host has user ids to give, it runs as another user than they do. Its /proc directory
is covered, its socket is closed in them, the kernel shields pid 1 from signals of its own tree, and the filter refuses
the calls that act on other processes. It handles files as the commands' user, and keeps only the capabilities to
become that user and to end commands.

    request                                    reply
    {"op": "exec", "argv", "cwd", "env", …}    {"exit_code", "truncated", "stopped", "seconds"} + output
    {"op": "start", "argv", "cwd", "env", …}   {"process"}
    {"op": "state" or "stop", "process"}       {"exit_code", "truncated", "stopped"} + output; exit_code null: it runs
    {"op": "read", "path", "max_bytes"}        {} + contents
    {"op": "write", "files": [[path, size]…]}  {}
    {"op": "snapshot", "max_bytes"}            {} + tar
    {"op": "restore"} + tar                    {}
    {"op": "listen"}                           {"port"} + a listening socket, handed over
    {"op": "interrupt"}                        none: ends the command that is running
    a request that cannot be served: {"errno": number, "path": …}; a machine that cannot go on: {"error": text}
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import select
import signal
import socket
from collections.abc import Iterator
from typing import Any, NamedTuple, NoReturn

from rollmill.environments.machines.namespace import command, files, kernel, layout, wire
from rollmill.environments.machines.namespace.memory import Watchdog
from rollmill.environments.machines.namespace.process import Processes

_WATCH_INTERVAL_S = 0.05
_BACKLOG = 16  # connections that wait to be accepted
_CAPABILITIES = (kernel.CAP_KILL, kernel.CAP_SETGID, kernel.CAP_SETUID)


class Limits(NamedTuple):
    """The limits of one machine, in bytes and counts."""

    memory: int
    disk: int
    processes: int
    open_files: int
    own_user: bool  # whether pid 1 has a user id of its own, apart from the commands'
    memory_counted: bool  # whether a control group bounds the machine's memory
    count_processes: bool  # whether the kernel counts the processes of this machine alone
    filter: bytes  # the filter of system calls; empty for none

    def confinement(self) -> command.Confinement:
        rlimits = {
            # twice: address space is not memory. A control group or the watchdog counts what is really used.
            resource.RLIMIT_AS: 2 * self.memory,
            resource.RLIMIT_FSIZE: self.disk,
            resource.RLIMIT_NOFILE: self.open_files,
            resource.RLIMIT_CORE: 0,
        }
        if self.count_processes:
            rlimits[resource.RLIMIT_NPROC] = self.processes
        return command.Confinement(rlimits, self.filter)


def main(connection: socket.socket, limits: Limits) -> NoReturn:
    """Run a machine to its end, in the process that was just cloned for it."""
    try:
        connection = _keep_only(connection)
        if connection.recv(1):  # the host has mapped our identity
            watchdog = _lock_in(limits)
            connection.sendall(wire.pack({"ready": True}))
            _serve(connection, limits, watchdog)
    except BrokenPipeError:
        pass
    except Exception as error:
        connection.sendall(wire.pack({"error": f"{type(error).__name__}: {error}"}))
    finally:
        os._exit(0)


def _keep_only(connection: socket.socket) -> socket.socket:
    """Close every open file that came from the host, except our own socket."""
    kept = os.dup2(connection.detach(), 3, inheritable=False)
    kernel.close_from(kept + 1)
    nothing = os.open("/dev/null", os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nothing, standard)
    os.close(nothing)
    return socket.socket(fileno=kept)


def _lock_in(limits: Limits) -> Watchdog:
    """The order matters: each step still has the rights it needs."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # with Python's handler a command could interrupt pid 1
    os.setsid()
    os.umask(0o022)
    user = 0 if limits.own_user else layout.USER_ID
    if limits.own_user:  # otherwise the kernel forbids it; the groups that stay give access to nothing in here
        os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    flags = kernel.MS_NOSUID | kernel.MS_NODEV
    owner = f"uid={layout.USER_ID},gid={layout.USER_ID}"
    options = f"size={limits.disk},nr_inodes=16384,{owner}"
    kernel.mount("tmpfs", layout.WORK, "tmpfs", flags, f"{options},mode=755")
    kernel.mount("tmpfs", layout.TEMPORARY, "tmpfs", flags, f"{options},mode=1777")
    kernel.mount("proc", "/proc", "proc", flags | kernel.MS_NOEXEC)
    sockets = os.open("/proc/net/sockstat", os.O_RDONLY | os.O_CLOEXEC)
    kernel.mount(layout.CODE, "/proc/1", None, kernel.MS_BIND)  # hides pid 1: CODE is an empty directory by now
    kernel.sethostname("machine")
    _open_loopback()
    kernel.keep_capabilities(*(_CAPABILITIES if limits.own_user else ()))
    _protect()
    os.chdir(layout.WORK)
    return Watchdog(limits.processes, limits.memory, limits.memory_counted, sockets)


def _open_loopback() -> None:
    """The machine reaches itself and nobody else. Buffers of its connections stay as small as memory.py counts them."""
    kernel.raise_loopback()
    for name in ("tcp_rmem", "tcp_wmem"):
        with open(f"/proc/sys/net/ipv4/{name}", "w") as setting:
            setting.write("4096 65536 131072")


def _protect() -> None:
    """Nobody may trace pid 1, and it ends with the machine host. The kernel forgets both when the user changes."""
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)


@contextlib.contextmanager
def _as_user(own_user: bool) -> Iterator[None]:
    """Act as the user of the commands. A process that runs meanwhile cannot reach pid 1: its real user stays another,
    signals to pid 1 have no effect, and the filter refuses the rest."""
    if not own_user:
        yield
        return
    os.setegid(layout.USER_ID)
    os.seteuid(layout.USER_ID)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)
        _protect()


def _serve(connection: socket.socket, limits: Limits, watchdog: Watchdog) -> None:
    confinement, processes = limits.confinement(), Processes()
    while request := _next_request(connection, processes, watchdog):
        header, body = request
        if header.get("op") == "interrupt":
            continue  # the command had ended already
        if header.get("op") == "listen":
            _hand_over_listener(connection)
            continue
        try:
            if header["op"] == "exec":
                order = _order(header, body)
                reply, data = command.run(order, confinement, connection, watchdog, processes.end_command)
            elif header["op"] == "start":
                reply, data = {"process": processes.start(_order(header, body), confinement)}, b""
            elif header["op"] == "state":
                reply, data = processes.get(header["process"]).state()
            elif header["op"] == "stop":
                reply, data = processes.stop(header["process"])
            else:
                with _as_user(limits.own_user):
                    reply, data = _handle_files(header, body)
        except OSError as error:
            reply, data = {"errno": error.errno or errno.EIO, "path": error.filename}, b""
            if (
                header.get("op") == "exec"
            ):  # this failed before the command began; what a command causes is in its result
                reply = {"error": f"no command could be started: {error}"}
        except MemoryError:
            reply, data = {"errno": errno.ENOMEM}, b""
        except Exception:  # refuse a request that makes no sense: nothing that a caller sends may end pid 1
            reply, data = {"errno": errno.EINVAL}, b""
        connection.sendall(wire.pack(reply, data))


def _order(header: dict[str, Any], body: bytes) -> command.Order:
    return command.Order(stdin=body, **{key: header[key] for key in command.Order._fields if key != "stdin"})


def _next_request(
    connection: socket.socket, processes: Processes, watchdog: Watchdog
) -> tuple[dict[str, Any], bytes] | None:
    """Wait for a request. Processes that run meanwhile are held to the limits of the machine."""
    arrived = False
    while processes.running() and not arrived:
        arrived = bool(select.select([connection], [], [], _WATCH_INTERVAL_S)[0])
        processes.reap()
        if limit := watchdog.exceeded():
            processes.stop_all(limit)
    return wire.receive(connection)


def _hand_over_listener(connection: socket.socket) -> None:
    """Give the client a socket that listens in this network namespace. Nothing of it stays here."""
    try:
        with socket.create_server(("127.0.0.1", 0), backlog=_BACKLOG) as listener:
            frame = wire.pack({"port": listener.getsockname()[1]})
            socket.send_fds(connection, [frame], [listener.fileno()])
    except OSError as error:
        connection.sendall(wire.pack({"errno": error.errno or errno.EIO}))


def _handle_files(header: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
    match header["op"]:
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
