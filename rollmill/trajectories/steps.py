"""The step record in SQL: what a step trains on, fixed before it runs, and the versions it became.

Functions over an open connection; `Ledger` wraps each in a transaction that holds the run's lock. Rows of `steps`,
`step_trajectories` and `commits` are inserted and never changed.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy import bindparam

from rollmill.errors import TrajectoryChanged, TrajectoryError
from rollmill.storage.database import among
from rollmill.storage.tables import commits, ledger, rewards, step_trajectories, steps, trajectories
from rollmill.trajectories.storable import from_json, to_json, to_number, to_text
from rollmill.trajectories.table_rows import COLUMNS, TrajectoryRow, to_row
from rollmill.types import LEDGER_TRANSITIONS, LedgerState, StepRecord, TrajectoryState, Version


@dataclass(frozen=True)
class Commit:
    """A step became this version. A step has several commits if other hardware had to start a new line."""

    step: int
    version: Version
    digest: str
    created_at: float


# a parameter must not have the name of a column: SQLAlchemy would set that column to it
_of_run: sa.BindParameter[str] = bindparam("of_run")
_decided: sa.BindParameter[int] = bindparam("decided")
# the group in this ledger: production has none of its own
_ENTERED = tuple(ledger.c.group_id if column.name == "group_id" else column for column in COLUMNS)
_UNDECIDED = (
    sa.select(*_ENTERED)
    .join_from(ledger, trajectories, ledger.c.trajectory == trajectories.c.id)
    .where(
        ledger.c.run == _of_run,
        among(ledger.c.group_id, "named"),
        ledger.c.state == LedgerState.admitted.value,
    )
    .order_by(ledger.c.group_id, trajectories.c.created_at, trajectories.c.id)
)
# locked until the lease is written, so that nobody deletes a payload in between
_UNDECIDED_HELD = _UNDECIDED.with_for_update(read=True, of=trajectories)
_DECIDE = (
    ledger.update()
    .where(
        ledger.c.run == _of_run,
        ledger.c.trajectory == bindparam("key"),
        ledger.c.state == LedgerState.admitted.value,
    )
    .values(state=bindparam("target"), reason=bindparam("why"), step=_decided)
)
_TRAINED = (
    ledger.update()
    .where(ledger.c.run == _of_run, ledger.c.state == LedgerState.leased.value, ledger.c.step == _decided)
    .values(state=LedgerState.trained.value)
)
_PINNED = sa.select(rewards.c.id, rewards.c.trajectory, rewards.c.grading).where(among(rewards.c.id, "ids"))
_NEWEST = sa.select(sa.func.coalesce(sa.func.max(steps.c.number), 0)).where(steps.c.run == _of_run)
_FIRST = sa.select(sa.func.min(step_trajectories.c.step)).where(step_trajectories.c.run == _of_run).scalar_subquery()
_FIRST_TOKENS = (
    sa.select(sa.func.sum(trajectories.c.sampled_tokens), sa.func.count())
    .join_from(step_trajectories, trajectories, step_trajectories.c.trajectory == trajectories.c.id)
    .where(step_trajectories.c.run == _of_run, step_trajectories.c.step == _FIRST)
)
_COMMITTED = sa.select(sa.func.coalesce(sa.func.max(commits.c.step), 0)).where(commits.c.run == _of_run)
_COMMITS = sa.select(commits).where(commits.c.run == _of_run).order_by(commits.c.created_at, commits.c.step)
assert LedgerState.trained in LEDGER_TRANSITIONS[LedgerState.leased]


def undecided(connection: sa.Connection, run: str, group_ids: Sequence[str]) -> list[TrajectoryRow]:
    """The trajectories of these groups that are admitted and not yet decided on."""
    return [to_row(row) for row in connection.execute(_UNDECIDED, {"of_run": run, "named": list(group_ids)})]


def insert_step(connection: sa.Connection, record: StepRecord) -> None:
    last = newest(connection, record.run)
    if record.number != last + 1:
        raise TrajectoryError(
            f"step {record.number} cannot be written: step {last} is the newest of run {record.run!r}",
            hint="steps are numbered 1, 2, 3, … and written once; `Ledger.steps` returns those to run again",
        )
    check_complete(connection, record.run, record.groups, record.trajectories, record.excluded)
    step = {
        "run": record.run,
        "number": record.number,
        "line": record.line,
        "groups": to_json("groups", record.groups),
        "created_at": record.created_at,
        "lr": record.lr,
    }
    connection.execute(steps.insert(), step)
    key = {"run": record.run, "step": record.number}
    leased = [
        {
            **key,
            "trajectory": id,
            "position": position,
            "reward_id": pinned,
            "reward": to_number(f"the reward of {id}", reward),
            "advantage": to_number(f"the advantage of {id}", advantage),
        }
        for position, (id, (pinned, reward, advantage)) in enumerate(record.trajectories.items())
    ]
    if leased:
        connection.execute(step_trajectories.insert(), leased)
    decisions: dict[str, tuple[LedgerState, str | None]] = dict.fromkeys(
        record.trajectories, (LedgerState.leased, None)
    )
    decide(connection, record.run, {**decisions, **record.excluded}, record.number)


def check_complete(
    connection: sa.Connection,
    run: str,
    group_ids: Sequence[str],
    leased: Mapping[str, tuple[int, float, float]],
    excluded: Mapping[str, tuple[LedgerState, str]],
) -> None:
    """Refuse a decision that omits a trajectory of the groups, names another one, pins the reward of another one, or
    mixes two gradings in a group."""
    held = connection.execute(_UNDECIDED_HELD, {"of_run": run, "named": list(group_ids)}).all()
    states = {row.id: row.state for row in held}
    gone = [id for id in leased if id in states and states[id] != TrajectoryState.graded]
    if gone:
        raise TrajectoryChanged(f"{gone[0]} is {states[gone[0]]}, so no step can train on it", hint="choose again")
    wrong = ["a group is named twice"] if len(set(group_ids)) < len(group_ids) else []
    wrong += [f"{id} is both trained on and excluded" for id in leased.keys() & excluded.keys()]
    wrong += [f"{id} is left out" for id in states.keys() - leased.keys() - excluded.keys()]
    wrong += [f"{id} is not an admitted member" for id in (leased.keys() | excluded.keys()) - states.keys()]
    if leased:
        ids = [pinned for pinned, _, _ in leased.values()]
        graded = {(row.trajectory, row.id): row.grading for row in connection.execute(_PINNED, {"ids": ids})}
        wrong += [
            f"reward {pinned} is not of {id}" for id, (pinned, _, _) in leased.items() if (id, pinned) not in graded
        ]
        groups = {row.id: row.group_id for row in held}
        used = {(groups.get(id), graded.get((id, pinned))) for id, (pinned, _, _) in leased.items()}
        wrong += ["a group is trained on two gradings"] if len(used) > len({group for group, _ in used}) else []
    if wrong:
        more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise TrajectoryError(
            f"groups {', '.join(group_ids)} of run {run!r} do not add up: {'; '.join(sorted(wrong)[:5])}{more}",
            hint="a graded trajectory of these groups is trained on, every other one is excluded with a reason",
        )


def decide(
    connection: sa.Connection, run: str, decisions: Mapping[str, tuple[LedgerState, str | None]], step: int | None
) -> None:
    """Set the ledger state of admitted trajectories. Every state but `leased` needs a reason."""
    rows = []
    for id, (state, why) in decisions.items():
        if state not in LEDGER_TRANSITIONS[LedgerState.admitted] or not (why or state == LedgerState.leased):
            raise TrajectoryError(f"{id} cannot go from admitted to {state} with the reason {why!r}")
        target = {"target": LedgerState(state).value, "why": to_text(why) if why else None}
        rows.append({"of_run": run, "key": id, "decided": step, **target})
    if rows:
        connection.execute(_DECIDE, rows)


def insert_commit(connection: sa.Connection, run: str, step: int, version: Version, digest: str) -> bool:
    """Returns False if exactly this commit exists already."""
    for one in read_commits(connection, run, step):
        if (one.version, one.digest) == (version, digest):
            return False
        if one.version.line == version.line:
            raise TrajectoryError(
                f"step {step} is committed as {one.version} {one.digest[:12]}, not as {version} {digest[:12]}",
                hint="other bits need a new line that starts from the checkpoint",
            )
    written = newest(connection, run)
    before = committed(connection, run)
    if not 1 <= step <= min(before + 1, written):
        raise TrajectoryError(
            f"step {step} cannot be committed: run {run!r} has {written} written and {before} committed",
            hint="write_step comes first, and steps are committed in order",
        )
    fields = {"run": run, "step": step, "line": version.line, "number": version.number, "digest": digest}
    connection.execute(commits.insert(), {**fields, "created_at": time.time()})
    connection.execute(_TRAINED, {"of_run": run, "decided": step})
    return True


def newest(connection: sa.Connection, run: str) -> int:
    """The newest written step, committed or not; 0 if there is none."""
    return connection.execute(_NEWEST, {"of_run": run}).scalar_one()


def first_tokens(connection: sa.Connection, run: str) -> float | None:
    """It never changes once it is there: steps are created once, and a deleted trajectory keeps its counts."""
    total, count = connection.execute(_FIRST_TOKENS, {"of_run": run}).one()
    return float(total or 0) / count if count else None


def committed(connection: sa.Connection, run: str) -> int:
    return connection.execute(_COMMITTED, {"of_run": run}).scalar_one()


def read_commits(connection: sa.Connection, run: str, step: int | None = None) -> list[Commit]:
    query = _COMMITS if step is None else _COMMITS.where(commits.c.step == step)
    rows = connection.execute(query, {"of_run": run})
    return [Commit(row.step, Version(row.line, row.number), row.digest, row.created_at) for row in rows]


def read_steps(connection: sa.Connection, run: str, after: int, last: int | None = None) -> list[StepRecord]:
    """The records as they were written, with trajectories in order."""

    def some(table: sa.Table, number: sa.Column[int], *order: sa.Column[int]) -> sa.Select[tuple[object, ...]]:
        query = sa.select(table).where(table.c.run == run, number > after).order_by(number, *order)
        return query if last is None else query.where(number <= last)

    leased: dict[int, dict[str, tuple[int, float, float]]] = {}
    for row in connection.execute(some(step_trajectories, step_trajectories.c.step, step_trajectories.c.position)):
        leased.setdefault(row.step, {})[row.trajectory] = (row.reward_id, row.reward, row.advantage)
    excluded: dict[int, dict[str, tuple[LedgerState, str]]] = {}
    for row in connection.execute(some(ledger, ledger.c.step)):
        if row.trajectory not in leased.get(row.step, {}):
            excluded.setdefault(row.step, {})[row.trajectory] = (LedgerState(row.state), row.reason)
    return [
        StepRecord(
            run=run,
            number=row.number,
            line=row.line,
            groups=tuple(from_json(row.groups)),
            trajectories=leased.get(row.number, {}),
            excluded=excluded.get(row.number, {}),
            created_at=row.created_at,
            lr=row.lr,
        )
        for row in connection.execute(some(steps, steps.c.number))
    ]
