"""Rows of the trajectory index, as they are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from rollmill.errors import TrajectoryError
from rollmill.storage.database import among
from rollmill.storage.tables import trajectories
from rollmill.trajectories.storable import from_json, is_key
from rollmill.types import LedgerState, TrafficClass, TrajectoryState

EVALUATION = "/eval-"  # in the key of an evaluation: see evals.run.Examination


@dataclass(frozen=True)
class TrajectoryRow:
    """The index row of a trajectory."""

    id: str
    run: str
    group_id: str
    task_id: str
    state: TrajectoryState
    reason: str | None
    traffic: TrafficClass
    payload_key: str | None
    submission_key: str | None
    tokens: int | None
    sampled_tokens: int | None
    segments: int | None
    created_at: float
    finished_at: float | None
    provenance: dict[str, Any]
    reward: float | None  # the newest
    reward_id: int | None
    solved: bool | None  # as the newest reward says
    grading: int | None  # of the newest reward; None: the run's own
    split: str | None
    family: str | None
    # facts of its tokens, once sealed
    line: str | None
    form: str | None
    oldest_version: int | None
    newest_version: int | None
    causes: str | None
    regions: str | None
    turns: int | None

    @property
    def unfit(self) -> str | None:
        """Why nothing may be trained on it, whatever stage asks; None if something may."""
        if not self.may_train:
            return "without consent to training"
        if EVALUATION in self.run:
            return "of an evaluation"
        return None if self.split in (None, "train") else f"of the split {self.split}"

    @property
    def may_train(self) -> bool:
        """Whether nobody's consent is missing."""
        return self.traffic != "production" or consent_of(self.provenance) == "train"


@dataclass(frozen=True)
class FeedbackRow:
    id: int
    kind: str
    value: float | None
    data: Any
    created_at: float


@dataclass(frozen=True)
class LedgerEntry:
    """What a run did with a trajectory."""

    run: str
    state: LedgerState
    step: int | None
    reason: str | None
    origin: str | None  # the run that it was admitted from, if it was


COLUMNS = tuple(trajectories.c[name] for name in TrajectoryRow.__annotations__)
_GET = sa.select(*COLUMNS).where(among(trajectories.c.id, "ids"))


def rows_of(connection: sa.Connection, ids: Sequence[str]) -> list[TrajectoryRow]:
    """In the given order. TrajectoryError if one does not exist."""
    rows = connection.execute(_GET, {"ids": list(filter(is_key, ids))})
    found = {row.id: to_row(row) for row in rows}
    for id in ids:
        if id not in found:
            raise missing(id)
    return [found[id] for id in ids]


def consent_of(provenance: Mapping[str, Any]) -> str:
    """What the user of a production conversation agreed to. Only what was said counts as consent to training."""
    return str(provenance.get("consent", "store"))


def to_row(row: sa.Row[Any]) -> TrajectoryRow:
    fields = dict(row._mapping)
    fields["state"] = TrajectoryState(fields["state"])
    fields["provenance"] = from_json(fields["provenance"])
    return TrajectoryRow(**fields)


def missing(id: str) -> TrajectoryError:
    return TrajectoryError(
        f"there is no trajectory {id!r:.300}", hint="`rollmill trajectories list` shows the existing ones"
    )
