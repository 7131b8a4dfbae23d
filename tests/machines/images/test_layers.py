"""Layers of images: shared, checked, kept in a store; sealed repositories; OCI images, hostile ones too."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import shutil
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from rollmill.errors import TaskError
from rollmill.machines.images import layers
from rollmill.machines.images.build import build_image, remove_image
from rollmill.machines.images.image import fetch_image, images_directory, load_image, push_image
from rollmill.machines.images.oci import take_files
from rollmill.machines.images.repository import check_sealed, seal
from rollmill.machines.namespace.client import NamespaceConfig
from rollmill.storage.objects import Objects
from tests.cli.conftest import Told, rollmill  # noqa: F401
from tests.machines.conftest import start_host


@pytest.fixture(autouse=True)
def own_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLMILL_IMAGES", str(tmp_path / "images"))


def git(directory: Path, *arguments: str) -> str:
    names = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", *names, *arguments], cwd=directory, check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with a past, a future on several refs, a dropped commit, a remote and a hook."""
    place = tmp_path / "source"
    place.mkdir()
    git(place, "init", "-q", "-b", "trunk")
    for number in range(4):
        (place / "main.py").write_text(f"version = {number}\n")
        (place / "tool.sh").write_text("#!/bin/sh\n")
        (place / "tool.sh").chmod(0o755)
        (place / f"only-{number}").write_text(f"secret {number}\n")
        git(place, "add", "-A")
        git(place, "commit", "-qm", f"commit {number}")
        git(place, "tag", "-a", f"v{number}", "-m", "tag")
    os.symlink("main.py", place / "link")
    git(place, "add", "-A")
    git(place, "commit", "-qm", "a link")
    git(place, "branch", "fix")
    (place / "dropped").write_text("the answer\n")
    git(place, "add", "-A")
    git(place, "commit", "-qm", "dropped")
    git(place, "reset", "-q", "--hard", "HEAD~1")
    git(place, "remote", "add", "origin", "https://example.invalid/repository")
    git(place, "gc", "-q")
    hook = place / ".git" / "hooks" / "post-checkout"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text("#!/bin/sh\ntouch executed\n")
    hook.chmod(0o755)
    return place


def test_a_sealed_repository_ends_at_its_commit(repository: Path, tmp_path: Path) -> None:
    target = tmp_path / "sealed"
    commit = seal(repository, "v1", target)
    assert commit == git(repository, "rev-parse", "v1^{commit}")
    assert git(target, "log", "--format=%s", "--all", "--reflog") == "commit 1\ncommit 0"
    assert git(target, "status", "--porcelain") == "" and (target / "main.py").read_text() == "version = 1\n"
    assert git(target, "remote") == git(target, "tag") == git(target, "reflog", "show") == ""
    assert not (target / "executed").exists() and not (target / "only-2").exists()
    packed = git(target, "cat-file", "--batch-all-objects", "--batch-check=%(objectname)").split()
    for later in ("v2", "v3", "trunk", "fix", "v1", git(repository, "rev-parse", "trunk@{1}")):
        name = git(repository, "rev-parse", later)
        assert name not in packed
        assert subprocess.run(["git", "cat-file", "-e", name], cwd=target, capture_output=True).returncode != 0
    for change in (
        lambda: git(target, "tag", "extra", "HEAD~1"),
        lambda: git(target, "remote", "add", "origin", "x"),
        lambda: (target / ".git" / "logs").mkdir(),
    ):
        shutil.copytree(target / ".git", tmp_path / "kept")
        change()
        with pytest.raises(TaskError, match="sealed repository"):
            check_sealed(target, commit)
        shutil.rmtree(target / ".git")
        (tmp_path / "kept").rename(target / ".git")
    with pytest.raises(TaskError, match="git rev-parse failed"):
        seal(repository, "no-such-commit", tmp_path / "other")
    with pytest.raises(TaskError, match="git rev-parse failed"):
        seal(repository, "--all", tmp_path / "other")


async def test_machines_of_a_repository_have_git_that_works(repository: Path) -> None:
    record = build_image("repository", repository=repository, commit="trunk")
    assert record.commit == git(repository, "rev-parse", "trunk")
    host = await start_host(NamespaceConfig())
    try:
        machine = await host.create("repository")
        result = await machine.exec(["git", "status", "--porcelain"])
        assert (result.exit_code, result.output) == (0, b""), result
        await machine.exec(["sh", "-c", "echo 1 >> main.py"])
        assert b"+1" in (await machine.exec(["git", "diff"])).output
        assert (await machine.exec(["git", "log", "--oneline", "--all"])).output.count(b"\n") == 5
    finally:
        await host.close()


async def test_images_share_layers_and_come_from_a_store_when_needed(tmp_path: Path) -> None:
    for name, text in (("base", "1"), ("more", "2")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "same").write_text(text)
        (tmp_path / name / name).write_text(name)
    archive = write_layout(tmp_path / "layout", [{"app/x": b"x", "app/same": b"0"}])
    one = build_image("one", archive=archive, inside="app", directory=tmp_path / "base")
    two = build_image("two", archive=archive, inside="app", directory=tmp_path / "more")
    assert one.layers[0] == two.layers[0] and len(list((images_directory() / "layers").iterdir())) == 3
    assert dict(load_image("two", None).files) == {"x": b"x", "same": b"2", "more": b"more"}

    store = f"{tmp_path}/store"
    assert len(push_image("one", store)) == 2 and len(push_image("two", store)) == 1 and push_image("two", store) == []
    assert remove_image("two") == two.layers[1].bytes
    shutil.rmtree(images_directory())
    host = await start_host(NamespaceConfig(image_store=store))
    try:
        machine = await host.create("one")
        assert await machine.read("same") == b"1" and machine.image == f"one@{one.digest}"
        with pytest.raises(TaskError, match="does not exist"):
            await host.create("three")
    finally:
        await host.close()
    assert len(list((images_directory() / "layers").iterdir())) == 2  # nothing of the other image


def hostile_layer(**member: object) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        entry = tarfile.TarInfo("x")
        for name, value in member.items():
            setattr(entry, name, value)
        archive.addfile(entry, io.BytesIO(b"\0" * entry.size))
    return buffer.getvalue()


HOSTILE = [
    {"name": "../outside"},
    {"name": "a/../../outside"},
    {"name": "/etc/passwd"},
    {"name": "link", "type": tarfile.SYMTYPE, "linkname": "/etc/passwd"},
    {"name": "link", "type": tarfile.LNKTYPE, "linkname": "../../etc/passwd"},
    {"name": "device", "type": tarfile.CHRTYPE},
    {"name": "pipe", "type": tarfile.FIFOTYPE},
]


@pytest.mark.parametrize("member", HOSTILE, ids=str)
def test_a_store_cannot_smuggle_anything_into_a_layer(tmp_path: Path, member: dict[str, object]) -> None:
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "x").write_text("x")
    record = build_image("own", directory=tmp_path / "files")
    store = Objects.open(f"{tmp_path}/store")
    push_image("own", f"{tmp_path}/store")
    [layer] = record.layers
    honest = store.get(f"images/layers/{layer.digest}.tar.zst")
    shutil.rmtree(images_directory())
    forged = [
        zstandard.compress(hostile_layer(**member)),
        honest[:-4],
        b"",
        zstandard.compress(hostile_layer(name="x")),
    ]
    for data in forged:
        store.put(f"images/layers/{layer.digest}.tar.zst", data)
        with pytest.raises(TaskError):
            fetch_image("own", f"{tmp_path}/store")
    assert not (images_directory() / "layers" / layer.digest).exists() and not (tmp_path / "outside").exists()
    store.put(f"images/layers/{layer.digest}.tar.zst", honest)
    forged_record = record.model_copy(update={"digest": "0" * 64})
    store.put("images/names/own.json", forged_record.model_dump_json().encode())
    with pytest.raises(TaskError, match="does not have the layers"):
        fetch_image("own", f"{tmp_path}/store")
    store.put("images/names/own.json", b'{"digest": "../../x"}')
    with pytest.raises(TaskError, match="damaged"):
        fetch_image("own", f"{tmp_path}/store")


def write_layout(
    place: Path, contents: list[dict[str, bytes] | bytes], compress: Callable[[bytes], bytes] = bytes
) -> Path:
    """An OCI layout. A layer is a dictionary of files, or a tar."""
    blobs = place / "blobs" / "sha256"
    blobs.mkdir(parents=True)

    def blob(data: bytes) -> dict[str, object]:
        digest = hashlib.sha256(data).hexdigest()
        (blobs / digest).write_bytes(data)
        return {"mediaType": "any", "digest": f"sha256:{digest}", "size": len(data)}

    parts = []
    for content in contents:
        data = content
        if isinstance(content, dict):
            buffer = io.BytesIO()
            with tarfile.open(fileobj=buffer, mode="w") as archive:
                for path, text in content.items():
                    member = tarfile.TarInfo(path)
                    member.size = len(text)
                    archive.addfile(member, io.BytesIO(text))
            data = buffer.getvalue()
        assert isinstance(data, bytes)
        parts.append(blob(compress(data)))
    manifest = blob(json.dumps({"schemaVersion": 2, "config": blob(b"{}"), "layers": parts}).encode())
    (place / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [manifest]}))
    (place / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    return place


def files_of(directory: Path) -> dict[str, bytes]:
    return {entry.path: entry.content for entry in layers.entries(directory)}


@pytest.mark.parametrize("compress", [bytes, gzip.compress, zstandard.compress])
def test_layers_of_an_oci_image_are_applied_in_order(tmp_path: Path, compress: Callable[[bytes], bytes]) -> None:
    contents: list[dict[str, bytes] | bytes] = [
        {"app/a": b"1", "app/b": b"1", "app/old/c": b"1", "etc/passwd": b"root", "app/kept/d": b"1", "app/file": b"1"},
        {"app/a": b"2", "app/.wh.b": b"", "app/old/.wh..wh..opq": b"", "app/old/e": b"2", "app/file/now": b"2"},
    ]
    layout = write_layout(tmp_path / "layout", contents, compress)
    expected = {"a": b"2", "old/e": b"2", "kept/d": b"1", "file/now": b"2"}
    take_files(layout, "/app", tmp_path / "taken")
    assert files_of(tmp_path / "taken") == expected
    archive = tmp_path / "image.tar"
    with tarfile.open(archive, "w") as packed:
        packed.add(layout, arcname=".")
    take_files(archive, "app/", tmp_path / "again")
    assert files_of(tmp_path / "again") == expected
    take_files(layout, "/", tmp_path / "all")
    assert files_of(tmp_path / "all")["etc/passwd"] == b"root"
    with pytest.raises(TaskError, match="no files below"):
        take_files(layout, "/nowhere", tmp_path / "none")


@pytest.mark.skipif(not all(map(shutil.which, ("umoci", "skopeo"))), reason="umoci and skopeo are not installed")
def test_images_that_umoci_and_skopeo_wrote(tmp_path: Path) -> None:
    def run(*words: object) -> None:
        subprocess.run([str(word) for word in words], check=True, capture_output=True, cwd=tmp_path)

    app = tmp_path / "app"
    (app / "old").mkdir(parents=True)
    for name in ("a", "b", "old/c"):
        (app / name).write_bytes(b"1")
    image = f"{tmp_path / 'made'}:shop"
    run("umoci", "init", "--layout", tmp_path / "made")
    run("umoci", "new", "--image", image)
    run("umoci", "insert", "--image", image, app, "/app")
    (app / "a").write_bytes(b"2")
    run("umoci", "insert", "--image", image, app / "a", "/app/a")
    run("umoci", "insert", "--image", image, "--whiteout", "/app/b")
    run("umoci", "insert", "--image", image, "--opaque", tmp_path / "app" / "old", "/app/new")
    expected = {"a": b"2", "old/c": b"1", "new/c": b"1"}
    take_files(tmp_path / "made", "/app", tmp_path / "of umoci")
    assert files_of(tmp_path / "of umoci") == expected
    for form, options in {"gzip": (), "zstd": ("--dest-compress", "--dest-compress-format", "zstd")}.items():
        copy = ["skopeo", "--insecure-policy", "copy", *options, f"oci:{image}"]
        run(*copy, f"oci:{tmp_path / form}:shop")
        run(*copy, f"oci-archive:{tmp_path / form}.tar")
        for number, copied in enumerate((tmp_path / form, tmp_path / f"{form}.tar")):
            take_files(copied, "/app", tmp_path / f"taken-{form}-{number}")
            assert files_of(tmp_path / f"taken-{form}-{number}") == expected


def test_hostile_oci_images_are_refused_or_lose_what_is_no_plain_file(tmp_path: Path) -> None:
    for number, member in enumerate(HOSTILE):
        layout = write_layout(tmp_path / f"hostile-{number}", [{"app/good": b"1"}, hostile_layer(**member)])
        target = tmp_path / f"target-{number}"
        try:
            take_files(layout, "/", target)
        except TaskError:
            assert number < 2
        assert set(files_of(target)) <= {"app/good", "etc/passwd"}
        assert not any(path.is_symlink() for path in target.rglob("*"))
    assert not (tmp_path / "outside").exists()
    # a link of an earlier layer must not lead the files of a later one outside
    link = hostile_layer(name="app/link", type=tarfile.SYMTYPE, linkname=str(tmp_path))
    layout = write_layout(tmp_path / "through", [link, {"app/link/planted": b"1"}])
    take_files(layout, "/", tmp_path / "through-target")
    assert files_of(tmp_path / "through-target") == {"app/link/planted": b"1"} and not (tmp_path / "planted").exists()

    layout = write_layout(tmp_path / "changed", [{"a": b"1"}])
    blob = max((layout / "blobs" / "sha256").iterdir(), key=lambda path: path.stat().st_size)
    blob.write_bytes(blob.read_bytes()[:-1] + b"x")
    with pytest.raises(TaskError, match="damaged"):
        take_files(layout, "/", tmp_path / "changed-target")
    for text in (
        "",
        "[]",
        '{"manifests": []}',
        '{"manifests": [{"digest": "sha256:../../etc/passwd"}]}',
        "[" * 100_000,
    ):
        (layout / "index.json").write_text(text)
        with pytest.raises(TaskError, match="is damaged"):
            take_files(layout, "/", tmp_path / "none")
    (tmp_path / "no.tar").write_bytes(b"no tar")
    with pytest.raises(TaskError, match="not an archive"):
        take_files(tmp_path / "no.tar", "/", tmp_path / "none")


def test_an_image_gets_its_name_when_its_commands_pass(
    rollmill: Callable[..., Told],  # noqa: F811
    repository: Path,
    tmp_path: Path,
) -> None:
    build = ("images", "build", "checked", "--repository", repository, "--commit", "v2", "--verify")
    failed = rollmill(*build, "grep 'version = 3' main.py")
    assert failed.code == 1 and "is not verified" in failed.err and "Traceback" not in failed.err
    assert rollmill("images", "rm", "checked").code == 1  # it does not exist
    passed = rollmill(*build, "grep 'version = 2' main.py", "--verify", "git log -1")
    assert passed.code == 0 and "checked@" in passed.out, passed
    assert list((images_directory() / "names").iterdir()) == [images_directory() / "names" / "checked.json"]
    assert "images push" in rollmill("images", "pull", "other", tmp_path / "store").err
    assert "1 layers written" in rollmill("images", "push", "checked", tmp_path / "store").out
    assert "checked@" in rollmill("images", "pull", "checked", tmp_path / "store").out
