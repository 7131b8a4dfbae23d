"""Builds, lists and removes machine images. `images.py` says what they are and where."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from rollmill.environments.machines import images
from rollmill.environments.machines.images import BUILT_IN, NAME, ImageRecord, images_directory
from rollmill.errors import TaskError

_PYTHON = b"#!/opt/bin/python\n"  # of every machine
# what pip writes before a script: a line, or three of them if the path of the interpreter is long
_SHEBANG = re.compile(rb"\A(#![^\n]*python[^\n]*\n|#!/bin/sh\n'''exec' [^\n]*\n' '''\n)")


def build_image(name: str, *, directory: Path | None = None, requirements: Path | None = None) -> ImageRecord:
    """Make an image of a directory, of Python requirements, or of both, and name it. The same content is kept once."""
    if not NAME.fullmatch(name) or name == BUILT_IN:
        raise TaskError(f"{name!r} cannot be the name of an image", hint="letters, digits, dots, dashes, underscores")
    root = images_directory()
    (root / "objects").mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".building-", dir=root, ignore_cleanup_errors=True) as temporary:
        place = Path(temporary)
        if directory is not None:
            _copy(directory, place / "work")
        if requirements is not None:
            _install(requirements, place / "packages")
        return _keep(name, place, requirements, root)


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
    for entry in images.entries(directory):
        path = target / entry.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(entry.content)
        path.chmod(0o755 if entry.executable else 0o644)
    target.mkdir(exist_ok=True)


def _install(requirements: Path, target: Path) -> None:
    """Install with pip for the Python of this process, which is the Python of the machines."""
    if not requirements.is_file():
        raise TaskError(f"{requirements} is not a file", hint="--requirements names a file with one package per line")
    arguments = ["install", "--quiet", "--disable-pip-version-check", "--no-input", "--target", str(target)]
    done = subprocess.run(
        [sys.executable, "-P", "-m", "pip", *arguments, "--requirement", str(requirements)],
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


def _keep(name: str, place: Path, requirements: Path | None, root: Path) -> ImageRecord:
    digest, size = hashlib.sha256(), 0
    for entry in images.entries(place):
        facts = f"{entry.path}\0{entry.executable}\0{hashlib.sha256(entry.content).hexdigest()}\n"
        digest.update(facts.encode("utf-8", "surrogateescape"))
        size += len(entry.content)
    record = ImageRecord(
        digest=digest.hexdigest(),
        python=images.python_platform() if requirements is not None else "",
        requirements=requirements.read_text().split("\n") if requirements is not None else [],
        bytes=size,
    )
    _write(place / "image.json", record)
    with contextlib.suppress(OSError):  # the same content is there already
        os.rename(place, root / "objects" / record.digest)
    (root / "names").mkdir(exist_ok=True)
    _write(root / "names" / f"{name}.json", record)
    return record


def _write(path: Path, record: ImageRecord) -> None:
    """The file is there whole or not at all."""
    unfinished = path.with_suffix(f".{os.getpid()}")
    unfinished.write_text(record.model_dump_json(indent=1))
    os.replace(unfinished, path)


def keep_fidelity(name: str, kind: str, distance: float) -> None:
    """Write the score of an image's machines into its record. It stays when the same content is built again."""
    record = images.find_record(name)
    if record is not None:
        scores = {**record.fidelity, kind: round(distance, 4)}
        place = images_directory() / "objects" / record.digest / "image.json"
        _write(place, record.model_copy(update={"fidelity": scores}))


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
    if record is None or record.digest in {each.digest for each in listed.values() if each is not None}:
        return 0
    shutil.rmtree(root / "objects" / record.digest, ignore_errors=True)
    return record.bytes
