"""The ledger of a run: which groups are open, what each step trains on, what the run did with every trajectory.

    group    running ──► waiting ──► leased ──► final         counts against the staleness bound until it is final
    ledger   admitted ─────────────► leased ──► trained       or stale | no_signal | dropped, each with a reason
             start_group group_ready write_step commit_step   `admit` enters groups that exist already, as waiting

Each method is one transaction. Every writer first locks the row of the run, so what it counts cannot change before it
writes. A killed process leaves nothing half-done. `write_step` comes before the update it describes and `commit_step`
after its weights are published, so a restart runs exactly the recorded steps again.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy import bindparam
from sqlalchemy.exc import IntegrityError

from rollmill.errors import TrajectoryChanged, TrajectoryError
from rollmill.storage.database import among, reading, writing
from rollmill.storage.tables import groups, ledger, runs, trajectories
from rollmill.trajectories import entering, steps
from rollmill.trajectories.admission import Experience, Room, Verdict
from rollmill.trajectories.changes import fail_unless_sealed, trajectory_rows
from rollmill.trajectories.results import Result, read_results
from rollmill.trajectories.staleness import Pace
from rollmill.trajectories.steps import Commit
from rollmill.trajectories.storable import from_json, to_key
from rollmill.trajectories.table_rows import COLUMNS, TrajectoryRow, to_row
from rollmill.types import (
    GROUP_TRANSITIONS,
    GroupState,
    LedgerState,
    StepRecord,
    TrafficClass,
    TrajectoryState,
    Version,
)

T = TypeVar("T")


@dataclass(frozen=True)
class GroupRow:
    id: str
    task_id: str
    size: int
    state: GroupState
    min_version: int  # committed when it was admitted; engines with older weights must not sample for it
    step: int | None
    created_at: float
    ready_at: float | None
    origin: str | None  # the run that it was admitted from; None: the run's dispatcher started it


@dataclass(frozen=True)
class NewGroup:
    id: str
    task_id: str
    ids: Sequence[str]  # of its trajectories
    provenance: Mapping[str, Any] = field(default_factory=dict)


_GROUP_COLUMNS = tuple(groups.c[name] for name in GroupRow.__annotations__)
_OPEN = [state.value for state in GroupState if state is not GroupState.final]
_UNSETTLED = (TrajectoryState.running, TrajectoryState.finished)
# a parameter must not have the name of a column: SQLAlchemy would set that column to it
_of_run: sa.BindParameter[str] = bindparam("of_run")

_LOCK = sa.select(runs.c.id).where(runs.c.id == _of_run).with_for_update()
_COUNT_OPEN = sa.select(sa.func.count()).where(groups.c.run == _of_run, groups.c.state.in_(_OPEN))
_COUNTERS = sa.select(runs.c.started, runs.c.changes).where(runs.c.id == _of_run)
_CHANGED = runs.update().where(runs.c.id == _of_run).values(changes=runs.c.changes + 1)
_ANOTHER = _CHANGED.values(started=runs.c.started + 1)
_NEXT_CHANGE = sa.select(runs.c.changes + 1).where(runs.c.id == _of_run).scalar_subquery()
_COUNTS = sa.select(ledger.c.state, sa.func.count()).where(ledger.c.run == _of_run).group_by(ledger.c.state)
_REASONS = (
    sa.select(ledger.c.state, ledger.c.reason, sa.func.count().label("number"))
    .where(ledger.c.run == _of_run, ledger.c.reason.is_not(None))
    .group_by(ledger.c.state, ledger.c.reason)
)
_MEMBERS = (
    sa.select(*COLUMNS)
    .join_from(ledger, trajectories, ledger.c.trajectory == trajectories.c.id)
    .where(ledger.c.run == _of_run, ledger.c.group_id == bindparam("group"))
    .order_by(trajectories.c.created_at, trajectories.c.id)
)
_ENTERED = sa.select(ledger.c.trajectory).where(ledger.c.run == _of_run, ledger.c.group_id == bindparam("group"))
_GROUPS = sa.select(*_GROUP_COLUMNS).where(groups.c.run == _of_run).order_by(groups.c.created_at, groups.c.id)
_NOT_TAKEN = (GroupState.running, GroupState.waiting)
_IS_UNTAKEN = groups.c.state.in_([state.value for state in _NOT_TAKEN])
_UNTAKEN = sa.select(*_GROUP_COLUMNS).where(groups.c.run == _of_run, _IS_UNTAKEN)
_CHANGED_SINCE = sa.select(*_GROUP_COLUMNS).where(groups.c.run == _of_run, groups.c.changed > bindparam("seen"))
_ADMITTED = sa.select(groups.c.id).where(groups.c.run == _of_run, _IS_UNTAKEN, groups.c.origin.is_not(None))
_UNTAKEN_BY_VERSION = (
    sa.select(groups.c.min_version, sa.func.count())
    .where(groups.c.run == _of_run, _IS_UNTAKEN)
    .group_by(groups.c.min_version)
)


def _move_groups(where: sa.ColumnElement[bool], source: GroupState, target: GroupState) -> sa.Update:
    assert target in GROUP_TRANSITIONS[source]
    there = (groups.c.run == _of_run) & (groups.c.state == source.value)
    return groups.update().where(there, where).values(state=target.value, changed=_NEXT_CHANGE)


_NAMED = among(groups.c.id, "named")
_READY = _move_groups(_NAMED, GroupState.running, GroupState.waiting).values(ready_at=bindparam("now"))
_LEASE = _move_groups(_NAMED, GroupState.waiting, GroupState.leased).values(step=bindparam("decided"))
_FINAL = _move_groups(groups.c.step == bindparam("decided"), GroupState.leased, GroupState.final)
_CLOSE_RUNNING, _CLOSE_WAITING = (
    _move_groups(_NAMED, source, GroupState.final).values(step=bindparam("decided", type_=sa.Integer))
    for source in (GroupState.running, GroupState.waiting)
)


class Ledger:
    """The ledger of one run. Safe to use from several threads and processes."""

    def __init__(self, engine: sa.Engine, run: str) -> None:
        self.run = to_key("the run", run)
        self._engine = engine
        with reading(engine) as connection:
            known = connection.execute(sa.select(runs.c.id).where(runs.c.id == run)).scalar()
        if known is None:
            row = {"id": run, "created_at": time.time()}
            with contextlib.suppress(IntegrityError):  # another process created it first
                writing(engine, lambda connection: connection.execute(runs.insert(), row))

    # groups: the dispatcher's side

    def start_group(
        self,
        name: Callable[[int], NewGroup],
        *,
        pace: Pace,
        traffic: TrafficClass = "rollout",
        committed: int | None = None,
        holder: str | None = None,
    ) -> tuple[NewGroup, int] | None:
        """Admit the next group and its trajectories: `name(index)` of the number of groups started before. Returns it
        with the version committed at that moment: no older version may sample for the group. Returns None, and changes
        nothing, while as many groups are open or started as `pace` allows, and if `committed` is given and is not that
        version: the task was chosen by the results up to another one.

        Index and version are read in the transaction that holds the run's lock, so dispatchers never want the same
        index. `name` runs meanwhile: it must be quick. `holder` is the dispatcher that plays the group, see claims.py.
        """

        def work(connection: sa.Connection) -> tuple[NewGroup, int] | None:
            # the run's row is locked, so no step is committed between this and the end of the transaction
            version = steps.committed(connection, self.run)
            started, changes = connection.execute(_COUNTERS, {"of_run": self.run}).one()
            open_ = connection.execute(_COUNT_OPEN, {"of_run": self.run}).scalar_one()
            full = pace.is_full(started, open_, version)
            if full or committed not in (None, version):
                return None
            group = name(started)
            self._insert(connection, group, version, traffic, {"holder": holder, "changed": changes + 1})
            connection.execute(_ANOTHER, {"of_run": self.run})
            return group, version

        return self._write(work)

    def _insert(
        self, connection: sa.Connection, group: NewGroup, version: int, traffic: TrafficClass, more: Mapping[str, Any]
    ) -> None:
        members = trajectory_rows(self.run, group.id, group.task_id, group.ids, group.provenance, traffic)
        row = {"run": self.run, "id": group.id, "task_id": group.task_id, "size": len(members), **more}
        state = {"state": GroupState.running.value, "created_at": time.time(), "min_version": version}
        try:
            connection.execute(groups.insert(), {**row, **state})
            connection.execute(trajectories.insert(), members)
            connection.execute(ledger.insert(), self._admitted(group.id, group.ids))
        except IntegrityError:
            raise TrajectoryError(
                f"group {group.id} or one of its trajectories already exists", hint="use new ids for a new group"
            ) from None

    def group_ready(self, group_id: str) -> None:
        """Mark a group as ready for the trainer: each of its trajectories is graded or has failed."""

        def work(connection: sa.Connection) -> None:
            for row in steps.undecided(connection, self.run, [group_id]):
                if row.state in _UNSETTLED:
                    raise TrajectoryError(f"group {group_id} is not ready: {row.id} is {row.state}")
            params = {"of_run": self.run, "named": [group_id], "now": time.time()}
            if connection.execute(_READY, params).rowcount == 0:
                return self._expect_group(connection, group_id, GroupState.waiting)
            connection.execute(_CHANGED, {"of_run": self.run})

        self._write(work)

    def replace_lost(self, group_id: str, old_id: str, new_id: str, reason: str = "lost") -> int | None:
        """Drop a trajectory that failed because of infrastructure, and admit a new attempt in its place.

        Returns the version committed at that moment, as `start_group` does. The group keeps the version it was
        admitted with, and so its deadline: its other trajectories have tokens that old. Returns None and changes
        nothing if the trajectory is sealed: it is not lost. A repeated call changes nothing.
        """

        def work(connection: sa.Connection) -> int | None:
            old = connection.execute(
                sa.select(*COLUMNS, ledger.c.state.label("entry"))
                .join_from(ledger, trajectories, ledger.c.trajectory == trajectories.c.id)
                .where(ledger.c.run == self.run, ledger.c.group_id == group_id, ledger.c.trajectory == old_id)
            ).first()
            entered = connection.execute(_ENTERED, {"of_run": self.run, "group": group_id}).scalars()
            done = old is not None and old.entry == LedgerState.dropped and new_id in set(entered)
            if not done and (old is None or old.entry != LedgerState.admitted):
                state = old.entry if old is not None else "unknown"
                raise TrajectoryError(f"{old_id} cannot be replaced in group {group_id}: it is {state} there")
            self._expect_group(connection, group_id, GroupState.running)
            if done:  # another holder of the group was first, or the first reply was lost
                return steps.committed(connection, self.run)
            assert old is not None
            if fail_unless_sealed(connection, old_id, reason):  # one that a user deleted stays deleted
                return None
            why = f"replaced by {new_id}: {old.reason or reason}"
            steps.decide(connection, self.run, {old_id: (LedgerState.dropped, why)}, None)
            provenance = {**from_json(old.provenance), "replaces": old_id}
            fresh = trajectory_rows(self.run, group_id, old.task_id, [new_id], provenance, old.traffic)
            connection.execute(trajectories.insert(), fresh)
            connection.execute(ledger.insert(), self._admitted(group_id, [new_id]))
            return steps.committed(connection, self.run)

        try:
            return self._write(work)
        except IntegrityError:
            raise TrajectoryError(f"{new_id} is already a trajectory", hint="a new attempt needs a new id") from None

    def close_group(self, group_id: str, excluded: Mapping[str, tuple[LedgerState, str]], step: int) -> None:
        """Make a group final without training on it. This makes room for the next group. `step`: the one that looks for
        groups at this moment; the group's results count from its commit on."""

        def work(connection: sa.Connection) -> None:
            params = {"of_run": self.run, "named": [group_id], "decided": step}
            if not any(
                connection.execute(statement, params).rowcount for statement in (_CLOSE_RUNNING, _CLOSE_WAITING)
            ):
                return self._expect_group(connection, group_id, GroupState.final)
            connection.execute(_CHANGED, {"of_run": self.run})
            steps.check_complete(connection, self.run, [group_id], {}, excluded)
            steps.decide(connection, self.run, excluded, None)

        self._write(work)

    def admit(self, found: Sequence[Experience], *, pace: Pace, dry_run: bool = False) -> list[Verdict]:
        """Admit groups that exist already, in this order (admission.py has the rules). One transaction for all.

        A stale group is recorded as such. Every other refusal changes nothing. Repeating a call changes nothing. With
        `dry_run`, nothing is changed at all.
        """

        def work(connection: sa.Connection) -> list[Verdict]:
            untaken = Counter[int]()
            for version, count in connection.execute(_UNTAKEN_BY_VERSION, {"of_run": self.run}):
                untaken[pace.deadline(version)] += count
            room = Room(
                pace,
                committed=steps.committed(connection, self.run),
                written=steps.newest(connection, self.run),
                open=connection.execute(_COUNT_OPEN, {"of_run": self.run}).scalar_one(),
                untaken=untaken,
            )
            there = entering.look(connection, self.run, found)
            verdicts = entering.judge(found, there, room)
            if not dry_run:
                changes = connection.execute(_COUNTERS, {"of_run": self.run}).one().changes
                if entering.enter(connection, self.run, zip(found, verdicts, strict=True), there, changes + 1):
                    connection.execute(_CHANGED, {"of_run": self.run})
            return verdicts

        try:
            return self._write(work)
        except IntegrityError:  # another stage of the run has just stored one of the trajectories
            return self._write(work)

    # steps: the trainer's side

    def changed_groups(self, seen: int | None) -> tuple[int, list[GroupRow]]:
        """The number of the newest change of the run's groups, and the groups that changed after number `seen`, taken
        ones too. With None: the untaken ones."""
        query = _UNTAKEN if seen is None else _CHANGED_SINCE
        with reading(self._engine) as connection:
            # read first: the next call finds again what changes in between
            newest = connection.execute(_COUNTERS, {"of_run": self.run}).one().changes
            rows = () if newest == seen else connection.execute(query, {"of_run": self.run, "seen": seen})
            return newest, [_to_group(row) for row in rows]

    def members(self, group_ids: Sequence[str]) -> dict[str, list[TrajectoryRow]]:
        """The trajectories of each group that no step has decided on yet."""
        found: dict[str, list[TrajectoryRow]] = {id: [] for id in group_ids}
        with reading(self._engine) as connection:
            for row in steps.undecided(connection, self.run, group_ids):
                found[row.group_id].append(row)
        return found

    def entered(self, group_id: str) -> list[TrajectoryRow]:
        """All trajectories of a group, also those that a step has decided on."""
        with reading(self._engine) as connection:
            return [to_row(row) for row in connection.execute(_MEMBERS, {"of_run": self.run, "group": group_id})]

    def write_step(self, record: StepRecord, considered: Collection[str] | None = None) -> None:
        """Lease the trajectories of a step before it runs. The record accounts for every trajectory of its groups.

        `considered`: the untaken groups that were there when these were chosen. TrajectoryChanged if another one has
        been admitted from elsewhere since then: it may be due in this step.
        """
        if record.run != self.run:
            raise TrajectoryError(f"a step of run {record.run!r} in the ledger of run {self.run!r}")

        def work(connection: sa.Connection) -> None:
            for id in connection.execute(_ADMITTED, {"of_run": self.run}).scalars():
                if considered is not None and id not in considered:
                    raise TrajectoryChanged(f"group {id} was admitted meanwhile", hint="choose again")
            steps.insert_step(connection, record)
            params = {"of_run": self.run, "named": list(record.groups), "decided": record.number}
            if connection.execute(_LEASE, params).rowcount != len(record.groups):
                for group_id in record.groups:
                    self._expect_group(connection, group_id, GroupState.leased, record.number)
            connection.execute(_CHANGED, {"of_run": self.run})

        self._write(work)

    def commit_step(self, number: int, version: Version, digest: str) -> None:
        """Mark the leased trajectories of a step as trained and its groups as final: its weights are published."""

        def work(connection: sa.Connection) -> None:
            if steps.insert_commit(connection, self.run, number, version, digest):
                connection.execute(_FINAL, {"of_run": self.run, "decided": number})
                connection.execute(_CHANGED, {"of_run": self.run})

        self._write(work)

    def steps(self, after: int = 0) -> list[StepRecord]:
        with reading(self._engine) as connection:
            return steps.read_steps(connection, self.run, after)

    def step(self, number: int) -> StepRecord | None:
        with reading(self._engine) as connection:
            found = steps.read_steps(connection, self.run, number - 1, number)
        return found[0] if found else None

    def committed(self) -> int:
        """The newest committed step, 0 if there is none."""
        with reading(self._engine) as connection:
            return steps.committed(connection, self.run)

    def commits(self) -> list[Commit]:
        """The version that each step became, in the order of the commits."""
        with reading(self._engine) as connection:
            return steps.read_commits(connection, self.run)

    def first_tokens(self) -> float | None:
        """Mean sampled tokens of the trajectories of the first step that has any; None before it."""
        with reading(self._engine) as connection:
            return steps.first_tokens(connection, self.run)

    # reports

    def results(self, after: int, through: int) -> list[Result]:
        """What came of the graded trajectories of the committed steps from `after` + 1 to `through`, oldest first."""
        with reading(self._engine) as connection:
            return read_results(connection, self.run, after, through)

    def open_groups(self) -> int:
        """The number of groups that are not final, which the staleness bound limits."""
        with reading(self._engine) as connection:
            return connection.execute(_COUNT_OPEN, {"of_run": self.run}).scalar_one()

    def groups_started(self) -> int:
        """The number of groups that the dispatcher has ever started, including final ones."""
        with reading(self._engine) as connection:
            return connection.execute(_COUNTERS, {"of_run": self.run}).one().started

    def is_spent(self, pace: Pace) -> bool:
        """Whether training ended before its last step, as Pace.is_spent says. A run without any step has not begun."""
        counts = self.groups_started(), self.open_groups(), self.committed()
        return counts[-1] > 0 and pace.is_spent(*counts)

    def groups(self, state: GroupState | str | None = None) -> list[GroupRow]:
        """Oldest first."""
        query = _GROUPS if state is None else _GROUPS.where(groups.c.state == str(state))
        with reading(self._engine) as connection:
            return [_to_group(row) for row in connection.execute(query, {"of_run": self.run})]

    def counts(self) -> dict[str, int]:
        """The number of trajectories of the run per ledger state. Each is in exactly one."""
        counts = {state.value: 0 for state in LedgerState}
        with reading(self._engine) as connection:
            for state, number in connection.execute(_COUNTS, {"of_run": self.run}):
                counts[state] = number
        return counts

    def reasons(self) -> dict[tuple[str, str], int]:
        """(ledger state, reason) -> number of trajectories, for those that were not trained on."""
        with reading(self._engine) as connection:
            rows = connection.execute(_REASONS, {"of_run": self.run})
            return {(row.state, row.reason): row.number for row in rows}

    def _write(self, work: Callable[[sa.Connection], T]) -> T:
        def locked(connection: sa.Connection) -> T:
            connection.execute(_LOCK, {"of_run": self.run})
            return work(connection)

        return writing(self._engine, locked)

    def _admitted(self, group_id: str, ids: Sequence[str]) -> list[dict[str, Any]]:
        entry = {"run": self.run, "group_id": group_id, "state": LedgerState.admitted.value}
        return [{"trajectory": id, **entry} for id in ids]

    def _expect_group(
        self, connection: sa.Connection, group_id: str, state: GroupState, step: int | None = None
    ) -> None:
        query = _GROUPS.where(groups.c.id == group_id)
        found = connection.execute(query, {"of_run": self.run}).first()
        if found is None:
            raise TrajectoryError(f"run {self.run!r} has no group {group_id!r}")
        if found.state != state or (step is not None and found.step != step):
            where = f" to step {found.step}" if found.step is not None else ""
            allowed = ", ".join(sorted(GROUP_TRANSITIONS[GroupState(found.state)])) or "nothing"
            raise TrajectoryError(
                f"group {group_id} is {found.state}{where}, not {state}",
                hint=f"only {allowed} can follow {found.state}",
            )


def _to_group(row: sa.Row[Any]) -> GroupRow:
    fields = dict(row._mapping)
    fields["state"] = GroupState(fields["state"])
    return GroupRow(**fields)


class UntakenGroups:
    """The groups that no step has taken yet. A look reads those that changed since the one before, not all of them."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._seen: int | None = None
        self._groups: list[GroupRow] = []

    def look(self) -> list[GroupRow]:
        """Oldest first. The same list as before if nothing has changed."""
        before, (self._seen, changed) = self._seen, self._ledger.changed_groups(self._seen)
        if self._seen != before:
            known = {group.id: group for group in (*self._groups, *changed)}
            untaken = (group for group in known.values() if group.state in _NOT_TAKEN)
            self._groups = sorted(untaken, key=lambda group: (group.created_at, group.id))
        return self._groups
