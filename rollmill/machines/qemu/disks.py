"""The two disks of a virtual machine that is an OCI image: the image, read-only, and what the machine writes.

    oci/disks/DIGEST.squashfs    below `images_directory()`: the layers of an image, one folder each, and an empty one

The first is made once, and all machines of the image share it, with the host's cache of it. An overlay in the guest
joins the layers. Owners are shifted on it as they are in the guest (guest/image_root.py). It is not compressed: guests
may be emulated, and the layers lie there unpacked anyway.

The second is a sparse file without a name, in the same directory. A machine gets a copy of its template's, which has
little in it, or of its parent's. It needs no journal: it ends with its machine.
"""

from __future__ import annotations

import os
import stat
import subprocess
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from rollmill.errors import MachineError, TaskError
from rollmill.machines.guest.image_root import SHIFT
from rollmill.machines.images.image import Image, images_directory
from rollmill.machines.oci.unpack_layers import OPAQUE, alone
from rollmill.machines.qemu import ram
from rollmill.machines.qemu.parts import disk_program

_UNCOMPRESSED = ("-noI", "-noD", "-noF", "-noX", "-no-duplicates", "-no-progress", "-quiet", "-exit-on-error")
_FEATURES = "^has_journal,^metadata_csum,^resize_inode,uninit_bg"


def image_disk(image: Image) -> Path:
    """The disk of an OCI image; made if it is not there. While someone has `hold_images`, nobody removes it."""
    assert image.whole is not None
    place = images_directory() / "oci" / "disks"
    place.mkdir(mode=0o700, exist_ok=True)
    name = image.digest.removeprefix("sha256:")
    disk = place / f"{name}.squashfs"
    with alone(place, name):
        if not disk.exists():
            unfinished = place / f".making-{name}"
            unfinished.unlink(missing_ok=True)  # of a process that was killed
            try:
                _make(image.name, image.whole.layers, image.whole.user, image.whole.group, unfinished)
                unfinished.rename(disk)
            finally:
                unfinished.unlink(missing_ok=True)
    return disk


def _make(name: str, layers: Sequence[str], user: int, group: int, target: Path) -> None:
    command, why = [disk_program("sqfstar"), *_UNCOMPRESSED, str(target)], ""
    with tempfile.TemporaryFile() as log:
        making = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=log)
        assert making.stdin is not None
        try:
            with making.stdin:
                _write_layers(layers, making.stdin, None if os.geteuid() == 0 else (user, group))
        except OSError as error:
            why = str(error)
            making.kill()
        code = making.wait()
        log.seek(0)
        said = log.read().decode("utf-8", "replace").strip()[-300:]
    if why or code != 0:
        raise TaskError(
            f"the disk of the image {name!r} cannot be made in {target.parent}: {said or why or f'exit code {code}'}",
            hint="it needs as much room as the image: free space there, or let $ROLLMILL_IMAGES name another disk",
        )
    target.chmod(0o644)  # QEMU reads it as a user of its own, whom the directory keeps out


def _write_layers(layers: Sequence[str], file: IO[bytes], owner: tuple[int, int] | None) -> None:
    """Write layers as one archive. `owner` has all files, where this host could not keep their owners."""
    with tarfile.open(fileobj=file, mode="w|", format=tarfile.PAX_FORMAT) as archive:
        for number, layer in enumerate(layers):

            def dress(entry: tarfile.TarInfo, layer: str = layer, number: int = number) -> tarfile.TarInfo:
                archive.members.clear()  # type: ignore[attr-defined]  # else it remembers every file
                entry.uid, entry.gid = (SHIFT + each for each in owner or (entry.uid, entry.gid))
                entry.uname = entry.gname = ""
                entry.mtime = int(entry.mtime)
                if entry.isdir() and _is_opaque(layer + entry.name.removeprefix(str(number))):
                    entry.pax_headers = {f"SCHILY.xattr.{OPAQUE}": "y"}
                return entry

            archive.add(layer, str(number), filter=dress)
        empty = tarfile.TarInfo("empty")
        empty.type, empty.mode = tarfile.DIRTYPE, 0o755
        archive.addfile(empty)


def _is_opaque(directory: str) -> bool:
    try:
        return os.getxattr(directory, OPAQUE) == b"y"
    except OSError:
        return False


def make_own(place: Path, size_mb: int) -> int:
    """An empty disk for what a machine writes, as an open file."""
    file = _create(place, size_mb << 20)
    path = f"/proc/self/fd/{file}"
    command = [disk_program("mke2fs"), "-q", "-F", "-t", "ext4", "-m", "0", "-O", _FEATURES]
    command += ["-E", "lazy_itable_init=1,nodiscard", path]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", pass_fds=[file], check=False)
    if done.returncode != 0:
        os.close(file)
        raise MachineError(f"a disk of machine.disk_mb = {size_mb} cannot be made: {done.stderr.strip()[-300:]}")
    return file


def copy_own(file: int, place: Path) -> int:
    """A copy of such a disk. MachineError: there is no room for it."""
    target = _create(place, os.fstat(file).st_size)
    try:
        ram.copy_data(file, target)
    except OSError as error:
        os.close(target)
        raise _no_disk(place, error) from None
    return target


def _create(place: Path, size: int) -> int:
    try:
        with tempfile.TemporaryFile(dir=place, buffering=0) as nameless:
            file = os.dup(nameless.fileno())
    except OSError as error:
        raise _no_disk(place, error) from None
    os.fchmod(file, stat.S_IRUSR | stat.S_IWUSR | stat.S_IROTH | stat.S_IWOTH)  # QEMU opens it as a user of its own
    os.truncate(file, size)
    return file


def _no_disk(place: Path, error: OSError) -> MachineError:
    return MachineError(
        f"a machine gets no disk for what it writes in {place}: {error.strerror}",
        hint="free space there, or let $ROLLMILL_IMAGES name another disk",
    )
