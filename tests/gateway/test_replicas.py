"""Several gateways of one run: any of them answers for any session; while one is dead, the others serve production."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from rollmill.chat.tokenizer import Tokenizer
from rollmill.gateway.recording.replaying import read_sessions
from rollmill.gateway.replicas import HEADER, Gateways, gateway_of
from rollmill.gateway.workers import Workers, _continues
from rollmill.rollouts.gateway_client import GatewayClient
from rollmill.storage.objects import Objects
from rollmill.trajectories.trajectory_store import TrajectoryStore
from tests.gateway.conftest import USER, Answers, Door, Mill
from tests.gateway.serve import ADMIN, LIVE
from tests.gateway.stand_in import StandIn
from tests.gateway.test_crash import Process, up
from tests.processes import free_port

COUNT = 2


def names(prefix: str, number: int, count: int = 2) -> list[str]:
    """`count` names of sessions that belong to gateway `number`."""
    all_names = (f"{prefix}-{index}" for index in range(1000))
    return [name for name in all_names if gateway_of(name, COUNT) == number][:count]


@contextlib.asynccontextmanager
async def gateways(
    mill: Mill, tokenizer: Tokenizer, engine: StandIn, workers: int = 1
) -> AsyncIterator[list[tuple[Process, Door]]]:
    tokenizer.save(mill.directory / "tokenizer.json")
    url, ports = (await mill.engine(engine)).url, [free_port() for _ in range(COUNT)]
    database, objects = mill.database(), Objects.open(mill.directory / "store")
    processes = [Process(mill, url, workers, port, ports) for port in ports]
    try:
        for process in processes:
            process.start()
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as http:
            doors = [Door(f"http://127.0.0.1:{port}", TrajectoryStore(database, objects), http) for port in ports]
            for door in doors:
                await up(door)
            yield list(zip(processes, doors, strict=True))
    finally:
        for process in processes:
            process.kill()


async def live(door: Door, session: str, messages: list[Any], headers: Any = ()) -> str:
    """Ask in production. Returns the trajectory that the answer is recorded in."""
    status, body = await door.ask(LIVE, messages, {"x-rollmill-session": session, **dict(headers)})
    assert status == 200, body
    messages.append(body["choices"][0]["message"])
    return str(body["rollmill"]["trajectory"])


async def say_again(door: Door, key: str, messages: list[Any]) -> None:
    """Asks like a harness: again while the gateway says that the session's own one is being restarted."""
    while (told := await door.ask(key, messages))[0] == 503:  # noqa: ASYNC110 - the other process cannot set an event
        await asyncio.sleep(0.1)
    assert told[0] == 200, told
    messages.append(told[1]["choices"][0]["message"])


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
async def test_sessions_are_found_through_any_gateway_and_survive_its_death(
    mill: Mill, tokenizer: Tokenizer, answers: Answers, workers: int
) -> None:
    rollouts = [*names("rollout", 0), *names("rollout", 1)]
    mill.plan(*rollouts)
    engine = StandIn([answers.text("one two three")])
    async with gateways(mill, tokenizer, engine, workers) as [(_, first), (dying, second)]:
        # rollouts: opened at one gateway, asked at the other, kept by the one that the hash names
        told: dict[str, list[Any]] = {id: [dict(USER)] for id in rollouts}
        keys = {id: await first.open(id, run="run", group_id="g", task_id="t") for id in rollouts}
        await asyncio.gather(*[second.say(keys[id], told[id]) for id in rollouts])
        for number in range(COUNT):
            log = mill.directory / f"gateway-{number + 1}"
            kept = {session.facts.trajectory for session in read_sessions(log)}
            assert kept == set(names("rollout", number))
        for door in (first, second):  # each lists the sessions of all
            status, listed = await door.admin("GET", "/sessions")
            assert status == 200 and {each["trajectory"] for each in listed["sessions"]} == set(rollouts)

        # production: a named conversation is one trajectory, whichever gateway is asked; the proof cannot be guessed
        [chat] = names("chat", 1, 1)
        messages: list[Any] = [dict(USER)]
        trajectory = await live(first, chat, messages)
        assert gateway_of(trajectory, COUNT) == 1, "its own id belongs to the gateway that made it"
        assert await live(second, chat, [*messages, dict(USER)], {HEADER: "guess"}) == trajectory
        assert await live(first, chat, [*messages, dict(USER)], {HEADER: "guess"}) == trajectory

        dying.kill()
        elsewhere = await live(first, chat, [*messages, dict(USER)])  # the other one answers meanwhile
        assert elsewhere != trajectory and gateway_of(elsewhere, COUNT) == 0
        asked, sent = {"messages": [dict(USER)]}, {"Authorization": f"Bearer {LIVE}", "x-rollmill-session": chat}
        async with first.http.post(f"{first.url}/v1/chat/completions", json=asked, headers=sent) as response:
            assert response.headers["x-rollmill-session"] == elsewhere, "feedback by the name would go to the other"
        status, _ = await first.admin("POST", "/forget", {"user": "nobody"})
        assert status == 503, "what a dead gateway knows cannot be forgotten now"
        waiting = asyncio.create_task(say_again(first, keys[rollouts[-1]], told[rollouts[-1]]))  # its rollouts wait
        dying.start()
        await waiting
        await up(second)

        # the dispatcher's client goes straight to the right gateway
        places = [lambda url=door.url: url for door in (first, second)]  # type: ignore[misc]
        async with GatewayClient(places, ADMIN) as client:
            for id in rollouts:
                door = (first, second)[gateway_of(id, COUNT)]
                assert client.url_of(id) == door.url
                await client.seal(id, None)
                assert first.trajectories.load(id).messages == told[id]
        assert await first.sessions() == 1  # what it answered for the other
        assert (await first.admin("POST", "/forget", {"user": "nobody"}))[0] == 200


def test_ids_are_divided_evenly_and_a_worker_makes_ids_of_its_own_gateway() -> None:
    share = [gateway_of(f"run-{number}", 3) for number in range(3000)]
    assert all(900 < share.count(number) < 1100 for number in range(3))
    gateways = Gateways(1, [lambda: None] * 3, ADMIN)
    workers = Workers(1, ["", ""], gateways=gateways)
    made = [workers.fresh("live-") for _ in range(20)]
    assert {(gateways.owner(id), workers.owner(id)) for id in made} == {(1, 1)}


@pytest.mark.parametrize(
    ("body", "continues"),
    [
        (b"{}", False),
        (b'{"previous_response_id": null}', False),
        (b'{"previous_response_id": "resp_1"}', True),
        (b'{"input": "\\"previous_response_id\\""}', False),
        (b'["previous_response_id"]', True),
    ],
)
def test_only_a_named_response_is_continued(body: bytes, continues: bool) -> None:
    assert _continues(body) == continues
