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
from pathlib import Path

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
_COMMIT = re.compile(r"^[0-9a-f]{7,64}$")
_TOUCHED = re.compile(r"^(?:(?:---|\+\+\+) [ab]/|(?:rename|copy) (?:from|to) )([^\t\n]+)", re.MULTILINE)
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


def apply_patch(repository: Path, commit: str, patch: str, field: str) -> tuple[dict[str, bytes], list[str]]:
    """The files that a patch changes or adds to a commit, with their new contents, and those it deletes."""
    if _QUOTED.search(patch):
        raise TaskError(f"{field}: it has a quoted path", hint="paths with special characters are not supported")
    touched = sorted({path for path in _TOUCHED.findall(patch) if path != "dev/null"})
    before = _contents(repository, commit, [check_field_path(path, field) for path in touched])
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch, "files")
        directory.mkdir()
        for path, data in before.items():
            (directory / path).parent.mkdir(parents=True, exist_ok=True)
            (directory / path).write_bytes(data)
        _git(directory, "apply", "--whitespace=nowarn", "-", stdin=patch.encode(), what=f"{field} does not apply")
        after = {
            path.relative_to(directory).as_posix(): path.read_bytes()
            for path in sorted(directory.rglob("*"))
            if path.is_file() and not path.is_symlink()
        }
    changed = {path: data for path, data in after.items() if before.get(path) != data}
    return changed, sorted(before.keys() - after.keys())


def check_field_path(path: str, field: str) -> str:
    try:
        return check_path(path)
    except ValueError as error:
        raise TaskError(f"{field}: {path[:200]!r}: {error}", hint="correct the patch") from None


@functools.lru_cache(maxsize=4)
def _read_commit(repository: Path, commit: str) -> dict[str, bytes]:
    listed = _git(repository, "ls-tree", "-r", "-z", "--long", commit, what=f"{commit} cannot be read")
    paths: list[str] = []
    size = 0
    for line in filter(None, listed.split(b"\0")):
        facts, _, name = line.partition(b"\t")
        mode, _, _, length = facts.split()
        if not mode.startswith(b"100"):  # links and submodules
            continue
        size += int(length)
        if size > MAX_BYTES:
            hint = "put the repository into a machine image"
            raise TaskError(f"{commit} of {repository} has more than {MAX_BYTES >> 20} MiB", hint=hint)
        paths.append(name.decode("utf-8", "replace"))
    return _contents(repository, commit, paths)


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
