"""API keys: hashed at rest, with scopes, limits and budgets; the gateway checks them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from rollmill.errors import ConfigError, GatewayError, StorageError
from rollmill.gateway.access.keys import Key, KeyRing, KeyStore
from rollmill.gateway.access.limits import KeyLimits
from rollmill.storage.database import open_database
from rollmill.storage.tables import keys
from tests.cli.conftest import Told, rollmill  # noqa: F401
from tests.gateway.conftest import QUICK, USER, Answers, Door, Mill, until
from tests.gateway.serve import ADMIN, LIVE
from tests.gateway.stand_in import StandIn
from tests.runs.conftest import make_config


async def status_of(door: Door, key: str) -> int:
    return (await door.ask(key, [USER]))[0]


def test_a_key_is_kept_as_a_hash_and_listed_and_revoked(database_url: str) -> None:
    database = open_database(database_url)
    store = KeyStore(database, "run")
    key, secret = store.create(["production", "feedback"], name="website", budget_tokens=10**12, consent="train")
    with database.connect() as connection:
        (row,) = connection.execute(sa.select(keys)).all()
    assert secret not in str(row) and secret.split("-", 2)[2] not in str(row)  # which may have dashes of its own
    assert store.list() == [key] and key.scopes == {"production", "feedback"}
    store.add_usage({key.id: 2**40, "other": 1})
    assert store.list()[0].used_tokens == 2**40
    assert KeyStore(database, "another run").list() == []
    first = store.revoke(key.id).revoked_at
    assert first is not None and store.revoke(key.id).revoked_at == first
    with pytest.raises(ConfigError, match="no key 'nobody'"):
        store.revoke("nobody")
    for scopes in ([], ["root"]):
        with pytest.raises(ConfigError, match="scope"):
            store.create(scopes)


async def test_a_ring_finds_valid_keys_only(tmp_path: Path) -> None:
    store = KeyStore(open_database(f"sqlite:///{tmp_path}/mill.db"), "run")
    ring = KeyRing(store, {"admin": "root", "production": "live"}, cache_s=0.0)
    key, secret = store.create(["read"])
    _, expired = store.create(["read"], expires_at=time.time() - 1)
    assert await ring.find(secret) == key
    assert [(await ring.find(text)) for text in (expired, secret + "x", secret[:-1], f"rmk-{key.id}-", "", "rmk-")] == [
        None
    ] * 6
    assert (await ring.check("root", "read")).id == "admin"
    with pytest.raises(GatewayError, match="scope production") as refused:
        await ring.check("root", "production")
    assert refused.value.status == 403
    store.revoke(key.id)
    assert await ring.find(secret) is None


async def test_a_database_that_is_down_does_not_stop_known_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = KeyStore(open_database(f"sqlite:///{tmp_path}/mill.db"), "run")
    ring = KeyRing(store, {"admin": "root"}, cache_s=0.0)
    key, secret = store.create(["read"])
    assert await ring.find(secret) == key
    open_database(f"sqlite:///{tmp_path}/mill.db").dispose()
    (tmp_path / "mill.db").rename(tmp_path / "away")
    (tmp_path / "mill.db").mkdir()
    store._database.dispose()
    assert await ring.find(secret) == key
    with pytest.raises(StorageError):
        await ring.find("rmk-12345678-x")


async def test_scopes_decide_what_a_key_may_do(mill: Mill, answers: Answers) -> None:
    door = await mill.gateway(await mill.engine(StandIn([answers.text("x")])))
    secrets = {scope: mill.keys.create([scope])[1] for scope in ("rollout", "production", "read", "feedback")}
    asked = {scope: await status_of(door, secret) for scope, secret in secrets.items()}
    assert asked == {"rollout": 403, "production": 200, "read": 403, "feedback": 403}
    facts = {"trajectory": "a"}
    opened = {scope: (await door.admin("POST", "/sessions", facts, secret))[0] for scope, secret in secrets.items()}
    assert opened == {"rollout": 200, "production": 403, "read": 403, "feedback": 403}
    shown = {scope: (await door.admin("GET", "/sessions/a", None, secret))[0] for scope, secret in secrets.items()}
    assert shown == {"rollout": 200, "production": 403, "read": 200, "feedback": 403}
    assert [await status_of(door, key) for key in (LIVE, ADMIN, "wrong", "")] == [200, 403, 401, 401]


async def test_a_key_for_rollouts_does_not_reach_production_sessions(mill: Mill, answers: Answers) -> None:
    door = await mill.gateway(await mill.engine(StandIn([answers.text("x")])))
    _, rollout = mill.keys.create(["rollout"])
    live = (await door.say(LIVE, [USER]))["rollmill"]["trajectory"]
    facts = {"trajectory": "a", "traffic": "production"}
    assert (await door.admin("POST", "/sessions", facts, rollout))[0] == 403
    assert (await door.admin("POST", f"/sessions/{live}/seal", {}, rollout))[0] == 403
    assert (await door.admin("DELETE", f"/sessions/{live}", None, rollout))[0] == 403
    assert (await door.admin("GET", f"/sessions/{live}", None, rollout))[0] == 403
    assert (await door.admin("POST", "/forget", {"user": "ann"}, rollout))[0] == 403
    assert (await door.admin("POST", "/sessions", facts))[0] == 200
    assert len((await door.seal(live)).segments) == 1


async def test_a_revoked_key_is_refused_soon(mill: Mill, answers: Answers) -> None:
    config = QUICK.model_copy(update={"key_cache_s": 0.05})
    door = await mill.gateway(await mill.engine(StandIn([answers.text("x")])), config=config)
    key, secret = mill.keys.create(["production"])
    host, _, port = door.url.removeprefix("http://").partition(":")
    reader, slow = await asyncio.open_connection(host, int(port))
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nx-api-key: {secret}\r\nContent-Length: 2\r\n\r\n"
    slow.write(head.encode() + b"{")
    assert await status_of(door, secret) == 200
    mill.keys.revoke(key.id)

    async def refused() -> bool:
        return await status_of(door, secret) == 401

    await until(refused)
    slow.write(b"}")  # its key was valid when its body began to come
    assert (await reader.readline()).split()[1] == b"401"
    slow.close()


async def test_over_the_rate_a_client_is_told_when_to_return(mill: Mill, answers: Answers) -> None:
    door = await mill.gateway(await mill.engine(StandIn([answers.text("x")])))
    _, secret = mill.keys.create(["production"], requests_per_minute=2)
    headers = {"Authorization": f"Bearer {secret}"}
    seen = []
    for _ in range(3):
        async with door.http.post(
            f"{door.url}/v1/chat/completions", json={"messages": [USER]}, headers=headers
        ) as response:
            seen.append((response.status, response.headers.get("Retry-After")))
            body = await response.json()
    assert [status for status, _ in seen] == [200, 200, 429]
    assert 1 <= int(seen[2][1] or 0) <= 30 and "2 requests per minute" in body["error"]["message"]


async def test_tokens_are_limited_and_the_budget_survives_a_restart(mill: Mill, answers: Answers) -> None:
    engine = await mill.engine(StandIn([answers.text("x")]))
    _, quick = mill.keys.create(["production"], tokens_per_minute=1)
    key, paid = mill.keys.create(["production"], budget_tokens=1)
    async with mill.running(engine) as door:
        assert [await status_of(door, quick) for _ in range(2)] == [200, 429]
        assert [await status_of(door, paid) for _ in range(2)] == [200, 402]
    used = mill.keys.find(key.id)
    assert used is not None and used.used_tokens > 1
    async with mill.running(engine) as door:
        assert await status_of(door, paid) == 402


def test_used_tokens_are_saved_once_and_kept_while_the_database_fails(tmp_path: Path) -> None:
    store = KeyStore(open_database(f"sqlite:///{tmp_path}/mill.db"), "run")
    key, _ = store.create(["production"], budget_tokens=100)
    limits = KeyLimits(store)
    limits.used(key, 60)
    limits.save()
    limits.save()
    limits.used(key, 39)
    limits.admit(key)
    limits.used(key, 1)
    with pytest.raises(GatewayError, match="budget"):
        limits.admit(key)  # although `key` still says that nothing is used
    assert store.list()[0].used_tokens == 60
    limits.used(Key("production", frozenset()), 5)  # bootstrap keys are not counted
    limits.save()
    assert store.list()[0].used_tokens == 100


async def test_many_requests_with_one_new_key_ask_the_database_once(tmp_path: Path) -> None:
    class Counting(KeyStore):
        asked = 0

        def find(self, id: str) -> Key | None:
            self.asked += 1
            return super().find(id)

    store = Counting(open_database(f"sqlite:///{tmp_path}/mill.db"), "run")
    ring = KeyRing(store, {"admin": "root"})
    key, secret = store.create(["read"])
    assert await asyncio.gather(*[ring.find(secret) for _ in range(20)]) == [key] * 20
    assert await ring.find(f"rmk-{key.id}-wrong") is None
    assert store.asked == 1


def test_the_command_shows_a_secret_once(
    rollmill: Callable[..., Told],  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from rollmill.runs.run import RunDirectory

    run = RunDirectory.create(tmp_path, make_config())
    assert f"rollmill keys create {run.path}" in rollmill("keys", "list", run.path).out
    made = rollmill("keys", "create", run.path, "--name", "trial", "--days", "30", "--requests-per-minute", "60")
    secret = made.out.strip()
    assert secret.startswith("rmk-") and secret not in made.err
    listed = rollmill("keys", "list", run.path).out
    assert "trial" in listed and "30 d left" in listed and secret not in listed
    monkeypatch.setenv("COLUMNS", "80")
    assert rollmill("keys", "list", run.path).out.split()[:6] == ["id", "name", "scopes", "state", "req/min", "used"]
    full = ("--scope", "production", "--scope", "feedback", "--budget", "100000000", "--consent", "train")
    rollmill("keys", "create", run.path, "--name", "website-of-the-company", "--days", "9", *full)
    printed = rollmill("keys", "list", run.path).out
    assert max(map(len, printed.splitlines())) <= 80 and "production" in printed and "budget     consent" in printed
    id = secret.split("-")[1]
    assert rollmill("keys", "revoke", run.path, id).out.startswith(f"revoked {id}")
    assert "revoked" in rollmill("keys", "list", run.path).out
    assert rollmill("keys", "create", run.path, "--scope", "root").code == 1
    assert rollmill("keys", "create", run.path, "--consent", "maybe").code == 1


class Slow(KeyStore):
    """A database that answers when `ready` is set."""

    ready = threading.Event()
    asked = 0

    def find(self, id: str) -> Key | None:
        self.asked += 1
        self.ready.wait()
        return super().find(id)


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[Slow]:
    store = Slow(open_database(f"sqlite:///{tmp_path}/mill.db"), "run")
    store.ready = threading.Event()
    store.ready.set()
    yield store
    store.ready.set()  # the thread that asks can end


async def test_a_database_that_hangs_does_not_stop_known_keys(slow: Slow) -> None:
    ring = KeyRing(slow, {"admin": "root"}, cache_s=0.0)
    key, secret = slow.create(["read"])
    assert await ring.find(secret) == key
    slow.ready.clear()
    assert await asyncio.gather(*[ring.find(secret) for _ in range(5)]) == [key] * 5
    assert slow.asked == 2
    slow.ready.set()
    slow.revoke(key.id)

    async def refused() -> bool:
        return await ring.find(secret) is None

    await until(refused)


async def test_a_flood_of_unknown_keys_is_bounded_and_known_keys_stay(slow: Slow) -> None:
    ring = KeyRing(slow, {"admin": "root"}, cache_s=3600.0)
    key, secret = slow.create(["read"])
    assert await ring.find(secret) == key
    assert [await ring.find(f"rmk-{id}-x") for id in ("no id", "ABCDEF01", "0" * 9, "é" * 8)] == [None] * 4
    assert slow.asked == 1  # these cannot be ids
    slow.ready.clear()
    flood = [asyncio.create_task(ring.find(f"rmk-{number:08x}-x")) for number in range(1000)]
    done, waiting = await asyncio.wait(flood, return_when=asyncio.FIRST_COMPLETED)
    assert len(waiting) < 100
    assert all(isinstance(task.exception(), GatewayError) for task in done)
    assert await ring.find(secret) == key
    slow.ready.set()
    assert {await task for task in waiting} == {None}
    assert await ring.find(secret) == key and slow.asked == 1 + len(waiting)


def test_two_saves_at_once_count_tokens_once(tmp_path: Path) -> None:
    """A gateway that stops saves while its thread still saves."""

    class Meeting(KeyStore):
        inside, go = threading.Event(), threading.Event()

        def add_usage(self, tokens: dict[str, int]) -> None:
            self.inside.set()
            self.go.wait()
            super().add_usage(tokens)

    store = Meeting(open_database(f"sqlite:///{tmp_path}/mill.db"), "run")
    key, _ = store.create(["production"])
    limits = KeyLimits(store)
    limits.used(key, 60)
    saves = [threading.Thread(target=limits.save) for _ in range(2)]
    saves[0].start()
    store.inside.wait()
    saves[1].start()
    limits.used(key, 5)  # does not wait for the database
    store.go.set()
    for save in saves:
        save.join()
    assert store.list()[0].used_tokens == 65
