"""Who sends a request, and whether it may: keys and their limits."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from aiohttp import web

from rollmill.gateway.access.account import current_account
from rollmill.gateway.access.keys import Key, KeyRing, check_scopes
from rollmill.gateway.access.limits import KeyLimits


class Access:
    def __init__(self, keys: KeyRing, limits: KeyLimits) -> None:
        self._keys = keys
        self._limits = limits

    async def check(self, request: web.Request, *scopes: str) -> Key:
        """The key of the request. Raises 401 without a valid one, 403 if it has none of the scopes."""
        return check_scopes(await self._find(request), *scopes)

    async def is_known(self, request: web.Request) -> bool:
        """Whether the request has a valid key, of any scope."""
        return await self._find(request) is not None

    async def _find(self, request: web.Request) -> Key | None:
        """The valid key of the request. It is asked for before and behind the body, and looked up once."""
        account = current_account()
        if account.key is None:
            account.key = await self._keys.find(given_key(request))
        return account.key

    async def admit(self, request: web.Request, scope: str, *, samples: bool = True) -> Key:
        """As `check`, and counts the request and its tokens. Raises 429 or 402 over a limit of the key."""
        key = await self.check(request, scope)
        self._limits.admit(key, samples=samples)
        account = current_account()
        account.on_end.append(lambda: self._limits.used(key, account.tokens))
        return key

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        saving = asyncio.create_task(self._limits.run())
        try:
            yield
        finally:
            saving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await saving
            self._keys.close()


def given_key(request: web.Request) -> str:
    """The API key of a request: a bearer token, or `x-api-key` as Anthropic's clients send it."""
    authorization = request.headers.get("Authorization")
    if authorization is not None:
        return authorization.removeprefix("Bearer ").strip()
    return request.headers.get("x-api-key", "")
