"""The file tree of an image as podman sees it, and as a machine of ours sees it: every path, mode, owner and byte."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

from rollmill.machines.namespace.client import NamespaceHost
from tests.machines.oci.making import entry, link, run, tar_of, write_layout

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]
# What a machine has of its own, as docs/guides/bring-your-docker-image.md and image_root.py say
_OWN = ["dev", "proc", "sys", "work", "etc/hosts", "etc/hostname", "etc/resolv.conf"]
_LIST = """
import hashlib, os, stat, sys
root, own = sys.argv[1], set(sys.argv[2:])
names = {}
for folder, folders, files in os.walk(root):
    inside = os.path.relpath(folder, root)
    for name in sorted(folders + files):
        path = os.path.normpath(os.path.join(inside, name))
        if path in own:
            continue
        place = os.path.join(folder, name)
        its = os.lstat(place)
        what = os.readlink(place) if stat.S_ISLNK(its.st_mode) else ""
        if stat.S_ISREG(its.st_mode):
            what = hashlib.sha256(open(place, "rb").read()).hexdigest()
            what += " " + names.setdefault((its.st_dev, its.st_ino), path) if its.st_nlink > 1 else ""
        print(path.encode("unicode_escape").decode(), oct(its.st_mode), its.st_uid, its.st_gid, what)
    folders[:] = sorted(each for each in folders if os.path.normpath(os.path.join(inside, each)) not in own)
"""


def with_another_layer(image: str, place: Path) -> Path:
    """The same layers, and above them one with what layers do to each other."""
    blobs = Path(image.removeprefix("oci:")) / "blobs" / "sha256"
    index = json.loads((blobs.parent.parent / "index.json").read_bytes())
    manifest = json.loads((blobs / index["manifests"][0]["digest"].removeprefix("sha256:")).read_bytes())
    tars = [
        gzip.decompress((blobs / each["digest"].removeprefix("sha256:")).read_bytes()) for each in manifest["layers"]
    ]
    top = tar_of(
        [
            entry("usr/share/.wh.doc"),
            entry("usr/share/less/"),
            entry("usr/share/less/.wh..wh..opq"),
            entry("usr/share/less/new", b"only this\n"),
            entry("srv/", mode=0o1770, uid=33, gid=1234),
            entry("srv/one", b"twice\n", uid=1000, gid=4000, mode=0o4711),
            entry("srv/two", type=b"1", linkname="srv/one", uid=1000, gid=4000, mode=0o4711),
            entry("srv/\N{SNOWMAN} a b", b"", mode=0o0),
            link("srv/away", "../../../etc/passwd"),
            entry("etc/passwd", b"root:x:0:0::/root:/bin/sh\n", mode=0o600),
        ]
    )
    return write_layout(place, [*tars, top])


@pytest.mark.skipif(shutil.which("podman") is None or os.geteuid() != 0, reason="podman and root are needed")
async def test_podman_and_a_machine_see_the_same_files(tmp_path: Path, host: NamespaceHost, debian: str) -> None:
    layout = with_another_layer(debian, tmp_path / "layout")
    with tempfile.TemporaryDirectory() as place:  # podman takes no long path
        podman = ["podman", "--root", f"{place}/store", "--runroot", f"{place}/run", "--storage-driver", "vfs"]
        image = run(*podman, "pull", "--quiet", f"oci:{layout}").strip()
        mounted = run(*podman, "image", "mount", image).strip()
        theirs = run(sys.executable, "-c", _LIST, mounted, *_OWN)
        run(*podman, "image", "unmount", image)
    machine = await host.create(f"oci:{layout}")
    try:
        command = ["python3", "-B", "-c", _LIST, "/", *_OWN]
        ours = await machine.exec(command, cwd="/", timeout_s=120.0, max_output=1 << 24)
    finally:
        await machine.close()
    assert ours.exit_code == 0 and not ours.truncated, ours.output[-1000:]
    seen, wanted = (set(text.splitlines()) for text in (ours.output.decode(), theirs))
    assert len(wanted) > 1000 and sorted(seen - wanted) == sorted(wanted - seen) == []
