"""Which engine answers: by line, channel, version and split; queues at overload."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from rollmill.gateway.config import EngineEndpoint
from rollmill.gateway.routing.engine_places import Places, Priority
from rollmill.gateway.routing.engines import EngineState
from rollmill.gateway.routing.router import Router
from rollmill.gateway.routing.targets import Target, pick, read_target
from rollmill.gateway.routing.traffic_splits import SplitStore
from rollmill.types import PolicyRef, same_line
from tests.gateway.conftest import QUICK, USER, Answers, Mill, until
from tests.gateway.serve import LIVE
from tests.gateway.stand_in import StandIn


def engine(line: str, number: int, channel: str | None = None) -> EngineState:
    state = EngineState(EngineEndpoint(f"http://{line}", "home"), alive=True, channel=channel)
    state.policy = PolicyRef(line, number, "bf16", "digest")
    return state


def test_a_name_means_a_line_a_channel_or_a_version() -> None:
    assert read_target("rollmill", {"live"}) == Target()
    assert read_target("live", {"live"}) == Target(channel="live")
    assert read_target("rl@7", set()) == Target("rl", 7)
    assert read_target("rl", set()) == Target("rl")
    assert same_line("rl", "rl.2") and not same_line("rl", "sft") and not same_line("rl", "rl-b")
    assert Target("rl").is_served_by(engine("rl.2", 9)) and not Target("rl").is_served_by(engine("sft", 9))
    assert Target("rl", 7).is_served_by(engine("rl", 7))
    assert not Target("rl", 7).is_served_by(engine("rl", 8)) and not Target("rl", 7).is_served_by(engine("sft", 7))
    assert Target(channel="live").is_served_by(engine("rl", 8, "live"))
    assert not Target(channel="live").is_served_by(engine("rl", 8))


def test_a_split_follows_its_weights_and_a_session_keeps_its_part() -> None:
    split = {"live": 0.9, "candidate": 0.1}
    drawn = Counter(pick(split, f"session-{number}") for number in range(5000))
    assert 400 < drawn["candidate"] < 600
    assert {pick(split, "one") for _ in range(10)} == {pick(split, "one")}
    moved = [number for number in range(1000) if pick({"live": 0.9}, str(number)) != pick(split, str(number))]
    assert len(moved) < 200  # the rest of the sessions stay where they were


async def ask(door: Any, model: str, session: str = "") -> tuple[int, Any]:
    headers = {"x-rollmill-session": session} if session else {}
    return await door.ask(LIVE, [USER], headers=headers, model=model)  # type: ignore[no-any-return]


async def test_model_names_choose_the_engine(mill: Mill, answers: Answers) -> None:
    engines = {
        "rl": StandIn([answers.text("rl")], line="rl", number=8),
        "sft": StandIn([answers.text("sft")], line="sft", number=3),
        "live": StandIn(
            [answers.text("live")], line="rl", number=7, serves={"kind": "channel", "name": "live", "context": 512}
        ),
    }
    door = await mill.gateway(*[await mill.engine(each) for each in engines.values()])

    async def asked(model: str) -> str:
        status, body = await ask(door, model)
        return str(body["choices"][0]["message"]["content"]) if status == 200 else str(status)

    assert [await asked(name) for name in ("sft", "live", "sft@3", "rl@7", "rl@8")] == [
        "sft",
        "live",
        "sft",
        "live",
        "rl",
    ]
    assert [await asked(name) for name in ("gpt-9", "rl@6", "sft@x")] == ["404"] * 3
    async with door.http.get(f"{door.url}/v1/models") as response:
        names = [each["id"] for each in (await response.json())["data"]]
    assert names == ["rollmill", "live", "rl", "rl@7", "rl@8", "sft", "sft@3"]
    assert (await door.health())["engines"][2]["context"] == 512


async def test_a_canary_gets_its_share_of_the_sessions(mill: Mill, answers: Answers) -> None:
    lines = [StandIn([answers.text(name)], line=name) for name in ("old", "new")]
    config = QUICK.model_copy(update={"split": {"rollmill": {"old": 0.5, "new": 0.5}}})
    door = await mill.gateway(*[await mill.engine(each) for each in lines], config=config)
    first = {f"s{n}": (await ask(door, "rollmill", f"s{n}"))[1] for n in range(40)}  # all on one side: 1 in 10^11
    again = {name: (await ask(door, "rollmill", name))[1] for name in first}
    said = {name: body["choices"][0]["message"]["content"] for name, body in first.items()}
    assert set(said.values()) == {"old", "new"}
    assert said == {name: body["choices"][0]["message"]["content"] for name, body in again.items()}


async def test_a_split_divides_production_alone(mill: Mill, answers: Answers) -> None:
    """A rollout belongs to its line, whatever production is divided between."""
    lines = [StandIn([answers.text(name)], line=name) for name in ("old", "new")]
    config = QUICK.model_copy(update={"split": {"rollmill": {"new": 1.0}}})
    door = await mill.gateway(*[await mill.engine(each) for each in lines], config=config)
    assert (await ask(door, "rollmill"))[1]["choices"][0]["message"]["content"] == "new"
    reply = await door.say(await door.open("a", line="old"), [USER])
    assert reply["choices"][0]["message"]["content"] == "old" and len(lines[1].requests) == 1


async def test_an_engine_that_is_lent_gets_rollouts_and_no_production(mill: Mill, answers: Answers) -> None:
    lent, own = StandIn([answers.text("lent")], name="lent"), StandIn([answers.text("own")], name="own")
    lent.health_body = {"engine": "lent", "region": "home", "policy": lent.policy(), "running": 0, "waiting": 0}
    lent.health_body |= {"paused": False, "serves": None, "lent": "main", "loan": "lent"}
    door = await mill.gateway(*[await mill.engine(each) for each in (lent, own)])
    for number in range(8):
        assert (await ask(door, "rollmill", f"s{number}"))[0] == 200
    assert len(own.requests) == 8 and not lent.requests
    own.alive = False
    await until(lambda: _dead(door, 1))
    reply = await door.say(await door.open("a"), [USER])
    assert reply["choices"][0]["message"]["content"] == "lent"


async def test_versions_are_numbers_of_a_line(mill: Mill, answers: Answers) -> None:
    """Version 9 of another line is no substitute for version 5 of the wanted one."""
    other, wanted = (
        StandIn([answers.text(line)], line=line, number=number) for line, number in (("other", 9), ("rl", 5))
    )
    door = await mill.gateway(*[await mill.engine(each) for each in (other, wanted)])
    key = await door.open("a", min_version=5, line="rl")
    assert (await door.say(key, [USER]))["choices"][0]["message"]["content"] == "rl"
    assert not other.requests and wanted.requests[0]["line"] == "rl"
    wanted.alive = False
    await until(lambda: _dead(door, 1))
    status, body = await door.ask(await door.open("b", min_version=5, line="rl"), [USER])
    assert status == 503 and "no engine" in body["error"]["message"] and not other.requests


async def _dead(door: Any, index: int) -> bool:
    return not (await door.health())["engines"][index]["alive"]


async def test_an_answer_never_mixes_lines(mill: Mill, answers: Answers) -> None:
    """An engine that is lent to another line in the middle of an answer counts as dead for this answer."""
    tokens = answers.text("one two three four five")
    first = StandIn([tokens], name="first", line="rl", switch_after=3, switch_line="other")
    second = StandIn([tokens[3:]], name="second", line="rl")
    door = await mill.gateway(await mill.engine(first), await mill.engine(second))
    mill.plan("a")
    key = await door.open("a", line="rl")
    await door.say(key, [USER], max_tokens=100)
    (segment,) = (await door.seal("a")).segments
    assert [(span.engine, span.end - span.start) for span in segment.spans] == [
        ("first", 3),
        ("second", len(tokens) - 3),
    ]
    assert {policy.line for policy in segment.policies} == {"rl"}
    assert segment.tokens[segment.sampled].tolist() == tokens


async def test_at_overload_the_served_keep_their_places_and_the_rest_are_told(
    mill: Mill, answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenised: list[object] = []
    render = mill.format.render_start
    monkeypatch.setattr(mill.format, "render_start", lambda *given: tokenised.append(given) or render(*given))
    engine = StandIn([answers.text("x")], gate=asyncio.Event())
    config = QUICK.model_copy(update={"engine_requests": 2, "queue_requests": 3, "engine_wait_s": 60.0})
    door = await mill.gateway(await mill.engine(engine), config=config)
    keys = [await door.open(f"s{number}") for number in range(12)]
    asked = [asyncio.create_task(door.ask(key, [USER])) for key in keys]
    refused: list[Any] = []
    while len(refused) < 7:
        done, _ = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        refused += [task.result() for task in done]
        asked = [task for task in asked if not task.done()]
    assert [status for status, _ in refused] == [429] * 7
    assert len(tokenised) == 5  # nothing is computed for those that are refused
    await engine.asked(2)
    assert len(engine.requests) == 2  # the engine never gets more than it can serve well
    production = asyncio.create_task(door.ask(LIVE, [USER]))  # takes the place of the last rollout that waits
    done, _ = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
    assert [task.result()[0] for task in done] == [429]
    assert engine.gate is not None
    engine.gate.set()
    assert (await production)[0] == 200
    assert sorted([(await task)[0] for task in asked]) == [200, 200, 200, 200, 429]
    assert [request["traffic"] for request in engine.requests] == ["rollout", "rollout", "production"] + ["rollout"] * 2


async def test_under_lasting_overload_who_is_served_waits_for_no_more_turns_than_the_queue_is_long(
    mill: Mill, answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Latency at overload, without a clock: a turn is one request that got its place. Those who are refused come back
    at once, which is the worst that clients can do."""
    entered, order, turns = 0, [], []
    take = Places.take

    async def counted(places: Places, *given: Any) -> EngineState:
        nonlocal entered
        entered += 1
        number, before = entered, len(order)
        engine = await take(places, *given)
        turns.append(len(order) - before)
        order.append(number)
        return engine

    monkeypatch.setattr(Places, "take", counted)
    queue, clients, served_each = 3, 12, 3
    config = QUICK.model_copy(update={"engine_requests": 1, "queue_requests": queue, "engine_wait_s": 60.0})
    engine = StandIn([answers.text("x")])
    door = await mill.gateway(await mill.engine(engine), config=config)
    told: list[int] = []

    async def insist(client: int) -> None:
        for number in range(served_each):
            while (status := (await door.ask(LIVE, [USER], {"x-rollmill-session": f"{client}-{number}"}))[0]) != 200:
                told.append(status)

    await asyncio.gather(*map(insist, range(clients)))
    assert len(turns) == clients * served_each and set(told) == {429}
    assert max(turns) <= queue
    assert order == sorted(order)  # by arrival


async def test_who_finds_the_queue_full_is_told_when_to_come_back(mill: Mill, answers: Answers) -> None:
    engine = StandIn([answers.text("x")], gate=asyncio.Event())
    config = QUICK.model_copy(update={"engine_requests": 1, "queue_requests": 1, "engine_wait_s": 60.0})
    door = await mill.gateway(await mill.engine(engine), config=config)
    keys = [await door.open(f"s{number}") for number in range(2)]

    async def post(key: str, path: str = "chat/completions") -> tuple[int, str | None, str]:
        body, headers = {"messages": [USER], "max_tokens": 9}, {"Authorization": f"Bearer {key}"}
        async with door.http.post(f"{door.url}/v1/{path}", json=body, headers=headers) as response:
            return response.status, response.headers.get("Retry-After"), await response.text()

    async def one_waits() -> bool:
        return "rollmill_gateway_waiting 1.0\n" in await door.metrics()

    served = asyncio.create_task(post(keys[0]))
    await engine.asked()
    rollout = asyncio.create_task(post(keys[1]))
    await until(one_waits)
    production = asyncio.create_task(post(LIVE))  # takes the place of the rollout
    refused = [await rollout, await post(LIVE), await post(LIVE, "messages")]
    assert [(status, retry) for status, retry, _ in refused] == [(429, "1")] * 3
    assert all("requests wait already" in text for _, _, text in refused)
    assert engine.gate is not None
    engine.gate.set()
    assert [(await task)[:2] for task in (served, production)] == [(200, None)] * 2


async def test_who_waits_is_served_in_order() -> None:
    one = engine("rl", 1)
    places = Places(longest_queue=10)
    order: list[int] = []

    async def use(number: int, priority: Priority) -> None:
        await places.take(lambda: one if one.in_flight < 1 else None, priority, 60.0)
        order.append(number)
        await asyncio.sleep(0)
        places.leave(one)

    first = await places.take(lambda: one, 2, 1.0)
    priorities: list[Priority] = [2, 1, 2, 0, 1]
    tasks = [asyncio.create_task(use(number, priority)) for number, priority in enumerate(priorities)]
    await asyncio.sleep(0)
    tasks[2].cancel()  # its client has gone
    await asyncio.sleep(0)
    assert places.waiting == 4
    places.leave(first)
    await asyncio.gather(*tasks, return_exceptions=True)
    assert order == [3, 1, 4, 0]
    assert (one.in_flight, places.waiting) == (0, 0)


async def test_a_waiter_that_gives_up_leaves_the_queue() -> None:
    one = engine("rl", 1)
    places = Places(longest_queue=1)
    with pytest.raises(TimeoutError):
        await places.take(lambda: None, 1, 0.0)
    assert places.waiting == 0
    assert await places.take(lambda: one, 2, 0.0) is one


async def test_a_split_of_the_database_and_a_canary_that_is_down(mill: Mill, answers: Answers) -> None:
    """Sessions of a candidate that nobody serves get the live version. Those of a live version that nobody serves wait:
    a candidate never gets more than its share."""
    splits = SplitStore(mill.database(), "run")
    splits.put("rollmill", {"live": 0.5, "candidate": 0.5})
    sessions = [f"s{number}" for number in range(16)]
    chosen = [pick({"live": 0.5, "candidate": 0.5}, session) for session in sessions]
    assert set(chosen) == {"live", "candidate"}
    router = Router([], QUICK, lambda text: [])
    router.divide(splits.get())
    parts = {name: engine("rl", number) for number, name in enumerate(("live", "candidate"))}
    for name, each in parts.items():
        each.channel, each.alive = name, True
    router.engines = list(parts.values())

    def targets() -> list[str | None]:
        return [router.target("rollmill", session, "production").channel for session in sessions]

    assert targets() == chosen
    parts["candidate"].alive = False
    assert set(targets()) == {"live"}
    parts["candidate"].alive, parts["live"].alive = True, False
    assert targets() == chosen
    splits.put("rollmill", {"live": 1.0})
    router.divide(splits.get())
    assert set(targets()) == {"live"}


async def test_a_split_leaves_rollouts_alone(mill: Mill, answers: Answers) -> None:
    """Training engines follow no channel: a rollout that asks for one would wait for ever."""
    training = StandIn([answers.text("training")])
    config = QUICK.model_copy(update={"split": {"rollmill": {"live": 0.95, "candidate": 0.05}}, "engine_wait_s": 0.1})
    door = await mill.gateway(await mill.engine(training), config=config)
    assert (await door.ask(await door.open("a"), [USER]))[0] == 200
    assert (await ask(door, "rollmill"))[0] == 503  # production is divided


async def test_a_session_of_one_line_cannot_ask_for_another(mill: Mill, answers: Answers) -> None:
    lines = [StandIn([answers.text(line)], line=line, number=7) for line in ("rl", "sft")]
    door = await mill.gateway(*[await mill.engine(each) for each in lines])
    key = await door.open("a", line="sft")
    status, body = await door.ask(key, [USER], model="rl@7")
    assert status == 400 and "line sft" in body["error"]["message"]
    assert [(await door.ask(key, [USER], model=name))[0] for name in ("sft@7", "sft", "rollmill")] == [200] * 3
    assert not lines[0].requests


async def test_waiters_that_ask_for_the_same_share_one_choice() -> None:
    """Thousands of rollouts that wait for a line nobody serves must not slow down the requests that end."""
    one = engine("rl", 1)
    places = Places(longest_queue=100)
    chosen: list[str] = []

    async def use(key: str) -> None:
        def choose() -> EngineState | None:
            chosen.append(key)
            return one if key == "rl" and one.in_flight < 1 else None

        await places.take(choose, 2, 60.0, key)

    await places.take(lambda: one, 1, 1.0)
    tasks = [asyncio.create_task(use(key)) for key in ["nobody"] * 20 + ["rl"] * 2]
    await asyncio.sleep(0)
    chosen.clear()
    places.leave(one)
    assert chosen == ["nobody", "rl"] and one.in_flight == 1
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert (places.waiting, one.in_flight) == (0, 0)


async def test_a_full_queue_whose_last_rollout_gives_up_admits_production() -> None:
    one = engine("rl", 1)
    places = Places(longest_queue=1)
    rollout = asyncio.create_task(places.take(lambda: None, 2, 60.0))
    await asyncio.sleep(0)
    rollout.cancel()  # its client has gone; it is still in the queue
    with pytest.raises(TimeoutError):
        await places.take(lambda: None, 1, 0.0)
    assert rollout.cancelled() and places.waiting == 0
    assert await places.take(lambda: one, 1, 0.0) is one


async def test_an_exact_version_is_kept_to_the_last_token(mill: Mill, answers: Answers) -> None:
    tokens = answers.text("one two three four five")
    first = StandIn([tokens], name="first", line="rl", number=7, switch_after=3)
    second = StandIn([tokens[3:]], name="second", line="rl", number=7)
    second.health_body = {}  # at first only the first engine is fit
    door = await mill.gateway(await mill.engine(first), await mill.engine(second), wait=False)
    mill.plan("a")
    key = await door.open("a")
    await until(lambda: _dead(door, 1))
    asked = asyncio.create_task(door.say(key, [USER], model="rl@7", max_tokens=100))
    await first.asked()
    second.health_body = None
    await asked
    (segment,) = (await door.seal("a")).segments
    assert {policy.number for policy in segment.policies} == {7}
    assert segment.tokens[segment.sampled].tolist() == tokens
