"""The files of a project: a clone with its history, a directory, or the sdist of a PyPI name."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from rollmill.environments.tasks.git_files import MAX_BYTES, CommitFiles
from rollmill.errors import TaskError
from rollmill.machines.images import layers
from rollmill.machines.images.repository import git
from rollmill.rollouts.factory.sdist import get_sdist

# version control, caches, builds and environments: they may hold the solution
_LEFT_OUT = frozenset(
    {".git", ".hg", "__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis", ".tox", ".nox"}
    | {".eggs", ".venv", "venv", "node_modules", "htmlcov"}
)
_LEFT_OUT_ABOVE = frozenset({"build", "dist"})  # only at the top: deeper they may be packages
_PYPI = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)(==[A-Za-z0-9.!+_-]+)?")
_URL = re.compile(r"(https?|ssh|git|file)://.+|[\w.-]+@[\w.-]+:.+")


@dataclass(frozen=True)
class Source:
    name: str
    files: dict[str, bytes] = field(repr=False)
    version: str = "0.0.0"  # for builds that would ask version control
    repository: Path | None = None  # a bare clone
    commit: str = ""  # of `files`


def get_source(given: str, place: Path) -> Source:
    """The source that a user names. TaskError if it cannot be had. `place` is an empty directory that stays."""
    path = Path(given)
    if (path / ".git").exists() or (path / "HEAD").is_file():
        return _clone(path.resolve().as_uri(), path.resolve().name, place)
    if path.is_dir():
        return _checked(Source(_plain(path.resolve().name), _read(path)))
    if _URL.fullmatch(given):
        return _clone(given, given.rstrip("/").rpartition("/")[2], place)
    if named := _PYPI.fullmatch(given):
        sdist = get_sdist(given)
        files = {path: data for path, data in sdist.files.items() if is_kept(path)}
        return _checked(Source(_plain(named[1]), files, sdist.version))
    raise TaskError(f"{given!r} is no repository", hint="a directory, the URL of a git repository, or a PyPI name")


def is_kept(path: str) -> bool:
    parts = PurePosixPath(path).parts
    hidden = _LEFT_OUT & set(parts) or parts[0] in _LEFT_OUT_ABOVE or any(part.endswith(".egg-info") for part in parts)
    return not hidden and not path.endswith((".pyc", ".orig", ".rej"))


def _clone(url: str, name: str, place: Path) -> Source:
    clone = place / "repository.git"
    git(place, "clone", "--quiet", "--bare", "--no-tags", "--template=", "--", url, str(clone), remote=True)
    commit = git(clone, "rev-parse", "--verify", "--end-of-options", "HEAD^{commit}").strip()
    files = {path: data for path, data in CommitFiles(clone, commit).items() if is_kept(path)}
    return _checked(Source(_plain(name.removesuffix(".git")), files, repository=clone, commit=commit))


def _read(directory: Path) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    size = 0
    for entry in layers.entries(directory):
        if is_kept(entry.path):
            size += len(entry.content)
            if size > MAX_BYTES:
                raise TaskError(f"{directory} has more than {MAX_BYTES >> 20} MiB", hint="give a smaller directory")
            found[entry.path] = entry.content
    return found


def _checked(source: Source) -> Source:
    if not any(path.endswith(".py") for path in source.files):
        raise TaskError(f"{source.name} has no Python files", hint="the factory makes tasks of Python projects")
    return source


def _plain(name: str) -> str:
    """As part of the name of an image and of a task."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:32] or "project"
