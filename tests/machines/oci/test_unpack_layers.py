"""Layers become trees: what is taken, what is hidden, what is refused."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import shutil
import stat
import tarfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rollmill.errors import TaskError
from rollmill.machines.oci import unpack_layers
from rollmill.machines.oci.kept_images import Kept
from rollmill.machines.oci.unpack_layers import tree_of, unpack_layer
from tests.machines.oci.making import (
    busybox_layer,
    entry,
    link,
    run,
    tar_of,
    tar_tree,
    write_layout,
)

Entries = Sequence[tuple[tarfile.TarInfo, bytes]]
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to others")


def unpacked(tmp_path: Path, entries: Entries, **options: Any) -> Path:
    tar = tar_of(entries)
    digest = f"sha256:{hashlib.sha256(tar).hexdigest()}"
    blob = tmp_path / "blob"
    blob.write_bytes(gzip.compress(tar))
    unpack_layer(blob, digest, tmp_path / "trees", **options)
    return tree_of(digest, tmp_path / "trees")


def test_files_keep_modes_links_times_and_bytes(tmp_path: Path) -> None:
    tree = unpacked(
        tmp_path,
        [
            entry("./", mode=0o755),
            entry("usr/bin/", mode=0o750),
            entry("usr/bin/tool", b"#!/bin/sh\n", mode=0o4755),
            entry("usr/bin/same", type=tarfile.LNKTYPE, linkname="usr/bin/tool"),
            link("bin", "usr/bin"),
            link("etc/broken", "/nowhere"),
            entry("etc/name-\udcff", b"\0\xff"),
            entry("dev/null", type=tarfile.CHRTYPE, devmajor=1, devminor=3),
            entry("run/pipe", type=tarfile.FIFOTYPE),
        ],
    )
    status = os.stat(tree / "usr/bin/tool")
    assert stat.S_IMODE(status.st_mode) == 0o4755 and status.st_mtime == 1_600_000_000 and status.st_nlink == 2
    assert stat.S_IMODE(os.stat(tree / "usr/bin").st_mode) == 0o751 and os.stat(tree / "usr/bin").st_mtime == 1.6e9
    assert os.readlink(tree / "bin") == "usr/bin" and os.readlink(tree / "etc/broken") == "/nowhere"
    assert (tree / "etc/name-\udcff").read_bytes() == b"\0\xff"
    assert not (tree / "dev/null").exists() and not list((tree / "run").iterdir())


@needs_root
def test_owners_are_kept_and_those_beyond_a_machines_users_are_nobody(tmp_path: Path) -> None:
    tree = unpacked(tmp_path, [entry("a", b"", uid=1000, gid=77), entry("b", b"", uid=1_516_583_083, gid=65535)])
    assert [(os.stat(tree / name).st_uid, os.stat(tree / name).st_gid) for name in "ab"] == [(1000, 77), (65534, 65535)]


def test_whiteouts_are_what_an_overlay_takes(tmp_path: Path) -> None:
    tree = unpacked(
        tmp_path,
        [
            entry("etc/.wh.gone"),
            entry("opt/.wh..wh..opq"),
            entry("opt/new", b"1"),
            entry(".wh..wh.plnk"),
            entry("srv/.wh.again"),
            entry("srv/again/"),
            entry("srv/again/file", b"2"),
        ],
    )
    status = os.lstat(tree / "etc/gone")
    assert stat.S_ISCHR(status.st_mode) and status.st_rdev == 0
    assert os.getxattr(tree / "opt", "user.overlay.opaque") == b"y" and (tree / "opt/new").read_bytes() == b"1"
    assert os.getxattr(tree / "srv/again", "user.overlay.opaque") == b"y", "what was there before stays hidden"
    assert sorted(path.name for path in tree.iterdir()) == ["etc", "opt", "srv"]


def test_links_on_the_way_are_followed_inside_the_tree(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    tree = unpacked(
        tmp_path,
        [
            link("a", str(outside)),
            entry("a/planted", b"1"),
            link("up", "../../../../../outside"),
            entry("up/planted", b"2"),
            entry("real/"),
            link("inside", "/real"),
            entry("inside/file", b"3"),
            link("file", "/etc/passwd"),
            entry("file", b"4"),
        ],
    )
    assert not list(outside.iterdir())
    assert (tree / str(outside)[1:] / "planted").read_bytes() == b"1", "as if the tree was the root"
    assert (tree / "outside/planted").read_bytes() == b"2" and (tree / "real/file").read_bytes() == b"3"
    assert (tree / "file").read_bytes() == b"4" and not (tree / "file").is_symlink()


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ([entry("../planted", b"1")], "leads outside"),
        ([entry("a/../../planted", b"1")], "leads outside"),
        ([entry("a", type=tarfile.LNKTYPE, linkname="/etc/passwd")], "no 'etc'"),
        ([entry("a", type=tarfile.LNKTYPE, linkname="../../etc/passwd")], "leads outside"),
        ([entry("d/"), entry("a", type=tarfile.LNKTYPE, linkname="d")], "no file"),
        ([link("x", "/etc"), entry("a", type=tarfile.LNKTYPE, linkname="x/passwd")], "no 'x'"),
        ([link("x", "x"), entry("x/y", b"")], "too many links"),
        ([entry("x" * 5000, b"")], "too long"),
        ([entry("a/.wh..", b"")], "removes nothing"),
        ([entry("a", type=tarfile.GNUTYPE_SPARSE)], "sparse"),
    ],
)
def test_hostile_layers_are_refused_and_leave_nothing(tmp_path: Path, entries: Entries, words: str) -> None:
    with pytest.raises(TaskError, match=r"cannot be unpacked") as error:
        unpacked(tmp_path, entries)
    assert words in str(error.value) or words == "sparse"
    assert not (tmp_path / "planted").exists()
    left = [path.name for path in (tmp_path / "trees").iterdir()]
    assert left == [".locks"], "half a tree is never seen"


def test_bombs_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TaskError, match="more than 1000 bytes"):
        unpacked(tmp_path, [entry("a", bytes(600)), entry("b", bytes(600))], most_bytes=1000)
    monkeypatch.setattr(unpack_layers, "MOST_ENTRIES", 10)
    with pytest.raises(TaskError, match="more than 10 entries"):
        unpacked(tmp_path, [entry(f"f{number}") for number in range(11)])
    # zeros behind the end of the archive
    blob, tar = tmp_path / "blob", tar_of([entry("a")]) + bytes(30_000_000)
    blob.write_bytes(gzip.compress(tar))
    with pytest.raises(TaskError, match="more bytes than"):
        unpack_layer(blob, f"sha256:{hashlib.sha256(tar).hexdigest()}", tmp_path / "trees", most_bytes=1000)


def test_a_bomb_of_many_layers_stops_after_the_first_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unpack_layers, "LARGEST", 1000)
    tars = [tar_of([entry(f"f{number}", bytes(600))]) for number in range(20)]
    kept, layout = Kept(tmp_path / "images"), write_layout(tmp_path / "bomb", tars)
    with pytest.raises(TaskError, match=r"more than|GiB of files"):
        kept.obtain(f"oci:{layout}")
    trees = [path for path in kept.trees.iterdir() if path.is_dir() and path.name != ".locks"]
    assert len(trees) <= 5, "as many as are unpacked at the same time"
    assert kept.find(f"oci:{layout}") is None and kept.collect() > 0


def test_a_layer_that_is_not_what_the_image_says_is_refused(tmp_path: Path) -> None:
    blob = tmp_path / "blob"
    blob.write_bytes(tar_of([entry("a", b"1")]))
    with pytest.raises(TaskError, match="diff_ids"):
        unpack_layer(blob, "sha256:" + "0" * 64, tmp_path / "trees")
    blob.write_bytes(gzip.compress(blob.read_bytes())[:-30])
    with pytest.raises(TaskError, match="cannot be unpacked"):
        unpack_layer(blob, "sha256:" + "0" * 64, tmp_path / "trees")
    assert [path.name for path in (tmp_path / "trees").iterdir()] == [".locks"]


def test_several_who_want_the_same_tree_find_it_made_once(tmp_path: Path) -> None:
    blob, tar = tmp_path / "blob", tar_of([entry(f"f{number}", b"x" * 1000) for number in range(500)])
    blob.write_bytes(tar)
    digest, found, made = f"sha256:{hashlib.sha256(tar).hexdigest()}", [], []

    def want() -> None:
        found.append(unpack_layer(blob, digest, tmp_path / "trees"))
        made.append(os.stat(tree_of(digest, tmp_path / "trees")).st_ino)

    threads = [threading.Thread(target=want) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [500_000] * 4 and len(set(made)) == 1


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    tar = tar_of([entry("a", b"1")])
    digest = hashlib.sha256(tar).hexdigest()
    left = tmp_path / "trees" / f".unpacking-{digest}"
    (left / "half").mkdir(parents=True)
    (tmp_path / "blob").write_bytes(tar)
    unpack_layer(tmp_path / "blob", f"sha256:{digest}", tmp_path / "trees")
    assert not left.exists() and os.listdir(tmp_path / "trees" / digest) == ["a"]


@pytest.mark.parametrize("packing", ["", "gzip", "zstd"])
def test_images_share_the_layers_that_they_have_in_common(tmp_path: Path, packing: str) -> None:
    base, top = tar_of([entry("base", b"1" * 100)]), tar_of([entry("top", b"2" * 10)])
    one = write_layout(tmp_path / "one", [base], packing=packing)
    both = write_layout(tmp_path / "both", [base, top, base], packing=packing, User="1:2", WorkingDir="/app")
    kept = Kept(tmp_path / "images")
    first, second = kept.obtain(f"oci:{one}"), kept.obtain(f"oci:{both}")
    assert (
        first.layers == second.layers[:1] and second.bytes == 210 and (second.user, second.directory) == ("1:2", "/app")
    )
    root = second.root(kept.trees)
    assert [Path(layer).name for layer in root.layers] == [each.removeprefix("sha256:") for each in second.layers[1:]]
    assert (root.user, root.group) == (1, 2) and stat.S_IMODE(os.stat(kept.root).st_mode) == 0o700
    assert kept.remove(f"oci:{both}") == 10 and kept.find(f"oci:{one}") == first and kept.find(f"oci:{both}") is None
    assert kept.remove(f"oci:{one}") == 100 and [path.name for path in kept.trees.iterdir()] == [".locks"]


@needs_root
@pytest.mark.skipif(not all(map(shutil.which, ("umoci",))), reason="umoci is not installed")
def test_a_tree_is_what_umoci_unpacks(tmp_path: Path) -> None:
    """Every path, mode, link, owner, time and byte."""
    files = tar_of(
        [
            entry("srv/deep/", mode=0o700, uid=33, gid=33),
            entry("srv/deep/one", b"1", uid=33, gid=44, mode=0o6640),
            entry("srv/deep/two", type=tarfile.LNKTYPE, linkname="srv/deep/one"),
            link("srv/link", "deep/one"),
            entry("srv/" + "n" * 200, b"long"),
        ]
    )
    layout = write_layout(tmp_path / "layout", [busybox_layer(tmp_path), files], packing="gzip")
    run("umoci", "unpack", "--image", f"{layout}:latest", tmp_path / "bundle")
    kept = Kept(tmp_path / "images")
    trees = [tree_of(layer, kept.trees) for layer in kept.obtain(f"oci:{layout}").layers]
    mounted = tmp_path / "mounted"
    mounted.mkdir()
    run("mount", "-t", "overlay", "overlay", "-o", f"lowerdir={trees[1]}:{trees[0]}", mounted)
    try:
        ours, theirs = listing(mounted), listing(tmp_path / "bundle" / "rootfs")
    finally:
        run("umount", mounted)
    assert len(theirs) > 300
    assert ours == theirs


def listing(root: Path) -> dict[str, tuple[Any, ...]]:
    found = {}
    for folder, names, leaves in os.walk(root):
        for name in [*names, *leaves]:
            path = Path(folder, name)
            status = path.lstat()
            content: Any = None
            if stat.S_ISREG(status.st_mode):
                content = hashlib.sha256(path.read_bytes()).hexdigest()
            elif stat.S_ISLNK(status.st_mode):
                content = os.readlink(path)
            links = status.st_nlink if stat.S_ISREG(status.st_mode) else 0
            time = 0 if stat.S_ISLNK(status.st_mode) else int(status.st_mtime)
            found[str(path.relative_to(root))] = (status.st_mode, status.st_uid, status.st_gid, links, time, content)
    return found


def test_archives_and_indexes(tmp_path: Path) -> None:
    layout = write_layout(tmp_path / "layout", [tar_of([entry("a", b"1")])], tag="v1")
    archive = tmp_path / "image.tar"
    with tarfile.open(archive, "w") as tar:
        tar.add(layout, ".")
    kept = Kept(tmp_path / "images")
    first = kept.obtain(f"oci:{archive}")
    assert first.digest == kept.obtain(f"oci:{layout}:v1").digest and kept.find(f"oci:{archive}") is not None
    with pytest.raises(TaskError, match="no tag 'v2'"):
        kept.obtain(f"oci:{layout}:v2")
    other = write_layout(tmp_path / "other", [tar_of([entry("a", b"1")])], architecture="s390x")
    with pytest.raises(TaskError, match="linux/s390x") as error:
        kept.obtain(f"oci:{other}")
    assert "for this host" in str(error.value.hint)
    with pytest.raises(TaskError, match="does not exist"):
        kept.obtain(f"oci:{tmp_path}/nothing.tar")
    archive.write_bytes(b"no archive")
    with pytest.raises(TaskError, match="not an archive"):
        kept.obtain(f"oci:{archive}")
    blob = max((layout / "blobs/sha256").iterdir(), key=lambda path: path.stat().st_mtime)
    blob.write_bytes(blob.read_bytes() + b" ")
    (layout / "index.json").touch()
    with pytest.raises(TaskError, match="damaged"):
        kept.obtain(f"oci:{layout}")


def test_the_archive_of_docker_save(tmp_path: Path) -> None:
    layer = tar_of([entry("a", b"1")])
    digest = f"sha256:{hashlib.sha256(layer).hexdigest()}"
    config = {"os": "linux", "config": {"Cmd": ["sh"], "Env": None}, "rootfs": {"diff_ids": [digest]}}
    facts = json.dumps(config)
    listed = b'[{"Config": "config.json", "RepoTags": ["shop:v1"], "Layers": ["one/layer.tar"]}]'
    files = {"config.json": facts.encode(), "one/layer.tar": layer, "manifest.json": listed}
    archive = tmp_path / "saved.tar"
    archive.write_bytes(tar_of([entry(name, content) for name, content in files.items()]))
    kept = Kept(tmp_path / "images")
    found = kept.obtain(f"oci:{archive}:v1")
    assert found.layers == (digest,) and found.command == ("sh",)


@pytest.mark.parametrize(
    "text", ["", "host.example/", "host.example/Shop", "host.example/shop:a b", "localhost:5000/x@sha256:1"]
)
def test_what_is_no_reference_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(TaskError, match="is no reference") as error:
        Kept(tmp_path).obtain(f"oci:{text}")
    assert "oci:REGISTRY/NAME:TAG" in str(error.value.hint)


def test_a_diff_id_that_leads_elsewhere_is_refused(tmp_path: Path) -> None:
    layout = write_layout(tmp_path / "layout", [tar_of([entry("a")])], diff_ids=["sha256:../../planted"])
    with pytest.raises(TaskError, match="diff_ids"):
        Kept(tmp_path / "images").obtain(f"oci:{layout}")


def test_the_user_of_an_image_is_found_in_it(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "etc").mkdir(parents=True)
    (tree / "etc/passwd").write_text("root:x:0:0::/root:/bin/sh\napp:x:1000:1001:,,,:/home/app:/bin/sh\n")
    (tree / "etc/group").write_text("app:x:1001:\nextra:x:77:app,other\n")
    layer = tar_tree(tree)
    kept = Kept(tmp_path / "images")
    for number, (user, expected) in enumerate(
        [("app", (1000, 1001, (77,))), ("1000", (1000, 1001, (77,))), ("app:extra", (1000, 77, ())), ("5", (5, 0, ()))]
    ):
        found = kept.obtain(f"oci:{write_layout(tmp_path / str(number), [layer], User=user)}").root(kept.trees)
        assert (found.user, found.group, found.groups) == expected
        assert dict(found.environment)["HOME"] == ("/" if user == "5" else "/home/app")
    with pytest.raises(TaskError, match="USER 'nobody' is not in its /etc/passwd"):
        kept.obtain(f"oci:{write_layout(tmp_path / 'nobody', [layer], User='nobody')}")


def test_a_reader_of_a_tree_sees_no_half(tmp_path: Path) -> None:
    """While a tree is written, its final name is not there."""
    seen: list[bool] = []
    real = unpack_layers._settle

    def look(directory: Path) -> None:
        seen.append(any(path.name[0] != "." for path in directory.parent.iterdir() if path.is_dir()))
        real(directory)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unpack_layers, "_settle", look)
        unpacked(tmp_path, [entry("a", io.BytesIO(b"1").read())])
    assert seen == [False]
