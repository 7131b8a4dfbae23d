"""The programs of a guest whose image has an operating system of its own, of this host's architecture or another.

The tree comes from `rollmill images build --suite` (os_layer.py). Links in it are copied as links and never followed
here: they mean what they mean in the guest.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from rollmill.errors import TaskError
from rollmill.machines.guest import layout
from rollmill.machines.images.os_layer import python_version
from rollmill.machines.namespace import root
from rollmill.machines.qemu.cpio import Archive

OLDEST_PYTHON = (3, 11)
_TAKEN = (*root.USERLAND, "etc", "var/lib/dpkg")
# what only people read, or package managers: a guest keeps all its files in memory
_LEFT_OUT = frozenset(
    f"usr/share/{name}"
    for name in ("doc", "doc-base", "info", "locale", "man", "lintian", "bug", "menu", "pixmaps", "icons", "i18n")
) | {"var/lib/dpkg/info", "usr/lib/udev", "usr/lib/systemd", "lib/udev", "lib/systemd"}
_LEFT_OUT_OF_PYTHON = frozenset({"test", "tests", "idlelib", "tkinter", "turtledemo", "lib2to3", "ensurepip"})


def add_system(archive: Archive, tree: Path) -> None:
    """Add the programs, libraries and settings of a tree, and its Python as that of the machine. TaskError: it has
    none that can run the machine's agent."""
    for name in _TAKEN:
        _add(archive, tree, name)
    for name in ("python", "python3"):
        archive.link(f"{layout.PROGRAMS}/{name}", f"/usr/bin/{_python(tree)}")


def environment() -> dict[str, str]:
    """The environment variables of a command. Libraries are where the tree's own loader looks for them."""
    return {name: value for name, value in root.environment().items() if name != "LD_LIBRARY_PATH"}


def _python(tree: Path) -> str:
    version = python_version(tree)
    if version is None or version < OLDEST_PYTHON:
        has = "no Python" if version is None else f"Python {version[0]}.{version[1]}"
        raise TaskError(
            f"the operating system of the image has {has}, and the agent of virtual machines needs 3.11 or newer",
            hint="build it with `--suite bookworm` or newer, and `--program python3`",
        )
    return f"python{version[0]}.{version[1]}"


def _add(archive: Archive, tree: Path, name: str) -> None:
    try:
        status = (tree / name).lstat()
    except OSError:
        return  # not every tree has it
    if stat.S_ISLNK(status.st_mode):
        archive.link(f"/{name}", os.readlink(tree / name))
    elif stat.S_ISREG(status.st_mode):
        archive.copy(f"/{name}", tree / name)
    elif stat.S_ISDIR(status.st_mode) and not _is_left_out(name):
        archive.directory(f"/{name}")
        for child in sorted(os.listdir(tree / name)):
            _add(archive, tree, f"{name}/{child}")


def _is_left_out(name: str) -> bool:
    parent, _, last = name.rpartition("/")
    return name in _LEFT_OUT or (last in _LEFT_OUT_OF_PYTHON and parent.startswith("usr/lib/python3."))
