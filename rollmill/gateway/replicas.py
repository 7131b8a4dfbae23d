"""Several gateways of one run. A session belongs to one of them: the hash of its id says which (`gateway_of`).

    client ──► any gateway ──(the session is another's)──► that gateway ──► answer, the same way back

Whoever makes an id or knows one can say where its session is; nobody keeps a table. The dispatcher goes straight to the
right gateway. A gateway that gets a request for another one forwards it. Ids that a gateway makes itself belong to it.

While a gateway is away, requests for its rollouts wait until it is back with its session log, or their rollouts are
replaced. Production does not wait: the gateway that got the request answers it, in a conversation of its own. What the
user said before is then in two trajectories, each of them exact.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ssl
import time
from collections.abc import Callable, Sequence

import aiohttp
from aiohttp import web

from rollmill.keepalive import keepalive_connector

HEADER = "x-rollmill-gateway"  # of a request that another gateway forwards: the proof that it is one
_CONNECT_S = 2.0  # a host that is gone does not refuse
_AWAY_S = 2.0  # for which a gateway that could not be reached is not asked for production


def gateway_of(session: str, count: int) -> int:
    """Which of `count` gateways a session belongs to, from 0."""
    if count == 1:
        return 0
    digest = hashlib.blake2b(session.encode(errors="replace"), digest_size=8, person=b"gateway")
    return int.from_bytes(digest.digest()) % count


class Gateways:
    """This gateway and the others. `finders` say where each one is now, by number. `secret` is what all gateways of the
    run know, and nobody else."""

    def __init__(
        self, number: int, finders: Sequence[Callable[[], str | None]], secret: str, tls: ssl.SSLContext | None = None
    ) -> None:
        self.number, self.count = number, len(finders)
        self._finders, self._tls = finders, tls
        self.proof = hmac.new(secret.encode(), b"gateway", hashlib.sha256).hexdigest()
        self._urls: dict[int, str] = {}
        self._away_until: dict[int, float] = {}

    @property
    def others(self) -> list[int]:
        return [number for number in range(self.count) if number != self.number]

    def owner(self, session: str) -> int:
        return gateway_of(session, self.count)

    def is_from_gateway(self, http: web.Request) -> bool:
        given = http.headers.get(HEADER)
        return given is not None and hmac.compare_digest(given.encode(errors="replace"), self.proof.encode())

    def is_away(self, number: int) -> bool:
        return self._away_until.get(number, 0.0) > time.monotonic()

    def client(self) -> aiohttp.ClientSession:
        """Connections to the other gateways."""
        return aiohttp.ClientSession(
            connector=keepalive_connector(ssl=self._tls or True, keepalive_timeout=30.0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        )

    async def url(self, number: int) -> str:
        """Where a gateway is. Raises ConnectionError if nobody knows."""
        if number not in self._urls:
            found = await asyncio.to_thread(self._finders[number])
            if found is None:
                raise ConnectionError("this gateway has not said where it is")
            self._urls[number] = found
        return self._urls[number]

    def failed(self, number: int) -> None:
        """It could not be reached. It may be elsewhere now."""
        self._urls.pop(number, None)
        self._away_until[number] = time.monotonic() + _AWAY_S
