"""Starts role processes by forking, so that each does not import the same modules for seconds again.

It is this module as a process of its own. It imports what a role needs when it is first asked for it, and
computes nothing. A supervisor talks with it in lines of JSON over a socket:

    supervisor  →  {"id": 3, "role": "engine-home", "run": {…}, "arguments": […], "environment": {…}, "log": PATH, …}
    supervisor  →  {"id": 3, "signal": 15}
    fork server →  {"id": 3, "code": 0}           it has ended; −9 if SIGKILL ended it

A fork server dies with its supervisor, and its children with it. On a node of a cluster several actors share one:
they find it at a Unix socket in a directory, and the first of them starts it. It belongs to none of them: it kills the
children of one whose connection ends, and leaves when nobody has been connected for IDLE_S.
"""

from __future__ import annotations

import contextlib
import fcntl
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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from setproctitle import setproctitle

from rollmill.launch.parent_death import SUPERVISOR, end_with_parent

# what a role imports only when it runs
LATER = {"engine": ("rollmill.inference.embedded.engine",)}
OF_RANKS = (
    "rollmill.training.parallel.many_ranks",
    "torch._dynamo",
)  # torch imports the second when a rank shards a model
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}  # of a fork server
SOCKET = "socket"  # of a shared fork server, in its directory
IDLE_S = 5.0  # a shared fork server that nobody needs leaves; the next stage of a run comes sooner


class ForkServer:
    """The supervisor's side. `shared`: the directory of a fork server that others of this host use too."""

    def __init__(self, shared: Path | None = None) -> None:
        self._shared = shared
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
        """Start a role process. `handed` is what it is told of its run (role_inputs.py); `name` is shown by `ps`;
        `environment` is added to the supervisor's."""
        if self._socket is None:
            self._socket = self._open() if self._shared is None else _join(self._shared)
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

    def _open(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "rollmill.launch.fork_server", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                env={**os.environ, **ENVIRONMENT, SUPERVISOR: str(os.getpid())},
                pass_fds=[theirs.fileno()],
                process_group=0,  # Ctrl-C reaches the supervisor alone, which then stops the roles in order
            )
        return ours

    def send(self, **message: Any) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):  # it has died: `receive` says so
                self._socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, timeout: float = 0.0) -> None:
        """Learn which children have ended. If the fork server has died, all have."""
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
        """End the fork server and with it the children that are left."""
        if self._socket is not None:
            self._socket.close()
        if self._process is not None:
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

    server: ForkServer
    id: int
    returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.server.receive()
        return self.returncode

    def wait(self, timeout: float) -> int | None:
        """Its exit code; None if it still runs after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while self.returncode is None and (left := deadline - time.monotonic()) > 0:
            self.server.receive(left)
        return self.returncode

    def signal(self, number: signal.Signals) -> None:
        """Does nothing if it has ended: another process may have its id by now, so the fork server sends signals."""
        self.server.send(id=self.id, signal=number)


def _join(directory: Path) -> socket.socket:
    """Connect to the shared fork server of this directory, and start it if there is none."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _locked(directory) as path, contextlib.ExitStack() as unless_connected:
        ours = unless_connected.enter_context(socket.socket(socket.AF_UNIX))
        try:
            ours.connect(path)
        except (FileNotFoundError, ConnectionRefusedError):
            _start_shared(directory, path)
            ours.connect(path)
        unless_connected.pop_all()
        return ours


def _start_shared(directory: Path, path: str) -> None:
    """Returns at once: who connects meanwhile waits in the queue of the socket."""
    Path(path).unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen()
        subprocess.run(
            [sys.executable, "-P", "-m", "rollmill.launch.fork_server", str(listening.fileno()), str(directory)],
            stdin=subprocess.DEVNULL,
            env={**os.environ, **ENVIRONMENT},
            pass_fds=[listening.fileno()],
            start_new_session=True,
            check=True,
        )


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[str]:
    """While somebody connects to a shared fork server, it does not leave. Yields the path of its socket: through a
    descriptor of the directory, because paths of sockets must be short."""
    held = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield f"/proc/self/fd/{held}/{SOCKET}"
    finally:
        os.close(held)


@dataclass(eq=False)
class _Asker:
    """The fork server's side of a connection."""

    socket: socket.socket
    unread: bytes = b""
    pids: dict[int, int] = field(default_factory=dict)  # id → pid

    def fileno(self) -> int:
        return self.socket.fileno()

    def read(self) -> list[dict[str, Any]] | None:
        """The requests that have come; None: it has left."""
        try:
            data = self.socket.recv(1 << 16)
        except ConnectionResetError:
            data = b""
        *lines, self.unread = (self.unread + data).split(b"\n")
        return [json.loads(line) for line in lines] if data else None

    def tell_ended(self) -> None:
        for id, pid in list(self.pids.items()):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                del self.pids[id]
                message = {"id": id, "code": os.waitstatus_to_exitcode(status)}
                with contextlib.suppress(OSError):  # it has left
                    self.socket.sendall(json.dumps(message).encode() + b"\n")

    def leave(self) -> None:
        self.socket.close()
        for pid in self.pids.values():
            os.kill(pid, signal.SIGKILL)


def main(descriptor: int, directory: Path | None = None) -> int:
    """The server's side. Returns the exit code of the process: in a forked child, of its role. The descriptor is the
    connection to the supervisor; with `directory`, of a shared fork server, a socket that listens."""
    if directory is None:
        end_with_parent()
    setproctitle("rollmill fork server")  # once before the environment changes: it looks for its place there
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    server = os.getpid()
    own, (woken, wake) = socket.socket(fileno=descriptor), _wake_when_children_end()
    askers = [] if directory else [_Asker(own)]
    left: list[_Asker] = []  # their children are dying
    while True:
        waited: list[socket.socket | _Asker] = [woken, *([own] if directory else []), *askers]
        ready = select.select(waited, [], [], None if askers else IDLE_S)[0]
        if not ready and directory and _retire(own, directory):
            return _leave()
        if woken in ready:
            woken.recv(4096)
            for asker in askers + left:
                asker.tell_ended()
            left = [asker for asker in left if asker.pids]
        if directory and own in ready:
            askers.append(_Asker(own.accept()[0]))
        for asker in [asker for asker in askers if asker in ready]:
            requests = asker.read()
            if requests is None:
                asker.leave()
                askers.remove(asker)
                left.append(asker)
                if not directory:
                    return _leave()
            for request in requests or ():
                if _serve(asker, request) == 0:
                    _leave()
                    for each in (own, woken, wake, *(asker.socket for asker in askers)):
                        each.close()
                    return _be(request, server)


def _wake_when_children_end() -> tuple[socket.socket, socket.socket]:
    """A socket that can be read when a child has ended, and its other end."""
    woken, wake = socket.socketpair()
    wake.setblocking(False)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    return woken, wake


def _leave() -> int:
    """Signals that come from now on wake nobody: the socket that they would write to will be closed."""
    signal.set_wakeup_fd(-1)
    return 0


def _serve(asker: _Asker, request: dict[str, Any]) -> int | None:
    """Returns 0 in a child that was forked."""
    pid = asker.pids.get(request["id"])
    if "signal" in request:
        if pid is not None:
            os.kill(pid, request["signal"])
        return None
    _import(request["role"].partition("-")[0], ranks="WORLD_SIZE" in request["environment"])
    pid = os.fork()
    if pid:
        asker.pids[request["id"]] = pid
    return pid


def _retire(listening: socket.socket, directory: Path) -> bool:
    """Whether nobody needs this shared fork server: then nobody can connect to it any more."""
    try:
        with _locked(directory) as path:
            if select.select([listening], [], [], 0)[0]:
                return False
            Path(path).unlink(missing_ok=True)
    except FileNotFoundError:  # the directory is gone
        pass
    return True


def _import(kind: str, ranks: bool) -> None:
    for module in (f"rollmill.launch.roles.{kind}", *LATER.get(kind, ()), *(OF_RANKS if ranks else ())):
        with contextlib.suppress(Exception):  # the child meets the same error, and has a log to tell it in
            importlib.import_module(module)
    gc.collect()
    gc.freeze()  # the collector of a child would copy the pages of all these objects


def _be(request: dict[str, Any], server: int) -> int:
    """Become the role process. `server` is the pid that its parent must have: it may have died since the fork."""
    from rollmill.launch import role
    from rollmill.launch.role_inputs import take

    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
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
    os.environ.update({**request["environment"], SUPERVISOR: str(server)})
    setproctitle(request["name"])
    return role.main(request["role"], lambda: take(request["run"]), *request["arguments"])


if __name__ == "__main__":
    if len(sys.argv) > 2 and os.fork():
        os._exit(0)  # a shared fork server is no child of the actor that starts it, and outlives it
    sys.exit(main(int(sys.argv[1]), *map(Path, sys.argv[2:])))
