"""All tables. Databases from before have other revisions and are refused."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op
from sqlalchemy import Column, ForeignKey, ForeignKeyConstraint, Index

revision = "0015"  # those up to 0014 are no longer read
down_revision = None

_SERIAL = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    _create_facts()
    _create_books()
    _create_steps()
    _create_keys()
    _create_cycles()
    _create_leases()


def _create_facts() -> None:
    op.create_table(
        "trajectories",
        _text("id", key=True),
        *map(_text, ("run", "group_id", "task_id", "traffic")),
        Column("split", sa.Text),
        Column("family", sa.Text),
        _text("state"),
        Column("reason", sa.Text),
        Column("payload_key", sa.Text),
        Column("submission_key", sa.Text),
        Column("tokens", sa.Integer),
        Column("sampled_tokens", sa.Integer),
        Column("segments", sa.Integer),
        Column("line", sa.Text),
        Column("form", sa.Text),
        Column("oldest_version", sa.Integer),
        Column("newest_version", sa.Integer),
        Column("causes", sa.Text),
        Column("regions", sa.Text),
        Column("reward_id", _SERIAL),
        Column("reward", sa.Double),
        _text("provenance"),
        _real("created_at"),
        Column("finished_at", sa.Double),
        Column("solved", sa.Boolean),
        Column("grading", _SERIAL),
        Column("turns", sa.Integer),
        Index("trajectories_by_run", "run", "created_at"),
        Index("trajectories_by_group", "group_id"),
        Index("trajectories_by_age", "created_at", "id"),
        Index("trajectories_by_end", "run", "finished_at", "id"),
    )
    op.create_table(
        "rewards",
        Column("id", _SERIAL, primary_key=True, autoincrement=True),
        Column("trajectory", sa.Text, ForeignKey("trajectories.id"), nullable=False, index=True),
        _real("value"),
        *map(_text, ("parts", "evidence", "grader")),
        _real("created_at"),
        Column("grading", _SERIAL),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "gradings",
        Column("id", _SERIAL, primary_key=True, autoincrement=True),
        *map(_text, ("run", "rewards")),
        _real("created_at"),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "feedback",
        Column("id", _SERIAL, primary_key=True, autoincrement=True),
        Column("trajectory", sa.Text, ForeignKey("trajectories.id"), nullable=False, index=True),
        _text("kind"),
        Column("value", sa.Double),
        _text("data"),
        _real("created_at"),
        Column("given_id", sa.Text),
        Index("feedback_by_given_id", "trajectory", "given_id", unique=True),
        sqlite_autoincrement=True,
    )


def _create_books() -> None:
    op.create_table(
        "runs",
        _text("id", key=True),
        _real("created_at"),
        Column("started", sa.Integer, nullable=False, server_default="0"),
        Column("changes", sa.BigInteger, nullable=False, server_default="0"),
    )
    op.create_table(
        "groups",
        Column("run", sa.Text, ForeignKey("runs.id"), primary_key=True),
        _text("id", key=True),
        _text("task_id"),
        _whole("size"),
        _text("state"),
        _whole("min_version"),
        Column("step", sa.Integer),
        _real("created_at"),
        Column("ready_at", sa.Double),
        Column("origin", sa.Text),
        Column("holder", sa.Text),
        Column("changed", sa.BigInteger, nullable=False, server_default="0"),
        Index("groups_by_state", "run", "state", "ready_at", "id"),
        Index("groups_by_step", "run", "state", "step"),
        Index("groups_by_change", "run", "changed"),
    )
    op.create_table(
        "ledger",
        _text("run", key=True),
        Column("trajectory", sa.Text, ForeignKey("trajectories.id"), primary_key=True),
        *map(_text, ("group_id", "state")),
        Column("reason", sa.Text),
        Column("step", sa.Integer),
        ForeignKeyConstraint(["run", "group_id"], ["groups.run", "groups.id"]),
        Index("ledger_by_group", "run", "group_id"),
        Index("ledger_by_state", "run", "state", "step"),
        Index("ledger_by_step", "run", "step"),
        Index("ledger_by_trajectory", "trajectory"),
    )


def _create_steps() -> None:
    op.create_table(
        "steps",
        Column("run", sa.Text, ForeignKey("runs.id"), primary_key=True),
        _whole("number", key=True),
        *map(_text, ("line", "groups")),
        _real("created_at"),
        Column("lr", sa.Double),
    )
    op.create_table(
        "step_trajectories",
        _text("run", key=True),
        Column("trajectory", sa.Text, ForeignKey("trajectories.id"), primary_key=True),
        *map(_whole, ("step", "position")),
        Column("reward_id", _SERIAL, ForeignKey("rewards.id"), nullable=False),
        *map(_real, ("reward", "advantage")),
        ForeignKeyConstraint(["run", "step"], ["steps.run", "steps.number"]),
        Index("step_trajectories_by_step", "run", "step", "position", unique=True),
    )
    op.create_table(
        "commits",
        _text("run", key=True),
        _whole("step", key=True),
        _text("line", key=True),
        _whole("number"),
        _text("digest"),
        _real("created_at"),
        ForeignKeyConstraint(["run", "step"], ["steps.run", "steps.number"]),
    )


def _create_keys() -> None:
    op.create_table(
        "keys",
        _text("id", key=True),
        *map(_text, ("run", "hash", "name", "scopes")),
        _real("created_at"),
        Column("expires_at", sa.Double),
        Column("revoked_at", sa.Double),
        Column("requests_per_minute", sa.Integer),
        Column("tokens_per_minute", sa.Integer),
        Column("budget_tokens", sa.BigInteger),
        Column("used_tokens", sa.BigInteger, nullable=False),
        Column("consent", sa.Text),
        Index("keys_by_run", "run", "created_at"),
    )


def _create_cycles() -> None:
    op.create_table(
        "cycles",
        _text("run", key=True),
        _whole("number", key=True),
        *map(_text, ("state", "facts")),
        *map(_real, ("started_at", "updated_at")),
    )
    op.create_table(
        "cycle_moves",
        _text("run", key=True),
        _whole("number", key=True),
        _whole("position", key=True),
        *map(_text, ("state", "reason")),
        _real("at"),
        ForeignKeyConstraint(["run", "number"], ["cycles.run", "cycles.number"]),
    )
    op.create_table(
        "splits",
        _text("run", key=True),
        _text("model", key=True),
        _text("weights"),
        _real("updated_at"),
    )


def _create_leases() -> None:
    op.create_table(
        "engines",
        _text("fleet", key=True),
        _text("name", key=True),
        *map(_text, ("url", "region", "kind", "form")),
        *map(_whole, ("wire", "capacity")),
        _real("expires_at"),
    )
    op.create_table(
        "dispatchers",
        _text("run", key=True),
        _text("name", key=True),
        _text("process"),
        _real("expires_at"),
    )


def _text(name: str, *, key: bool = False) -> Column[Any]:
    return Column(name, sa.Text, primary_key=key, nullable=False)


def _whole(name: str, *, key: bool = False) -> Column[Any]:
    return Column(name, sa.Integer, primary_key=key, nullable=False)


def _real(name: str) -> Column[Any]:
    return Column(name, sa.Double, nullable=False)
