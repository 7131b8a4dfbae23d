"""The root file system of every machine: read-only, with the programs of this host and nothing else of it.

    /usr /bin /lib …      the host's programs and libraries
    /opt/python           the Python installation in use, where it is not part of /usr; standard library only
    /opt/bin              python, python3
    /opt/packages         the Python packages of the image, if it has any
    /opt/emulator …       only where the image has programs of another architecture (emulation.py)
    /etc /dev /run /var   a few files made for machines (computer.py)
    /sys                  what this host's /sys says about its maker and processors
    /proc /tmp /work      mounted afresh by each machine, and so is the home of its user

Each slot puts overlays over this root, so that no inode is shared (inodes.py).

Not there: this host's home directories, the checkout, virtual environments, the run directory, installed Python
packages.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import site
import stat
import sys
import sysconfig
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from rollmill.machines.guest import computer, layout
from rollmill.machines.guest import linux as kernel
from rollmill.machines.namespace import emulation

_STAGE = "/tmp"  # noqa: S108  any directory that always exists: covered in our own mount namespace only
USERLAND = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32", "nix")
# /dev/full reads like /dev/zero, but cannot be mapped: memory shared through such a mapping is counted nowhere.
_DEVICES = {"null": "null", "zero": "full", "full": "full", "random": "random", "urandom": "urandom", "tty": "tty"}
_LINKS = {
    "fd": "/proc/self/fd",
    "stdin": "fd/0",
    "stdout": "fd/1",
    "stderr": "fd/2",
    "shm": layout.TEMPORARY,
    "ptmx": "pts/ptmx",
}
# what any user of this host may read about its maker and processors; serial numbers are not among them
_HARDWARE = (
    *(f"class/dmi/id/{name}" for name in ("sys_vendor", "product_name", "board_vendor", "board_name", "bios_vendor")),
    *(f"devices/system/cpu/{name}" for name in ("online", "possible", "present")),
)
_INSTALLED = 90 * 86400  # seconds since system files were written
_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_SEALED = kernel.MOUNT_ATTR_RDONLY | kernel.MOUNT_ATTR_NOSUID | kernel.MOUNT_ATTR_NODEV


def enter_new_root(
    packages: str | None, userland: str | None = None, emulator: str | None = None, layers: Sequence[str] = ()
) -> list[str]:
    """Build the root in this process's private mount namespace and move into it. Returns the command of its Python.

    The source of the machine host is still there, on a mount of its own. The host unmounts it after its imports.
    With `emulator`, the programs of `userland` are of another architecture. `layers`: of an OCI image, lowest first.
    """
    loader = _loader() if emulator is not None else None
    python_home = Path(sys.base_prefix).resolve()
    hidden = [path for path in _private_directories() if path not in (python_home, *python_home.parents)]
    if userland is not None:  # it has nothing of this host to hide
        hidden = [path for path in hidden if not path.is_relative_to("/usr")]
        if python_home.is_relative_to("/usr"):
            raise OSError(errno.ENOTSUP, "this Python is part of /usr, where the image has programs of its own")
    kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.mount("tmpfs", _STAGE, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=755")
    os.mkdir(f"{_STAGE}/old")
    kernel.pivot_root(_STAGE, f"{_STAGE}/old")
    os.mkdir("/new")
    kernel.mount("tmpfs", "/new", "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=755,size=16m")
    new, old = Path("/new"), Path("/old")
    for name in (layout.TEMPORARY, layout.WORK, layout.PROGRAMS, layout.CODE, layout.HOME, "/proc", "/dev/pts", "/etc"):
        (new / name[1:]).mkdir(parents=True)
    base = old if userland is None else old / Path(userland).absolute().relative_to("/")
    _bind_userland(old, base, new)
    _furnish(old, base, new)
    for number, layer in enumerate(layers):
        _bind(old / Path(layer).absolute().relative_to("/"), new / layout.LAYERS[1:] / str(number))
    if layers:
        (new / layout.LAYERS[1:] / "empty").mkdir()
    if packages is not None:
        _bind(old / Path(packages).absolute().relative_to("/"), new / layout.PACKAGES[1:])
    inside = python_home
    if not python_home.is_relative_to("/usr"):
        inside = Path(layout.PYTHON)
        _bind(old / python_home.relative_to("/"), new / layout.PYTHON[1:])
    inside /= f"bin/python{sys.version_info.major}.{sys.version_info.minor}"
    python = [str(inside)]
    if emulator is not None and loader is not None:
        _bind(old / Path(emulator).resolve().relative_to("/"), new / layout.EMULATOR[1:])
        _bind(old / loader.parent.relative_to("/"), new / layout.NATIVE[1:])
        libraries = f"{layout.NATIVE}:{layout.PYTHON}/lib"
        python = [f"{layout.NATIVE}/{loader.name}", "--library-path", libraries, str(inside)]
    for name in ("python", "python3") if emulator is None else ():
        (new / layout.PROGRAMS[1:] / name).symlink_to(inside)
    _cover(hidden, python_home, new)
    _copy_own_code(old, new)
    kernel.restrict_mount(str(new), _SEALED)
    os.chdir(new)
    kernel.pivot_root(".", ".")
    kernel.unmount(".")
    os.chdir("/")
    return python


def _loader() -> Path:
    """The loader of this Python; the C library lies beside it."""
    found = emulation.interpreter_of(Path("/proc/self/exe"))
    if found is None:
        raise OSError(errno.ENOTSUP, "this Python needs no loader")
    loader = Path(found).resolve()
    if not any(loader.parent.glob("libc.*")):  # then it would find the image's, before it has given up its rights
        raise OSError(errno.ENOTSUP, f"no C library lies beside {loader}")
    return loader


def environment(*, emulated: bool = False) -> dict[str, str]:
    """The environment variables of a command."""
    home = Path(sys.base_prefix)
    own = f"{layout.PROGRAMS}:{layout.PACKAGES}/bin:{layout.PYTHON}/bin"
    variables = {
        "PATH": f"{f'{layout.PACKAGES}/bin' if emulated else own}:{_SYSTEM_PATH}",
        "HOME": layout.HOME,
        "USER": layout.USER,
        "LOGNAME": layout.USER,
        "SHELL": "/bin/bash",
        "LANG": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    if sysconfig.get_config_var("Py_ENABLE_SHARED") and not emulated and not home.is_relative_to("/usr"):
        variables["LD_LIBRARY_PATH"] = f"{layout.PYTHON}/lib"
    return variables


def _bind_userland(old: Path, base: Path, new: Path) -> None:
    """Programs and libraries of `base`; devices of this host."""
    for name in USERLAND:
        entry = base / name
        if entry.is_symlink():
            (new / name).symlink_to(os.readlink(entry))
        elif entry.is_dir():
            _bind(entry, new / name)
    # so that programs find their libraries, Debian's links their targets, and dpkg its packages
    for name in ("etc/ld.so.cache", "etc/alternatives", "var/lib/dpkg"):
        if (base / name).is_dir() and _is_inside(base / name, base):
            _bind(base / name, new / name)
        elif (base / name).exists() and _is_inside(base / name, base):
            shutil.copy(base / name, new / name)
    for name, source in _DEVICES.items():
        _bind(old / "dev" / source, new / "dev" / name, kernel.MOUNT_ATTR_NOSUID | kernel.MOUNT_ATTR_NOEXEC)
    for name, target in _LINKS.items():
        (new / "dev" / name).symlink_to(target)
    # a machine may mount its own /proc only while a whole one is visible; it then covers this one
    _bind(old / "proc", new / "proc", 0)


def _furnish(old: Path, base: Path, new: Path) -> None:
    """Write the files that make a machine an ordinary computer, dated as if it was installed a while ago."""
    for directory in computer.DIRECTORIES:
        (new / directory[1:]).mkdir(parents=True, exist_ok=True)
    texts = {path[1:]: text.encode() for path, text in computer.FILES.items()}
    texts |= _public(base, "etc", computer.HOST_FILES) | _public(old, "sys", _HARDWARE)
    installed = time.time() - _INSTALLED
    for path, data in texts.items():
        (new / path).parent.mkdir(parents=True, exist_ok=True)
        (new / path).write_bytes(data)
        os.utime(new / path, (installed, installed))
    (new / "etc/os-release").symlink_to("../usr/lib/os-release")
    (new / "etc/localtime").symlink_to("/usr/share/zoneinfo/Etc/UTC")
    (new / "etc/mtab").symlink_to("../proc/self/mounts")


def _is_inside(path: Path, base: Path) -> bool:
    """A tree from elsewhere may have links to files of this host."""
    return path.resolve().is_relative_to(base.resolve())


def _public(base: Path, directory: str, names: Iterable[str]) -> dict[str, bytes]:
    """The files of a tree that every user may read, by path."""
    found = {}
    for name in names:
        path = Path(directory, name)
        with contextlib.suppress(OSError):
            if _is_inside(base / path, base) and stat.S_IMODE(os.stat(base / path).st_mode) & stat.S_IROTH:
                found[str(path)] = (base / path).read_bytes()
    return found


def _bind(source: Path, target: Path, attributes: int = _SEALED) -> None:
    if source.is_dir():
        target.mkdir(parents=True, exist_ok=True)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()
    kernel.mount(str(source), str(target), None, kernel.MS_BIND | kernel.MS_REC)
    if attributes:
        kernel.restrict_mount(str(target), attributes, recursive=True)


def _private_directories() -> list[Path]:
    """Directories that may lie inside /usr or the Python installation, and that machines must not see."""
    packages = [Path(path) for path in site.getsitepackages([sys.base_prefix])]
    packages += [Path("/usr/lib/python3/dist-packages"), Path("/usr/src"), Path("/usr/local/src")]
    checkout = Path(__file__).resolve().parents[3]
    return [path.resolve() for path in (*packages, checkout, Path.cwd(), Path(sys.prefix)) if path.is_dir()]


def _cover(hidden: list[Path], python_home: Path, new: Path) -> None:
    """Mount an empty directory over each private one that the binds made visible."""
    for path in sorted(set(hidden)):
        visible = new / path.relative_to("/")
        if not path.is_relative_to("/usr") and path.is_relative_to(python_home):
            visible = new / layout.PYTHON[1:] / path.relative_to(python_home)
        if visible.is_dir():
            kernel.mount(
                "tmpfs", str(visible), "tmpfs", kernel.MS_RDONLY | kernel.MS_NOSUID | kernel.MS_NODEV, "size=4k"
            )


def _copy_own_code(old: Path, new: Path) -> None:
    """Copy the source of this package and of what runs in a machine, with empty packages above them."""
    here = Path(__file__).resolve().parent
    code = new / layout.CODE[1:]
    kernel.mount("tmpfs", str(code), "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "size=4m")
    for package in (here, here.parent / "guest"):
        target = code
        for part in (*__package__.split(".")[:-1], package.name):
            target /= part
            target.mkdir(parents=True, exist_ok=True)
            (target / "__init__.py").touch()
        for source in (old / package.relative_to("/")).glob("*.py"):
            shutil.copy(source, target / source.name)
