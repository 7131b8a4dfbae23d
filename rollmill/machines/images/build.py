"""Builds, lists and removes machine images. `image.py` says what they are and where."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import ValidationError

from rollmill.errors import TaskError
from rollmill.machines.images import image as images
from rollmill.machines.images import layers
from rollmill.machines.images.image import BUILT_IN, NAME, ImageRecord, LayerRecord, images_directory
from rollmill.machines.images.oci import take_files
from rollmill.machines.images.os_layer import make_debian, unpacked_root
from rollmill.machines.images.repository import seal

_PYTHON = b"#!/opt/bin/python\n"  # of every machine
# what pip writes before a script: a line, or three of them if the path of the interpreter is long
_SHEBANG = re.compile(rb"\A(#![^\n]*python[^\n]*\n|#!/bin/sh\n'''exec' [^\n]*\n' '''\n)")
# `--only-binary` does not hold for addresses and directories: so pip can start no program, as builds and git would be
_PIP_ALONE = """
import runpy, sys
def refuse(event, arguments):
    if event in ("subprocess.Popen", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.system"):
        raise PermissionError("a package without a wheel would be built on this host")
sys.addaudithook(refuse)
runpy.run_module("pip", run_name="__main__")
"""


def build_image(
    name: str,
    *,
    directory: Path | None = None,
    requirements: Path | None = None,
    repository: Path | None = None,
    commit: str = "HEAD",
    archive: Path | None = None,
    inside: str = "/",
    suite: str | None = None,
    programs: Sequence[str] = (),
    architecture: str | None = None,
    wheels: Path | None = None,
) -> ImageRecord:
    """Make an image of a Debian suite with `programs` (its packages), Python requirements, a repository, files of an
    OCI image, a directory, or several, and name it. `architecture` is that of the suite. With `wheels`, a directory
    with wheels beside those of the index, no code of a package runs on this host: pip takes wheels alone.

    Each is a layer of its own, in this order; the same content is kept once.
    """
    if not NAME.fullmatch(name) or name == BUILT_IN:
        raise TaskError(f"{name!r} cannot be the name of an image", hint="letters, digits, dots, dashes, underscores")
    if architecture is not None and suite is None:
        raise TaskError("an architecture needs an operating system of it", hint="--suite bookworm")
    root = images_directory()
    root.mkdir(parents=True, exist_ok=True)
    system: str | None = None
    record = ImageRecord(digest="0" * 64)
    with tempfile.TemporaryDirectory(prefix=".building-", dir=root, ignore_cleanup_errors=True) as temporary:
        place = Path(temporary)
        if suite is not None:
            make_debian(suite, programs, place / "root", architecture)
            _add(record, "root", place / "root")
            system = unpacked_root(root / "layers" / record.layers[0].digest, root)
        if requirements is not None:
            record.python = images.python_platform(system)
            _install(requirements, place / "packages", record.python, wheels)
            _add(record, "packages", place / "packages")
            record.requirements = requirements.read_text().split("\n")
        if repository is not None:
            record.commit = seal(repository, commit, place / "repository")
            _add(record, "work", place / "repository")
        if archive is not None:
            take_files(archive, inside, place / "archive")
            _add(record, "work", place / "archive")
        if directory is not None:
            _copy(directory, place / "files")
            _add(record, "work", place / "files")
    record.digest = images.digest_of(record.layers)
    record.bytes = sum(layer.bytes for layer in record.layers)
    earlier = _record_of(record.digest)
    if earlier is not None:
        record.fidelity, record.verified = earlier.fidelity, earlier.verified
    images.keep_record(name, record)
    return record


def keep_work(name: str, base: str, work: Path, verified: Sequence[str] = ()) -> ImageRecord:
    """An image with the packages of `base`, and one layer for the work directory; the tree is moved into it."""
    record = images.find_record(base)
    kept = [layer for layer in record.layers if layer.place == "packages"] if record is not None else []
    layer = layers.keep(work, images_directory())
    parts = [*kept, LayerRecord(place="work", digest=layer.digest, bytes=layer.bytes)]
    facts = record.model_dump(include={"python", "requirements", "commit"}) if record is not None else {}
    size = sum(part.bytes for part in parts)
    made = ImageRecord(digest=images.digest_of(parts), layers=parts, bytes=size, verified=list(verified), **facts)
    images.keep_record(name, made)
    return made


def _add(record: ImageRecord, place: Literal["root", "packages", "work"], directory: Path) -> None:
    layer = layers.keep(directory, images_directory())
    record.layers.append(LayerRecord(place=place, digest=layer.digest, bytes=layer.bytes))


def _record_of(digest: str) -> ImageRecord | None:
    """What is known of the same content from earlier."""
    try:
        return ImageRecord.model_validate_json((images_directory() / "objects" / digest / "image.json").read_bytes())
    except (OSError, ValidationError):
        return None


def check_python(version: str | None) -> None:
    """TaskError if `version` (3.12, 3.12.1) is not the Python of this process: machines run this one and no other."""
    own = sys.version_info
    if version is None or version in (f"{own.major}.{own.minor}", f"{own.major}.{own.minor}.{own.micro}"):
        return
    raise TaskError(
        f"an image for Python {version} cannot be built here: machines run the Python that Rollmill runs on, "
        f"{own.major}.{own.minor}",
        hint=f"install Rollmill into an environment with Python {version}, and build and use the image there",
    )


def _copy(directory: Path, target: Path) -> None:
    if not directory.is_dir():
        raise TaskError(f"{directory} is not a directory", hint="--directory names the files of the work directory")
    for entry in layers.entries(directory):
        path = target / entry.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(entry.content)
        path.chmod(0o755 if entry.executable else 0o644)
    target.mkdir(exist_ok=True)


def _install(requirements: Path, target: Path, python: str, wheels: Path | None) -> None:
    """Install with pip for the Python of this process, which is that of the machines. Or for another architecture's
    (`python` is a platform of image.py): then only packages that are built already."""
    if not requirements.is_file():
        raise TaskError(f"{requirements} is not a file", hint="--requirements names a file with one package per line")
    arguments = ["install", "--quiet", "--disable-pip-version-check", "--no-input", "--target", str(target)]
    if python != images.python_platform():
        arguments += _pip_options(*python.split(" linux-"))
    pip = ["-m", "pip"]
    if wheels is not None:
        pip = ["-c", _PIP_ALONE]
        arguments += ["--only-binary=:all:", f"--find-links={wheels}"]
    done = subprocess.run(
        [sys.executable, "-P", *pip, *arguments, "--requirement", str(requirements)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode != 0:
        missing = "No module named pip" in done.stderr
        raise TaskError(
            f"pip could not install {requirements}: {done.stderr.strip()[-800:]}",
            hint="`python -m ensurepip` installs pip" if missing else "try the same with `pip install -r`",
        )
    target.mkdir(exist_ok=True)
    for script in (target / "bin").glob("*"):
        if script.is_file():
            data = script.read_bytes()
            script.write_bytes(_SHEBANG.sub(_PYTHON, data))


def _pip_options(version: str, architecture: str) -> list[str]:
    """Options with which pip takes packages for another Python."""
    platforms = [f"manylinux_2_{minor}_{architecture}" for minor in (36, 34, 31, 28, 27, 24, 17)]
    platforms += [f"manylinux2014_{architecture}", f"linux_{architecture}"]
    named = [f"--platform={each}" for each in platforms]
    return ["--only-binary=:all:", f"--python-version={version}", "--implementation=cp", *named]


def keep_fidelity(name: str, kind: str, distance: float) -> None:
    """Write the score of an image's machines into its record. It stays when the same content is built again."""
    record = images.find_record(name)
    if record is not None:
        scores = {**record.fidelity, kind: round(distance, 4)}
        images.keep_record(name, record.model_copy(update={"fidelity": scores}))


class Listed(NamedTuple):
    name: str
    record: ImageRecord | None  # None: damaged


def list_images() -> list[Listed]:
    found = []
    for name in images.built_names():
        try:
            found.append(Listed(name, images.find_record(name)))
        except TaskError:
            found.append(Listed(name, None))
    return found


def remove_image(name: str) -> int:
    """Forget a name, and its content if no other name has it. Returns the bytes that are free now."""
    listed = {each.name: each.record for each in list_images()}
    if name not in listed:
        known = ", ".join(listed) or "none"
        raise TaskError(f"there is no built image {name!r}", hint=f"`rollmill images list` shows them: {known}")
    root, record = images_directory(), listed.pop(name)
    (root / "names" / f"{name}.json").unlink(missing_ok=True)
    others = [each for each in listed.values() if each is not None]
    if record is None or record.digest in {each.digest for each in others}:
        return 0
    shutil.rmtree(root / "objects" / record.digest, ignore_errors=True)
    used = {layer.digest for each in others for layer in each.layers}
    freed = {layer.digest: layer.bytes for layer in record.layers if layer.digest not in used}
    for digest in freed:
        shutil.rmtree(root / "layers" / digest, ignore_errors=True)
        shutil.rmtree(root / "roots" / digest, ignore_errors=True)
    return sum(freed.values())
