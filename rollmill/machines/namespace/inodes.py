"""Files of a slot's own: what all machines see, on inodes that no other slot has.

Locks and watches belong to inodes, and a read-only mount does not hinder them: with the host's own inodes, `flock` on
/usr/bin/ls carries messages from one machine to another, and inotify tells what the host runs. So the cloner of a slot
puts an overlay over every shared tree. Its files are inodes of the slot; contents and page cache stay the host's.
Devices are made anew for each slot, where the host may make devices.
"""

from __future__ import annotations

import contextlib
import os
import stat

from rollmill.machines.guest import layout
from rollmill.machines.guest import linux as kernel

_STAGE, _EMPTY = layout.TEMPORARY, layout.HOME  # in the mount namespace of a cloner, where both are empty directories
_DEVICES = layout.WORK  # of all slots, in the mount namespace of the machine host
_SEALED = kernel.MS_RDONLY | kernel.MS_NOSUID | kernel.MS_NODEV
_DEVICE = kernel.MOUNT_ATTR_RDONLY | kernel.MOUNT_ATTR_NOSUID | kernel.MOUNT_ATTR_NOEXEC


def hold_devices() -> None:
    """Make room for the devices of slots. OSError: this host may not."""
    kernel.mount("tmpfs", _DEVICES, "tmpfs", kernel.MS_NOSUID | kernel.MS_NOEXEC, "mode=755,size=1m")


def make_devices(slot: int) -> None:
    """The devices of a slot, in the machine host. OSError: it may not; then machines share the host's."""
    place = f"{_DEVICES}/{slot}"
    with contextlib.suppress(FileExistsError):
        os.mkdir(place)
        for entry in os.scandir("/dev"):
            status = entry.stat(follow_symlinks=False)
            if stat.S_ISCHR(status.st_mode):
                os.mknod(f"{place}/{entry.name}", status.st_mode, status.st_rdev)
                os.chmod(f"{place}/{entry.name}", stat.S_IMODE(status.st_mode))


def separate(slot: int, users: int | None = None) -> None:
    """Move into a root of the slot's own, in a mount namespace of its own. OSError: the kernel does not allow it.

    Layers of an image belong to the user namespace `users`: each machine puts an overlay of its own over them.
    """
    mounts = _mount_points()
    kernel.mount("tmpfs", _EMPTY, "tmpfs", _SEALED, "size=4k")  # an overlay needs two layers
    for path in mounts:
        if path.startswith(f"{layout.LAYERS}/"):
            _place_layer(path, users)
            continue
        if os.path.isdir(path) and path != "/proc":
            kernel.mount("overlay", _STAGE + path, "overlay", _SEALED, f"lowerdir={path}:{_EMPTY}")
            continue
        source = f"{_DEVICES}/{slot}/{os.path.basename(path)}"
        own = os.path.dirname(path) == "/dev" and os.path.exists(source)
        kernel.mount(source if own else path, _STAGE + path, None, kernel.MS_BIND | kernel.MS_REC)
        if own:
            kernel.restrict_mount(_STAGE + path, _DEVICE)
    os.chdir(_STAGE)
    kernel.pivot_root(".", ".")
    kernel.unmount(".")
    os.chdir("/")


def _place_layer(path: str, users: int | None) -> None:
    layer = kernel.copy_mount(path)
    try:
        if users is not None:
            kernel.map_owners(layer, users)
        kernel.place_mount(layer, _STAGE + path)
    finally:
        os.close(layer)


def _mount_points() -> list[str]:
    """Where something is mounted, those above first. What lies below /proc goes with it."""
    with open("/proc/self/mountinfo", "rb") as lines:
        paths = {line.split()[4].decode("unicode_escape").encode("latin-1").decode() for line in lines}
    return sorted(path for path in paths if path != _DEVICES and not path.startswith("/proc/"))
