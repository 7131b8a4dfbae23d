"""Runs buildah where the code of a Dockerfile may run: in namespaces. build_image.py starts it as a process.

users       0 to 65535 of the build are users of the host that own nothing; its root is none of the host
network     loopback alone, with one port: build_image.py serves a proxy there, which reaches the names on its list
processes   a tree of its own, with a limit; it ends with this process
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys

from rollmill.machines.guest import image_root
from rollmill.machines.guest import linux as kernel

FIRST_USER = 0x7FFE0000  # of builds: above the users of machines, which end here (namespace/host.py)
_PR_SET_PDEATHSIG = 1
_SPACES = kernel.CLONE_NEWNS | kernel.CLONE_NEWPID | kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS


def main() -> int:
    order = json.loads(sys.argv[1])
    owner = socket.socket(fileno=order["socket"])
    kernel.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if order["place_users"]:  # we are root of the host, else `buildah unshare` has given us users
        _own(order["place"])
    resource.setrlimit(resource.RLIMIT_FSIZE, (order["disk"], order["disk"]))
    resource.setrlimit(resource.RLIMIT_NPROC, (order["processes"], order["processes"]))
    ready, go = os.pipe()
    pid, _ = kernel.clone(_SPACES | (kernel.CLONE_NEWUSER if order["place_users"] else 0))
    if pid == 0:
        os.close(go)
        status = 1
        try:
            status = _build(order, owner, ready)
        finally:
            os._exit(status)
    if order["place_users"]:
        image_root.map_range(pid, f"0 {FIRST_USER} {image_root.COUNT}")
    os.close(go)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


def _own(place: str) -> None:
    for folder, _, names in os.walk(place):
        for path in (folder, *(f"{folder}/{name}" for name in names)):
            os.lchown(path, FIRST_USER, FIRST_USER)
        for name in os.listdir(folder):
            os.lchown(f"{folder}/{name}", FIRST_USER, FIRST_USER)  # links to directories are not walked


def _build(order: dict[str, object], owner: socket.socket, ready: int) -> int:
    """Pid 1 of the build. Returns the exit status of the command that failed, or 0."""
    kernel.as_after_fork()
    os.read(ready, 1)  # until the users are there
    os.setresgid(0, 0, 0)
    os.setgroups([])
    os.setresuid(0, 0, 0)
    kernel.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    kernel.mount("proc", "/proc", "proc", kernel.MS_NOSUID | kernel.MS_NODEV)
    kernel.raise_loopback()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        proxy = f"http://127.0.0.1:{listener.getsockname()[1]}"
        socket.send_fds(owner, [b"x"], [listener.fileno()])
    owner.close()
    names = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")
    variables = {**order["environment"], **dict.fromkeys(names, proxy)}  # type: ignore[dict-item]
    for command in order["commands"]:  # type: ignore[attr-defined]
        done = subprocess.run(command, cwd=str(order["place"]), env=variables, stdin=subprocess.DEVNULL, check=False)
        if done.returncode:
            return done.returncode % 256
    return 0


if __name__ == "__main__":
    sys.exit(main())
