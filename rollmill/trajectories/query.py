"""Which trajectories to list, and in which order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import sqlalchemy as sa

from rollmill.storage.tables import trajectories
from rollmill.trajectories.storable import to_text

Cursor = tuple[float, str | None]  # created_at and id of the last one that was seen; without id: all of that moment
Range = tuple[float | None, float | None]  # lowest and highest, both included; None: no limit
Order = Literal["newest", "oldest", "reward", "length", "task", "version"]
ORDERS: tuple[str, ...] = get_args(Order)
_table = trajectories.c
_ORDER_BY: dict[str, tuple[Any, ...]] = {
    "newest": (),
    "oldest": (_table.created_at,),
    "reward": (sa.nulls_last(_table.reward.desc()),),
    "length": (sa.nulls_last(_table.tokens.desc()),),
    "task": (_table.task_id,),
    "version": (sa.nulls_last(_table.newest_version.desc()),),
}


@dataclass(frozen=True)
class TrajectoryQuery:
    """Every field that is set narrows the list. Trajectories that are equal in `order` come newest first."""

    run: str | None = None  # exactly this key
    state: str | None = None
    group_id: str | None = None
    split: str | None = None
    line: str | None = None
    task_prefix: str | None = None
    id_prefix: str | None = None
    solved: bool | None = None
    reward: Range = (None, None)
    length: Range = (None, None)  # in tokens
    version: Range = (None, None)  # of any token in it
    of_run: str | None = None  # this run's id: trajectories of its stages and evaluations too
    created: Range = (None, None)  # seconds since the epoch
    after: Cursor | None = None  # what follows it in the order `newest`: a next page that costs as much as the first
    order: Order = "newest"
    limit: int | None = None

    def narrow(self, query: sa.Select[Any]) -> sa.Select[Any]:
        for name in ("run", "state", "group_id", "split", "line"):
            wanted = getattr(self, name)
            if wanted is not None:
                query = query.where(_table[name] == to_text(wanted))
        if self.of_run is not None:
            within = _table.run.startswith(to_text(f"{self.of_run}/"), autoescape=True)
            query = query.where((_table.run == to_text(self.of_run)) | within)
        if self.solved is not None:
            query = query.where(_table.solved.is_(self.solved))
        for column, prefix in ((_table.task_id, self.task_prefix), (_table.id, self.id_prefix)):
            if prefix is not None:
                query = query.where(column.startswith(to_text(prefix), autoescape=True))
        for lowest, highest, wanted in (
            (_table.reward, _table.reward, self.reward),
            (_table.tokens, _table.tokens, self.length),
            (_table.oldest_version, _table.newest_version, self.version),
            (_table.created_at, _table.created_at, self.created),
        ):
            if wanted[0] is not None:
                query = query.where(highest >= wanted[0])
            if wanted[1] is not None:
                query = query.where(lowest <= wanted[1])
        if self.after is not None:
            at, id = self.after
            later = _table.created_at < at
            same = sa.false() if id is None else (_table.created_at == at) & (_table.id > to_text(id))
            query = query.where(_table.created_at <= at, later | same)
        return query.order_by(*_ORDER_BY[self.order], _table.created_at.desc(), _table.id).limit(self.limit)
