"""The engines of a run register with a lease, and every gateway of the run follows the table.

    engine  ── PUT /engines/NAME, every RENEW_S ──►  any gateway  ──►  table `engines`  ──►  every gateway's router

An engine needs a gateway's URL and the engine token for this, never the password of the database: it may be in another
region. A lease is by the database's clock. An engine whose lease has expired gets no new request, whatever its health
says. So engines may join, leave and be pre-empted at any moment. While the database does not answer, the gateway goes
on with the engines that it knows; their health is checked as always.

A name has one holder. A process that registers takes the name over, and a renewal by an earlier holder at another URL
is refused: a host that was cut off and comes back does not replace its successor.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import Annotated, Any

import sqlalchemy as sa
from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rollmill.errors import GatewayError, StorageError
from rollmill.gateway.access.access import Access
from rollmill.gateway.config import EngineEndpoint
from rollmill.gateway.routing.router import Router
from rollmill.gateway.wire.body import parse_object
from rollmill.inference.engine_wire import WIRE
from rollmill.storage.database import now, reading, writing
from rollmill.storage.tables import engines
from rollmill.strict import describe_problem

log = logging.getLogger(__name__)
LEASE_S = 15.0
RENEW_S = 5.0
LOOK_S = 1.0  # between two looks at the table
_FORGET_S = 3600.0  # after which the row of an expired lease is deleted
_Text = Annotated[str, Field(min_length=1, max_length=200)]


class Registration(BaseModel):
    """What an engine says about itself."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)  # a newer engine may say more

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]
    url: Annotated[str, Field(pattern=r"^https?://[^/?#@\s]+$", max_length=300)]
    region: _Text
    kind: _Text
    form: _Text
    wire: int
    capacity: Annotated[int, Field(ge=1, le=1 << 20)]


@dataclass(frozen=True)
class Fleet:
    """The registered engines of one run, or of one service of it."""

    database: sa.Engine
    name: str
    token: str = field(repr=False)  # engines register with it, and ask for it
    _unreadable: set[str] = field(default_factory=set, repr=False, compare=False)  # engines that were logged as such

    def hold(self, engine: Registration, *, renews: bool, seconds: float = LEASE_S) -> bool:
        """Register an engine, or renew its lease. False if it renews what another process has taken over."""

        def work(connection: sa.Connection) -> bool:
            mine = (engines.c.fleet == self.name) & (engines.c.name == engine.name)
            held = connection.execute(sa.select(engines.c.url).where(mine).with_for_update()).scalar()
            if renews and held not in (None, engine.url):
                return False
            row = {**engine.model_dump(exclude={"name"}), "expires_at": now() + seconds}
            if held is None:
                connection.execute(engines.insert().values(fleet=self.name, name=engine.name, **row))
            else:
                connection.execute(engines.update().where(mine).values(**row))
            gone = (engines.c.fleet == self.name) & (engines.c.expires_at < now() - _FORGET_S)
            connection.execute(engines.delete().where(gone))
            return True

        return writing(self.database, work)

    def release(self, name: str, url: str) -> None:
        """End the lease of the engine at this URL. It stays if another process has the name by now."""
        mine = (engines.c.fleet == self.name) & (engines.c.name == name) & (engines.c.url == url)
        writing(self.database, lambda connection: connection.execute(engines.delete().where(mine)))

    def registered(self) -> list[Registration]:
        """The engines whose lease has not expired, by name. Rows that this release cannot read are left out: another
        release may have written them."""
        query = engines.select().where(engines.c.fleet == self.name, engines.c.expires_at > now())
        with reading(self.database) as connection:
            rows = connection.execute(query.order_by(engines.c.name)).all()
        found = [self._read(dict(row._mapping)) for row in rows]
        return [each for each in found if each is not None]

    def _read(self, row: dict[str, Any]) -> Registration | None:
        try:
            return Registration.model_validate(row)
        except ValidationError as error:
            if row["name"] not in self._unreadable:
                self._unreadable.add(row["name"])
                log.warning("engine %s is left out: %s", row["name"], describe_problem(error))
            return None


class FleetRoutes:
    def __init__(self, fleet: Fleet, access: Access, router: Router) -> None:
        self._fleet, self._access, self._router = fleet, access, router
        self._looking = asyncio.Lock()  # an older view must not replace a newer one
        self._problem: str | None = None

    def add_to(self, app: web.Application) -> None:
        app.router.add_put("/engines/{name}", self.register)
        app.router.add_delete("/engines/{name}", self.leave)

    async def register(self, request: web.Request) -> web.Response:
        """Register an engine, or renew its lease. It gets requests until the lease expires.

        Needs: a key with the scope engine.
        Takes: {"url", "region", "kind", "form", "wire", "capacity", "renews"}: `renews` is false the first time.
        Returns: {"lease_seconds", "renew_seconds"}; 409 if its contract is another one than this gateway's, or if it
        renews a name that another process has taken over.
        """
        await self._access.check(request, "engine")
        body = parse_object(await request.read())
        engine = _registration({**body, "name": request.match_info["name"]})
        if engine.wire != WIRE:
            raise GatewayError(
                f"{engine.name} speaks version {engine.wire} of the contract with engines, this gateway {WIRE}",
                status=409,
                hint="install the same release of rollmill on both",
            )
        renews = body.get("renews") is True
        if not await asyncio.to_thread(self._fleet.hold, engine, renews=renews):
            raise GatewayError(
                f"another process serves as {engine.name} now", status=409, hint="this one is not needed any more"
            )
        if not renews:
            await self.look()
        return web.json_response({"lease_seconds": LEASE_S, "renew_seconds": RENEW_S})

    async def leave(self, request: web.Request) -> web.Response:
        """End the lease of an engine: it gets no new request.

        Needs: a key with the scope engine.
        Takes: `?url=`: its address. The lease of another process with this name stays.
        Returns: {}.
        """
        await self._access.check(request, "engine")
        await asyncio.to_thread(self._fleet.release, request.match_info["name"], request.query.get("url", ""))
        await self.look()
        return web.json_response({})

    async def run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            await self.look()

    async def look(self) -> None:
        """Follow the table. If the database does not answer, the engines stay as they are."""
        async with self._looking:
            try:
                found = await asyncio.to_thread(self._fleet.registered)
            except StorageError as error:
                if self._problem is None:
                    log.warning("registered engines cannot be read: %s", error)
                self._problem = error.message
                return
            self._problem = None
            token, ours = self._fleet.token, [each for each in found if each.wire == WIRE]
            self._router.follow(EngineEndpoint(each.url, each.region, token, capacity=each.capacity) for each in ours)


def _registration(tree: dict[str, Any]) -> Registration:
    try:
        return Registration.model_validate(tree)
    except ValidationError as error:
        raise GatewayError(describe_problem(error)) from None
