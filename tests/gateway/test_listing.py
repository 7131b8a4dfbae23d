"""Open conversations of production are in the index: many rows in one transaction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from rollmill.gateway.sessions import sessions
from rollmill.trajectories.storable import LONGEST_JSON
from rollmill.trajectories.trajectory_store import TrajectoryStore
from tests.gateway.conftest import LIVE, Answers, Mill, until
from tests.gateway.stand_in import StandIn


async def test_new_conversations_are_listed_together_and_one_that_fails_holds_up_no_other(
    mill: Mill, answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollmill.gateway.recording.sealing._SWEEP_S", 0.05)
    together: list[list[str]] = []
    alone: list[str] = []
    add, create = TrajectoryStore.add, TrajectoryStore.create

    def watched(store: TrajectoryStore, rows: Sequence[Mapping[str, Any]]) -> bool:
        added = add(store, rows if together else [*rows, rows[0]])  # the first time one of them is there already
        together.append([row["id"] for row in rows] if added else [])
        return added

    def watched_alone(store: TrajectoryStore, run: str, group: str, task: str, ids: list[str], *rest: Any) -> None:
        alone.extend(ids)
        create(store, run, group, task, ids, *rest)

    monkeypatch.setattr(TrajectoryStore, "add", watched)
    monkeypatch.setattr(TrajectoryStore, "create", watched_alone)
    door = await mill.gateway(await mill.engine(StandIn([answers.text("one")])))
    ids: list[str] = []
    for number in range(2):
        for user in ("ann", "bob", "carl"):
            said = await door.say(LIVE, [{"role": "user", "content": f"{user} {number}"}], user=user)
            ids.append(said["rollmill"]["trajectory"])

        async def listed() -> bool:
            return {row.id for row in door.trajectories.list("production")} >= set(ids)

        await until(listed)
    users = {row.id: row.provenance["user"] for row in door.trajectories.list("production")}
    assert len(users) == 6 and len(set(users.values())) == 3
    assert together[0] == []  # those rows were written one by one, and no other
    assert {id for some in together for id in some} <= set(ids)
    assert sum(map(len, together)) >= 3 + len(alone) and alone and set(alone) < set(ids)


async def test_a_conversation_that_the_index_cannot_hold_is_refused_and_holds_up_no_other(
    mill: Mill, answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollmill.gateway.recording.sealing._SWEEP_S", 0.05)
    door = await mill.gateway(await mill.engine(StandIn([answers.text("one")])))
    large = {"note": "x" * (LONGEST_JSON - len('{"note":""}'))}  # as large as may be, until the run is added
    facts = {"trajectory": "large", "traffic": "production", "provenance": large}
    assert (await door.admin("POST", "/sessions", facts))[0] == 400
    with monkeypatch.context() as older:  # a release that let it in: its log may be replayed
        older.setattr(sessions, "to_object", lambda what, value: "")
        key = await door.open("large", traffic="production", provenance=large)
    await door.say(key, [{"role": "user", "content": "hello"}])
    said = await door.say(LIVE, [{"role": "user", "content": "hello"}], user="ann")

    async def listed() -> bool:
        return said["rollmill"]["trajectory"] in {row.id for row in door.trajectories.list("production")}

    await until(listed)
    assert "large" not in {row.id for row in door.trajectories.list("")}
