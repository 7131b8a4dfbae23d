"""Feedback about production answers: at any time, once, and only by the owner."""

from __future__ import annotations

from typing import Any

import pytest

from rollmill.gateway.keys import KeyStore
from rollmill.storage.database import open_database
from rollmill.storage.objects import Objects
from rollmill.trajectories.store import TrajectoryStore
from tests.gateway.conftest import ADMIN, LIVE, USER, Answers, Door, Mill
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
    keys = KeyStore(open_database(f"sqlite:///{mill.directory}/mill.db"), "run")
    _, other = keys.create(["production", "feedback"])
    door = await mill.gateway(await mill.engine(StandIn([answers.text("one")])))
    mill.plan("a")
    session_key = await door.open("a")
    trajectory = (await door.say(LIVE, [USER]))["rollmill"]["trajectory"]
    for target in (trajectory, "nobody", "a"):
        assert (await give(door, {"session": target, "value": 1.0}, token=other))[0] == 404
    assert (await give(door, {"session": "a", "value": 1.0}))[0] == 404  # a rollout is no user's
    assert (await give(door, {"session": "a", "value": 1.0}, token=session_key))[0] == 401
    await door.seal(trajectory)
    assert (await give(door, {"session": trajectory, "value": 1.0}, token=other))[0] == 404
    door.trajectories.delete(trajectory)
    assert (await give(door, {"session": trajectory, "value": 1.0}))[0] == 404
    assert door.trajectories.feedback(trajectory) == []


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
