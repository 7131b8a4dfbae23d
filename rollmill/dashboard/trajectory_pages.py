"""Trajectories to search, filter and read: the list, and one of them turn by turn. All text in them is untrusted."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlencode

from markupsafe import Markup

from rollmill.dashboard.conversation import readings
from rollmill.dashboard.queries import WINDOW, Page, find_page, run_keys
from rollmill.dashboard.render import render
from rollmill.dashboard.run_source import Source
from rollmill.errors import ConfigError, StorageError, TrajectoryError
from rollmill.trajectories.query import Cursor, Range, TrajectoryQuery
from rollmill.trajectories.table_rows import LedgerEntry
from rollmill.types import TrajectoryState

MOST_GROUP = 64  # other members of its group that are shown


@dataclass(frozen=True)
class Filters:
    """What the form of the list asks for."""

    search: str = ""
    run: str = ""
    state: str = ""
    solved: str = ""  # yes or no
    split: str = ""
    reward: str = ""  # LOW..HIGH
    version: str = ""
    after: str = ""  # CREATED_AT,ID: where the page before ended

    @classmethod
    def of(cls, given: Mapping[str, str]) -> Filters:
        return cls(**{name: given.get(name, "").strip()[:200] for name in cls.__dataclass_fields__})

    def query(self) -> TrajectoryQuery:
        if self.state and self.state not in set(TrajectoryState):
            raise ConfigError(f"there is no state {self.state!r}", hint=f"one of {', '.join(TrajectoryState)}")
        return TrajectoryQuery(
            state=self.state or None,
            split=self.split or None,
            solved={"yes": True, "no": False}.get(self.solved),
            reward=_range("reward", self.reward),
            version=_range("version", self.version),
            after=_cursor(self.after),
        )

    def url(self, **changes: str) -> str:
        given = {name: value for name, value in {**vars(self), "after": "", **changes}.items() if value}
        return f"/trajectories?{urlencode(given)}"


def _range(name: str, text: str) -> Range:
    low, dots, high = text.partition("..")
    try:
        lowest, highest = (float(part) if part else None for part in (low, high if dots else low))
    except ValueError:
        raise ConfigError(
            f"{name} {text!r} is no range of numbers", hint="NUMBER, LOW..HIGH, LOW.. or ..HIGH"
        ) from None
    return lowest, highest


def _cursor(text: str) -> Cursor | None:
    if not text:
        return None
    at, _, id = text.partition(",")
    try:
        created = float(at)
    except ValueError:
        created = math.nan
    if not math.isfinite(created):
        raise ConfigError(f"after {text!r} is no place in the list", hint="begin with the first page")
    return created, id or None


def list_page(source: Source, filters: Filters) -> Markup:
    """One page of the list."""
    if not source.exists:
        return render("trajectories", "none_yet")
    known = run_keys(source.database, source.only)
    keys = [filters.run] if filters.run in known else known if not filters.run else []
    page = Page([], None, True)
    if keys:
        page = find_page(source.database, filters.query(), keys, filters.search, source.only)
    more = ""
    if page.next is not None:
        at, id = page.next
        more = filters.url(after=f"{at!r},{id or ''}")
    return render(
        "trajectories",
        "listed",
        source.only,
        filters,
        filters != Filters(),
        known,
        list(TrajectoryState),
        page,
        more,
        WINDOW,
    )


def reading_page(source: Source, id: str) -> Markup:
    """One trajectory: its facts, then its turns with tokens, versions and rewards."""
    store = source.trajectories() if source.exists else None
    row = store.get(id) if store is not None else None
    if store is None or row is None or not source.shows(row):
        raise TrajectoryError(f"there is no trajectory {id!r:.300} in this run")
    group = store.list(run=row.run, group_id=row.group_id, limit=MOST_GROUP) if row.group_id else []
    try:
        trajectory = source.load(row)
        problem = f"It is {row.state}, and nothing of it can be read."
    except (TrajectoryError, StorageError) as error:  # the index is still worth reading
        trajectory, problem = None, f"Its payload cannot be read: {error.message}"
    content = readings({row.task_id: trajectory}, source.decode) if trajectory else ""
    entries = [_entry(entry) for entry in store.entries(row.id)]
    members = sorted(group, key=lambda member: member.id)
    return render("trajectories", "read", row, members, entries, store.feedback(row.id), content, problem)


def _entry(entry: LedgerEntry) -> str:
    step = f" in step {entry.step}" if entry.step is not None else ""
    origin = f"admitted from {entry.origin}" if entry.origin else ""
    return " · ".join(part for part in (entry.run, f"{entry.state}{step}", (entry.reason or "")[:300], origin) if part)
