"""An agent that compacts its context by itself is recorded as a chain, without a word to the gateway."""

from __future__ import annotations

from typing import Any

import numpy as np

from rollmill.gateway.sessions.segments import OpenSegment, Turn
from rollmill.gateway.wire.answer import Answer
from rollmill.training.rl.credit import credit_of
from tests.gateway.conftest import USER, Answers, Mill
from tests.gateway.stand_in import StandIn

NOTES = [
    "add() in main.py returns a - b; the tests call it with 2 and 3",
    "the sign in main.py is fixed; what remains is to run the tests",
]


async def test_an_agent_that_compacts_by_itself_is_a_chain(mill: Mill, answers: Answers) -> None:
    script = [answers.call("read", path="main.py"), answers.text(NOTES[0])]
    script += [answers.call("read", path="test.py"), answers.text(NOTES[1]), answers.text("Done.")]
    sampled = [token for answer in script for token in answer]
    door = await mill.gateway(await mill.engine(StandIn(list(script))))
    door.trajectories.create("r", "g", "task", ["t"], {})
    key = await door.open("t")
    for note in ["", *NOTES]:
        known = f"{USER['content']}\n<context>\n{note}\n</context>" if note else USER["content"]
        messages = [{"role": "user", "content": known}]
        await door.say(key, messages)
        if note != NOTES[-1]:
            call = messages[-1]["tool_calls"][0]["id"]  # type: ignore[index]
            messages.append({"role": "tool", "tool_call_id": call, "content": "return a - b"})
            messages.append({"role": "user", "content": "Compact the conversation."})
            await door.say(key, messages)
    trajectory = await door.seal("t")
    segments = trajectory.segments
    assert [segment.cause for segment in segments] == ["start", "summary", "summary"]
    assert [segment.parent and segment.parent[0] for segment in segments] == [None, "t.0", "t.1"]
    assert np.concatenate([each.tokens[each.sampled] for each in segments]).tolist() == sampled
    for segment, credit_T in zip(segments, credit_of(segments, "path"), strict=True):
        assert credit_T[segment.sampled].all(), "the reward reaches every answer of the chain"


async def test_a_header_declares_why_a_context_begins(mill: Mill, answers: Answers) -> None:
    """Nothing in the texts shows it. Without the header it is an edit, and with a wrong one a bad request."""
    door = await mill.gateway(await mill.engine(StandIn([answers.text(text) for text in ("a", "b", "c", "d")])))
    door.trajectories.create("r", "g", "task", ["t"], {})
    key = await door.open("t")
    asked: list[tuple[str, dict[str, str]]] = [
        ("Fix it.", {}),
        ("Look for it.", {"x-rollmill-cause": "sub_agent"}),
        ("Go on.", {"x-rollmill-cause": "summary", "x-rollmill-parent": "t.0"}),
        ("Other.", {}),
    ]
    for text, headers in asked:
        assert (await door.ask(key, [{"role": "user", "content": text}], headers))[0] == 200
    status, error = await door.ask(key, [{"role": "user", "content": "x"}], {"x-rollmill-cause": "edit"})
    assert status == 400 and "x-rollmill-cause" in error["error"]["message"]
    segments = (await door.seal("t")).segments
    assert [segment.cause for segment in segments] == ["start", "sub_agent", "summary", "edit"]
    assert [segment.parent and segment.parent[0] for segment in segments[:3]] == [None, "t.0", "t.0"]


async def test_a_header_declares_the_outcome(mill: Mill, answers: Answers) -> None:
    """An agent that starts over: nothing in the texts shows that its second context is the one that counts."""
    door = await mill.gateway(await mill.engine(StandIn([answers.text(text) for text in ("one", "two", "three")])))
    door.trajectories.create("r", "g", "task", ["t"], {})
    key = await door.open("t")
    messages: list[Any] = [USER]
    await door.say(key, messages)
    await door.say(key, [*messages, {"role": "user", "content": "Go on."}])
    again = [{"role": "user", "content": "From the beginning."}]
    status, error = await door.ask(key, again, {"x-rollmill-outcome": "yes"})
    assert status == 400 and "x-rollmill-outcome" in error["error"]["message"]
    assert (await door.ask(key, again, {"x-rollmill-outcome": "true"}))[0] == 200
    segments = (await door.seal("t")).segments
    assert [
        credit_T[each.sampled].max() for each, credit_T in zip(segments, credit_of(segments, "path"), strict=True)
    ] == [0, 1]


async def test_the_gateway_tells_the_window_of_its_engines(mill: Mill, answers: Answers) -> None:
    engines = [StandIn([answers.text("x")], serves={"kind": "line", "name": "main", "context": n}) for n in (512, 384)]
    door = await mill.gateway(*[await mill.engine(each) for each in engines])
    async with door.http.get(f"{door.url}/v1/models") as response:
        assert {each["max_model_len"] for each in (await response.json())["data"]} == {384}


async def test_engines_that_tell_no_window(mill: Mill, answers: Answers) -> None:
    door = await mill.gateway(await mill.engine(StandIn([answers.text("x")])))
    async with door.http.get(f"{door.url}/v1/models/rollmill") as response:
        assert "max_model_len" not in await response.json()


def test_a_chain_may_be_longer_than_the_stack_is_deep() -> None:
    segment: OpenSegment | None = None
    for number in range(3000):
        parent = None if segment is None else (segment.id, 2)
        prompt = [1, 2, number] if segment is None else [number]
        turn = Turn(f"t.{number}", [], prompt, answer_of([7]), parent=parent, cause="summary" if parent else "start")
        segment = OpenSegment(turn, segment)
        segment.append(turn)
    assert segment is not None
    assert segment.tokens == [1, 2, 2999, 7] and segment.slice(1, 3) == [2, 2999] and segment.slice(0, 2) == [1, 2]
    assert segment.slice(2, 2) == [] and segment.slice(3, 4) == [7]


def answer_of(tokens: list[int]) -> Answer:
    message = {"role": "assistant", "content": "x"}
    return Answer(tokens, [-0.5], [0], [], [], [], finish="stop", closed=True, message=message)
