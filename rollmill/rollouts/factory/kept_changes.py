"""Candidates from traffic: what users asked a product's agent for, and the change of its repository that they kept.

The product names that change with the signal `kept`: two commits (see rollmill/signals.py). The state of the repository
is the first one. What was asked is read from the record of the session, as the gateway redacted it. A session becomes a
candidate only if its user agreed to training, and if the redactor finds nothing private in the request and the change.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from rollmill.environments.rewards.transcript import text_of
from rollmill.errors import StorageError, TaskError, TrajectoryError
from rollmill.gateway.access.redaction import Redactor
from rollmill.machines.images.repository import git
from rollmill.rollouts.factory.edits import Candidate
from rollmill.rollouts.factory.history import Change, make_again
from rollmill.rollouts.factory.sources import Source
from rollmill.signals import KEPT
from rollmill.trajectories.table_rows import TrajectoryRow
from rollmill.trajectories.trajectory_store import TrajectoryStore
from rollmill.types import TrajectoryState

_MOST_ASKED = 6000  # characters
_TAKEN_BACK = {("reverted", True), ("accepted", False)}
_PRIVATE = "what was asked or kept has something that `[gateway.redaction]` removes"


@dataclass(frozen=True)
class Kept:
    """A change that a user kept."""

    session: str  # its trajectory
    asked: str
    base: str
    commit: str


@dataclass(frozen=True)
class Sessions:
    kept: list[Kept]
    left_out: Counter[str]  # other sessions whose product said what the user kept: why, and how many
    redactor: Redactor = field(repr=False)


def read_sessions(store: TrajectoryStore, run: str, redactor: Redactor) -> Sessions:
    """The production sessions of a run with a signal `kept`."""
    found = Sessions([], Counter(), redactor)
    for row in store.with_feedback("kept"):
        if row.traffic == "production" and row.provenance.get("run") == run:
            kept = _read(store, row)
            if isinstance(kept, str):
                found.left_out[kept] += 1
            else:
                found.kept.append(kept)
    return found


def _read(store: TrajectoryStore, row: TrajectoryRow) -> Kept | str:
    """Or why it is left out."""
    if row.unfit is not None:
        return row.unfit
    if row.state not in (TrajectoryState.finished, TrajectoryState.graded):
        return f"the session is {row.state}"
    said = store.feedback(row.id)
    newest = max(number for number, each in enumerate(said) if each.kind == "kept")
    if any((each.kind, bool(each.value)) in _TAKEN_BACK for each in said[newest:]):
        return "the user took it back"
    commits = KEPT.fullmatch(str(said[newest].data.get("label")))
    if commits is None:
        return "its signal names no commits"
    try:
        messages = store.load(row.id).messages
    except (TrajectoryError, StorageError):
        return "its record cannot be read"
    asked = "\n\n".join(text_of(message).strip() for message in messages if message.get("role") == "user").strip()
    if not 0 < len(asked) <= _MOST_ASKED:
        return f"what was asked is empty, or longer than {_MOST_ASKED} characters"
    return Kept(row.id, asked, **commits.groupdict())


def find_kept(source: Source, sessions: Sessions) -> tuple[list[Candidate], Counter[str]]:
    """Candidates, and why other sessions are none. TaskError for a project without history."""
    if source.repository is None:
        raise TaskError(
            f"{source.name} has no history, in which the commits that users kept would be",
            hint="--from-sessions needs a git repository: a clone, or its URL",
        )
    found, left_out = list[Candidate](), Counter(sessions.left_out)
    for kept in sessions.kept:
        candidate = _candidate(source, source.repository, kept, sessions.redactor)
        if isinstance(candidate, str):
            left_out[candidate] += 1
        else:
            found.append(candidate)
    return found, left_out


def _candidate(source: Source, repository: Path, kept: Kept, redactor: Redactor) -> Candidate | str:
    try:
        for commit in (kept.base, kept.commit):
            _fetch(repository, commit)
    except TaskError:
        return "the repository does not have its commits"
    name = f"{source.name}-session-{kept.session}-{kept.commit[:12]}"
    title = f"A user asks for this:\n\n{kept.asked}"
    candidate = make_again(source, Change(name, "session", title, kept.base, kept.commit))
    if isinstance(candidate, str):
        return candidate
    text = f"{kept.asked}\n{candidate.solution}"
    return candidate if redactor.redact(text) == text else _PRIVATE


def _fetch(repository: Path, commit: str) -> None:
    """Also commits that no branch has: products may push what users kept under refs of their own."""
    with contextlib.suppress(TaskError):
        git(repository, "cat-file", "-e", f"{commit}^{{commit}}")
        return
    git(repository, "fetch", "--quiet", "--no-tags", "--no-recurse-submodules", "origin", commit, remote=True)
