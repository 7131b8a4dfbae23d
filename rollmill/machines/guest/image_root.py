"""The root file system of a machine that is an OCI image: an overlay of the image's layers, with a layer of its own.

    /           the layers of the image, read-only, and above them what the machine has written: in memory, or in a
                virtual machine on a disk
    /dev /sys   as in every machine; /proc and /dev/pts are the machine's own
    /work       a link to the image's WORKDIR, where that is not /work itself

Nothing of the host is left below this root, and nothing of the image has run when it is put together. Python may not
be in the image, so pid 1 has imported all that it needs before.

Where the host has user ids to give, a machine has a range of 65,536: those of the image. Pid 1 is not among them. A
command enters a user namespace in which they are 0 to 65,535, and which owns nothing else of the machine. Its root has
the rights over the image's files and users that root of a container has. Without a range there is one user, and its
number is that of the image's USER.

A snapshot is what the machine has written, as a layer of an OCI image has it: whiteouts are `.wh.NAME`, a directory
that hides what was there before has `.wh..wh..opq`.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import resource
import signal
import stat
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from rollmill.machines.guest import computer, layout
from rollmill.machines.guest import linux as kernel

if TYPE_CHECKING:
    import tarfile

COUNT = 65536  # users of an image
SHIFT = 65536  # what the machine's own user namespace adds to their numbers: 0 is pid 1 there
_STAGE, _NEW = layout.WORK, layout.TEMPORARY  # empty directories of the root that is left
_UPPER, _SCRATCH, _OUTPUTS = (f"{_STAGE}/{name}" for name in ("upper", "scratch", "outputs"))
_OPTIONS = "userxattr,index=off,metacopy=off"
_OPAQUE_MARK, _WHITEOUT_MARK = ".wh..wh..opq", ".wh."
_OPAQUE = "user.overlay.opaque"
_MOUNTED = ("dev", "proc", "sys")  # what a machine has there is not the image's
_FILES = ("/etc/hosts", "/etc/hostname", "/etc/resolv.conf")
_FLAGS = kernel.MS_NOSUID | kernel.MS_NODEV
RIGHTS = (
    kernel.CAP_CHOWN,
    kernel.CAP_DAC_OVERRIDE,
    kernel.CAP_FOWNER,
    kernel.CAP_FSETID,
    kernel.CAP_KILL,
    kernel.CAP_SETGID,
    kernel.CAP_SETUID,
)
_OVER_FILES = RIGHTS[:4]


class ImageRoot(NamedTuple):
    """What the agent needs to know of an image."""

    layers: tuple[str, ...]  # directories, the lowest first: of the host, or below layout.LAYERS
    user: int
    group: int
    groups: tuple[int, ...]
    directory: str  # WORKDIR
    environment: tuple[tuple[str, str], ...]

    @property
    def work(self) -> str:
        """The directory that a task's files are in."""
        directory = os.path.normpath(f"/{self.directory}")
        return layout.WORK if directory in ("/", "//") else directory.replace("//", "/")


class Stage(NamedTuple):
    """How a machine puts its root together. Computed once for all machines of an image."""

    root: ImageRoot
    shift: int  # 0: there is only one user
    upper: tuple[str, str, str]  # source, kind and options of the file system for what the machine writes
    overlay: str

    @classmethod
    def of(cls, root: ImageRoot, *, ranges: bool, disk: int, files: int, device: str | None) -> Stage:
        """`device`: a disk for what the machine writes; None: it is in memory, up to `disk` bytes in `files` files."""
        lower = ":".join(f"{layout.LAYERS}/{number}" for number in reversed(range(len(root.layers))))
        where = f"lowerdir={lower}:{layout.LAYERS}/empty,upperdir={_UPPER},workdir={_SCRATCH}"
        upper = ("tmpfs", "tmpfs", f"size={disk},nr_inodes={files},mode=700")
        if device is not None:
            upper = (device, "ext4", "noinit_itable,errors=continue")
        return cls(root, SHIFT if ranges else 0, upper, f"{where},{_OPTIONS}")

    @contextlib.contextmanager
    def as_user(self, user: int, group: int) -> Iterator[None]:
        """Handle files as a user of the image. The kernel forgets meanwhile what protects pid 1."""
        if not self.shift:  # pid 1 is that user
            yield
            return
        rights = _OVER_FILES if user == 0 else ()
        with kernel.files_as(self.shift + user, *rights, group=self.shift + group):
            yield

    def path(self, path: str) -> str:
        """The same path without the link to the directory of a task's files."""
        if os.path.islink(layout.WORK) and f"{path}/".startswith(f"{layout.WORK}/"):
            return os.path.realpath(layout.WORK) + path.removeprefix(layout.WORK)
        return path


class Open(NamedTuple):
    """Open files of pid 1, of what no command can reach by a name."""

    sockets: int
    upper: int
    outputs: int  # a directory for what processes print


def enter(stage: Stage, mounts: tuple[tuple[str, str, str | None, int, str], ...]) -> Open:
    """Become a machine of that image, in its namespaces, with all rights in them. OSError: it cannot be put together.

    `mounts` are arguments of kernel.mount, for file systems that are mounted in the image.
    """
    source, its_kind, its_options = stage.upper
    kernel.mount(source, _STAGE, its_kind, _FLAGS, its_options)
    for path in (_UPPER, _SCRATCH, _OUTPUTS):
        os.mkdir(path, 0o755)
    if stage.shift:
        os.chown(_UPPER, stage.shift, stage.shift)
    kernel.mount("overlay", _NEW, "overlay", _FLAGS, stage.overlay)
    for name, mode in (("dev", 0o755), ("proc", 0o555), ("sys", 0o555), ("tmp", 0o1777), ("etc", 0o755)):
        _make_directory(f"{_NEW}/{name}", mode, stage.shift)
    for name in ("/dev", "/sys"):
        kernel.mount(name, f"{_NEW}{name}", None, kernel.MS_BIND | kernel.MS_REC)
    for source, target, kind, flags, options in mounts:
        kernel.mount(source, f"{_NEW}{target}", kind, flags, options)
    files = Open(
        os.open(f"{_NEW}/proc/net/sockstat", os.O_RDONLY | os.O_CLOEXEC),
        os.open(_UPPER, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC),
        os.open(_OUTPUTS, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC),
    )
    kernel.mount(layout.INIT, f"{_NEW}/proc/1", None, kernel.MS_BIND)  # hides pid 1
    os.chdir(_NEW)
    kernel.pivot_root(".", ".")
    kernel.unmount(".")
    os.chdir("/")
    _furnish(stage)
    return files


def live_in(root: ImageRoot) -> None:
    """In the process whose copies become machines: nothing may be imported from the image, and commands get its
    variables."""
    import tarfile  # noqa: F401  for snapshots and directories

    sys.path.clear()
    sys.path_importer_cache.clear()
    os.environ.clear()
    os.environ.update(root.environment)


def _make_directory(path: str, mode: int, owner: int) -> None:
    """Make a directory, unless there is one. A link in its place would lead what is mounted there elsewhere."""
    try:
        os.mkdir(path)
    except FileExistsError:
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            raise NotADirectoryError(errno.ENOTDIR, f"the image has no directory {path.removeprefix(_NEW)}") from None
        return
    os.chmod(path, mode)
    os.chown(path, owner, owner)


def _furnish(stage: Stage) -> None:
    """What container engines add to an image: names of this host, and the directory for a task's files."""
    root, shift = stage.root, stage.shift
    with stage.as_user(0, 0):
        for path in _FILES:
            with contextlib.suppress(OSError):  # the image has a directory or a broken link there
                file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
                os.write(file, computer.FILES[path].encode())
                os.close(file)
        if not os.path.isdir(root.work):
            os.makedirs(root.work, exist_ok=True)
            if shift:
                os.chown(root.work, shift + root.user, shift + root.group)
        if not os.path.lexists(layout.WORK):
            os.symlink(root.work, layout.WORK)


def make_users(processes: int) -> int:
    """An open user namespace with the users of the image, below that of the machine. In the cloner, with all rights.

    The kernel bounds the processes of all its users together by the limit that its maker has.
    """
    before = resource.getrlimit(resource.RLIMIT_NPROC)
    resource.setrlimit(resource.RLIMIT_NPROC, (processes, before[1]))
    try:
        return open_users(lambda pid: map_range(pid, f"0 {SHIFT} {COUNT}"))
    finally:
        resource.setrlimit(resource.RLIMIT_NPROC, before)


def open_users(map_users: Callable[[int], None]) -> int:
    """An open user namespace, whose users `map_users` sets by a process in it. That process ends here, or with this one
    if it is killed meanwhile: cloners often are."""
    parent = os.getpid()
    pid, pidfd = kernel.clone(kernel.CLONE_NEWUSER)
    if pid == 0:
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
        while os.getppid() == parent:
            signal.pause()
        os._exit(0)
    try:
        map_users(pid)
        return os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(pidfd)


def map_range(pid: int, users: str, groups: str | None = None) -> None:
    for name, lines in (("uid_map", users), ("gid_map", groups or users)):
        file = os.open(f"/proc/{pid}/{name}", os.O_WRONLY)
        try:
            os.write(file, lines.encode())
        finally:
            os.close(file)


def pack(stage: Stage, upper: int, max_bytes: int) -> bytes:
    """What the machine has written, as a layer. OSError (EFBIG): it has more than `max_bytes`."""
    import tarfile

    buffer = io.BytesIO()
    known: dict[int, str] = {}  # files with several names, by their number
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for folder, names, leaves, opened in os.fwalk(".", dir_fd=upper, onerror=_raise):
            inside = os.path.normpath(folder)
            names[:] = sorted(name for name in names if inside != "." or name not in _MOUNTED)
            if inside != "." and _is_opaque(opened):
                archive.addfile(tarfile.TarInfo(f"{inside}/{_OPAQUE_MARK}"))
            for name in [*names, *sorted(leaves)]:
                if buffer.tell() > max_bytes:
                    raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), name)
                _pack_one(archive, stage, opened, name, os.path.normpath(f"{inside}/{name}"), known, max_bytes)
    return buffer.getvalue()


def _pack_one(
    archive: tarfile.TarFile, stage: Stage, opened: int, name: str, path: str, known: dict[int, str], max_bytes: int
) -> None:
    if name.startswith(_WHITEOUT_MARK):
        return  # layers have no other files of such a name
    status = os.lstat(name, dir_fd=opened)
    member = archive.tarinfo(path)
    member.mode, member.mtime = stat.S_IMODE(status.st_mode), int(status.st_mtime)
    member.uid, member.gid = status.st_uid - stage.shift, status.st_gid - stage.shift
    if stat.S_ISCHR(status.st_mode):
        folder, _, last = path.rpartition("/")
        archive.addfile(archive.tarinfo(f"{folder}/{_WHITEOUT_MARK}{last}".lstrip("/")))
    elif stat.S_ISDIR(status.st_mode):
        member.type = b"5"
        archive.addfile(member)
    elif stat.S_ISLNK(status.st_mode):
        member.type, member.linkname = b"2", os.readlink(name, dir_fd=opened)
        archive.addfile(member)
    elif stat.S_ISREG(status.st_mode) and status.st_ino in known:
        member.type, member.linkname = b"1", known[status.st_ino]
        archive.addfile(member)
    elif stat.S_ISREG(status.st_mode):
        if status.st_nlink > 1:
            known[status.st_ino] = path
        if status.st_size > max_bytes:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), path)
        with open(os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=opened), "rb") as file:
            member.size = status.st_size
            archive.addfile(member, file)


def _is_opaque(opened: int) -> bool:
    try:
        return os.getxattr(opened, _OPAQUE) == b"y"
    except OSError:
        return False


def _raise(error: OSError) -> None:
    raise error


def unpack(stage: Stage, data: bytes) -> None:
    """Apply a layer of `pack` to this machine, in which nothing has run."""
    import tarfile

    times: list[tuple[str, int]] = []
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
        for member in archive:
            path = os.path.normpath(f"/{member.name}")
            folder, name = os.path.split(path)
            if name == _OPAQUE_MARK:
                for entry in os.listdir(folder):
                    _remove(f"{folder}/{entry}")
                continue
            if name.startswith(_WHITEOUT_MARK):
                _remove(f"{folder}/{name.removeprefix(_WHITEOUT_MARK)}")
                continue
            _put(archive, member, path)
            if member.type != b"1":
                os.chown(path, stage.shift + member.uid, stage.shift + member.gid, follow_symlinks=False)
                if member.type != b"2":
                    os.chmod(path, member.mode)
                times.append((path, int(member.mtime)))
    for path, time in reversed(times):
        with contextlib.suppress(OSError):
            os.utime(path, (time, time), follow_symlinks=False)


def _put(archive: tarfile.TarFile, member: tarfile.TarInfo, path: str) -> None:
    is_directory = os.path.isdir(path) and not os.path.islink(path)
    if not (is_directory and member.isdir()):
        _remove(path)
    if member.isdir():
        with contextlib.suppress(FileExistsError):
            os.mkdir(path)
    elif member.issym():
        os.symlink(member.linkname, path)
    elif member.islnk():
        os.link(os.path.normpath(f"/{member.linkname}"), path, follow_symlinks=False)
    else:
        content = archive.extractfile(member)
        assert content is not None
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
            while chunk := content.read(1 << 20):
                file.write(chunk)


def _remove(path: str) -> None:
    try:
        status = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return
    if stat.S_ISDIR(status.st_mode):
        for entry in os.listdir(path):
            _remove(f"{path}/{entry}")
        os.rmdir(path)
    else:
        os.unlink(path)
