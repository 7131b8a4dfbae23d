"""Starts role processes by forking, so that each does not import the same modules for seconds again.

A supervisor starts one nursery: this module as a process of its own, which imports what a role needs when it is first
asked for it, and computes nothing. They talk in lines of JSON over a socket:

    supervisor →  {"id": 3, "role": "engine-home", "run": {…}, "arguments": […], "environment": {…}, "log": PATH, …}
    supervisor →  {"id": 3, "signal": 15}
    nursery    →  {"id": 3, "code": 0}           it has ended; −9 if SIGKILL ended it

A nursery dies with its supervisor, and its children with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from setproctitle import setproctitle

SUPERVISOR = "ROLLMILL_SUPERVISOR"  # environment variable: pid of the process whose death ends this one
# what a role imports only when it runs
LATER = {"engine": ("rollmill.inference.embedded.engine",)}
OF_RANKS = (
    "rollmill.training.parallel.sharded",
    "torch._dynamo",
)  # torch imports the second when a rank shards a model
PR_SET_PDEATHSIG = 1


class Nursery:
    """The supervisor's side."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._unread = b""
        self._children: dict[int, Child] = {}

    def start(
        self,
        role: str,
        handed: Mapping[str, Any],
        arguments: Sequence[str],
        *,
        name: str,
        environment: Mapping[str, str],
        log: Path,
    ) -> Child:
        """Start a role process. `handed` is what it is told of its run (handed.py); `name` is shown by `ps`;
        `environment` is added to the supervisor's."""
        if self._process is None:
            self._open()
        child = Child(self, len(self._children))
        self._children[child.id] = child
        self.send(
            id=child.id,
            role=role,
            run=handed,
            name=name,
            arguments=list(arguments),
            environment={**os.environ, **environment},
            log=str(log.absolute()),
        )
        return child

    def _open(self) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "rollmill.cluster.nursery", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", SUPERVISOR: str(os.getpid())},
                pass_fds=[theirs.fileno()],
                process_group=0,  # Ctrl-C reaches the supervisor alone, which then stops the roles in order
            )

    def send(self, **message: Any) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):  # it has died: `receive` says so
                self._socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, timeout: float = 0.0) -> None:
        """Learn which children have ended. If the nursery has died, all have."""
        if self._socket is None or not select.select([self._socket], [], [], timeout)[0]:
            return
        try:
            data = self._socket.recv(1 << 16)
        except ConnectionResetError:
            data = b""
        if not data:
            self.close()
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            message = json.loads(line)
            self._children[message["id"]].returncode = message["code"]

    def close(self) -> None:
        """End the nursery and with it the children that are left."""
        if self._process is not None and self._socket is not None:
            self._socket.close()
            self._process.kill()
            self._process.wait()
        self._process = self._socket = None
        for child in self._children.values():
            if child.returncode is None:
                child.returncode = -signal.SIGKILL
        self._children, self._unread = {}, b""


@dataclass(eq=False)
class Child:
    """A role process, with the methods of a Popen."""

    nursery: Nursery
    id: int
    returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.nursery.receive()
        return self.returncode

    def wait(self, timeout: float) -> int | None:
        """Its exit code; None if it still runs after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while self.returncode is None and (left := deadline - time.monotonic()) > 0:
            self.nursery.receive(left)
        return self.returncode

    def signal(self, number: signal.Signals) -> None:
        """Does nothing if it has ended: another process may have its id by now, so the nursery sends signals."""
        self.nursery.send(id=self.id, signal=number)


def main(descriptor: int) -> int:
    """The nursery's side. Returns the exit code of the process: in a forked child, of its role."""
    end_with_parent()
    setproctitle("rollmill nursery")  # once before the environment changes: it looks for its place there
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    woken, wake = socket.socketpair()
    wake.setblocking(False)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    supervisor = socket.socket(fileno=descriptor)
    pids: dict[int, int] = {}  # id → pid
    unread = b""
    while True:
        ready = select.select([supervisor, woken], [], [])[0]
        if woken in ready:
            woken.recv(4096)
            _tell_ended(supervisor, pids)
        if supervisor not in ready:
            continue
        data = supervisor.recv(1 << 16)
        if not data:
            return 0
        *lines, unread = (unread + data).split(b"\n")
        for request in map(json.loads, lines):
            if "signal" in request:
                if request["id"] in pids:
                    os.kill(pids[request["id"]], request["signal"])
                continue
            _import(request["role"].partition("-")[0], ranks="WORLD_SIZE" in request["environment"])
            pid = os.fork()
            if pid == 0:
                for each in (supervisor, woken, wake):
                    each.close()
                return _be(request)
            pids[request["id"]] = pid


def _tell_ended(supervisor: socket.socket, pids: dict[int, int]) -> None:
    for id, pid in list(pids.items()):
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            del pids[id]
            message = {"id": id, "code": os.waitstatus_to_exitcode(status)}
            supervisor.sendall(json.dumps(message).encode() + b"\n")


def _import(kind: str, ranks: bool) -> None:
    for module in (f"rollmill.cluster.roles.{kind}", *LATER.get(kind, ()), *(OF_RANKS if ranks else ())):
        with contextlib.suppress(Exception):  # the child meets the same error, and has a log to tell it in
            importlib.import_module(module)
    gc.collect()
    gc.freeze()  # the collector of a child would copy the pages of all these objects


def _be(request: dict[str, Any]) -> int:
    """Become the role process."""
    from rollmill.cluster import role
    from rollmill.cluster.handed import take

    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    nursery = os.getppid()
    os.setpgid(0, 0)
    try:
        log = os.open(request["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    except OSError as error:  # the supervisor has checked it a moment ago
        print(f"rollmill: {request['log']} cannot be opened: {error.strerror}", file=sys.stderr)
        return 1
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.environ.clear()
    os.environ.update({**request["environment"], SUPERVISOR: str(nursery)})
    setproctitle(request["name"])
    return role.main(request["role"], lambda: take(request["run"]), *request["arguments"])


def end_with_parent() -> None:
    """Ask the kernel to kill this process when its parent dies: nobody would restart or stop it any more."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(os.environ.get(SUPERVISOR, os.getppid())):  # the parent died before the call
        sys.exit(1)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
