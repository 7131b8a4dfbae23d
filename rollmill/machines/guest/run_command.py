"""Runs one command, in pid 1: starts it, collects its output, ends it and everything it started."""

from __future__ import annotations

import _signal  # not signal, in commands: its enums cost more time than the call
import contextlib
import errno
import os
import resource
import select
import signal
import time
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, NoReturn

from rollmill.machines.guest import cgroups, layout, seccomp, terminal, warm_python
from rollmill.machines.guest import frames as wire
from rollmill.machines.guest import linux as kernel
from rollmill.machines.guest.output import Output
from rollmill.machines.guest.stolen_time import Clock
from rollmill.machines.guest.usage import Watchdog

GROUP = 4  # in pid 1: the open file by which a command enters its control group (cgroups.py), if it has one
USERS = 5  # in pid 1: the user namespace that commands enter, if its root is an image's
ROOT = "root"
NO_CAPABILITIES = kernel.capability_sets()


class Order(NamedTuple):
    argv: list[str]
    cwd: str
    env: dict[str, str]
    stdin: bytes
    timeout_s: float
    max_output: int
    pty: list[int] | None = None  # rows and columns of its terminal; None: it has none
    user: str | None = None  # "root": see `_call_root`
    longest_s: float = 0.0  # `timeout_s` and what the machine may be kept from the processor, see stolen_time.py


class Identity(NamedTuple):
    """Who a command is."""

    user: int = layout.USER_ID
    group: int = layout.USER_ID
    groups: tuple[int, ...] = ()
    rights: tuple[int, ...] | None = None  # of root over files and users; None: a command enters no namespace at USERS


class Confinement(NamedTuple):
    """The limits that are put on a command before it starts."""

    rlimits: dict[int, int]
    filter: seccomp.Filter | None  # of system calls
    warm: bool = True  # whether pid 1 is the Python that a command calls `python`
    apart: bool = False  # whether commands enter a control group of their own
    identity: Identity = Identity()


def run(
    order: Order,
    confinement: Confinement,
    connection: int,
    watchdog: Watchdog,
    end: Callable[[int, str | None], int],
    meanwhile: Callable[[], None],
    ready: Ready | None = None,
) -> tuple[dict[str, Any], bytes]:
    """Run a command until it ends or reaches a limit. Then `end` kills every process that it left running.

    `meanwhile` is called now and then. With `ready`, that process becomes the command.
    """
    started = time.monotonic()
    pid, reading = (ready.begin(order) if ready is not None else None) or _begin(order, confinement)
    try:
        output = Output(order.max_output)
        deadline = _Deadline(started, order.timeout_s, order.longest_s)
        stopped = _watch(pid, reading, output, connection, deadline, watchdog, meanwhile)
        status = end(pid, stopped)
        while output.take(reading):  # the rest of the pipe; all its writers are dead
            pass
    finally:
        os.close(reading)
    exit_code = os.waitstatus_to_exitcode(status)
    if stopped is None and exit_code == -signal.SIGKILL:
        stopped = "memory"  # the kernel killed it, because the machine ran out of memory
    result = {
        "exit_code": exit_code,
        "truncated": output.truncated,
        "stopped": stopped,
        "seconds": time.monotonic() - started,
        "starved": stopped == "time" and deadline.starved,
    }
    return result, output.bytes()


class _Deadline:
    """The end of a command's time. It moves while others of the host have all processors."""

    def __init__(self, started: float, timeout_s: float, longest_s: float) -> None:
        self.at = started + timeout_s
        self._room = max(longest_s - timeout_s, 0.0)  # by which it may move
        self._moved = 0.0
        self._clock = Clock() if self._room else None

    def move(self) -> None:
        if self._clock is not None:
            by = min(self._clock.look(), self._room - self._moved)
            self._moved += by
            self.at += by

    @property
    def starved(self) -> bool:
        """It moved nearly as far as it may."""
        return self._moved > 0.75 * self._room > 0.0


class Ready(NamedTuple):
    """A process that is forked and confined already, and waits for its command. It shortens the next one."""

    pid: int
    orders: int  # an open file: what is written here is its order
    reading: int  # what the command prints can be read here

    @classmethod
    def make(cls, confinement: Confinement) -> Ready:
        reading, writing = os.pipe()
        waiting, orders = os.pipe()
        try:
            pid = kernel.fork()
        except BaseException:
            os.close(reading)
            os.close(orders)
            raise
        else:
            if pid == 0:
                _wait_for_order(confinement, waiting, writing)
        finally:
            os.close(writing)
            os.close(waiting)
        os.read(reading, 1)  # it is confined
        return cls(pid, orders, reading)

    def begin(self, order: Order) -> tuple[int, int] | None:
        """Hand it the order. Returns its process id and where its output can be read; None if it is gone."""
        try:
            wire.send(self.orders, wire.pack({**order._asdict(), "stdin": None}, order.stdin))
        except BrokenPipeError:  # a process that runs between commands may have killed it, or a limit did
            os.close(self.reading)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self.pid, 0)
            return None
        finally:
            os.close(self.orders)
        return self.pid, self.reading


def _wait_for_order(confinement: Confinement, waiting: int, writing: int) -> NoReturn:
    """Runs in the child."""
    order: Order | None = None
    try:
        os.dup2(writing, 1)
        os.dup2(writing, 2)
        os.dup2(waiting, 3, inheritable=False)
        if confinement.identity.rights is not None:
            kernel.enter_users(USERS)
        kernel.close_from(4)
        os.setsid()
        _confine(confinement)
        os.write(1, b"r")
        request = wire.receive(3)
        if request is None:  # pid 1 has gone
            os._exit(0)
        order = Order(**{**request[0], "stdin": request[1]})
        os.close(3)
        if order.user == ROOT:
            _call_root(confinement.identity)
        if order.stdin:
            stdin = os.memfd_create("stdin")
            _fill(stdin, order.stdin)
            os.dup2(stdin, 0)
            os.close(stdin)
        _go(order, confinement)
    except BaseException as error:
        if order is not None:  # without an order, pid 1 finds that this process is gone, and starts the command itself
            _say(order, error)
    finally:
        os._exit(126)


def _begin(order: Order, confinement: Confinement) -> tuple[int, int]:
    """Start a command. Returns its process id, and an open file from which its output can be read."""
    reading, writing = os.pipe()
    try:
        return start(order, confinement, writing), reading
    except BaseException:
        os.close(reading)
        raise
    finally:
        os.close(writing)


def start(order: Order, confinement: Confinement, writing: int) -> int:
    """Start a command whose output goes to the open file `writing`: its terminal, if it has one. Returns its pid."""
    if order.pty is not None:
        reading = os.dup(writing)
    else:
        reading = os.memfd_create("stdin") if order.stdin else os.open("/dev/null", os.O_RDONLY)
    try:
        if order.stdin and order.pty is None:
            _fill(reading, order.stdin)
        pid = kernel.fork()
        if pid == 0:
            _become(order, confinement, reading, writing)
        return pid
    finally:
        os.close(reading)


def _fill(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]
    os.lseek(file, 0, os.SEEK_SET)


def _become(order: Order, confinement: Confinement, reading: int, writing: int) -> NoReturn:
    """Become the command. Runs in the child."""
    try:
        os.dup2(reading, 0)
        os.dup2(writing, 1)
        os.dup2(writing, 2)
        if confinement.apart:  # not before: an error must reach the output of the command
            os.write(GROUP, cgroups.ENTER)
        if confinement.identity.rights is not None:
            kernel.enter_users(USERS)
        kernel.close_from(3)
        os.setsid()
        if order.pty is not None:
            terminal.control(0)
        _confine(confinement, order.user)
        _go(order, confinement)
    except BaseException as error:
        _say(order, error)
    finally:
        os._exit(126)


def _go(order: Order, confinement: Confinement) -> NoReturn:
    """Become the command, in a process that is confined."""
    code = 126
    try:
        os.chdir(order.cwd)
        if order.env:
            os.environ.update(order.env)
        # the streams of a warm Python know of no terminal
        if order.pty is None and confinement.warm and warm_python.can_run(order.argv):
            kernel.as_after_fork()
            warm_python.run(order.argv)
        _signal.signal(_signal.SIGPIPE, _signal.SIG_DFL)
        _execute(order.argv)
    except BaseException as error:
        code = 127 if isinstance(error, FileNotFoundError) else 126
        _say(order, error)
    finally:
        os._exit(code)


def _say(order: Order, error: BaseException) -> None:
    """As a shell does: why the command could not begin, in its output."""
    os.write(2, f"{order.argv[0]}: {error}\n".encode("utf-8", "replace"))


def _execute(argv: list[str]) -> NoReturn:
    """As os.execvp, which costs more: it handles warnings, and tries to execute the program in every directory.

    Nearly always the first file that may be executed is a program. Python code in a command is dear: each page of
    memory that it touches is copied.
    """
    program = argv[0]
    if "/" not in program:
        for place in os.environ.get("PATH", os.defpath).split(":"):
            path = f"{place}/{program}"
            if os.access(path, os.X_OK):
                with contextlib.suppress(OSError):  # a directory
                    os.execv(path, argv)  # noqa: S606
                break
        places = [os.path.join(place, program) for place in os.environ.get("PATH", os.defpath).split(":")]
        found = [place for place in places if os.path.isfile(place)]
        if not found:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        program = next((place for place in found if os.access(place, os.X_OK)), found[0])
    os.execv(program, argv)  # noqa: S606


def _confine(confinement: Confinement, user: str | None = None) -> None:
    """The order matters: each step still has the rights it needs."""
    identity = confinement.identity
    if identity.rights is None:
        _become_user(identity.user, identity.group)
        kernel.set_capabilities(NO_CAPABILITIES)
    else:
        _become_one_of_many(identity, user)
    kernel.prctl(kernel.PR_SET_DUMPABLE, 1)  # its /proc/self belongs to it
    _prefer_as_victim()
    for which, value in confinement.rlimits.items():
        resource.setrlimit(which, (value, value))
    if user == ROOT and identity.rights is None and identity.user != 0:
        _call_root(identity)
    if confinement.filter is not None:
        seccomp.install(confinement.filter)


def _become_user(user: int, group: int) -> None:
    os.setresgid(group, group, group)
    os.setresuid(user, user, user)


def _become_one_of_many(identity: Identity, wanted: str | None) -> None:
    """In the user namespace of an image. Its root has rights there, and nobody else has any."""
    user, group, groups = (0, 0, (0,)) if wanted == ROOT else (identity.user, identity.group, identity.groups)
    os.setgroups(groups)
    _become_user(user, group)
    kernel.set_capabilities(kernel.capability_sets(*(identity.rights or ())) if user == 0 else NO_CAPABILITIES)


def _call_root(identity: Identity) -> None:
    """Let the user of the commands have the name root and the number 0, for this process and what it starts. It is the
    same user: it gets no right, and owns the same files. A user namespace gives capabilities in itself; they go at
    once, and with no_new_privs no program brings them back. The limits are set before, so they hold above it too."""
    kernel.unshare(kernel.CLONE_NEWUSER)
    maps = (("setgroups", b"deny"), ("gid_map", b"0 %d 1" % identity.group), ("uid_map", b"0 %d 1" % identity.user))
    for name, text in maps:
        file = os.open(f"/proc/self/{name}", os.O_WRONLY)
        os.write(file, text)
        os.close(file)
    kernel.set_capabilities(NO_CAPABILITIES)


def _prefer_as_victim() -> None:
    """If the machine runs out of memory, the kernel must kill the command and not pid 1."""
    file = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
    os.write(file, b"1000")
    os.close(file)


def _watch(
    pid: int,
    reading: int,
    output: Output,
    connection: int,
    deadline: _Deadline,
    watchdog: Watchdog,
    meanwhile: Callable[[], None],
) -> Literal["time", "memory", "processes"] | None:
    """Wait until the command ends or reaches a limit. Returns the limit, or None if the command ended by itself."""
    pidfd = os.pidfd_open(pid)
    poll = select.poll()
    for file in (pidfd, reading, connection):
        poll.register(file, select.POLLIN)
    next_count = time.monotonic() + watchdog.interval_s
    try:
        while True:
            now = time.monotonic()
            if now >= deadline.at:
                deadline.move()
                if now >= deadline.at:
                    return "time"
            if now >= next_count:
                meanwhile()
                deadline.move()
                if limit := watchdog.exceeded():
                    return limit
                next_count = now + watchdog.interval_s
            ready = dict(poll.poll((min(deadline.at, next_count) - now) * 1000))
            if connection in ready:
                if wire.receive(connection) is None:
                    os._exit(0)  # the client is gone
                return "time"  # an interrupt: nobody waits for the command any more
            if reading in ready and not output.take(reading):
                poll.unregister(reading)
            if pidfd in ready:
                return None
    finally:
        os.close(pidfd)


def check_first() -> None:
    """Whoever kills all that it sees must be the first process of a machine: elsewhere that is the whole computer."""
    if os.getpid() != 1:
        raise RuntimeError("this is not the first process of a machine")


def end_all(pid: int) -> int:
    """Kill and reap every other process of the machine. Returns the wait status of `pid`."""
    check_first()
    status = 0
    while True:
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        try:
            ended, its_status = os.waitpid(-1, 0)
        except ChildProcessError:
            return status
        if ended == pid:
            status = its_status
