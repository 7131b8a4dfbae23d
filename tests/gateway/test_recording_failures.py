"""A full or hanging disk, and a failing store: production is served and the loss is reported; rollouts wait or get an
error."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from rollmill.gateway.recording import recorder
from tests.gateway.conftest import LIVE, QUICK, USER, Answers, Door, Mill, until
from tests.gateway.stand_in import StandIn
from tests.gateway.test_recorder import full_disk


async def test_a_full_disk_fails_rollouts_and_serves_production(mill: Mill, answers: Answers) -> None:
    engine = StandIn([answers.text(text) for text in ("one", "two", "three", "four", "five")])
    door = await mill.gateway(await mill.engine(engine))
    mill.plan("a")
    key = await door.open("a")
    live: list[Any] = [USER]
    recorded = await door.say(LIVE, live)
    with full_disk((mill.directory / "gateway" / "sessions.log").stat().st_size + 8):
        status, body = await door.ask(key, [USER])
        assert status == 503
        assert "could not be recorded" in body["error"]["message"] and "disk space" in body["error"]["message"]
        assert (await door.admin("POST", "/sessions", {"trajectory": "b"}))[0] == 503
        continued = await door.say(LIVE, [*live, USER])
        assert continued["rollmill"]["trajectory"] == recorded["rollmill"]["trajectory"]
        fresh = await door.say(LIVE, [{"role": "user", "content": "hello"}])
        health = await door.health()
        assert health["status"] == "degraded" and "sessions.log" in health["problems"][0]
    metrics = await door.metrics()
    assert 'recording_failures_total{traffic="rollout"} 1' in metrics
    assert 'recording_failures_total{traffic="production"} 2' in metrics
    # there is space again: the rollout continues without the lost answer
    await door.say(key, [USER])
    (segment,) = (await door.seal("a")).segments
    assert segment.tokens[segment.sampled].tolist() == answers.text("five")
    assert (await door.health())["status"] == "ok"
    # a conversation with a missing answer is not sealed
    assert (await door.admin("POST", f"/sessions/{fresh['rollmill']['trajectory']}/seal", {}))[0] == 410
    assert (await door.admin("POST", f"/sessions/{recorded['rollmill']['trajectory']}/seal", {}))[0] == 410


class HangingDisk:
    """Simulates a disk that stops answering: the calls that wait for it block until it recovers. Files, the writing
    thread and everything else are real."""

    def __init__(self) -> None:
        self._answers = threading.Event()
        self._answers.set()
        self._sync, self._write_through = recorder.sync, recorder.write_through

    def sync(self, file: int) -> None:
        self._answers.wait()
        self._sync(file)

    def write_through(self, file: int, data: bytes, at: int) -> None:
        if not self._answers.is_set():
            os.pwrite(file, data, at)  # who reads the file sees it, though it is not on disk
        self._answers.wait()
        self._write_through(file, data, at)

    def hang(self) -> None:
        self._answers.clear()

    def recover(self) -> None:
        self._answers.set()


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[HangingDisk]:
    disk = HangingDisk()
    monkeypatch.setattr(recorder, "sync", disk.sync)
    monkeypatch.setattr(recorder, "write_through", disk.write_through)
    yield disk
    disk.recover()


async def test_a_disk_that_hangs_costs_production_its_record_and_not_its_answer(
    mill: Mill, answers: Answers, disk: HangingDisk
) -> None:
    config = QUICK.model_copy(update={"record_wait_s": 0.05})
    engine = StandIn([answers.text("one"), answers.text("two"), answers.text("three"), answers.text("four")])
    door = await mill.gateway(await mill.engine(engine), config=config)
    mill.plan("a")
    key = await door.open("a")
    live: list[Any] = [USER]
    recorded = (await door.say(LIVE, live))["rollmill"]["trajectory"]
    disk.hang()
    rollout = asyncio.create_task(door.ask(key, [USER]))
    await engine.asked(2)
    # the conversation continues, another one starts; neither is in the log
    continued = await door.say(LIVE, [*live, USER])
    fresh = (await door.say(LIVE, [{"role": "user", "content": "hello"}]))["rollmill"]["trajectory"]
    assert continued["rollmill"]["trajectory"] == recorded
    assert 'recording_failures_total{traffic="production"} 2' in await door.metrics()
    assert not rollout.done()  # a rollout waits: its tokens have no value without their record
    disk.recover()
    assert (await rollout)[0] == 200
    assert len((await door.seal("a")).segments) == 1
    # log and index mark both as incomplete, with the reason: they are not sealed and never trained on
    assert {entry.session for _, _, entry in mill.log_entries() if entry.op == "incomplete"} == {recorded, fresh}
    for trajectory in (recorded, fresh):
        await until(lambda id=trajectory: _is(door, id, "failed"))
        assert "not recorded completely" in str(door.trajectories.get(trajectory).reason)
        assert "did not answer within 0.05 s" in str(door.trajectories.get(trajectory).reason)
        assert (await door.admin("POST", f"/sessions/{trajectory}/seal", {}))[0] == 410


async def test_incomplete_sessions_stay_incomplete_after_a_restart(
    mill: Mill, answers: Answers, disk: HangingDisk
) -> None:
    config = QUICK.model_copy(update={"record_wait_s": 0.05})
    engine = await mill.engine(StandIn([answers.text("one")]))
    async with mill.running(engine, config=config) as door:
        live: list[Any] = [USER]
        trajectory = (await door.say(LIVE, live))["rollmill"]["trajectory"]
        disk.hang()
        await door.say(LIVE, [*live, USER])
        disk.recover()
    async with mill.running(engine, config=config) as door:
        assert (await door.admin("POST", f"/sessions/{trajectory}/seal", {}))[0] == 410
        row = door.trajectories.get(trajectory)
        assert row.state == "failed" and "not recorded completely" in str(row.reason)


async def _is(door: Door, id: str, state: str) -> bool:
    return any(row.id == id and row.state == state for row in door.trajectories.list())


async def test_a_store_that_fails_keeps_the_session_until_it_works_again(mill: Mill, answers: Answers) -> None:
    door = await mill.gateway(await mill.engine(StandIn([answers.text("x")])))
    mill.plan("a")
    key = await door.open("a")
    await door.say(key, [USER])
    store, aside = mill.directory / "store", mill.directory / "aside"
    store.rename(aside)
    store.write_text("not a directory any more")
    status, body = await door.admin("POST", "/sessions/a/seal", {"submission_key": None})
    assert status == 503, body
    assert (await door.health())["status"] == "degraded"
    assert body["error"]["type"] == "server_error"
    store.unlink()
    aside.rename(store)
    assert len((await door.seal("a")).segments) == 1
    assert (await door.health())["status"] == "ok"


@pytest.mark.parametrize("headers", [{}, {"x-rollmill-session": "chat-7"}])
async def test_a_request_during_the_seal_of_its_conversation_opens_a_new_one(
    mill: Mill, answers: Answers, disk: HangingDisk, headers: dict[str, str]
) -> None:
    """The disk stops in the middle of the seal. A client with a valid key neither waits for it nor gets a 401."""
    config = QUICK.model_copy(update={"seal_idle_s": 0.5, "record_wait_s": 0.05})
    door = await mill.gateway(await mill.engine(StandIn([answers.text("one")])), config=config)
    live: list[Any] = [USER]
    first = (await door.say(LIVE, live, headers=headers))["rollmill"]["trajectory"]
    disk.hang()
    await until(lambda: _is_ending(mill, first))
    second = (await door.say(LIVE, [*live, USER], headers=headers))["rollmill"]["trajectory"]
    assert second != first
    disk.recover()
    await until(lambda: _is(door, first, "finished"))


async def test_a_served_conversation_is_listed_at_once(mill: Mill, answers: Answers) -> None:
    door = await mill.gateway(await mill.engine(StandIn([answers.text("one")])))
    trajectory = (await door.say(LIVE, [USER]))["rollmill"]["trajectory"]
    await until(lambda: _is(door, trajectory, "running"))
    assert door.trajectories.get(trajectory).traffic == "production"
    assert len((await door.seal(trajectory)).segments) == 1
    assert door.trajectories.get(trajectory).state == "finished"
    # a conversation that an administrator deletes does not stay `running`
    other = (await door.say(LIVE, [{"role": "user", "content": "hello"}]))["rollmill"]["trajectory"]
    await until(lambda: _is(door, other, "running"))
    await door.admin("DELETE", f"/sessions/{other}")
    assert door.trajectories.get(other).state == "failed"
    assert "deleted" in str(door.trajectories.get(other).reason)


async def _is_ending(mill: Mill, id: str) -> bool:
    """Whether the seal of the session is in the log file, although the disk has not confirmed it."""
    return any(entry.session == id and entry.op == "seal" for _, _, entry in mill.log_entries())
