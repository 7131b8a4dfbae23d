"""Lends the engines of a service to the training of its run. See `rollmill.gateway.routing.lender`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rollmill.errors import StorageError
from rollmill.runs.run import RunDirectory

if TYPE_CHECKING:
    import sqlalchemy as sa

log = logging.getLogger(__name__)
_PAUSE_S = 5.0  # between two tries to open the database


@contextlib.contextmanager
def lending(service: RunDirectory, channel: str) -> Iterator[None]:
    """While the block runs, engines of the service that follow `channel` are lent as [lending] says. At its end all
    return. Without [lending] none is lent."""
    if service.config.lending is None:
        yield
        return
    loop = asyncio.new_event_loop()
    task = loop.create_task(_lend(service, channel))
    thread = threading.Thread(target=_run, args=(loop, task), name="lender", daemon=True)
    thread.start()
    try:
        yield
    finally:
        with contextlib.suppress(RuntimeError):  # its thread has ended, and closed the loop
            loop.call_soon_threadsafe(task.cancel)
        thread.join()


def _run(loop: asyncio.AbstractEventLoop, task: asyncio.Task[None]) -> None:
    asyncio.set_event_loop(loop)
    try:
        with contextlib.suppress(asyncio.CancelledError):
            loop.run_until_complete(task)
    finally:
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()


async def _lend(service: RunDirectory, channel: str) -> None:
    from rollmill.gateway.routing.fleet import Fleet
    from rollmill.gateway.routing.lender import Lender
    from rollmill.tls import trust

    config, token, database = service.config, service.secrets["engine_token"], await _open(service)
    assert config.lending is not None
    if config.tls is not None:
        trust(config.tls.ca)
    lender = Lender(
        config.lending,
        Fleet(database, service.fleet, token),
        Fleet(database, service.id, token),
        channel=channel,
        line=config.lending.line or config.line,
        gateway=config.gateway,
    )
    await lender.run()


async def _open(service: RunDirectory) -> sa.Engine:
    """The database, once it can be reached."""
    from rollmill.storage.database import open_database

    while True:
        try:
            return await asyncio.to_thread(open_database, service.database_url)
        except StorageError as error:
            log.warning("no engine can be lent now: %s", error)
            await asyncio.sleep(_PAUSE_S)
