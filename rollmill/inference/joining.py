"""An engine registers at a gateway and renews its lease. See `rollmill.gateway.routing.fleet`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from rollmill.backoff import Backoff
from rollmill.errors import EngineError
from rollmill.inference.engine_wire import WIRE

log = logging.getLogger(__name__)
_TIMEOUT = aiohttp.ClientTimeout(total=5)
_LEAVE_TIMEOUT = aiohttp.ClientTimeout(total=1)
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 1.0  # a gateway that starts again should find its engines soon


@dataclass(frozen=True)
class Joining:
    """How an engine joins its run."""

    gateway: str | Callable[[], str | None]  # URL, or a function that says where it is now
    token: str = field(repr=False)
    kind: str  # of [[engines]]
    capacity: int  # requests that it decodes together
    tls: ssl.SSLContext | None = None  # of the gateway, if it is not one that the system trusts


async def keep_registered(joining: Joining, name: str, url: str, *, region: str, form: str) -> None:
    """Registers the engine and renews its lease until it is cancelled; then ends the lease. Raises EngineError if the
    gateway wants no such engine."""
    facts = {
        "url": url,
        "region": region,
        "kind": joining.kind,
        "form": form,
        "wire": WIRE,
        "capacity": joining.capacity,
    }
    renews = False
    backoff = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
    headers = {"Authorization": f"Bearer {joining.token}"}
    path = await _path(joining, name)
    connector = aiohttp.TCPConnector(ssl=joining.tls or True)
    async with aiohttp.ClientSession(headers=headers, connector=connector) as client:
        try:
            while True:
                pause = await _register(client, path, {**facts, "renews": renews})
                if pause is None:
                    await asyncio.sleep(backoff.failed())
                    path = await _path(joining, name)
                    continue
                renews = True
                backoff.reset()
                await asyncio.sleep(pause)
        finally:
            with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
                async with client.delete(path, params={"url": url}, timeout=_LEAVE_TIMEOUT):
                    pass


async def _path(joining: Joining, name: str) -> str:
    gateway = joining.gateway if isinstance(joining.gateway, str) else await asyncio.to_thread(joining.gateway)
    return f"{gateway or ''}/engines/{name}"  # no gateway: the request fails, and is tried again


async def _register(client: aiohttp.ClientSession, path: str, body: dict[str, Any]) -> float | None:
    """Seconds until the next renewal; None if it did not work and may work later."""
    try:
        async with client.put(path, json=body, timeout=_TIMEOUT) as response:
            answer = await response.json(content_type=None)
            if response.status == 200:
                return float(answer["renew_seconds"])
            problem = f"the gateway refused this engine ({response.status}): {_message(answer)}"
            if response.status == 409:
                raise EngineError(problem)
            log.warning(problem)
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError, KeyError, TypeError) as error:
        log.debug("cannot register at %s: %s", path, error)
    return None


def _message(answer: Any) -> str:
    error = answer.get("error") if isinstance(answer, dict) else None
    return str(error.get("message", error) if isinstance(error, dict) else error)[:300]
