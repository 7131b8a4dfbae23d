"""Which dispatcher plays which group. Several dispatchers share the groups of one ledger.

    dispatcher ── renews every RENEW_S ──► table `dispatchers`: a lease per name, by the database's clock
               ── start_group(holder=NAME) ──► table `groups`: who plays the group
               ── take_over ──► groups that run, and whose holder has no lease: their holder is this one now

A process that starts takes its name over, with the groups of that name: the earlier process of the name is dead, or
will notice at its next renewal that it is not needed any more. Until then both may play a group. That costs work and
harms nothing: the ledger lets a trajectory be graded once, and a group become ready once.
"""

from __future__ import annotations

import secrets

import sqlalchemy as sa

from rollmill.storage.database import now, reading, writing
from rollmill.trajectories.tables import dispatchers, groups, runs
from rollmill.types import GroupState

LEASE_S = 15.0
RENEW_S = 3.0


class Claims:
    """The claims of one dispatcher process. `run` is the key of the ledger, `name` that of the dispatcher."""

    def __init__(self, database: sa.Engine, run: str, name: str, *, lease_s: float = LEASE_S) -> None:
        self.run, self.name = run, name
        self._database, self._lease_s = database, lease_s
        self._process = secrets.token_hex(8)

    def hold(self) -> None:
        """Take the name over, and begin its lease."""
        mine = self._mine()

        def work(connection: sa.Connection) -> None:
            row = {"process": self._process, "expires_at": now() + self._lease_s}
            if connection.execute(dispatchers.update().where(mine).values(**row)).rowcount == 0:
                connection.execute(dispatchers.insert().values(run=self.run, name=self.name, **row))

        writing(self._database, work)

    def renew(self) -> bool:
        """Renew the lease. False if it has expired, or if another process has taken the name over: then others play
        the groups of this one."""
        mine = self._mine() & (dispatchers.c.process == self._process) & (dispatchers.c.expires_at > now())
        renewed = dispatchers.update().where(mine).values(expires_at=now() + self._lease_s)
        return writing(self._database, lambda connection: connection.execute(renewed).rowcount) > 0

    def take_over(self, *, own: bool = False) -> list[str]:
        """Become the holder of all running groups whose holder has no lease. Returns their ids, oldest first. With
        `own`, the groups that already name this dispatcher are among them: an earlier process left them."""
        leases = sa.select(dispatchers.c.name).where(dispatchers.c.run == self.run, dispatchers.c.expires_at > now())
        left = groups.c.holder.is_(None) | groups.c.holder.not_in(leases)
        left = left | (groups.c.holder == self.name) if own else left & (groups.c.holder.is_distinct_from(self.name))
        running = (groups.c.run == self.run) & (groups.c.state == GroupState.running.value)
        query = sa.select(groups.c.id).where(running, left).order_by(groups.c.created_at, groups.c.id)
        if not own:
            with reading(self._database) as connection:  # it is asked often: most times there is nothing to write
                if connection.execute(query).first() is None:
                    return []

        def work(connection: sa.Connection) -> list[str]:
            connection.execute(sa.select(runs.c.id).where(runs.c.id == self.run).with_for_update())
            found = list(connection.execute(query).scalars())
            named = (groups.c.run == self.run) & groups.c.id.in_(found)
            connection.execute(groups.update().where(named).values(holder=self.name))
            return found

        return writing(self._database, work)

    def _mine(self) -> sa.ColumnElement[bool]:
        return (dispatchers.c.run == self.run) & (dispatchers.c.name == self.name)
