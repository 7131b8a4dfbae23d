"""Forgetting a user, old trajectories, and the overview of sessions."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rollmill.cli.main import app
from rollmill.config import load_config
from rollmill.errors import GatewayError
from rollmill.gateway.recording.forgetting import forget_in_log
from rollmill.gateway.recording.replaying import read_sessions
from rollmill.gateway.sessions.registry import pseudonym
from rollmill.rollouts.gateway_client import GatewayClient
from rollmill.runs.run import RunConfig, RunDirectory
from rollmill.storage.database import open_database
from rollmill.storage.objects import Objects
from rollmill.trajectories.trajectory_store import TrajectoryStore
from tests.gateway.conftest import ADMIN, LIVE, QUICK, USER, Answers, Door, Mill, until
from tests.gateway.stand_in import StandIn
from tests.gateway.test_privacy import written
from tests.gateway.test_recording_failures import HangingDisk, disk  # noqa: F401
from tests.trajectories.test_cli import DEMO

PRIVATE = {"role": "user", "content": "Ann's private words"}
OF_ANN = {"user": "ann"}


async def conversations(door: Door) -> tuple[str, str, str]:
    """A sealed and an open one of ann, and one of bob."""
    sealed = (await door.say(LIVE, [PRIVATE], user="ann"))["rollmill"]["trajectory"]
    await door.admin("POST", "/v1/feedback", {"session": sealed, "value": 1.0, "text": "Ann's opinion"}, token=LIVE)
    await door.seal(sealed)
    lasting = (await door.say(LIVE, [PRIVATE], user="ann"))["rollmill"]["trajectory"]
    other = (await door.say(LIVE, [USER], user="bob", headers={"x-rollmill-session": "chat-7"}))["rollmill"]
    return sealed, lasting, other["trajectory"]


async def test_a_user_is_forgotten_everywhere(mill: Mill, answers: Answers) -> None:
    endpoint = await mill.engine(StandIn([answers.text("one")]))
    async with mill.running(endpoint) as door:
        sealed, lasting, other = await conversations(door)
        assert (await door.admin("POST", "/forget", OF_ANN, token=LIVE))[0] == 403
        status, body = await door.admin("POST", "/forget", OF_ANN)
        assert (status, body["open"], body["kept"]) == (200, 1, {})
        assert sealed in body["deleted"]
        assert (await door.admin("POST", "/forget", OF_ANN))[1] == {"open": 0, "deleted": [], "kept": {}}
        log = (mill.directory / "gateway" / "sessions.log").read_bytes()
        assert lasting.encode() not in log and other.encode() in log
        assert b"ann" not in log
        row, (said,) = door.trajectories.get(sealed), door.trajectories.feedback(sealed)
        assert (row.state, said.value, said.data) == ("deleted", 1.0, {})
        assert not list((mill.directory / "store" / "trajectories").glob("*"))
        assert len((await door.seal(other)).segments) == 1
    assert b"private words" not in written(mill)


def stores(mill: Mill) -> tuple[TrajectoryStore, Objects]:
    objects = Objects.open(mill.directory / "store")
    return TrajectoryStore(mill.database(), objects), objects


@pytest.mark.parametrize("forgets", [True, False])
async def test_nothing_stays_of_an_answer_that_is_being_recorded(
    mill: Mill,
    answers: Answers,
    disk: HangingDisk,  # noqa: F811
    forgets: bool,
) -> None:
    endpoint = await mill.engine(StandIn([answers.text("one")]))
    async with mill.running(endpoint) as door:
        disk.hang()
        asked = asyncio.create_task(door.ask(LIVE, [PRIVATE], user="ann"))
        await until(lambda: _is_written(mill, b"private words"))
        ((_, _, entry), *_) = mill.log_entries()
        path = ("POST", "/forget", OF_ANN) if forgets else ("DELETE", f"/sessions/{entry.session}")
        ended = asyncio.create_task(door.admin(*path))
        await asyncio.wait([ended], timeout=0.05)  # it arrives while the disk is busy
        disk.recover()
        assert (await asked)[0] == (await ended)[0] == 200
    assert read_sessions(mill.directory / "gateway") == []


async def _is_written(mill: Mill, text: bytes) -> bool:
    return text in (mill.directory / "gateway" / "sessions.log").read_bytes()


@pytest.mark.parametrize("running", [True, False])
async def test_the_payload_of_a_seal_that_did_not_end_is_deleted(mill: Mill, answers: Answers, running: bool) -> None:
    endpoint = await mill.engine(StandIn([answers.text("one")]))
    payloads = mill.directory / "store" / "trajectories"
    database = mill.database()
    async with mill.running(endpoint) as door:
        trajectory = (await door.say(LIVE, [PRIVATE], user="ann"))["rollmill"]["trajectory"]
        with database.begin() as connection:  # the index fails in the middle of the seal
            refuse = "BEFORE UPDATE ON trajectories BEGIN SELECT RAISE(ABORT, 'the disk is full'); END"
            connection.exec_driver_sql(f"CREATE TRIGGER full {refuse}")
        assert (await door.admin("POST", f"/sessions/{trajectory}/seal", {}))[0] >= 500
        assert len(list(payloads.glob("*"))) == 1
        if running:
            assert (await door.admin("POST", "/forget", OF_ANN))[0] >= 500  # the row cannot be marked
    if not running:
        assert await forget_in_log(mill.directory / "gateway", ADMIN, "ann", *stores(mill)) == 1
    assert not list(payloads.glob("*"))
    assert read_sessions(mill.directory / "gateway") == []


async def test_a_log_is_rewritten_without_its_gateway(mill: Mill, answers: Answers) -> None:
    endpoint = await mill.engine(StandIn([answers.text("one")]))
    log = mill.directory / "gateway"
    async with mill.running(endpoint) as door:
        _, _, other = await conversations(door)
        with pytest.raises(GatewayError, match="another gateway"):
            await forget_in_log(log, ADMIN, "ann", *stores(mill))
        status, body = await door.admin("GET", "/sessions")
        assert status == 200 and {each["name"] for each in body["sessions"]} >= {"chat-7"}
        assert "private" not in str(body)
        assert (await door.admin("GET", "/sessions", token=LIVE))[0] == 403
        assert len(read_sessions(log)) == 2
        async with GatewayClient(door.url, ADMIN) as client:
            assert (await client.forget("nobody"))["open"] == 0
    assert await forget_in_log(log, ADMIN, "nobody", *stores(mill)) == 0
    assert await forget_in_log(log, ADMIN, "ann", *stores(mill)) == 1
    assert b"private words" not in (log / "sessions.log").read_bytes()
    assert [session.facts.trajectory for session in read_sessions(log)] == [other]


@pytest.mark.parametrize("running", [True, False])
async def test_feedback_that_waits_for_a_session_of_the_user_is_forgotten(
    mill: Mill, answers: Answers, running: bool
) -> None:
    """The session is open and has no answer yet."""
    stand_in = StandIn([answers.text("one")], gate=asyncio.Event())
    endpoint, log = await mill.engine(stand_in), mill.directory / "gateway"
    async with mill.running(endpoint) as door:
        for name in ("of-ann", "of-nobody"):
            given = {"session": name, "text": f"opinion {name}"}
            assert (await door.admin("POST", "/v1/feedback", given, token=LIVE))[0] == 202
        named = {"x-rollmill-session": "of-ann"}
        asked = asyncio.create_task(door.ask(LIVE, [USER], named, user="ann"))
        await stand_in.asked()
        if running:
            assert (await door.admin("POST", "/forget", OF_ANN))[1]["open"] == 1
        assert stand_in.gate is not None
        stand_in.gate.set()
        await asked
    if not running:
        with_session = [session.name for session in read_sessions(log)]
        assert with_session == ["of-ann"]
        assert await forget_in_log(log, ADMIN, "ann", *stores(mill)) == 1
    data = (log / "sessions.log").read_bytes()
    assert b"opinion of-ann" not in data and b"opinion of-nobody" in data


async def test_old_trajectories_are_deleted(mill: Mill, answers: Answers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollmill.gateway.recording.sealing._EXPIRE_S", 0.02)
    config = QUICK.model_copy(update={"retention_days": 1e-9})
    door = await mill.gateway(await mill.engine(StandIn([answers.text("one")])), config=config)
    mill.plan("a")
    await door.say(await door.open("a"), [USER])
    live = (await door.say(LIVE, [USER]))["rollmill"]["trajectory"]
    await door.admin("POST", f"/sessions/{live}/seal", {})
    await door.seal("a")

    async def is_deleted() -> bool:
        return door.trajectories.get(live).state == "deleted"

    await until(is_deleted)
    assert door.trajectories.get("a").state == "finished"  # rollouts are not production


def call(*arguments: Any, code: int = 0) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result.output


async def test_the_commands(mill: Mill, answers: Answers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    endpoint = await mill.engine(StandIn([answers.text("one")]))
    async with mill.running(endpoint) as door:
        _, _, other = await conversations(door)
    run = RunDirectory.create(mill.directory, load_config(RunConfig, DEMO, ['name="demo"']))
    assert "no session yet" in await asyncio.to_thread(call, "sessions", "list", run.path)
    (mill.directory / "gateway").rename(run.path / "gateway")
    listed = await asyncio.to_thread(call, "sessions", "list", run.path)
    assert "chat-7" in listed and "open" in listed and "private" not in listed
    monkeypatch.setenv("COLUMNS", "80")
    narrow = await asyncio.to_thread(call, "sessions", "list", run.path)
    names = [word for word in listed.split() if word.startswith("live-")]
    assert names and all(name in narrow for name in names) and max(map(len, narrow.splitlines())) <= 80
    shown = await asyncio.to_thread(call, "sessions", "show", run.path, "chat-7")
    assert other in shown and f"segment {other}.0 (start): 1 turns" in shown
    store = TrajectoryStore(open_database(run.database_url), Objects.open(run.home_store))
    user = pseudonym(run.secrets["admin_token"].encode(), "ann")
    store.create("production", "", "", ["live-1"], {"user": user}, "production")
    said = await asyncio.to_thread(call, "trajectories", "forget", run.path, "--user", "ann")
    assert (
        "0 open sessions ended, 1 trajectories deleted" in said
    )  # the log is that of another gateway, with another secret
    assert store.get("live-1").state == "deleted"
    second = RunDirectory.create(mill.directory, load_config(RunConfig, DEMO, ['name="second"']))
    said = await asyncio.to_thread(call, "trajectories", "forget", run.path, second.path, "--user", "ann")
    assert f"{run.path}: 0 open" in said and f"{second.path}: nothing was recorded" in said


def test_a_log_that_is_not_there_has_no_sessions(tmp_path: Path) -> None:
    assert read_sessions(tmp_path) == []
