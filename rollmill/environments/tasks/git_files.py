"""Files of a commit in a local git repository, and what a patch makes of them.

Only objects are read (`ls-tree`, `cat-file`) and patches applied in a directory of their own: no hook, filter or
attribute of the repository is used, and nothing is fetched.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rollmill.environments.task_machine import stays_inside
from rollmill.environments.tasks.jsonl import check_path
from rollmill.errors import TaskError

MAX_BYTES = 1 << 26  # of one commit
_GIT_S = 120.0
_SAFE = ["-c", "core.hooksPath=/dev/null", "-c", "core.fsmonitor=false", "-c", "protocol.allow=never"]
_ENVIRONMENT = {
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_NO_LAZY_FETCH": "1",
    "GIT_OPTIONAL_LOCKS": "0",
    "LC_ALL": "C",
}
_FILE, _PROGRAM, _LINK = "100644", "100755", "120000"  # git's modes
_COMMIT = re.compile(r"^[0-9a-f]{7,64}$")
_TOUCHED = re.compile(r"^(?:(?:---|\+\+\+) [ab]/|(?:rename|copy) (?:from|to) )([^\t\n]+)", re.MULTILINE)
_NAMED = re.compile(r"^diff --git a/(.+) b/\1$", re.MULTILINE)  # also files of which only the mode changes
_QUOTED = re.compile(r'^(?:---|\+\+\+|rename from|rename to|diff --git) "', re.MULTILINE)


class CommitFiles(Mapping[str, bytes]):
    """The regular files of a commit. They are read when they are first needed: a data set has many commits."""

    def __init__(self, repository: Path, commit: str) -> None:
        self._place = (repository, commit)

    def __getitem__(self, path: str) -> bytes:
        return _read_commit(*self._place)[path]

    def __iter__(self) -> Iterator[str]:
        return iter(_read_commit(*self._place))

    def __len__(self) -> int:
        return len(_read_commit(*self._place))


def check_commit(repository: Path, commit: str) -> None:
    """TaskError if the repository or the commit is not there."""
    if not _COMMIT.match(commit):
        raise TaskError(f"base_commit: {commit!r} is no commit", hint="it is a number of hexadecimal digits")
    if not repository.is_dir():
        raise TaskError(f"repo: there is no directory {repository}", hint="clone it there: `git clone --bare URL`")
    _git(repository, "cat-file", "-e", f"{commit}^{{commit}}", what=f"base_commit: {commit} is not in {repository}")


@dataclass(frozen=True)
class PatchResult:
    """What a patch makes of a commit."""

    files: dict[str, bytes]  # changed and new ones
    executable: list[str]  # of `files`
    links: dict[str, str]  # changed and new ones
    deleted: list[str]


def apply_patch(repository: Path, commit: str, patch: str, field: str) -> PatchResult:
    modes = _list_commit(repository, commit)
    return patched(_contents(repository, commit, paths_of(patch, field)), patch, field, modes)


def paths_of(patch: str, field: str) -> list[str]:
    """The files that a patch reads or writes. TaskError for one that leaves the work directory."""
    if _QUOTED.search(patch):
        raise TaskError(f"{field}: it has a quoted path", hint="paths with special characters are not supported")
    named = {*_TOUCHED.findall(patch), *_NAMED.findall(patch)}
    return [check_field_path(path, field) for path in sorted(named) if path != "dev/null"]


def patched(
    contents: Mapping[str, bytes], patch: str, field: str, modes: Mapping[str, str] | None = None
) -> PatchResult:
    """What a patch makes of files. `modes`: git's modes of those that are programs or links."""
    before = {path: (data, (modes or {}).get(path, _FILE)) for path, data in contents.items()}
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch, "files")
        directory.mkdir()
        _write_files(directory, before)
        _git(directory, "apply", "--whitespace=nowarn", "-", stdin=patch.encode(), what=f"{field} does not apply")
        after = _read_files(directory)
    changed = {path: file for path, file in after.items() if before.get(path) != file}
    return PatchResult(
        files={path: data for path, (data, mode) in changed.items() if mode != _LINK},
        executable=[path for path, (_, mode) in changed.items() if mode == _PROGRAM],
        links={path: os.fsdecode(data) for path, (data, mode) in changed.items() if mode == _LINK},
        deleted=sorted(before.keys() - after.keys()),
    )


def _write_files(directory: Path, files: Mapping[str, tuple[bytes, str]]) -> None:
    """Links are written last, and git does not follow them: nothing is written outside of the directory."""
    for path, (data, mode) in sorted(files.items(), key=lambda file: file[1][1] == _LINK):
        place = directory / path
        place.parent.mkdir(parents=True, exist_ok=True)
        if mode == _LINK:
            place.symlink_to(os.fsdecode(data))
        else:
            place.write_bytes(data)
            place.chmod(0o755 if mode == _PROGRAM else 0o644)


def _read_files(directory: Path) -> dict[str, tuple[bytes, str]]:
    """Contents and git's mode of the files and links below a directory."""
    found: dict[str, tuple[bytes, str]] = {}
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory).as_posix()
        if path.is_symlink():
            found[name] = (os.fsencode(path.readlink()), _LINK)
        elif path.is_file():
            found[name] = (path.read_bytes(), _PROGRAM if path.stat().st_mode & 0o100 else _FILE)
    return found


def modes_of(repository: Path, commit: str) -> tuple[list[str], dict[str, str]]:
    """The programs of a commit, and its symbolic links that stay in the work directory."""
    modes = _list_commit(repository, commit)
    targets = _contents(repository, commit, [path for path, mode in modes.items() if mode == _LINK])
    links = {path: os.fsdecode(target) for path, target in targets.items()}
    inside = {path: target for path, target in links.items() if stays_inside(path, target)}
    return [path for path, mode in modes.items() if mode == _PROGRAM], inside


def check_field_path(path: str, field: str) -> str:
    try:
        return check_path(path)
    except ValueError as error:
        raise TaskError(f"{field}: {path[:200]!r}: {error}", hint="correct the patch") from None


@functools.lru_cache(maxsize=4)
def _read_commit(repository: Path, commit: str) -> dict[str, bytes]:
    files = [path for path, mode in _list_commit(repository, commit).items() if mode != _LINK]
    return _contents(repository, commit, files)


@functools.lru_cache(maxsize=4)
def _list_commit(repository: Path, commit: str) -> dict[str, str]:
    """Files and links of a commit, with git's mode. Submodules are left out."""
    listed = _git(repository, "ls-tree", "-r", "-z", "--long", commit, what=f"{commit} cannot be read")
    found: dict[str, str] = {}
    size = 0
    for line in filter(None, listed.split(b"\0")):
        facts, _, name = line.partition(b"\t")
        mode, _, _, length = facts.decode().split()
        if mode not in (_FILE, _PROGRAM, _LINK):
            continue
        size += int(length)
        if size > MAX_BYTES:
            hint = "put the repository into a machine image"
            raise TaskError(f"{commit} of {repository} has more than {MAX_BYTES >> 20} MiB", hint=hint)
        found[name.decode("utf-8", "replace")] = mode
    return found


def _contents(repository: Path, commit: str, paths: Sequence[str]) -> dict[str, bytes]:
    """The contents of those of `paths` that a commit has."""
    order = "".join(f"{commit}:{path}\n" for path in paths if "\n" not in path).encode()
    output = _git(repository, "cat-file", "--batch", stdin=order, what=f"{commit} cannot be read")
    found: dict[str, bytes] = {}
    start = 0
    for path in paths:
        if "\n" in path:
            continue
        end = output.index(b"\n", start)
        words = output[start:end].rsplit(b" ", 2)
        start = end + 1
        if words[-1] == b"missing" or words[-2] != b"blob":
            start += 0 if words[-1] == b"missing" else int(words[-1]) + 1
            continue
        size = int(words[-1])
        found[path] = output[start : start + size]
        start += size + 1
    return found


def _git(directory: Path, *arguments: str, what: str, stdin: bytes = b"") -> bytes:
    """The output of a git command. TaskError that starts with `what` if it fails."""
    # a directory without a repository of its own must not find one above it
    environment = {**os.environ, **_ENVIRONMENT, "GIT_CEILING_DIRECTORIES": str(directory.absolute().parent)}
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        environment.pop(name, None)
    try:
        done = subprocess.run(
            ["git", *_SAFE, *arguments],
            cwd=directory,
            env=environment,
            input=stdin,
            capture_output=True,
            timeout=_GIT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise TaskError(f"{what}: {error}", hint="git must be installed on this machine") from None
    if done.returncode != 0:
        why = done.stderr.decode("utf-8", "replace").strip()[:300]
        raise TaskError(f"{what}: {why}", hint="nothing is fetched: the local repository must have it")
    return done.stdout
