"""A repository at one commit, with a history that ends there: what an agent may see of it.

A plain clone shows the future: branches, tags, remote refs, the reflog, and objects that no ref names but that are
still in a pack. `seal` makes a new repository and fetches one commit into it. Git sends exactly what that commit
reaches, so nothing has to be removed. `check_sealed` proves it object by object.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from rollmill.errors import TaskError

BRANCH = "main"
_GIT_S = 600.0
# settings of this host and its user must not matter, and nothing of the repository is executed
_ENVIRONMENT = {
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_ALLOW_PROTOCOL": "file",
    "GIT_NO_LAZY_FETCH": "1",
    "LC_ALL": "C",
}
_REMOTE = {"GIT_ALLOW_PROTOCOL": "file:git:http:https:ssh"}
_CONFIG = (
    "core.hooksPath=/dev/null",
    "core.fsmonitor=false",
    "core.symlinks=false",  # images keep regular files only
    "core.fileMode=false",
    "uploadpack.allowAnySHA1InWant=true",
    "uploadpack.packObjectsHook=",
    "gc.auto=0",
    "safe.directory=*",
)
_LEFT = ("HEAD", "config", "index", "objects", "refs")  # all that a sealed repository has


def seal(repository: Path, commit: str, target: Path) -> str:
    """Check out `commit` of a repository into `target`, with the history up to it. Returns the commit's full name."""
    if not repository.is_dir():
        raise TaskError(f"{repository} is not a directory", hint="--repository names a clone on this host")
    source = repository.resolve()
    full = git(source, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{commit}^{{commit}}").strip()
    target.mkdir(parents=True)
    git(target, "init", "--quiet", f"--initial-branch={BRANCH}", "--template=")
    git(target, "fetch", "--quiet", "--no-tags", "--no-recurse-submodules", f"file://{source}", full)
    git(target, "update-ref", f"refs/heads/{BRANCH}", full)
    git(target, "config", "core.symlinks", "false")
    git(target, "config", "core.fileMode", "false")
    git(target, "reset", "--quiet", "--hard", full)
    git(target, "repack", "-a", "-d", "--quiet")
    folder = target / ".git"
    for entry in folder.iterdir():
        if entry.name not in _LEFT:
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    check_sealed(target, full)
    return full


def check_sealed(target: Path, commit: str) -> None:
    """TaskError if the repository holds anything beyond `commit` and its history."""
    folder = target / ".git"
    found = sorted(entry.name for entry in folder.iterdir())
    if found != sorted(_LEFT):
        raise TaskError(f"a sealed repository has {found}, not only {sorted(_LEFT)}")
    names = git(target, "for-each-ref", "--format=%(refname) %(objectname)").splitlines()
    if names != [f"refs/heads/{BRANCH} {commit}"] or (folder / "objects" / "info" / "alternates").exists():
        raise TaskError(f"a sealed repository has other refs or borrowed objects: {names}")
    there = git(target, "cat-file", "--batch-all-objects", "--batch-check=%(objectname)", "--unordered").split()
    reached = {line.split()[0] for line in git(target, "rev-list", "--objects", commit).splitlines()}
    beyond = set(there) - reached
    if beyond:
        raise TaskError(f"a sealed repository holds {len(beyond)} objects that its commit does not reach")
    if "remote" in git(target, "config", "--local", "--list"):
        raise TaskError("a sealed repository names a remote")


def git(directory: Path, *arguments: str, remote: bool = False) -> str:
    """The output of a git command. With `remote` it may fetch from other hosts. TaskError if it fails."""
    settings = [word for setting in _CONFIG for word in ("-c", setting)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    done = subprocess.run(
        ["git", *settings, *arguments],
        cwd=directory,
        env={**environment, **_ENVIRONMENT, **(_REMOTE if remote else {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=_GIT_S,
        check=False,
    )
    if done.returncode != 0:
        said = done.stderr.strip()[-500:] or f"exit code {done.returncode}"
        raise TaskError(
            f"git {arguments[0]} failed in {directory}: {said}", hint="is it a repository with this commit?"
        )
    return done.stdout
