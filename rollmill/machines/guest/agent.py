"""Pid 1 of a machine: locks itself in, then serves files and commands to the client, one request at a time.

Commands cannot reach it. Where the host has user ids to give, it runs as another user than they do. Its /proc directory
is covered, its socket is closed in them, the kernel shields pid 1 from signals of its own tree, and the filter refuses
the calls that act on other processes. It handles files as the commands' user, and keeps only the capabilities to
become that user and to end commands.

    request                                    reply
    {"op": "exec", "argv", "cwd", "env", …}    {"exit_code", "truncated", "stopped", "seconds"} + output
    {"op": "start", "argv", "cwd", "env", …}   {"process"}; "pty": [rows, columns] gives it a terminal
    {"op": "input", "process"} + bytes         {"count"}: how many of them its terminal took
    {"op": "resize", "process", "rows", …}     {}
    {"op": "state" or "stop", "process"}       {"exit_code", "truncated", "stopped"} + output; exit_code null: it runs
    {"op": "read", "path", "max_bytes"}        {} + contents
    {"op": "write", "files": [[path, size]…]}  {}
    {"op": "pack", "path", "max_bytes", …}     {} + tar; if "whole" is false, without what cannot be read
    {"op": "snapshot", "max_bytes"}            {} + tar
    {"op": "restore"} + tar                    {}
    {"op": "listen"}                           {"port"} + a listening socket, handed over
    {"op": "busy"}                             {"busy"}: whether a process runs that "start" started
    {"op": "prepare"}                          {}: if `ahead`, a process waits for the next command
    {"op": "interrupt"}                        none: ends the command that is running
    a request that cannot be served: {"errno": number, "path": …}; a machine that cannot go on: {"error": text}

A request has a number, "id", and its reply has the same one. Before the first, pid 1 says that it is set up: {"id": 0}.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import resource
import select
import signal
import socket
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple, NoReturn

from rollmill.machines.guest import computer, image_root, layout, seccomp, terminal
from rollmill.machines.guest import file_requests as files
from rollmill.machines.guest import frames as wire
from rollmill.machines.guest import linux as kernel
from rollmill.machines.guest import run_command as command
from rollmill.machines.guest.processes import COMMAND_MARK, MOST, Process, Processes
from rollmill.machines.guest.usage import Watchdog

_WATCH_INTERVAL_S, _SELDOM_S = 0.05, 1.0
_IDLE_S = 0.1  # a request that comes sooner than this would have to wait while a process is made ahead
_BACKLOG = 16  # connections that wait to be accepted
CONNECTION = 3  # the open file of the socket to the client
_TERMINALS = f"newinstance,ptmxmode=0666,mode=620,max={MOST}"
_BUFFERS = b"4096 65536 131072"  # of a TCP connection: least, default and most bytes
_SIGNALS, _LOCKED = 512, 1 << 16  # queued signals; bytes of memory that is never paged out
_SHARED = (("/proc/sys/user/max_inotify_instances", b"8"), ("/proc/sys/user/max_inotify_watches", b"4096"))
_HOME_FILES = tuple((f"{layout.HOME}/{name}", text.encode()) for name, text in computer.HOME_FILES.items())
_RULES = "/proc/sys/fs/binfmt_misc"
_SET_UP = wire.pack({"id": 0})
_CAPABILITIES = kernel.capability_sets(kernel.CAP_KILL, kernel.CAP_SETGID, kernel.CAP_SETUID)
_CAPABILITIES_OF_IMAGE = kernel.capability_sets(*image_root.RIGHTS)  # it handles files as root of the image does
_FILES, _BYTES_PER_FILE = 16384, 16384  # most files of a machine; of an image more if there is memory for them


class Limits(NamedTuple):
    """The limits of one machine, in bytes and counts."""

    memory: int
    disk: int
    processes: int
    open_files: int
    own_user: bool  # whether pid 1 has a user id of its own, apart from the commands'
    memory_counted: bool  # whether a control group bounds the machine's memory
    count_processes: bool  # whether the kernel counts the processes of this machine alone
    filter: seccomp.Filter | None  # of system calls
    apart: bool = False  # whether commands enter a control group of their own
    # The machine has a kernel of its own, probably emulated: that kernel counts, pid 1 only seldom, and a process is
    # made before its command is known. What else runs in the machine sees that process.
    own_kernel: bool = False
    emulation: str | None = None  # the rule by which the kernel starts the emulator of the machine's programs
    image: image_root.ImageRoot | None = None  # what the machine's root is made of, if it is an OCI image
    disk_device: str | None = None  # what such a machine writes to; None: memory

    def confinement(self) -> command.Confinement:
        wanted = {
            # twice: address space is not memory. A control group or the watchdog counts what is really used.
            **({} if self.image and self.memory_counted else {resource.RLIMIT_AS: 2 * self.memory}),
            resource.RLIMIT_FSIZE: self.disk,
            resource.RLIMIT_NOFILE: self.open_files,
            # 1 and not 0: a program of the host that takes core files from a pipe is not started then
            resource.RLIMIT_CORE: 1,
            # The kernel adds these up for all machines of a host's user.
            resource.RLIMIT_SIGPENDING: _SIGNALS,
            resource.RLIMIT_MEMLOCK: _LOCKED,
            **COMMAND_MARK,
        }
        if self.count_processes:  # commands of pid 1's user share the count with it and its cloner
            wanted[resource.RLIMIT_NPROC] = self.processes + (0 if self.own_user else 2)
        rlimits = {}
        for which, value in wanted.items():
            _, hard = resource.getrlimit(which)
            rlimits[which] = value if hard == resource.RLIM_INFINITY else min(value, hard)
        warm = self.emulation is None and self.image is None
        return command.Confinement(rlimits, self.filter, warm=warm, apart=self.apart, identity=self._identity())

    def _identity(self) -> command.Identity:
        if self.image is None:
            return command.Identity()
        rights = image_root.RIGHTS if self.own_user else None
        return command.Identity(self.image.user, self.image.group, self.image.groups, rights)


class Plan(NamedTuple):
    """What every machine does in the same way. The host computes it once: a machine is a copy of the host, and each
    page of memory that it touches is copied for it."""

    own_user: bool
    mounts: tuple[tuple[str, str, str | None, int, str], ...]  # arguments of kernel.mount
    confinement: command.Confinement  # of commands
    watchdog: Watchdog
    ahead: bool  # whether a process is made before its command is known
    rule: bytes | None  # for the kernel, to run programs of another architecture
    image: image_root.Stage | None = None

    @classmethod
    def of(cls, limits: Limits) -> Plan:
        flags = kernel.MS_NOSUID | kernel.MS_NODEV
        options = f"size={limits.disk},nr_inodes={_FILES},uid={layout.USER_ID},gid={layout.USER_ID}"
        mounts = (
            ("tmpfs", layout.WORK, "tmpfs", flags, f"{options},mode=755"),
            ("tmpfs", layout.TEMPORARY, "tmpfs", flags, f"{options},mode=1777"),
            ("tmpfs", layout.HOME, "tmpfs", flags, f"{options},mode=755"),
            ("proc", "/proc", "proc", flags | kernel.MS_NOEXEC, ""),
            ("devpts", "/dev/pts", "devpts", kernel.MS_NOSUID | kernel.MS_NOEXEC, _TERMINALS),
        )
        watchdog = Watchdog(
            limits.processes,
            limits.memory,
            limits.memory_counted,
            -1,
            _SELDOM_S if limits.own_kernel else _WATCH_INTERVAL_S,
            (layout.WORK, layout.TEMPORARY, layout.HOME) if limits.image is None else ("/",),
        )
        rule = None if limits.emulation is None else limits.emulation.encode()
        plan = cls(limits.own_user, mounts, limits.confinement(), watchdog, limits.own_kernel, rule)
        if limits.image is None:
            return plan
        most = max(_FILES, limits.memory // _BYTES_PER_FILE if limits.memory_counted else 0)
        room: dict[str, Any] = {"disk": limits.disk, "files": most, "device": limits.disk_device}
        stage = image_root.Stage.of(limits.image, ranges=limits.own_user, **room)
        return plan._replace(image=stage, mounts=mounts[-2:])


def main(connection: int, plan: Plan) -> NoReturn:
    """Run a machine to its end, in the process that was just cloned for it, after `prepare`."""
    try:
        users = command.USERS if plan.confinement.identity.rights is not None else None
        keep_only(connection, command.GROUP if plan.confinement.apart else None, users)
        watchdog, opened = _lock_in(plan)
        wire.send(CONNECTION, _SET_UP)
        _serve(CONNECTION, plan, watchdog, opened)
    except BrokenPipeError:
        pass
    except Exception as error:
        wire.send(CONNECTION, wire.pack({"error": f"{type(error).__name__}: {error}"}))
    finally:
        os._exit(0)


def keep_only(connection: int, commands: int | None = None, users: int | None = None) -> None:
    """Close every open file but the standard streams, our own socket, which becomes CONNECTION, the file by which
    commands enter their group, which becomes command.GROUP, and a user namespace, which becomes command.USERS."""
    wanted = {CONNECTION: connection, command.GROUP: commands, command.USERS: users}
    # beyond all of them, because the numbers may be those of one another
    held = {
        number: fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, command.USERS + 1)
        for number, file in wanted.items()
        if file is not None
    }
    kernel.close_from(CONNECTION, command.USERS)
    for number, file in held.items():
        os.dup2(file, number, inheritable=False)
    kernel.close_from(command.USERS + 1)


def prepare(plan: Plan) -> None:
    """What a machine inherits from the process that clones it, its cloner or the first process of a guest."""
    user = 0 if plan.own_user else plan.confinement.identity.user
    group = 0 if plan.own_user else plan.confinement.identity.group
    if plan.own_user:  # otherwise the kernel forbids it; the groups that stay give access to nothing in here
        os.setgroups([])
    os.setresgid(group, group, group)
    os.setresuid(user, user, user)
    _share()
    kernel.sethostname(layout.HOST_NAME)
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)


def _lock_in(plan: Plan) -> tuple[Watchdog, image_root.Open | None]:
    """The order matters: each step still has the rights it needs."""
    opened = None if plan.image is None else image_root.enter(plan.image, plan.mounts)
    sockets = _set_up_root(plan) if opened is None else opened.sockets
    _count_on()
    _open_loopback(low_ports=plan.image is not None)
    kept = _CAPABILITIES if plan.image is None else _CAPABILITIES_OF_IMAGE
    kernel.set_capabilities(kept if plan.own_user else command.NO_CAPABILITIES)
    protect()
    os.chdir("/")  # not the work directory, which could then not be unmounted when the machine forks
    return plan.watchdog._replace(sockets=sockets), opened


def _set_up_root(plan: Plan) -> int:
    """What belongs to this machine in the root of all. Returns the open file by which sockets are counted."""
    for arguments in plan.mounts:
        kernel.mount(*arguments)
    sockets = os.open("/proc/net/sockstat", os.O_RDONLY | os.O_CLOEXEC)
    if plan.rule is not None:
        _emulate(plan.rule)
    _furnish_home()
    kernel.mount(layout.INIT, "/proc/1", None, kernel.MS_BIND)  # hides pid 1
    return sockets


def _emulate(rule: bytes) -> None:
    kernel.mount("binfmt_misc", _RULES, "binfmt_misc", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)
    setting = os.open(f"{_RULES}/register", os.O_WRONLY | os.O_CLOEXEC)
    # Rules belong to the user namespace, which is that of the machine before this one too. They go with its mounts, but
    # a file that one of its commands has sent to a socket of its own may keep those a little longer.
    with contextlib.suppress(FileExistsError):
        os.write(setting, rule)
    os.close(setting)


def _furnish_home() -> None:
    for path, data in _HOME_FILES:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        os.write(file, data)
        os.fchown(file, layout.USER_ID, layout.USER_ID)
        os.close(file)


def _count_on() -> None:
    """Process ids begin where those of a computer are after its boot. Some kernels cannot."""
    with contextlib.suppress(OSError):
        setting = os.open("/proc/sys/kernel/ns_last_pid", os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(setting, b"%d" % layout.FIRST_PID)
        finally:
            os.close(setting)


def _share() -> None:
    """Bound what the kernel counts for all machines of a user of the host together: one machine could take all of it
    from the others and from the host. And hide the names of the host's control groups. Some kernels cannot."""
    with contextlib.suppress(OSError):
        kernel.unshare(kernel.CLONE_NEWCGROUP)
    for path, most in _SHARED:
        with contextlib.suppress(OSError):
            setting = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
            os.write(setting, most)
            os.close(setting)


def _open_loopback(*, low_ports: bool) -> None:
    """The machine reaches itself and nobody else. Buffers of its connections stay as small as usage.py counts them.
    `low_ports`: any user may listen at ports below 1024, as in a container."""
    kernel.raise_loopback()
    settings = {
        "tcp_rmem": _BUFFERS,
        "tcp_wmem": _BUFFERS,
        **({"ip_unprivileged_port_start": b"0"} if low_ports else {}),
    }
    for name, value in settings.items():
        setting = os.open(f"/proc/sys/net/ipv4/{name}", os.O_WRONLY)
        os.write(setting, value)
        os.close(setting)


def protect() -> None:
    """Nobody may trace this process, and it ends with its parent. The kernel forgets both when the user changes."""
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)


@contextlib.contextmanager
def _as_user(plan: Plan) -> Iterator[None]:
    """Be the user of the commands for a while. A process that runs meanwhile cannot reach pid 1: its real user stays
    another, signals to pid 1 have no effect, and the filter refuses the rest."""
    if plan.image is not None:
        try:
            with plan.image.as_user(plan.image.root.user, plan.image.root.group):
                yield
        finally:
            protect()
        return
    if not plan.own_user:
        yield
        return
    os.setegid(layout.USER_ID)
    os.seteuid(layout.USER_ID)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)
        protect()


def _serve(connection: int, plan: Plan, watchdog: Watchdog, opened: image_root.Open | None) -> None:
    confinement, processes = plan.confinement, Processes(None if opened is None else opened.outputs)
    ready: command.Ready | None = None
    while True:
        if plan.ahead and ready is None and not select.select([connection], [], [], _IDLE_S)[0]:
            with contextlib.suppress(OSError):  # the next command will say why
                ready = command.Ready.make(confinement)
        request = _next_request(connection, processes, watchdog)
        if request is None:
            return
        header, body = request
        if header.get("op") == "interrupt":
            continue  # the command had ended already
        if header.get("op") == "listen":
            _hand_over_listener(connection, header.get("id"))
            continue
        try:
            if header["op"] == "exec":
                order = _order(header, body)
                made = None
                if plan.image is None or order.user != command.ROOT:  # root of an image cannot be chosen later
                    made, ready = ready, None
                end, meanwhile = processes.end_command, processes.take_output
                reply, data = command.run(order, confinement, connection, watchdog, end, meanwhile, made)
            elif header["op"] == "start":
                number = processes.start(_order(header, body), confinement, partial(_open_terminal, plan))
                reply, data = {"process": number}, b""
            elif header["op"] in ("state", "input", "resize"):
                reply, data = _ask_process(processes.get(header["process"]), header, body)
            elif header["op"] == "busy":
                processes.reap()
                reply, data = {"busy": processes.running()}, b""
            elif header["op"] == "prepare":
                ready = ready or (command.Ready.make(confinement) if plan.ahead else None)
                reply, data = {}, b""
            elif header["op"] == "stop":
                reply, data = processes.stop(header["process"])
            elif plan.image is not None and opened is not None and header["op"] in ("snapshot", "restore"):
                reply, data = _handle_layer(plan.image, opened, header, body)
            else:
                with _as_user(plan):
                    reply, data = _handle_files(header, body, plan.image)
        except OSError as error:
            reply, data = {"errno": error.errno or errno.EIO, "path": error.filename}, b""
            # this failed before the command began; what a command causes is in its result
            if header.get("op") == "exec":
                reply = {"error": f"no command could be started: {error}"}
        except MemoryError:
            reply, data = {"errno": errno.ENOMEM}, b""
        except Exception:  # refuse a request that makes no sense: nothing that a caller sends may end pid 1
            reply, data = {"errno": errno.EINVAL}, b""
        wire.send(connection, wire.pack({**reply, "id": header.get("id")}, data))


def _order(header: dict[str, Any], body: bytes) -> command.Order:
    order = command.Order(stdin=body, **{key: header[key] for key in command.Order._fields if key in header})
    return order if order.cwd[:1] in ("/", "") else order._replace(cwd=f"{layout.WORK}/{order.cwd}")


def _handle_layer(
    stage: image_root.Stage, opened: image_root.Open, header: dict[str, Any], body: bytes
) -> tuple[dict[str, Any], bytes]:
    """What the machine has written to its root, out and in."""
    try:
        with stage.as_user(0, 0):
            if header["op"] == "snapshot":
                return {}, image_root.pack(stage, opened.upper, header["max_bytes"])
            image_root.unpack(stage, body)
            return {}, b""
    finally:
        protect()


def _open_terminal(plan: Plan, rows: int, columns: int) -> tuple[int, int]:
    with _as_user(plan):  # it belongs to the user of the commands
        return terminal.open_pair(rows, columns)


def _ask_process(process: Process, header: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
    if header["op"] == "input":
        process.take_output()
        return {"count": terminal.write(process.its_terminal(), body)}, b""
    if header["op"] == "resize":
        terminal.resize(process.its_terminal(), header["rows"], header["columns"])
        return {}, b""
    return process.state()


def _next_request(connection: int, processes: Processes, watchdog: Watchdog) -> tuple[dict[str, Any], bytes] | None:
    """Wait for a request. Processes that run meanwhile are held to the limits of the machine."""
    arrived = False
    while processes.running() and not arrived:
        arrived = connection in select.select([connection, *processes.terminals()], [], [], watchdog.interval_s)[0]
        processes.reap()
        processes.take_output()
        if limit := watchdog.exceeded():
            processes.stop_all(limit)
    return wire.receive(connection)


def _hand_over_listener(connection: int, number: object) -> None:
    """Give the client a socket that listens in this network namespace. Nothing of it stays here."""
    try:
        with (
            socket.create_server(("127.0.0.1", 0), backlog=_BACKLOG) as listener,
            socket.socket(fileno=os.dup(connection)) as client,
        ):
            frame = wire.pack({"port": listener.getsockname()[1], "id": number})
            socket.send_fds(client, [frame], [listener.fileno()])
    except OSError as error:
        wire.send(connection, wire.pack({"errno": error.errno or errno.EIO, "id": number}))


def _handle_files(header: dict[str, Any], body: bytes, image: image_root.Stage | None) -> tuple[dict[str, Any], bytes]:
    match header["op"]:
        case "read":
            return {}, files.read(header["path"], header["max_bytes"])
        case "write":
            files.write_all(header["files"], body)
        case "pack":
            path = header["path"] if image is None else image.path(header["path"])
            return {}, files.pack_directory(path, header["max_bytes"], whole=header["whole"])
        case "snapshot":
            return {}, files.pack_directory(layout.WORK, header["max_bytes"])
        case "restore":
            files.unpack_directory(layout.WORK, body)
        case unknown:
            raise OSError(errno.ENOSYS, f"unknown request {unknown!r}")
    return {}, b""
