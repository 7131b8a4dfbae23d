"""Trajectories to search, filter and read: the list, and one of them turn by turn. All text in them is untrusted."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlencode

from rollmill.dashboard.queries import WINDOW, Page, find_page, run_keys
from rollmill.dashboard.run_overview import moment, table
from rollmill.dashboard.run_source import Source
from rollmill.errors import ConfigError, StorageError, TrajectoryError
from rollmill.runs.report.markup import Markup, join, tag
from rollmill.runs.report.page import readings
from rollmill.runs.report.scales import duration, number
from rollmill.runs.report.sections import section
from rollmill.trajectories.query import Cursor, Range, TrajectoryQuery
from rollmill.trajectories.table_rows import FeedbackRow, LedgerEntry, TrajectoryRow
from rollmill.types import TrajectoryState

COLOURS = {"graded": "good", "failed": "bad", "quarantined": "bad", "running": "live-text"}
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
        return _frame(section("Trajectories", "There are none yet: they appear when the first rollouts start.", " "))
    known = run_keys(source.database, source.only)
    keys = [filters.run] if filters.run in known else known if not filters.run else []
    page = Page([], None, True)
    if keys:
        page = find_page(source.database, filters.query(), keys, filters.search, source.only)
    whose = "What agents and users did" if source.only is None else "What agents and users did in this run"
    return _frame(
        section(
            "Trajectories",
            f"{whose}, newest first. A search looks at ids, tasks, families and reasons.",
            _form(filters, known),
            _list(page.rows, source.only) if page.rows else tag("p", _nothing(page), class_="lead"),
            _more(filters, page),
        )
    )


def _frame(*content: str) -> Markup:
    return tag("main", *content, id="content", class_="list")


def _nothing(page: Page) -> str:
    if page.looked_at_all:
        return "No trajectory matches."
    return f"None of these {number(WINDOW)} trajectories matches. Older ones may."


def _more(filters: Filters, page: Page) -> Markup:
    if page.next is None:
        return Markup("")
    at, id = page.next
    words = "Older ones" if page.looked_at_all else "Look further back"
    return tag("p", tag("a", words, href=filters.url(after=f"{at!r},{id or ''}"), rel="next"), class_="more")


def _form(filters: Filters, keys: Sequence[str]) -> Markup:
    fields = [
        tag("input", type="search", name_="search", value=filters.search, placeholder="search", aria_label="search"),
        _choice("run", filters.run, {"": "every stage", **{key: key for key in keys}}),
        _choice("state", filters.state, {"": "any state", **{str(state): str(state) for state in TrajectoryState}}),
        _choice("solved", filters.solved, {"": "solved or not", "yes": "solved", "no": "not solved"}),
        *(
            tag("input", name_=name, value=getattr(filters, name), placeholder=words, aria_label=words, size=9)
            for name, words in (("split", "split"), ("reward", "reward 0..1"), ("version", "version 3..7"))
        ),
        tag("button", "Filter"),
        tag("a", "clear", href="/trajectories") if filters != Filters() else "",
    ]
    return tag("form", fields, action="/trajectories", class_="filters", role="search")


def _choice(name: str, chosen: str, options: Mapping[str, str]) -> Markup:
    listed = [tag("option", words, value=value, selected=value == chosen) for value, words in options.items()]
    return tag("select", listed, name_=name, aria_label=name)


def _link(row: TrajectoryRow, words: str) -> Markup:
    return tag("a", words, href=f"/trajectory?{urlencode({'id': row.id})}", title=row.id)


def _list(rows: Sequence[TrajectoryRow], only: str | None) -> Markup:
    heads = ("Trajectory", "State", "Task", "Sampled by", "Created", "Reward", "Tokens", "Turns", "Took")
    return table(heads, [_cells(row, only) for row in rows], words=5)


def _cells(row: TrajectoryRow, only: str | None) -> list[str]:
    """The id without that of the run, which all of them would have."""
    reason = tag("small", f" {(row.reason or '')[:80]}") if row.reason else ""
    split = tag("small", f" {row.split}") if row.split else ""
    return [
        _link(row, row.id.removeprefix(f"{only}-")),
        join(tag("span", str(row.state), class_=COLOURS.get(row.state, "off")), reason),
        join(row.task_id[:60], split),
        tag("code", _versions(row)),
        moment(row.created_at),
        _reward(row.reward),
        "–" if row.tokens is None else number(row.tokens),
        "–" if row.turns is None else number(row.turns),
        "–" if row.finished_at is None else duration(row.finished_at - row.created_at),
    ]


def _reward(value: float | None) -> Markup:
    if value is None:
        return Markup("–")
    return tag("b", number(round(value, 3)), class_="good" if value > 0 else "bad")


def _versions(row: TrajectoryRow) -> str:
    if row.newest_version is None:
        return "–"
    oldest = f"{row.oldest_version}–" if row.oldest_version != row.newest_version else ""
    return f"{row.line}@{oldest}{row.newest_version}"


def reading_page(source: Source, id: str) -> Markup:
    """One trajectory: its facts, then its turns with tokens, versions and rewards."""
    store = source.trajectories() if source.exists else None
    row = store.get(id) if store is not None else None
    if store is None or row is None or not source.shows(row):
        raise TrajectoryError(f"there is no trajectory {id!r:.300} in this run")
    group = store.list(run=row.run, group_id=row.group_id, limit=MOST_GROUP) if row.group_id else []
    try:
        trajectory = source.load(row)
        problem = "" if trajectory else f"It is {row.state}, and nothing of it can be read."
    except (TrajectoryError, StorageError) as error:  # the index is still worth reading
        trajectory, problem = None, f"Its payload cannot be read: {error.message}"
    content = readings({row.task_id: trajectory}, source.decode) if trajectory else tag("p", problem, class_="lead")
    return _frame(
        tag("p", tag("a", "All trajectories", href="/trajectories"), class_="more"),
        _facts(row, group, store.entries(row.id), store.feedback(row.id)),
        content,
    )


def _facts(
    row: TrajectoryRow, group: Sequence[TrajectoryRow], entries: Sequence[LedgerEntry], said: Sequence[FeedbackRow]
) -> Markup:
    facts: list[tuple[str, str]] = [
        ("State", tag("span", str(row.state), class_=COLOURS.get(row.state, "off"))),
        ("Reward", _reward(row.reward)),
        ("Why", (row.reason or "")[:2000]),
        ("Task", " · ".join(part for part in (row.task_id, row.family, row.split) if part)[:500]),
        ("Run", f"{row.run} · {row.traffic}"),
        ("Sampled by", tag("code", _versions(row))),
        ("Regions", row.regions or ""),
        ("Created", moment(row.created_at)),
        ("Took", "" if row.finished_at is None else duration(row.finished_at - row.created_at)),
        ("Segments", f"{row.segments} ({row.causes})" if row.segments else ""),
        ("Group", _group(row, group)),
        *(("Ledger", _entry(entry)) for entry in entries),
        *(("Feedback", _feedback(each)) for each in said[:100]),
    ]
    cells = [tag("tr", tag("th", name, scope="row"), tag("td", value)) for name, value in facts if value]
    head = tag("h2", tag("code", row.id))
    return tag("section", head, tag("table", tag("tbody", cells), class_="facts-of"))


def _group(row: TrajectoryRow, group: Sequence[TrajectoryRow]) -> Markup:
    """The rewards of the whole group: how it compares is what it is trained on."""
    members = []
    for member in sorted(group, key=lambda member: member.id):
        words = str(member.state) if member.reward is None else number(round(member.reward, 3))
        members.append(tag("b", words, aria_current="true") if member.id == row.id else _link(member, words))
    return join(*(part for member in members for part in (member, " "))) if len(members) > 1 else Markup("")


def _entry(entry: LedgerEntry) -> str:
    step = f" in step {entry.step}" if entry.step is not None else ""
    origin = f"admitted from {entry.origin}" if entry.origin else ""
    return " · ".join(part for part in (entry.run, f"{entry.state}{step}", (entry.reason or "")[:300], origin) if part)


def _feedback(said: FeedbackRow) -> Markup:
    value = "" if said.value is None else f" {said.value:g}"
    return join(f"{said.kind[:80]}{value} ", tag("small", str(said.data)[:500]), " ", moment(said.created_at))
