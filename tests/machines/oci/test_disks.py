"""Disks of OCI images for virtual machines: what is on them, and what happens when they cannot be made."""

from __future__ import annotations

import io
import os
import re
import resource
import shutil
import tarfile
from pathlib import Path

import pytest

from rollmill.errors import MachineError, TaskError
from rollmill.machines.guest.image_root import SHIFT
from rollmill.machines.images.image import load_oci
from rollmill.machines.oci.kept_images import Kept
from rollmill.machines.qemu import disks, parts
from tests.machines.oci.making import entry, link, run, tar_of, write_layout

pytestmark = pytest.mark.skipif(shutil.which("sqfstar") is None, reason="squashfs-tools is not installed")
_LINE = re.compile(r"(\S{10}) (\d+)/(\d+) +([\d, ]+?) \S+ \S+ squashfs-root/?(.*)")


@pytest.fixture
def image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("ROLLMILL_IMAGES", str(tmp_path / "images"))
    below = [entry("etc/"), entry("etc/old", b"1"), entry("bin/tool", b"x" * 5000, mode=0o4755, uid=3, gid=4)]
    above = [entry("etc/"), entry("etc/.wh..wh..opq"), entry("bin/.wh.tool"), link("out", "../../etc")]
    above += [entry("née", b"1"), entry("b\udcff", b"1"), entry("twin", type=b"1", linkname="née")]
    return f"oci:{write_layout(tmp_path / 'layout', [tar_of(below), tar_of(above)], User='7:8')}"


def test_a_disk_has_what_the_layers_have(image: str, tmp_path: Path) -> None:
    loaded = load_oci(image)
    disk = disks.image_disk(loaded)
    made = disk.stat()
    assert disks.image_disk(loaded) == disk and disk.stat() == made, "once per image"
    assert disk.parent.stat().st_mode & 0o77 == 0 == disk.parent.parent.stat().st_mode & 0o77
    listed = [
        match.groups()
        for line in run("unsquashfs", "-lln", disk, errors="replace").splitlines()
        if (match := _LINE.match(line))
    ]
    found = {name: (mode, int(user), int(group), size.strip()) for mode, user, group, size, name in listed}
    own = {"user": 0, "group": 0} if os.geteuid() == 0 else {"user": 7, "group": 8}
    user, group = SHIFT + own["user"], SHIFT + own["group"]
    tool = (SHIFT + 3, SHIFT + 4) if os.geteuid() == 0 else (user, group)
    assert found["0/bin/tool"] == ("-rwsr-xr-x", *tool, "5000")
    assert found["0/etc/old"] == ("-rw-r--r--", user, group, "1")
    assert found["1/bin/tool"][0][0] == "c" and found["1/bin/tool"][3].replace(" ", "") == "0,0", "a whiteout"
    assert found["1/out -> ../../etc"][0] == "lrwxrwxrwx" and found["empty"][0][0] == "d"
    run("unsquashfs", "-no-progress", "-user-xattrs", "-dest", tmp_path / "tree", disk, "1/etc", "1/twin", "1/née", "1")
    assert os.getxattr(tmp_path / "tree/1/etc", "user.overlay.opaque") == b"y"
    assert (tmp_path / "tree/1/twin").stat().st_ino == (tmp_path / "tree/1/née").stat().st_ino
    assert (tmp_path / "tree/1" / os.fsdecode(b"b\xff")).read_bytes() == b"1"


def test_the_disk_of_an_image_that_is_not_named_any_more_is_collected(image: str, tmp_path: Path) -> None:
    disk = disks.image_disk(load_oci(image))
    kept = Kept(tmp_path / "images")
    kept.collect()
    assert disk.exists()
    (disk.parent / ".making-x").touch()  # of a process that was killed
    size = disk.stat().st_size
    assert kept.remove(image) >= size and not list(disk.parent.glob("*.squashfs"))
    assert not (disk.parent / ".making-x").exists()


def test_a_disk_that_cannot_be_made_leaves_nothing(image: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load_oci(image)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(TaskError, match="the disk of the image") as refused:
            disks.image_disk(loaded)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "ROLLMILL_IMAGES" in str(refused.value.hint)
    monkeypatch.setattr(parts, "_DISK_PATH", "/nowhere")
    with pytest.raises(MachineError, match="sqfstar is not installed") as missing:
        disks.image_disk(loaded)
    assert "rollmill machines setup" in str(missing.value.hint) and parts.missing_packages() == [
        "squashfs-tools",
        "e2fsprogs",
    ]
    assert [path.name for path in (tmp_path / "images/oci/disks").iterdir()] == [".locks"]


def test_where_this_host_kept_no_owners_the_user_of_the_image_has_all_files(image: str) -> None:
    loaded, buffer = load_oci(image), io.BytesIO()
    assert loaded.whole is not None
    disks._write_layers(loaded.whole.layers, buffer, (loaded.whole.user, loaded.whole.group))
    with tarfile.open(fileobj=io.BytesIO(buffer.getvalue())) as archive:
        owners = {(each.uid, each.gid) for each in archive if each.name != "empty"}
    assert owners == {(SHIFT + 7, SHIFT + 8)}
