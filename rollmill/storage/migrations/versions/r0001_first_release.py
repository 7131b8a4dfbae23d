"""The schema of 0.1.0: facts about trajectories, and each run's books. Databases without a revision have it."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op
from sqlalchemy import Column, ForeignKey, ForeignKeyConstraint

revision = "0001"
down_revision = None

_SERIAL = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    versions = op.create_table("schema_version", _text("component", primary_key=True), _whole("version"))
    op.bulk_insert(versions, [{"component": "trajectories", "version": 1}])
    _create_trajectories()
    _create_books()
    _create_steps()


def _create_trajectories() -> None:
    op.create_table(
        "trajectories",
        _text("id", primary_key=True),
        *map(_text, ("run", "group_id", "task_id", "traffic")),
        *(_text(name, nullable=True) for name in ("split", "family")),
        _text("state"),
        *(_text(name, nullable=True) for name in ("reason", "payload_key", "submission_key")),
        *(_whole(name, nullable=True) for name in ("tokens", "sampled_tokens", "segments")),
        *(_text(name, nullable=True) for name in ("line", "form")),
        *(_whole(name, nullable=True) for name in ("oldest_version", "newest_version")),
        *(_text(name, nullable=True) for name in ("causes", "regions")),
        Column("reward_id", _SERIAL),
        _real("reward", nullable=True),
        _text("provenance"),
        _real("created_at"),
        _real("finished_at", nullable=True),
    )
    op.create_index("trajectories_by_run", "trajectories", ["run", "created_at"])
    op.create_index("trajectories_by_group", "trajectories", ["group_id"])
    _create_appended("rewards", _real("value"), *map(_text, ("parts", "evidence", "grader")))
    _create_appended("feedback", _text("kind"), _real("value", nullable=True), _text("data"))


def _create_appended(name: str, *columns: Column[Any]) -> None:
    """A table of numbered facts about trajectories."""
    op.create_table(
        name,
        Column("id", _SERIAL, primary_key=True, autoincrement=True),
        Column("trajectory", sa.Text, ForeignKey("trajectories.id"), nullable=False, index=True),
        *columns,
        _real("created_at"),
        sqlite_autoincrement=True,
    )


def _create_books() -> None:
    op.create_table("runs", _text("id", primary_key=True), _real("created_at"))
    op.create_table(
        "groups",
        Column("run", sa.Text, ForeignKey("runs.id"), primary_key=True),
        _text("id", primary_key=True),
        _text("task_id"),
        _whole("size"),
        _text("state"),
        _whole("min_version"),
        _whole("step", nullable=True),
        _real("created_at"),
        _real("ready_at", nullable=True),
    )
    op.create_index("groups_by_state", "groups", ["run", "state", "ready_at", "id"])
    op.create_table(
        "ledger",
        _text("run", primary_key=True),
        Column("trajectory", sa.Text, ForeignKey("trajectories.id"), primary_key=True),
        _text("group_id"),
        _text("state"),
        _text("reason", nullable=True),
        _whole("step", nullable=True),
        ForeignKeyConstraint(["run", "group_id"], ["groups.run", "groups.id"]),
    )
    op.create_index("ledger_by_group", "ledger", ["run", "group_id"])
    op.create_index("ledger_by_state", "ledger", ["run", "state", "step"])


def _create_steps() -> None:
    op.create_table(
        "steps",
        Column("run", sa.Text, ForeignKey("runs.id"), primary_key=True),
        _whole("number", primary_key=True),
        _text("line"),
        _text("groups"),
        _real("created_at"),
    )
    op.create_table(
        "step_trajectories",
        _text("run", primary_key=True),
        Column("trajectory", sa.Text, ForeignKey("trajectories.id"), primary_key=True),
        _whole("step"),
        _whole("position"),
        Column("reward_id", _SERIAL, ForeignKey("rewards.id"), nullable=False),
        _real("reward"),
        _real("advantage"),
        ForeignKeyConstraint(["run", "step"], ["steps.run", "steps.number"]),
    )
    op.create_index("step_trajectories_by_step", "step_trajectories", ["run", "step", "position"], unique=True)
    op.create_table(
        "commits",
        _text("run", primary_key=True),
        _whole("step", primary_key=True),
        _text("line", primary_key=True),
        _whole("number"),
        _text("digest"),
        _real("created_at"),
        ForeignKeyConstraint(["run", "step"], ["steps.run", "steps.number"]),
    )


def _text(name: str, *, primary_key: bool = False, nullable: bool = False) -> Column[Any]:
    return Column(name, sa.Text, primary_key=primary_key, nullable=nullable)


def _whole(name: str, *, primary_key: bool = False, nullable: bool = False) -> Column[Any]:
    return Column(name, sa.Integer, primary_key=primary_key, nullable=nullable)


def _real(name: str, *, nullable: bool = False) -> Column[Any]:
    return Column(name, sa.Double, nullable=nullable)
