"""OCI images for tests: layouts written here, and root file systems of Debian's packages."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import platform
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import zstandard

ARCHITECTURE = {"x86_64": "amd64", "aarch64": "arm64"}[platform.machine()]


def entry(name: str, content: bytes = b"", *, mode: int = 0o644, **fields: Any) -> tuple[tarfile.TarInfo, bytes]:
    """An entry of a layer. A name that ends with / is a directory."""
    info = tarfile.TarInfo(name.rstrip("/") or "./")
    info.mode, info.size, info.mtime = mode, len(content), 1_600_000_000
    if name.endswith("/"):
        info.type, info.mode = tarfile.DIRTYPE, mode | 0o111
    for key, value in fields.items():
        setattr(info, key, value)
    return info, content


def link(name: str, target: str) -> tuple[tarfile.TarInfo, bytes]:
    return entry(name, type=tarfile.SYMTYPE, linkname=target, mode=0o777)


def tar_of(entries: Sequence[tuple[tarfile.TarInfo, bytes]]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for info, content in entries:
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def write_layout(
    directory: Path,
    tars: Sequence[bytes],
    *,
    packing: str = "gzip",
    architecture: str = ARCHITECTURE,
    diff_ids: Sequence[str] | None = None,
    tag: str = "latest",
    **config: Any,
) -> Path:
    """An OCI layout whose layers are these tars. `config`: User, WorkingDir, Env …"""
    blobs = directory / "blobs" / "sha256"
    blobs.mkdir(parents=True)

    def keep(data: bytes, kind: str) -> dict[str, Any]:
        digest = hashlib.sha256(data).hexdigest()
        (blobs / digest).write_bytes(data)
        return {"mediaType": f"application/vnd.oci.image.{kind}", "digest": f"sha256:{digest}", "size": len(data)}

    pack = {"gzip": lambda data: gzip.compress(data, 1), "zstd": zstandard.compress, "": lambda data: data}[packing]
    kind = f"layer.v1.tar{f'+{packing}' if packing else ''}"
    layers = [keep(pack(tar), kind) for tar in tars]
    ids = diff_ids or [f"sha256:{hashlib.sha256(tar).hexdigest()}" for tar in tars]
    facts = {
        "architecture": architecture,
        "os": "linux",
        "config": config,
        "rootfs": {"type": "layers", "diff_ids": list(ids)},
    }
    described = keep(json.dumps(facts).encode(), "config.v1+json")
    manifest = keep(
        json.dumps({"schemaVersion": 2, "config": described, "layers": layers}).encode(), "manifest.v1+json"
    )
    manifest |= {
        "annotations": {"org.opencontainers.image.ref.name": tag},
        "platform": {"os": "linux", "architecture": architecture},
    }
    (directory / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [manifest]}))
    (directory / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    return directory


def run(*command: str | Path, **options: Any) -> str:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, (command, done.stderr[-2000:])
    return done.stdout


def fetch_packages(names: Sequence[str], directory: Path, *, needed: bool = False) -> list[Path]:
    """The archives of Debian packages, from the mirror of this host; if `needed`, with all that they need. Skips where
    there is none."""
    (directory / "partial").mkdir(parents=True, exist_ok=True)
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        pytest.skip("apt-get and dpkg-deb are not here")
    (directory / "status").touch()
    options = ["-o", f"Dir::State::status={directory}/status", "-o", f"Dir::Cache::archives={directory}/"]
    options += ["-o", "Debug::NoLocking=1", "-o", "APT::Sandbox::User="]
    install = ["-y", "-qq", "--no-install-recommends", *options, "--download-only", "install"]
    command = ["apt-get", *(install if needed else ["download"]), *names]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"the packages {' '.join(names)} cannot be fetched: {done.stderr.strip()[-300:]}")
    return sorted(directory.glob("*.deb"))


def unpack_packages(packages: Sequence[Path], tree: Path) -> Path:
    """A root file system with the files of packages. Their scripts do not run."""
    for name in ("usr/bin", "usr/sbin", "usr/lib", "usr/lib64", "etc", "tmp", "root"):
        (tree / name).mkdir(parents=True, exist_ok=True)
    for name in ("bin", "sbin", "lib", "lib64"):
        (tree / name).symlink_to(f"usr/{name}")
    for package in packages:
        # not `dpkg-deb -x`: it would replace the links by directories
        with tempfile.TemporaryFile() as archive:
            subprocess.run(["dpkg-deb", "--fsys-tarfile", package], stdout=archive, check=True)
            archive.seek(0)
            subprocess.run(["tar", "-x", "--keep-directory-symlink", "-C", tree], stdin=archive, check=True)
    (tree / "tmp").chmod(0o1777)
    (tree / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\napp:x:1000:1000:,,,:/home/app:/bin/sh\n")
    (tree / "etc/group").write_text("root:x:0:\napp:x:1000:\nextra:x:77:app\n")
    return tree


def tar_tree(tree: Path) -> bytes:
    """A tree as a layer, with the owners that it has, or root."""
    return subprocess.run(
        ["tar", "--numeric-owner", "--sort=name", "-C", str(tree), "-c", "."], stdout=subprocess.PIPE, check=True
    ).stdout


def busybox_layer(directory: Path, config: Mapping[str, str] | None = None) -> bytes:
    """A root file system of busybox with a shell and the usual tools, statically linked."""
    tree = unpack_packages(fetch_packages(["busybox-static"], directory / "packages"), directory / "tree")
    program = next(path for path in (tree / "bin/busybox", tree / "usr/bin/busybox") if path.exists())
    for name in run(program, "--list").split():
        place = tree / "usr/bin" / name
        if not place.exists():
            place.symlink_to("busybox")
    return tar_tree(tree)
