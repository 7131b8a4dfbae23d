"""What the dashboard asks the database. Each query reads through an index, and a bounded number of rows.

A page of trajectories looks at no more than WINDOW of the newest ones per run key, however rare the wanted ones are; a
link to the next page continues from there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import sqlalchemy as sa

from rollmill.feedback.collect import PRODUCTION
from rollmill.runs.cycle_journal import Journal, Move
from rollmill.storage.database import reading
from rollmill.storage.tables import feedback, groups, ledger, trajectories
from rollmill.trajectories.query import Cursor, TrajectoryQuery
from rollmill.trajectories.results import read_results
from rollmill.trajectories.staleness import Pace
from rollmill.trajectories.steps import committed
from rollmill.trajectories.storable import to_object
from rollmill.trajectories.table_rows import COLUMNS, TrajectoryRow, to_row
from rollmill.types import GroupState

PAGE = 50  # trajectories per page
WINDOW = 5000  # trajectories that one page looks at, per run key
MOST_KEYS = 1000  # run keys of a shared database
MOST_CYCLES = 10
MOST_STEPS = 1000  # newest steps whose costs are shown
_table = trajectories.c


@dataclass(frozen=True)
class Page:
    rows: Sequence[TrajectoryRow]
    next: Cursor | None  # None: there are no more
    looked_at_all: bool  # False: the window ended before the page was full


def run_keys(engine: sa.Engine, only: str | None) -> list[str]:
    """The keys that trajectories have in `run`: the run's id, ID/STAGE, ID/EVALUATION, and production, which runs
    share. One lookup in the index each."""
    found: list[str] = []
    with reading(engine) as connection:
        while len(found) < MOST_KEYS:
            query = sa.select(sa.func.min(_table.run))
            if found:
                query = query.where(_table.run > found[-1])
            key = connection.execute(query).scalar()
            if key is None:
                break
            found.append(key)
    return [key for key in found if only is None or key in (only, PRODUCTION) or key.startswith(f"{only}/")]


def of_run(only: str | None, columns: Any = _table) -> sa.ColumnElement[bool]:
    """Of production, the conversations of this run alone: its gateways write its id into the provenance. The text
    between quotes cannot come from a client, because JSON escapes quotes."""
    if only is None:
        return sa.true()
    mine = columns.provenance.contains(to_object("run", {"run": only})[1:-1], autoescape=True)
    return sa.or_(columns.run != PRODUCTION, mine)


def find_page(
    engine: sa.Engine, wanted: TrajectoryQuery, keys: Sequence[str], contains: str = "", only: str | None = None
) -> Page:
    """The newest trajectories with one of the run keys. `contains`: a part of the id, task, family or reason. `only`:
    see `of_run`."""
    with reading(engine) as connection:
        oldest = max((at for key in keys if (at := _window(connection, key, wanted.after)) is not None), default=None)
        query = replace(wanted, created=(oldest, None), limit=PAGE + 1)
        select = sa.select(*COLUMNS).where(_table.run.in_(keys), of_run(only))
        if contains:
            texts = (_table.id, _table.task_id, _table.family, _table.reason)
            select = select.where(sa.or_(*(text.icontains(contains, autoescape=True) for text in texts)))
        rows = [to_row(row) for row in connection.execute(query.narrow(select))]
    if len(rows) > PAGE:
        last = rows[PAGE - 1]
        return Page(rows[:PAGE], (last.created_at, last.id), True)
    return Page(rows, None if oldest is None else (oldest, None), oldest is None)


def _window(connection: sa.Connection, key: str, after: Cursor | None) -> float | None:
    """When the last trajectory of the window was created; None if the window holds all that is left."""
    query = sa.select(_table.created_at).where(_table.run == key)
    if after is not None:
        query = query.where(_table.created_at <= after[0])
    # the offset walks over entries of one index, WINDOW at most
    found: float | None = connection.execute(
        query.order_by(_table.created_at.desc()).offset(WINDOW - 1).limit(1)
    ).scalar()
    return found


@dataclass(frozen=True)
class Queue:
    """The groups of a stage that are not final, and what its ledger says of the rest."""

    groups: Counter[str]  # open groups by state
    most_open: int
    due: int  # groups that no later step than the next may train on
    committed: int
    ledger: dict[str, int]  # trajectories by what the run did with them


def read_queue(engine: sa.Engine, key: str, pace: Pace) -> Queue:
    """Of a stage, by its key."""
    open_states = [state.value for state in GroupState if state is not GroupState.final]
    mine = sa.select(groups.c.state, groups.c.min_version).where(groups.c.run == key, groups.c.state.in_(open_states))
    counts = sa.select(ledger.c.state, sa.func.count()).where(ledger.c.run == key).group_by(ledger.c.state)
    with reading(engine) as connection:
        step = committed(connection, key)
        rows = connection.execute(mine).all()  # few: the staleness bound limits them
        entries = {str(state): int(count) for state, count in connection.execute(counts)}
    untaken = [row for row in rows if row.state != GroupState.leased.value]
    return Queue(
        groups=Counter(row.state for row in rows),
        most_open=pace.most_open(step),
        due=sum(pace.deadline(row.min_version) <= step + 1 for row in untaken),
        committed=step,
        ledger=entries,
    )


@dataclass
class StepCost:
    attempts: int = 0
    solved: int = 0
    tokens: int = 0  # sampled


@dataclass
class Costs:
    """What the attempts of each committed step cost. Later calls of `read` fetch only what is new."""

    key: str
    steps: dict[int, StepCost] = field(default_factory=dict)
    through: int = 0

    def read(self, engine: sa.Engine) -> None:
        with reading(engine) as connection:
            newest = committed(connection, self.key)
            if newest <= self.through:
                return
            results = read_results(connection, self.key, max(self.through, newest - MOST_STEPS), newest)
        for result in results:
            cost = self.steps.setdefault(result.step, StepCost())
            cost.attempts += 1
            cost.solved += result.solved
            cost.tokens += result.tokens
        self.through = newest


def read_cycles(engine: sa.Engine, run: str) -> dict[int, list[Move]]:
    """The newest cycles of a run, the newest first, with their moves in order."""
    journal = Journal(engine, run)
    current = journal.current()
    numbers = range(current.number, max(0, current.number - MOST_CYCLES), -1) if current is not None else ()
    return {number: journal.history(number) for number in numbers}


@dataclass(frozen=True)
class RecentWork:
    """The newest trajectories with one run key."""

    key: str
    newest: float  # seconds since the epoch
    trajectories: int
    graded: int
    solved: int
    tokens: int  # sampled, of the graded ones
    reward: float | None  # mean


def read_recent(engine: sa.Engine, keys: Sequence[str], most: int) -> list[RecentWork]:
    """Of each key, what came of its newest `most` trajectories. The key that is busy now comes first."""
    found = []
    with reading(engine) as connection:
        for key in keys:
            names = ("created_at", "reward", "solved", "sampled_tokens")
            query = sa.select(*(_table[name] for name in names)).where(_table.run == key)
            rows = connection.execute(query.order_by(_table.created_at.desc()).limit(most)).all()
            graded = [row for row in rows if row.reward is not None]
            found.append(
                RecentWork(
                    key,
                    newest=rows[0].created_at if rows else 0.0,
                    trajectories=len(rows),
                    graded=len(graded),
                    solved=sum(bool(row.solved) for row in graded),
                    tokens=sum(row.sampled_tokens or 0 for row in graded),
                    reward=sum(row.reward for row in graded) / len(graded) if graded else None,
                )
            )
    return sorted(found, key=lambda work: -work.newest)


@dataclass
class VersionTraffic:
    """Conversations of users with one version."""

    conversations: int = 0
    contexts: int = 0
    judged: int = 0  # conversations that users said something about
    signals: Counter[str] = field(default_factory=Counter)  # by kind


def read_served(engine: sa.Engine, run: str, most: int) -> dict[str, VersionTraffic]:
    """Of the newest `most` conversations of production those that were recorded for the run, by version; the newest
    first."""
    names = ("id", "run", "provenance", "line", "newest_version", "segments", "state", "created_at")
    newest = sa.select(*(_table[name] for name in names)).where(_table.run == PRODUCTION)
    found_in = newest.order_by(_table.created_at.desc()).limit(most).subquery().c
    query = sa.select(found_in.id, found_in.line, found_in.newest_version, found_in.segments)
    query = query.where(of_run(run, found_in), found_in.state != "deleted").order_by(found_in.created_at.desc())
    mine = query.subquery()
    said = sa.select(feedback.c.trajectory, feedback.c.kind).join(mine, mine.c.id == feedback.c.trajectory)
    said = said.where(feedback.c.kind != "task")  # names the kind of task: no report
    found: dict[str, VersionTraffic] = {}
    by_id: dict[str, VersionTraffic] = {}
    with reading(engine) as connection:
        for row in connection.execute(query):
            version = f"{row.line}@{row.newest_version}" if row.line else "still open"
            served = by_id[row.id] = found.setdefault(version, VersionTraffic())
            served.conversations += 1
            served.contexts += row.segments or 0
        spoken = connection.execute(said).all()
    for served in (by_id[id] for id in {id for id, _ in spoken} & by_id.keys()):
        served.judged += 1
    for id, kind in spoken:
        if id in by_id:
            by_id[id].signals[kind] += 1
    return found
