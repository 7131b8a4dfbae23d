"""Which dispatcher plays which group. Several dispatchers share the groups of one ledger.

    dispatcher ── renews every RENEW_S ──► table `dispatchers`: a lease per name, by the database's clock
               ── start_group(holder=NAME) ──► table `groups`: who plays the group
               ── take_over ──► groups that run, and whose holder has no lease: their holder is this one now

A late renewal is no loss by itself: a dispatcher loses its name when another process takes the name over, or when
another dispatcher takes groups over. `take_over` first ends the names whose lease has expired (process = ""), in the
same transaction; such a dispatcher stops at its next renewal. One that cannot reach the database stops by itself when
its lease is over (`left_s`), before others may take its groups.

A process that was stopped for longer than its lease plays on until its next renewal, which is due at once. Whoever took
its groups waits RENEW_S before it plays them. A process that starts takes its own name over and does not wait: the
earlier process of the name should be dead. If it lives, both may play a group for RENEW_S, and with checkpoints in one
session. A trajectory is graded once and a group becomes ready once in any case.
"""

from __future__ import annotations

import secrets
import time

import sqlalchemy as sa

from rollmill.storage.database import now, reading, writing
from rollmill.storage.tables import dispatchers, groups, runs
from rollmill.types import GroupState

LEASE_S = 15.0
RENEW_S = 3.0


class Claims:
    """The claims of one dispatcher process. `run` is the key of the ledger, `name` that of the dispatcher."""

    def __init__(self, database: sa.Engine, run: str, name: str, *, lease_s: float = LEASE_S) -> None:
        self.run, self.name = run, name
        self._database, self._lease_s = database, lease_s
        self._process = secrets.token_hex(8)
        self._renewed = time.monotonic()

    def hold(self) -> None:
        """Take the name over, and begin its lease."""
        began, mine = time.monotonic(), self._mine()

        def work(connection: sa.Connection) -> None:
            row = {"process": self._process, "expires_at": now() + self._lease_s}
            if connection.execute(dispatchers.update().where(mine).values(**row)).rowcount == 0:
                connection.execute(dispatchers.insert().values(run=self.run, name=self.name, **row))

        writing(self._database, work)
        self._renewed = began

    def renew(self) -> bool:
        """Renew the lease, also a late one. False if another process has taken the name over, or another dispatcher its
        groups."""
        began, mine = time.monotonic(), self._mine() & (dispatchers.c.process == self._process)
        renewed = dispatchers.update().where(mine).values(expires_at=now() + self._lease_s)
        if writing(self._database, lambda connection: connection.execute(renewed).rowcount) == 0:
            return False
        self._renewed = began
        return True

    def left_s(self) -> float:
        """For how many seconds nobody can take over from this process, by its own clock; negative if somebody may."""
        return self._renewed + self._lease_s - time.monotonic()

    def plays(self, group_id: str) -> bool:
        """Whether the group runs, and this dispatcher is its holder."""
        query = sa.select(groups.c.id).where(self._running(), groups.c.id == group_id, groups.c.holder == self.name)
        with reading(self._database) as connection:
            return connection.execute(query).first() is not None

    def take_over(self, *, own: bool = False) -> list[str]:
        """Become the holder of all running groups whose holder has no lease. Returns their ids, oldest first. With
        `own`, the groups that already name this dispatcher are among them: an earlier process left them. Takes nothing
        if this process has lost its name."""
        if not own:
            query = self._left(dispatchers.c.expires_at > now(), own)
            with reading(self._database) as connection:  # it is asked often: most times there is nothing to write
                if connection.execute(query).first() is None:
                    return []
        others = (dispatchers.c.run == self.run) & (dispatchers.c.name != self.name)
        ended = dispatchers.update().where(others, dispatchers.c.expires_at <= now()).values(process="")

        def work(connection: sa.Connection) -> list[str]:
            connection.execute(sa.select(runs.c.id).where(runs.c.id == self.run).with_for_update())
            process = sa.select(dispatchers.c.process).where(self._mine()).with_for_update()
            if connection.execute(process).scalar() != self._process:
                return []
            connection.execute(ended)
            found = list(connection.execute(self._left(dispatchers.c.process != "", own)).scalars())
            named = (groups.c.run == self.run) & groups.c.id.in_(found)
            connection.execute(groups.update().where(named).values(holder=self.name))
            return found

        return writing(self._database, work)

    def _left(self, alive: sa.ColumnElement[bool], own: bool) -> sa.Select[str]:
        """The running groups whose holder is none of the dispatchers that are `alive`."""
        leases = sa.select(dispatchers.c.name).where(dispatchers.c.run == self.run, alive)
        left = groups.c.holder.is_(None) | groups.c.holder.not_in(leases)
        left = left | (groups.c.holder == self.name) if own else left & (groups.c.holder.is_distinct_from(self.name))
        return sa.select(groups.c.id).where(self._running(), left).order_by(groups.c.created_at, groups.c.id)

    def _running(self) -> sa.ColumnElement[bool]:
        return (groups.c.run == self.run) & (groups.c.state == GroupState.running.value)

    def _mine(self) -> sa.ColumnElement[bool]:
        return (dispatchers.c.run == self.run) & (dispatchers.c.name == self.name)
