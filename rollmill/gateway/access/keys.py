"""API keys: who may do what at the gateway.

A key is `rmk-ID-SECRET`. The database holds the SHA-256 of the whole key, never the key. The secret part has 256 random
bits, so a slow hash would add nothing. The gateway remembers a key for `key_cache_s` seconds; a revocation takes that
long at most. While the database does not answer, or not soon, keys that are in the cache stay valid.

    scope        allows
    rollout      open, show, seal and delete rollout sessions
    production   requests to the model as production traffic
    feedback     feedback about the sessions of this key
    read         list and show sessions
    engine       register an engine, which then gets requests
    admin        everything but requests to the model

Bootstrap keys come from the run's run.json: `admin_token` (id "admin"), `production_key` (id "production"),
`rollout_key` (id "rollout"), which the dispatcher has, and `engine_token` (id "engine").
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
import secrets
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, get_args

import sqlalchemy as sa

from rollmill.errors import ConfigError, GatewayError, StorageError
from rollmill.gateway.access.privacy import Consent
from rollmill.storage.database import reading, writing
from rollmill.storage.tables import keys

log = logging.getLogger(__name__)
SCOPES = ("rollout", "production", "feedback", "read", "engine", "admin")
SESSION_KEY = "rm-"  # begins the keys of sessions: see sessions/registry.py
_PREFIX = "rmk-"
_ID = re.compile(r"[0-9a-f]{8}")
_MOST_UNKNOWN = 10_000  # ids that are remembered as unknown
_MOST_ASKED = 64  # ids that the database is asked about at the same time; keys in the cache do not count
_REFRESH_S = 0.25  # how long a request with a cached key waits for the database
_BOOTSTRAP = {
    "admin": {"admin"},
    "production": {"production", "feedback"},
    "rollout": {"rollout"},
    "engine": {"engine"},
}
_HINT = "send `Authorization: Bearer KEY`; `rollmill keys create RUN` makes a key"


@dataclass(frozen=True)
class Key:
    id: str
    scopes: frozenset[str]
    name: str = ""
    created_at: float = 0.0
    expires_at: float | None = None
    revoked_at: float | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    budget_tokens: int | None = None
    used_tokens: int = 0
    consent: str | None = None  # consent of its sessions, unless a request says otherwise
    hash: str = field(default="", repr=False)

    def allows(self, scope: str) -> bool:
        return scope in self.scopes or ("admin" in self.scopes and scope != "production")

    def valid(self, now: float) -> bool:
        return self.revoked_at is None and (self.expires_at is None or now < self.expires_at)


class KeyStore:
    """The keys of one run in the database."""

    def __init__(self, database: sa.Engine, run: str) -> None:
        self._database = database
        self._run = run

    def create(
        self,
        scopes: Iterable[str],
        *,
        name: str = "",
        expires_at: float | None = None,
        requests_per_minute: int | None = None,
        tokens_per_minute: int | None = None,
        budget_tokens: int | None = None,
        consent: str | None = None,
    ) -> tuple[Key, str]:
        """Returns the key and its secret, which cannot be read again."""
        wanted = frozenset(scopes)
        strange = sorted(wanted - set(SCOPES))
        if strange or not wanted:
            what = f"{strange[0]!r} is not a scope" if strange else "a key needs at least one scope"
            raise ConfigError(what, hint=f"the scopes are {', '.join(SCOPES)}")
        if consent is not None and consent not in get_args(Consent):
            raise ConfigError(f"{consent!r} is not a consent", hint=f"one of {', '.join(get_args(Consent))}")
        id = secrets.token_hex(4)
        secret = f"{_PREFIX}{id}-{secrets.token_urlsafe(32)}"
        key = Key(
            id,
            wanted,
            name,
            time.time(),
            expires_at,
            None,
            requests_per_minute,
            tokens_per_minute,
            budget_tokens,
            0,
            consent,
            hash_of(secret),
        )
        row = {**vars(key), "run": self._run, "scopes": ",".join(scope for scope in SCOPES if scope in wanted)}
        writing(self._database, lambda connection: connection.execute(keys.insert(), row))
        return key, secret

    def list(self) -> list[Key]:
        """All keys of the run, oldest first."""
        query = keys.select().where(keys.c.run == self._run).order_by(keys.c.created_at, keys.c.id)
        with reading(self._database) as connection:
            return [_key(row) for row in connection.execute(query)]

    def find(self, id: str) -> Key | None:
        with reading(self._database) as connection:
            row = connection.execute(keys.select().where(keys.c.run == self._run, keys.c.id == id)).first()
        return None if row is None else _key(row)

    def revoke(self, id: str) -> Key:
        """Revokes a key at once. Revoking it again changes nothing."""
        mine = (keys.c.run == self._run) & (keys.c.id == id)
        revoked = keys.update().where(mine, keys.c.revoked_at.is_(None)).values(revoked_at=time.time())
        writing(self._database, lambda connection: connection.execute(revoked))
        key = self.find(id)
        if key is None:
            raise ConfigError(f"this run has no key {id!r}", hint="`rollmill keys list RUN` shows the ids")
        return key

    def add_usage(self, tokens: dict[str, int]) -> None:
        """Adds used tokens to keys by their ids."""

        def add(connection: sa.Connection) -> None:
            for id, count in tokens.items():
                mine = (keys.c.run == self._run) & (keys.c.id == id)
                connection.execute(keys.update().where(mine).values(used_tokens=keys.c.used_tokens + count))

        writing(self._database, add)


class KeyRing:
    """The keys as the gateway checks them. One thread asks the database. A slow one delays a request with a cached key
    by at most `_REFRESH_S`."""

    def __init__(self, store: KeyStore | None, bootstrap: Mapping[str, str | None], *, cache_s: float = 2.0) -> None:
        """`bootstrap`: the secrets of bootstrap keys by their ids."""
        self._store = store
        self._cache_s = cache_s
        self._cached: dict[str, tuple[float, Key]] = {}  # keys of the database only: nobody else can make it grow
        self._unknown: dict[str, float] = {}  # ids that the database did not have, and when
        self._asking: dict[str, tuple[float, asyncio.Task[Key | None]]] = {}  # since when
        self._thread = ThreadPoolExecutor(1, "keys")
        self._bootstrap = {
            hash_of(secret): Key(id, frozenset(_BOOTSTRAP[id]), hash=hash_of(secret))
            for id, secret in bootstrap.items()
            if secret
        }

    async def find(self, secret: str) -> Key | None:
        """The valid key with this secret, or None."""
        given = hash_of(secret)
        found = self._bootstrap.get(given)  # by hash: how long it takes says nothing about the secret
        id = secret.removeprefix(_PREFIX).partition("-")[0]
        if found is None and secret.startswith(_PREFIX) and _ID.fullmatch(id) and self._store is not None:
            found = await self._lookup(id)
            if found is not None and not hmac.compare_digest(given, found.hash):
                found = None
        return found if found is not None and found.valid(time.time()) else None

    async def check(self, secret: str, *scopes: str) -> Key:
        """The key with this secret. Raises 401 if there is none, 403 if it has none of the scopes."""
        return check_scopes(await self.find(secret), *scopes)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _lookup(self, id: str) -> Key | None:
        now = time.monotonic()
        at, key = self._cached.get(id) or (self._unknown.get(id, float("-inf")), None)
        if now - at < self._cache_s:
            return key
        if id not in self._asking:
            if key is None and len(self._asking.keys() - self._cached.keys()) >= _MOST_ASKED:
                raise GatewayError("too many unknown API keys are being looked up", status=503, hint="try again")
            self._asking[id] = (now, asyncio.create_task(self._ask(id)))
        since, task = self._asking[id]
        if key is None:
            return await asyncio.shield(task)
        await asyncio.wait([task], timeout=max(0.0, since + _REFRESH_S - now))
        return task.result() if task.done() else key

    async def _ask(self, id: str) -> Key | None:
        assert self._store is not None
        try:
            key = await asyncio.get_running_loop().run_in_executor(self._thread, self._store.find, id)
        except StorageError as error:
            log.warning("keys cannot be read: %s", error)
            if id not in self._cached:
                raise
            key = self._cached[id][1]  # serving goes on with what was known
        finally:
            del self._asking[id]
        if key is not None:
            self._unknown.pop(id, None)
            self._cached[id] = (time.monotonic(), key)
            return key
        self._cached.pop(id, None)
        if len(self._unknown) >= _MOST_UNKNOWN:
            self._unknown.clear()
        self._unknown[id] = time.monotonic()
        return None


def check_scopes(key: Key | None, *scopes: str) -> Key:
    """The key. Raises 401 if there is none, 403 if it has none of the scopes."""
    if key is None:
        raise unknown_key()
    if not any(key.allows(scope) for scope in scopes):
        has, wanted = ", ".join(sorted(key.scopes)), scopes[0]
        raise GatewayError(
            f"this key does not have the scope {wanted}",
            status=403,
            hint=f"it has {has}; `rollmill keys create --scope {wanted}` makes another",
        )
    return key


def unknown_key() -> GatewayError:
    return GatewayError("this API key is unknown, expired or revoked", status=401, hint=_HINT)


def hash_of(secret: str) -> str:
    return hashlib.sha256(secret.encode(errors="replace")).hexdigest()


def _key(row: Any) -> Key:
    fields = dict(row._mapping)
    del fields["run"]
    return Key(**{**fields, "scopes": frozenset(fields["scopes"].split(","))})
