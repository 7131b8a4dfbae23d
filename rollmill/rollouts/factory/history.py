"""Candidates from the history: commits that change tests and code. The tree before them, with their tests hidden."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from rollmill.environments.tasks.git_files import CommitFiles
from rollmill.machines.images.repository import git
from rollmill.rollouts.factory.edits import Candidate
from rollmill.rollouts.factory.install import Project
from rollmill.rollouts.factory.sources import Source, is_kept
from rollmill.rollouts.factory.stable_tests import files_of_tests

_MOST_FILES = 10  # that a commit changes besides tests
_TEST = re.compile(r"(.*/)?(test_[^/]*|[^/]*_test)\.py")
_TRAILER = re.compile(r"^[A-Z][\w-]+: .*$|^\(?cherry.*$", re.M)


def find_commits(project: Project, most: int) -> Iterator[Candidate]:
    """At most `most` commits, the newest first."""
    if project.source.repository is None:
        return
    repository, found = project.source.repository, 0
    for line in git(repository, "log", "--no-merges", "--format=%H %P", project.source.commit).splitlines():
        commit, _, parent = line.partition(" ")
        if not parent or " " in parent:
            continue
        message = git(repository, "log", "-1", "--format=%B", commit)
        title = "Make this change:\n\n" + _TRAILER.sub("", message).strip()[:3000]
        name = f"{project.source.name}-history-{commit[:12]}"
        candidate = make_again(project.source, Change(name, "history", title, parent, commit))
        if isinstance(candidate, Candidate) and candidate.tests:
            yield candidate
            found += 1
        if found == most:
            return


@dataclass(frozen=True)
class Change:
    """What is between two commits, to make again."""

    id: str
    kind: str
    title: str
    base: str
    commit: str


def make_again(source: Source, change: Change) -> Candidate | str:
    """The candidate; its tests are the modules of tests that the change has. Or why there is none."""
    repository = source.repository
    assert repository is not None
    paths = git(repository, "diff", "--name-only", "-z", "--no-renames", change.base, change.commit).split("\0")
    changed = [path for path in paths if path and is_kept(path)]
    tests = [path for path in changed if _TEST.fullmatch(path)]
    code = [path for path in changed if path not in files_of_tests(changed, tests)]
    if not any(path.endswith(".py") for path in code) or len(code) > _MOST_FILES:
        return f"it changes no Python file, or more than {_MOST_FILES} files"
    before, after = CommitFiles(repository, change.base), CommitFiles(repository, change.commit)
    if any(path not in after for path in code + tests):
        return "it removes a file"  # a reference writes files, and removes none
    reference = {path: after[path] for path in code}
    try:
        [data.decode() for path in code for data in (after[path], before.get(path, b""))]
    except UnicodeDecodeError:
        return "it changes a file that is not text"
    diff = git(repository, "diff", "-U0", "--no-renames", change.base, change.commit, "--", *code).splitlines()
    solution = "\n".join(line[1:] for line in diff if line.startswith("+") and not line.startswith("+++ "))
    return Candidate(
        change.id,
        change.kind,
        change.title,
        {path: before[path] for path in code if path in before},
        reference,
        solution,
        tuple(tests),
        tuple(path for path in code if path not in before),
        change.commit,
    )


def at_commit(project: Project, commit: str) -> Project:
    """The project as a commit leaves it, with what the build of the newest one generates."""
    assert project.source.repository is not None
    files = {path: data for path, data in CommitFiles(project.source.repository, commit).items() if is_kept(path)}
    generated = {path: data for path, data in project.files.items() if path not in project.source.files}
    return replace(project, files={**generated, **files})
