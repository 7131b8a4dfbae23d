"""All tables of the database: facts about trajectories, each run's ledger, keys, cycles and leases.

A new database is made from them. What a change needs for databases that exist: `rollmill/storage/migrations`.

    trajectories ──< rewards            append-only; the row also carries the newest one, which listings show
    gradings ──< rewards                with which settings stored trajectories were graded again
                 ──< feedback           append-only; what users said, often days later
    runs ──< groups ──< ledger          what this run did with a trajectory, keyed (run, trajectory)
         ──< steps ──< step_trajectories  exactly what a step trains on; rows are inserted and never changed
                   ──< commits          the versions a step became: one per line
    keys                                API keys of the gateway, by run
    cycles ──< cycle_moves              the states of real-time RL, and how they came about
    splits                              how the gateway divides production between versions
    engines                             who serves the run now: registrations with a lease
    dispatchers                         who plays groups now: a lease per dispatcher, by run

Facts and ledgers are separate, so another run can read the same experience again. JSON is stored in text columns: it is
always read whole, and PostgreSQL's JSON types refuse some of what agents print.
"""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy import Column, ForeignKey, ForeignKeyConstraint, Index, Integer, Table, Text

metadata = sa.MetaData()
_Time = sa.Double  # seconds since the epoch
_Serial = sa.BigInteger().with_variant(Integer, "sqlite")  # SQLite numbers rows only if the column type is INTEGER

trajectories = Table(
    "trajectories",
    metadata,
    Column("id", Text, primary_key=True),
    Column("run", Text, nullable=False),
    Column("group_id", Text, nullable=False),
    Column("task_id", Text, nullable=False),
    Column("traffic", Text, nullable=False),
    Column("split", Text),  # split of the task, copied from the provenance because people filter by it
    Column("family", Text),
    Column("state", Text, nullable=False),
    Column("reason", Text),
    Column("payload_key", Text),
    Column("submission_key", Text),
    Column("tokens", Integer),
    Column("sampled_tokens", Integer),
    Column("segments", Integer),
    # facts of the segments, written by the seal, so that selecting by them opens no payloads
    Column("line", Text),
    Column("form", Text),
    Column("oldest_version", Integer),
    Column("newest_version", Integer),
    Column("causes", Text),  # distinct, joined by commas
    Column("regions", Text),
    Column("reward_id", _Serial),  # the newest reward; no foreign key, because rewards refer to this table
    Column("reward", sa.Double),
    Column("provenance", Text, nullable=False),
    Column("created_at", _Time, nullable=False),
    Column("finished_at", _Time),
    Column("solved", sa.Boolean),  # of the newest reward; with several rewards it does not follow from their sum
    Column("grading", _Serial),  # of the newest reward
    Column("turns", Integer),  # answers of the model; a fact of the segments too
    Index("trajectories_by_run", "run", "created_at"),
    Index("trajectories_by_group", "group_id"),
    Index("trajectories_by_age", "created_at", "id"),
    Index("trajectories_by_end", "run", "finished_at", "id"),
)
rewards = Table(
    "rewards",
    metadata,
    Column("id", _Serial, primary_key=True, autoincrement=True),
    Column("trajectory", Text, ForeignKey("trajectories.id"), nullable=False, index=True),
    Column("value", sa.Double, nullable=False),
    Column("parts", Text, nullable=False),
    Column("evidence", Text, nullable=False),
    Column("grader", Text, nullable=False),
    Column("created_at", _Time, nullable=False),
    Column("grading", _Serial),  # NULL: given when the trajectory ended, with the rewards of its run
    sqlite_autoincrement=True,  # a number is never reused: steps refer to it
)
gradings = Table(
    "gradings",
    metadata,
    Column("id", _Serial, primary_key=True, autoincrement=True),
    Column("run", Text, nullable=False),
    Column("rewards", Text, nullable=False),  # their settings
    Column("created_at", _Time, nullable=False),
    sqlite_autoincrement=True,
)
feedback = Table(
    "feedback",
    metadata,
    Column("id", _Serial, primary_key=True, autoincrement=True),
    Column("trajectory", Text, ForeignKey("trajectories.id"), nullable=False, index=True),
    Column("kind", Text, nullable=False),
    Column("value", sa.Double),
    Column("data", Text, nullable=False),
    Column("created_at", _Time, nullable=False),
    Column("given_id", Text),  # the sender's own id; NULL if it gave none
    Index("feedback_by_given_id", "trajectory", "given_id", unique=True),
    sqlite_autoincrement=True,
)
runs = Table(
    "runs",
    metadata,
    Column("id", Text, primary_key=True),
    Column("created_at", _Time, nullable=False),
    Column("started", Integer, nullable=False, server_default="0"),  # groups that the run's dispatchers started
    Column("changes", sa.BigInteger, nullable=False, server_default="0"),  # of its untaken groups, see `groups.changed`
)
groups = Table(
    "groups",
    metadata,
    Column("run", Text, ForeignKey("runs.id"), primary_key=True),
    Column("id", Text, primary_key=True),
    Column("task_id", Text, nullable=False),
    Column("size", Integer, nullable=False),
    Column("state", Text, nullable=False),
    Column("min_version", Integer, nullable=False),
    Column("step", Integer),  # that took it, or closed it while it looked for its own
    Column("created_at", _Time, nullable=False),
    Column("ready_at", _Time),
    Column("origin", Text),  # the run that it was admitted from; NULL: the run's dispatcher started it
    Column("holder", Text),  # the dispatcher that plays it
    Column("changed", sa.BigInteger, nullable=False, server_default="0"),  # the number of its last change in the run
    Index("groups_by_state", "run", "state", "ready_at", "id"),
    Index("groups_by_step", "run", "state", "step"),
    Index("groups_by_change", "run", "changed"),
)
ledger = Table(
    "ledger",
    metadata,
    Column("run", Text, primary_key=True),
    Column("trajectory", Text, ForeignKey("trajectories.id"), primary_key=True),
    Column("group_id", Text, nullable=False),
    Column("state", Text, nullable=False),
    Column("reason", Text),
    Column("step", Integer),  # the step that decided on it
    ForeignKeyConstraint(["run", "group_id"], ["groups.run", "groups.id"]),
    Index("ledger_by_group", "run", "group_id"),
    Index("ledger_by_state", "run", "state", "step"),
    Index("ledger_by_step", "run", "step"),
    Index("ledger_by_trajectory", "trajectory"),
)
steps = Table(
    "steps",
    metadata,
    Column("run", Text, ForeignKey("runs.id"), primary_key=True),
    Column("number", Integer, primary_key=True),
    Column("line", Text, nullable=False),
    Column("groups", Text, nullable=False),  # JSON list: a repeated step uses the same order
    Column("created_at", _Time, nullable=False),
    Column("lr", sa.Double),
)
step_trajectories = Table(
    "step_trajectories",
    metadata,
    # the key does not contain the step: a trajectory is in at most one step of a run
    Column("run", Text, primary_key=True),
    Column("trajectory", Text, ForeignKey("trajectories.id"), primary_key=True),
    Column("step", Integer, nullable=False),
    Column("position", Integer, nullable=False),
    Column("reward_id", _Serial, ForeignKey("rewards.id"), nullable=False),
    Column("reward", sa.Double, nullable=False),
    Column("advantage", sa.Double, nullable=False),
    ForeignKeyConstraint(["run", "step"], ["steps.run", "steps.number"]),
    Index("step_trajectories_by_step", "run", "step", "position", unique=True),
)
commits = Table(
    "commits",
    metadata,
    Column("run", Text, primary_key=True),
    Column("step", Integer, primary_key=True),
    Column("line", Text, primary_key=True),
    Column("number", Integer, nullable=False),
    Column("digest", Text, nullable=False),
    Column("created_at", _Time, nullable=False),
    ForeignKeyConstraint(["run", "step"], ["steps.run", "steps.number"]),
)
keys = Table(
    "keys",
    metadata,
    Column("id", Text, primary_key=True),
    Column("run", Text, nullable=False),
    Column("hash", Text, nullable=False),  # SHA-256 of the secret
    Column("name", Text, nullable=False),
    Column("scopes", Text, nullable=False),  # joined by commas
    Column("created_at", _Time, nullable=False),
    Column("expires_at", _Time),
    Column("revoked_at", _Time),
    Column("requests_per_minute", Integer),
    Column("tokens_per_minute", Integer),
    Column("budget_tokens", sa.BigInteger),
    Column("used_tokens", sa.BigInteger, nullable=False),
    Column("consent", Text),
    Index("keys_by_run", "run", "created_at"),
)
cycles = Table(
    "cycles",
    metadata,
    Column("run", Text, primary_key=True),
    Column("number", Integer, primary_key=True),
    Column("state", Text, nullable=False),
    Column("facts", Text, nullable=False),  # what was found out so far
    Column("started_at", _Time, nullable=False),
    Column("updated_at", _Time, nullable=False),
)
cycle_moves = Table(
    "cycle_moves",
    metadata,
    Column("run", Text, primary_key=True),
    Column("number", Integer, primary_key=True),
    Column("position", Integer, primary_key=True),
    Column("state", Text, nullable=False),
    Column("reason", Text, nullable=False),
    Column("at", _Time, nullable=False),
    ForeignKeyConstraint(["run", "number"], ["cycles.run", "cycles.number"]),
)
splits = Table(
    "splits",
    metadata,
    Column("run", Text, primary_key=True),
    Column("model", Text, primary_key=True),
    Column("weights", Text, nullable=False),  # name → weight
    Column("updated_at", _Time, nullable=False),
)
engines = Table(
    "engines",
    metadata,
    Column("fleet", Text, primary_key=True),  # the run, or a service of it: their engines serve one gateway or several
    Column("name", Text, primary_key=True),
    Column("url", Text, nullable=False),
    Column("region", Text, nullable=False),
    Column("kind", Text, nullable=False),
    Column("form", Text, nullable=False),
    Column("wire", Integer, nullable=False),  # version of the contract between gateway and engine
    Column("capacity", Integer, nullable=False),  # requests that it decodes together
    Column("expires_at", _Time, nullable=False),  # by the database's clock
)
dispatchers = Table(
    "dispatchers",
    metadata,
    Column("run", Text, primary_key=True),  # with its stage, as in the ledger
    Column("name", Text, primary_key=True),
    Column("process", Text, nullable=False),  # random: which process has the name
    Column("expires_at", _Time, nullable=False),  # by the database's clock
)
