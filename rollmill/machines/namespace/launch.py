"""Starts the machine host: enters its namespaces, builds the machines' root, and becomes `host.py` inside it.

    python -m rollmill.machines.namespace.launch CONTROL_FD LIMITS_JSON SEEN_JSON

SEEN_JSON is a list: Python packages and an operating system whose programs take the place of this host's (directories
of this host, or null), its architecture if it is not this host's, and the root of an OCI image (image_root.py) or null.
All machines of this machine host see them, read-only. This process becomes `host.py` by running this host's Python with
the C library of that operating system, before it gives up its rights: both must be trusted, see os_layer.py. Of another
architecture, and of an OCI image, it runs nothing.
What the kernel refuses is reported on the control socket as {"error", "hint"}; the client raises it as MachineError.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import sys
from pathlib import Path

from rollmill.machines.guest import cgroups, layout
from rollmill.machines.guest import linux as kernel
from rollmill.machines.namespace import emulation, root

_ENTER = f"import sys; sys.path.insert(0, {layout.CODE!r}); from {__package__}.host import main; main(sys.argv.pop())"


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    limits = json.loads(sys.argv[2])
    packages, userland, architecture, image = json.loads(sys.argv[3])
    emulator = None if architecture is None else emulation.find(architecture)
    environment = root.environment(emulated=emulator is not None)
    try:
        if architecture is not None and emulator is None:
            raise OSError(errno.ENOENT, f"the emulator for {architecture} is gone")
        groups = cgroups.find(limits["memory"], limits["processes"])
        privileged = kernel.has_capability(kernel.CAP_SYS_ADMIN) and kernel.has_capability(kernel.CAP_SETUID)
        identities = _identities() if privileged else 1
        if identities == 1:
            _enter_user_namespace()
        kernel.unshare(kernel.CLONE_NEWNS)
        python = root.enter_new_root(packages, userland, emulator, image[0] if image else ())
    except OSError as error:
        control.send(json.dumps({"error": f"cannot enter namespaces: {error.strerror}", "hint": hint()}).encode())
        sys.exit(1)
    state = {
        "control": control.fileno(),
        "limits": limits,
        "identities": identities,
        "groups": groups,
        "packages": packages is not None,
        "image": image,
        "emulation": None if architecture is None else emulation.rule(architecture),
    }
    for file in (control.fileno(), *(groups.parents.values() if groups else ())):
        os.set_inheritable(file, True)
    # bind all C functions now: otherwise each machine would look them up again when it first calls them
    environment["LD_BIND_NOW"] = "1"
    words = ["python", *python[1:], "-c", _ENTER, json.dumps(state)]
    os.execve(python[0], words, environment)  # noqa: S606


def hint() -> str:
    """The remedy for the usual obstacle that is found on this host."""
    if _setting("kernel/apparmor_restrict_unprivileged_userns") == "1":
        return "`sudo sysctl -w kernel.apparmor_restrict_unprivileged_userns=0` allows user namespaces, or run as root"
    if _setting("kernel/unprivileged_userns_clone") == "0":
        return "`sudo sysctl -w kernel.unprivileged_userns_clone=1` allows user namespaces, or run as root"
    if _setting("user/max_user_namespaces") == "0":
        return "`sudo sysctl -w user.max_user_namespaces=65536` allows user namespaces"
    if kernel.version() < (5, 12):
        return f"Linux 5.12 or newer is needed, this is {os.uname().release}"
    if Path("/.dockerenv").exists() or Path("/run/.containerenv").exists():
        return "in a container: `docker run --privileged`, or --security-opt seccomp=unconfined,systempaths=unconfined"
    return "user and mount namespaces must be allowed: try `unshare --user --map-root-user --mount true`"


def _setting(name: str) -> str | None:
    try:
        return Path("/proc/sys", name).read_text().strip()
    except OSError:
        return None


def _identities() -> int:
    """One past the highest user id that we may give to machines. In a container there may be few."""
    ranges = [line.split() for line in Path("/proc/self/uid_map").read_text().splitlines()]
    return max(int(start) + int(length) for start, _, length in ranges)


def _enter_user_namespace() -> None:
    """Without root: become root of a user namespace that has only our own user id."""
    user, group = os.geteuid(), os.getegid()
    kernel.unshare(kernel.CLONE_NEWUSER)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    Path("/proc/self/gid_map").write_text(f"0 {group} 1")


if __name__ == "__main__":
    main()
