"""Feedback about production answers: at any time, once, and only by the owner."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rollmill.gateway.access.keys import KeyStore
from rollmill.storage.database import open_database
from rollmill.storage.objects import Objects
from rollmill.trajectories.trajectory_store import TrajectoryStore
from tests.gateway.conftest import ADMIN, LIVE, USER, Answers, Door, Mill, until
from tests.gateway.stand_in import StandIn


async def give(door: Door, body: Any, token: str = LIVE, path: str = "/v1/feedback") -> tuple[int, Any]:
    return await door.admin("POST", path, body, token=token)


async def test_feedback_is_appended_before_and_after_the_seal_and_only_once(mill: Mill, answers: Answers) -> None:
    door = await mill.gateway(await mill.engine(StandIn([answers.text("one")])))
    about = (await door.say(LIVE, [USER], headers={"x-rollmill-session": "chat-7"}))["rollmill"]
    trajectory, (answer,) = about["trajectory"], about["answers"]
    assert answer == f"{about['segment']}/0"
    first = await give(door, {"session": "chat-7", "id": "f1", "value": 1.0, "kind": "thumb"})  # not in the index yet
    assert first == (200, {"trajectory": trajectory, "feedback": first[1]["feedback"]})
    await door.seal(trajectory)
    assert await give(door, {"session": trajectory, "id": "f1", "value": 1.0, "kind": "thumb"}) == first
    assert (await give(door, {"answer": answer, "text": "late", "label": "bad"}))[0] == 200
    assert (await give(door, {"segment": about["segment"], "value": 2}, token=ADMIN))[0] == 200
    assert (await give(door, {"value": 0.5}, path=f"/s/{trajectory}/v1/feedback"))[0] == 200
    said = [(row.kind, row.value, row.data) for row in door.trajectories.feedback(trajectory)]
    assert said == [
        ("thumb", 1.0, {"key": "production"}),
        ("feedback", None, {"answer": answer, "label": "bad", "text": "late", "key": "production"}),
        ("feedback", 2.0, {"segment": about["segment"], "key": "admin"}),
        ("feedback", 0.5, {"key": "production"}),
    ]


async def test_a_key_that_does_not_own_the_session_is_refused(mill: Mill, answers: Answers) -> None:
    keys = KeyStore(mill.database(), "run")
    _, other = keys.create(["production", "feedback"])
    door = await mill.gateway(await mill.engine(StandIn([answers.text("one")])))
    mill.plan("a")
    session_key = await door.open("a")
    trajectory = (await door.say(LIVE, [USER]))["rollmill"]["trajectory"]
    for target in (trajectory, "a"):
        assert (await give(door, {"session": target, "value": 1.0}, token=other))[0] == 404
    assert (await give(door, {"session": "a", "value": 1.0}))[0] == 404  # a rollout is no user's
    assert (await give(door, {"session": "a", "value": 1.0}, token=session_key))[0] == 401
    await door.seal(trajectory)
    assert (await give(door, {"session": trajectory, "value": 1.0}, token=other))[0] == 404
    door.trajectories.delete(trajectory)
    assert (await give(door, {"session": trajectory, "value": 1.0}))[0] == 404
    assert door.trajectories.feedback(trajectory) == []


async def test_feedback_may_come_before_its_session(
    mill: Mill, answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits, also through a restart, for a session of its key and name, and is appended once."""
    monkeypatch.setattr("rollmill.gateway.recording.early_feedback._LOOK_S", 0.01)
    monkeypatch.setattr("rollmill.gateway.recording.early_feedback._MOST_PER_KEY", 2)
    endpoint = await mill.engine(StandIn([answers.text("one")]))
    _, other = mill.keys.create(["production", "feedback"])
    _, talker = mill.keys.create(["feedback"])
    early = {"session": "chat-9", "id": "f1", "value": 1.0, "kind": "thumb"}
    async with mill.running(endpoint) as door:
        for _ in range(2):
            assert await give(door, early) == (202, {"trajectory": None, "feedback": None})
        assert (await give(door, {"session": "chat-9", "value": -1.0}, token=other))[0] == 202
        assert (await give(door, early, token=talker))[0] == 404  # it cannot own a session
        assert (await give(door, early, token=ADMIN))[0] == 404
        assert (await give(door, {"answer": "chat-9.0/0", "value": 1.0}))[0] == 404  # an answer is never early
        assert (await give(door, {"session": "chat-10", "value": 1.0}))[0] == 202
        assert (await give(door, {"session": "chat-11", "value": 1.0}))[0] == 429
    async with mill.running(endpoint) as door:
        about = (await door.say(LIVE, [USER], headers={"x-rollmill-session": "chat-9"}))["rollmill"]

        async def appended() -> bool:
            return bool(door.trajectories.feedback(about["trajectory"]))

        await until(appended)
        number = door.trajectories.feedback(about["trajectory"])[0].id
        assert await give(door, early) == (200, {"trajectory": about["trajectory"], "feedback": number})
        await door.seal(about["trajectory"])
    (said,) = door.trajectories.feedback(about["trajectory"])
    assert (said.kind, said.value, said.data) == ("thumb", 1.0, {"key": "production"})


async def test_early_feedback_without_a_session_is_dropped_and_counted(
    mill: Mill, answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollmill.gateway.recording.early_feedback._LOOK_S", 0.01)
    door = await mill.gateway(await mill.engine(StandIn([answers.text("one")])))
    assert (await give(door, {"session": "silent", "value": 1.0}))[0] == 202
    await door.say(LIVE, [USER], headers={"x-rollmill-session": "silent", "x-rollmill-consent": "none"})

    async def dropped(reason: str) -> bool:
        return f'feedback_dropped_total{{reason="{reason}"}} 1' in await door.metrics()

    await until(lambda: dropped("consent"))
    monkeypatch.setattr("rollmill.gateway.recording.early_feedback._LONGEST_S", 0.0)
    assert (await give(door, {"session": "nobody", "value": 1.0}))[0] == 202
    await until(lambda: dropped("age"))


async def test_early_feedback_outlasts_a_database_that_fails(
    mill: Mill, answers: Answers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("rollmill.gateway.recording.early_feedback._LOOK_S", 0.01)
    door = await mill.gateway(await mill.engine(StandIn([answers.text("one")])))
    database = door.trajectories._engine
    with database.begin() as connection:
        connection.exec_driver_sql("ALTER TABLE feedback RENAME TO gone")
    assert (await give(door, {"session": "chat", "value": 1.0}))[0] == 202
    about = (await door.say(LIVE, [USER], headers={"x-rollmill-session": "chat"}))["rollmill"]

    async def tried() -> bool:
        return "early feedback is not appended yet" in caplog.text

    async def appended() -> bool:
        return bool(door.trajectories.feedback(about["trajectory"]))

    await until(tried)
    with database.begin() as connection:
        connection.exec_driver_sql("ALTER TABLE gone RENAME TO feedback")
    await until(appended)


async def test_feedback_to_a_session_whose_first_answer_fails_leaves_no_row(
    mill: Mill, answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollmill.gateway.recording.early_feedback._LOOK_S", 0.01)
    engine = StandIn([answers.text("one")], gate=asyncio.Event(), context_limit=1)
    door = await mill.gateway(await mill.engine(engine))
    asked = asyncio.create_task(door.ask(LIVE, [USER], {"x-rollmill-session": "chat"}))
    await engine.asked()
    status, body = await give(door, {"session": "chat", "value": 1.0})
    assert status == 202 and body["trajectory"] is not None
    assert engine.gate is not None
    engine.gate.set()
    assert (await asked)[0] == 400
    engine.context_limit = None
    about = (await door.say(LIVE, [USER], headers={"x-rollmill-session": "chat"}))["rollmill"]

    async def appended() -> bool:
        return bool(door.trajectories.feedback(about["trajectory"]))

    await until(appended)
    assert [row.id for row in door.trajectories.list()] == [about["trajectory"]]


async def test_feedback_counts_as_requests_of_its_key_and_not_as_tokens(mill: Mill, answers: Answers) -> None:
    _, secret = mill.keys.create(
        ["production", "feedback"], requests_per_minute=2, tokens_per_minute=1, budget_tokens=1
    )
    door = await mill.gateway(await mill.engine(StandIn([answers.text("one")])))
    trajectory = (await door.say(secret, [USER]))["rollmill"]["trajectory"]  # takes all tokens of the key
    given = [(await give(door, {"session": trajectory, "value": 1.0}, token=secret))[0] for _ in range(2)]
    assert given == [200, 429]


async def test_feedback_that_says_nothing_or_too_much_is_refused(mill: Mill, answers: Answers) -> None:
    door = await mill.gateway(await mill.engine(StandIn([answers.text("one")])))
    wrong: list[dict[str, Any]] = [
        {"session": "a"},
        {"value": 1.0},
        {"session": "a", "text": "x" * 5000},
        {"session": "a", "value": 1e9},
        {"session": "a", "value": "good"},
        {"session": "a", "kind": "thumbs", "value": 100.0},
        {"session": "a", "kind": "accepted", "value": -1.0},
        {"session": "../a", "value": 1.0},
        {"session": "a", "value": 1.0, "surprise": 1},
    ]
    for body in wrong:
        status, reply = await give(door, body)
        assert status == 400, reply


@pytest.mark.parametrize("given_id", [None, "f1"])
def test_the_store_appends_feedback_once_per_id(database_url: str, tmp_path: Any, given_id: str | None) -> None:
    store = TrajectoryStore(open_database(database_url), Objects.open(tmp_path / "store"))
    store.create("run", "g", "t", ["a", "b"], {})
    numbers = [store.add_feedback("a", "thumb", 1.0, {}, given_id) for _ in range(2)]
    assert len(set(numbers)) == (2 if given_id is None else 1) == len(store.feedback("a"))
    assert store.add_feedback("b", "thumb", 1.0, {}, given_id) not in numbers


async def test_what_a_user_kept_is_named_by_two_commits(mill: Mill, answers: Answers) -> None:
    door = await mill.gateway(await mill.engine(StandIn([answers.text("one")])))
    about = (await door.say(LIVE, [USER]))["rollmill"]
    kept = {"answer": about["answers"][0], "kind": "kept"}
    for label in ("main..HEAD", f"{'a' * 40}", f"{'a' * 40}..{'b' * 41}", None):
        status, body = await give(door, {**kept, "label": label, "text": "more"})
        assert status == 400 and "BASE..COMMIT" in str(body)
    assert door.trajectories.with_feedback("kept") == []
    assert (await give(door, {**kept, "label": f"{'a' * 40}..{'b' * 40}"}))[0] == 200
    assert [row.id for row in door.trajectories.with_feedback("kept")] == [about["trajectory"]]
