"""The cloner of a slot: the process whose clones are the machines of that slot, one after the other.

It is in the control groups and the user namespace of the slot, so its clones are there from their first instruction.
Otherwise each machine would have to be moved into its groups: with version 1 that waits about 10 ms, in which no
process of the whole system can fork or end. What is the same for each machine of a slot is set once, here.

No machine sees its cloner: it has process ids, mounts, a network and interprocess communication of its own.

    cloner: b"r", once it is in its namespaces: the host maps its users and sends b"g"
    host: b"c"    cloner: process id of a machine, 0, and the client's end of its socket; or 0, errno, and words
"""

from __future__ import annotations

import _socket  # not socket: its Python part touches more memory, which is copied after each clone
import array
import contextlib
import errno
import os
import signal
import socket
import struct
from collections.abc import Callable
from typing import NoReturn

from rollmill.machines.guest import agent, cgroups, image_root
from rollmill.machines.guest import linux as kernel
from rollmill.machines.guest import run_command as command
from rollmill.machines.namespace import inodes

_NAMESPACES = kernel.CLONE_NEWUSER | kernel.CLONE_NEWUTS
_OF_A_MACHINE = kernel.CLONE_NEWNS | kernel.CLONE_NEWPID | kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC
_MACHINE = kernel.clone_arguments(_OF_A_MACHINE, sibling=True)  # the host learns of its end, and ends with it
_READY = b"r"
_MADE = struct.Struct("=ii")
_CLONE = b"c"
_MOST_WORDS = 300  # bytes


class Cloner:
    """The host's side."""

    def __init__(
        self,
        plan: agent.Plan,
        group: cgroups.Slot | None,
        identify: Callable[[int], None],
        slot: int = 0,
        *,
        own_files: bool = False,
        users: int | None = None,
    ) -> None:
        """`identify` maps the users of a process. `own_files`: see inodes.py. `users`: an open user namespace, whose
        users the files of an image belong to. OSError: there is no cloner. It is not ready yet: several begin at the
        same time."""
        self._group, self._identify, self._ready = group, identify, False
        self._connection, its = socket.socketpair()
        with its:
            try:
                flags = kernel.CLONE_NEWNS if own_files else 0
                self.pid, pidfd = kernel.clone(flags, group.directory if group else None)
            except OSError:
                self._connection.close()
                raise
            if self.pid == 0:
                _keep(its.fileno(), plan, group.commands if group else None, slot if own_files else None, users)
        os.close(pidfd)

    def prepare(self) -> None:
        """Returns when it can be asked. OSError: it cannot, and has ended."""
        if self._ready:
            return
        try:
            self._wait()
            self._identify(self.pid)
            if self._group:
                self._group.add(self.pid)
            self._connection.send(b"g")
            self._ready = True
        except OSError:
            self.end()
            raise

    def _wait(self) -> None:
        """Until it is in its namespaces."""
        message = self._connection.recv(_MADE.size + _MOST_WORDS)
        if message != _READY:
            problem = _MADE.unpack_from(message)[1] if len(message) >= _MADE.size else errno.EIO
            raise OSError(problem, message[_MADE.size :].decode("utf-8", "replace"))

    def ask(self) -> None:
        """Ask for a machine. Several cloners can be asked before `take`: they work at the same time."""
        with contextlib.suppress(BrokenPipeError):  # `take` says so
            self._connection.send(_CLONE)

    def take(self) -> tuple[int, int, int]:
        """The machine that was asked for: its process id, its pidfd, and the client's end of its socket, an open file.

        ConnectionError: someone has killed the cloner.
        """
        message, files, _, _ = socket.recv_fds(self._connection, _MADE.size + _MOST_WORDS, 1)
        if len(message) < _MADE.size:
            raise ConnectionResetError("the cloner of a machine has ended")
        pid, problem = _MADE.unpack_from(message)
        if problem:
            raise OSError(problem, message[_MADE.size :].decode("utf-8", "replace"))
        try:
            if not files:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))  # what the kernel does not say here
            return pid, os.pidfd_open(pid), files[0]
        except OSError:
            for file in files:
                os.close(file)
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise

    def end(self) -> None:
        self._connection.close()
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def _keep(connection: int, plan: agent.Plan, commands: int | None, slot: int | None, users: int | None) -> NoReturn:
    """Runs in the child, until the host has gone."""
    try:
        agent.keep_only(connection, commands, users)
        os.dup2(0, 2)  # the host's input and output are /dev/null already
        host = _socket.socket(fileno=agent.CONNECTION)
        try:
            if slot is not None:
                inodes.separate(slot, None if users is None else command.USERS)
            kernel.unshare(_NAMESPACES)
            host.send(_READY)
            if host.recv(1):  # the host has mapped our identity
                agent.prepare(plan)
                if users is not None:
                    kernel.prctl(kernel.PR_SET_DUMPABLE, 1)  # else nobody may say who the users are
                    os.dup2(image_root.make_users(plan.watchdog.processes), command.USERS, inheritable=False)
                agent.protect()
                while host.recv(1):
                    _clone(host, plan)
        except OSError as error:
            _refuse(host, error)
    finally:
        os._exit(0)


def _clone(host: _socket.socket, plan: agent.Plan) -> None:
    ours, its = _socket.socketpair()
    try:
        pid = kernel.fork(_MACHINE)
        if pid == 0:
            agent.main(its.fileno(), plan)
        files = array.array("i", [ours.fileno()])
        host.sendmsg([_MADE.pack(pid, 0)], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, files)])
    except OSError as error:
        _refuse(host, error)
    finally:
        ours.close()
        its.close()


def _refuse(host: _socket.socket, error: OSError) -> None:
    with contextlib.suppress(OSError):  # the host has gone
        host.send(_MADE.pack(0, error.errno or errno.EIO) + str(error.strerror).encode()[:_MOST_WORDS])


def usable_groups(groups: cgroups.Groups | None) -> cgroups.Groups | None:
    """Returns `groups` if a process can enter one. Being allowed to create groups does not mean that."""
    if groups is None:
        return None
    try:
        slot = groups.make_slot(0)
        pid, pidfd = kernel.clone(0, slot.directory)
        if pid == 0:
            signal.pause()
    except OSError:
        return None
    try:
        slot.add(pid)
        return groups._replace(apart=slot.commands is not None and _enters(slot.commands))
    except OSError:
        return None
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(pidfd)


def _enters(commands: int) -> bool:
    """Whether a process can move itself into the group of commands."""
    pid, pidfd = kernel.clone(0)
    if pid == 0:
        with contextlib.suppress(OSError):
            os.write(commands, cgroups.ENTER)
            os._exit(0)
        os._exit(1)
    os.close(pidfd)
    return os.waitpid(pid, 0)[1] == 0
