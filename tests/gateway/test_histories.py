"""Random histories: whatever clients do, no sampled token is lost, duplicated or tokenised again.

One machine drives registry, sessions and the log in real files; only the engine and HTTP are left out. One test sends
random histories over HTTP to a stand-in engine. ROLLMILL_TEST_HISTORIES=N runs N times as many examples.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from rollmill.chat.formats.compact import CompactFormat
from rollmill.chat.tokenizer import Tokenizer
from rollmill.gateway.recording.entries import encode_open, encode_turn
from rollmill.gateway.recording.recorder import Recorder
from rollmill.gateway.recording.replaying import replay
from rollmill.gateway.sessions.causes import Declared
from rollmill.gateway.sessions.flights import Asked, Flight
from rollmill.gateway.sessions.registry import Registry
from rollmill.gateway.sessions.sessions import Plan, Session, SessionFacts
from rollmill.gateway.wire.answer import Answer
from rollmill.trajectories.payload import decode_trajectory, encode_trajectory
from rollmill.types import PolicyRef, Sampling, Span, Trajectory
from tests.chat.conftest import TOOLS
from tests.gateway.conftest import USER, Door, Mill
from tests.gateway.stand_in import StandIn

TIMES = int(os.environ.get("ROLLMILL_TEST_HISTORIES", "1"))
PHASES = [Phase.explicit, Phase.generate, *([Phase.shrink] if TIMES > 1 else [])]  # shrinking takes minutes
POLICY = PolicyRef("main", 1, "bf16", "d")
Messages = list[dict[str, Any]]
SEEDS = st.integers(0, 2**32)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def letters(tokenizer: Tokenizer, text: str) -> list[int]:
    """An answer in tokens that the tokenizer would not choose: tokenised again, it would be another one."""
    single = [token for letter in text for token in tokenizer.encode(letter)]
    return [tokenizer.token_id("<text>"), *single, tokenizer.token_id("<end>")]


def mutate(history: Messages, kind: str, draw: random.Random, number: int) -> Messages:
    """What clients do with a conversation that ends with an answer."""
    at = draw.randrange(len(history))
    if kind == "retry":
        return history[:-1] or [USER]
    if kind == "drop":
        return [message for index, message in enumerate(history) if index != at] or [USER]
    if kind == "edit":
        return [*history[:at], {**history[at], "content": f"edited {number}"}, *history[at + 1 :], user("go on")]
    if kind == "reorder":
        return [*draw.sample(history, len(history)), user("go on")]
    if kind == "compact":
        return [user(f"So far: {history[-1]['content']}")]
    if kind == "same":
        return [*history, user("again")]
    return [*history, user(f"message {number}")]


KINDS = ("extend", "same", "retry", "drop", "edit", "reorder", "compact")


@dataclass
class Request:
    messages: Messages
    plan: Plan
    stack: contextlib.ExitStack
    flight: Flight


@dataclass
class Recorded:
    """An answer that was recorded: the context that the engine got, and what it sampled."""

    context: list[int]
    tokens: list[int]
    logprob: float


class Histories(RuleBasedStateMachine):
    """Requests are planned, answered in any order, cut, lost, and survive restarts."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        self.in_flight: list[Request] = []
        self.recorded: list[Recorded] = []
        self.conversations: list[tuple[Messages, list[int]]] = []  # and the tokens of the record
        self.sampled = 0
        self.format = CompactFormat(tokenizer)
        self.loop = asyncio.new_event_loop()
        self.directory = tempfile.TemporaryDirectory()

    @initialize()
    def start(self) -> None:
        self.open()
        if self.registry.get("t") is None:
            facts = SessionFacts("t")
            self.loop.run_until_complete(self.recorder.append("t", encode_open(facts)))
            self.registry.add(facts)

    def open(self) -> None:
        self.recorder = Recorder(Path(self.directory.name), compact_bytes=4096)
        self.registry = Registry("secret")
        replay(self.registry, self.recorder.replay())
        self.recorder.start()

    @property
    def session(self) -> Session:
        session = self.registry.get("t")
        assert session is not None
        return session

    @rule(seed=SEEDS, kind=st.sampled_from(KINDS), declared=st.sampled_from([None, None, "sub_agent", "summary"]))
    def ask(self, seed: int, kind: str, declared: Any) -> None:
        draw = random.Random(seed)
        messages, kept = draw.choice([*self.conversations, ([USER], [])])
        if kept:
            messages = mutate(messages, kind, draw, len(self.recorded))
        messages = json.loads(json.dumps(messages))
        plan = self.session.plan(messages, TOOLS, self.format, Declared(declared) if declared else None)
        assert plan.encoded is None or json.loads(plan.encoded) == list(plan.tokens)
        if kept and kind in ("extend", "same"):
            assert list(plan.tokens)[: len(kept)] == kept  # nothing is tokenised again
        stack = contextlib.ExitStack()
        flight = stack.enter_context(self.session.flight(plan, Asked(messages, TOOLS, None), lambda: False))
        assert len({each.cache for each in self.session.flights}) == len(self.session.flights)
        self.in_flight.append(Request(messages, plan, stack, flight))

    @precondition(lambda self: self.in_flight)
    @rule(seed=SEEDS, cut=st.booleans())
    def answer(self, seed: int, cut: bool) -> None:
        request = self.in_flight.pop(seed % len(self.in_flight))
        self.sampled += 1
        tokens = letters(self.tokenizer, f"answer {self.sampled} of this model in its session")
        tokens = tokens[: 1 + seed % len(tokens)] if cut else tokens
        logprob = -self.sampled / 1024
        turn = self.session.place(request.plan, self._answer(request.plan, tokens, logprob, cut))
        self.loop.run_until_complete(self.recorder.append("t", encode_turn("t", turn)))
        segment = self.registry.append(self.session, turn)
        segment.delivered = True
        request.stack.close()
        assert segment.tokens == list(request.plan.tokens) + tokens
        self.recorded.append(Recorded(list(request.plan.tokens), tokens, logprob))
        self.conversations.append(([*request.messages, turn.answer.message], segment.tokens))

    def _answer(self, plan: Plan, tokens: list[int], logprob: float, cut: bool) -> Answer:
        start, finish = len(plan.tokens), "abort" if cut else "stop"
        sampling = Sampling()
        span = Span(start, start + len(tokens), sampling, finish, "e", "home", "rollout", 0.0, 1.0, 0)  # type: ignore[arg-type]
        return Answer(
            tokens=tokens,
            logprobs=[logprob] * len(tokens),
            policy=[0] * len(tokens),
            policies=[POLICY],
            spans=[span],
            routes=[(0, np.full((start + len(tokens) - 1, 1, 2), self.sampled % 256, np.uint8))],
            finish=finish,  # type: ignore[arg-type]
            closed=tokens[-1] in self.format.stop_tokens,
            message=self.format.parse(tokens, TOOLS),
        )

    @precondition(lambda self: self.in_flight)
    @rule(seed=SEEDS)
    def lose(self, seed: int) -> None:
        """A request that fails: nothing is recorded."""
        self.in_flight.pop(seed % len(self.in_flight)).stack.close()

    @rule()
    def restart(self) -> None:
        before = self.record()
        self.recorder.close()
        self.in_flight.clear()
        self.open()
        assert self.record() == before

    def record(self) -> list[Any]:
        return [(s.id, s.cause, s.parent, s.tokens.tolist()) for s in self.session.build().segments]

    @invariant()
    def every_sampled_token_is_there_once(self) -> None:
        session = self.registry.get("t") if hasattr(self, "registry") else None
        if session is not None and len(self.recorded) % 4 == 0:
            check(decode_trajectory(encode_trajectory(session.build())), self.recorded)

    def teardown(self) -> None:
        check(decode_trajectory(encode_trajectory(self.session.build())), self.recorded)
        self.recorder.close()
        self.loop.close()
        self.directory.cleanup()


def check(trajectory: Trajectory, recorded: list[Recorded]) -> None:
    found = []
    for segment in trajectory.segments:
        for span in segment.spans:
            logprobs = segment.logprobs[span.start : span.end]
            tokens = segment.tokens.tolist()
            found.append((tokens[: span.start], tokens[span.start : span.end], sorted({float(x) for x in logprobs})))
    assert sorted(found) == sorted((each.context, each.tokens, [each.logprob]) for each in recorded)
    assert sum(int(segment.sampled.sum()) for segment in trajectory.segments) == sum(
        len(each.tokens) for each in recorded
    )


def test_random_histories_of_one_session(tokenizer: Tokenizer) -> None:
    run_state_machine_as_test(
        lambda: Histories(tokenizer),  # type: ignore[arg-type]
        settings=settings(max_examples=12 * TIMES, stateful_step_count=20, deadline=None, phases=PHASES),
    )


@settings(max_examples=3 * TIMES, deadline=None, phases=PHASES, suppress_health_check=list(HealthCheck))
@given(seed=SEEDS)
def test_random_histories_over_http(tokenizer: Tokenizer, seed: int) -> None:
    asyncio.run(_over_http(tokenizer, random.Random(seed)))


async def _over_http(tokenizer: Tokenizer, draw: random.Random) -> None:
    script = [letters(tokenizer, f"answer {number} of this model in its session") for number in range(60)]
    engine = StandIn(list(script))
    conversations: list[Messages] = [[USER]]
    acknowledged: list[str] = []
    with tempfile.TemporaryDirectory() as directory:
        async with contextlib.AsyncExitStack() as stack:
            mill = Mill(Path(directory), CompactFormat(tokenizer), tokenizer, stack)
            endpoint = await mill.engine(engine)
            mill.plan("a")
            for _ in range(3):  # restarts
                async with mill.running(endpoint) as door:
                    key = await door.open("a")
                    for _ in range(3):
                        acknowledged += await _talk(door, key, conversations, draw)
            async with mill.running(endpoint) as door:
                trajectory = await door.seal("a")
    answers = {tokenizer.decode(tokens[1:-1]): tokens for tokens in script}
    spans = [(segment, span) for segment in trajectory.segments for span in segment.spans]
    sampled = [segment.tokens[span.start : span.end].tolist() for segment, span in spans]
    asked = [request["tokens"] for request in engine.requests]
    for (segment, span), tokens in zip(spans, sampled, strict=True):
        number = asked.index(segment.tokens[: span.start].tolist())
        numbers = [at for at in range(number, len(asked)) if asked[at] == asked[number]]
        assert any(script[at][: len(tokens)] == tokens for at in numbers)
    whole = [tuple(tokens) for tokens in sampled]
    assert all(whole.count(tuple(answers[text])) == 1 for text in acknowledged)
    # an answer that was cut is in the record as far as it went, and never twice
    assert len(spans) <= len(engine.requests)


async def _talk(door: Door, key: str, conversations: list[Messages], draw: random.Random) -> list[str]:
    """Some requests at the same time, a few of which go away in the middle. Returns the texts that arrived."""
    chosen = [draw.choice(conversations) for _ in range(draw.randint(1, 3))]
    asked = [
        mutate(messages, draw.choice(KINDS), draw, draw.randrange(1000)) if len(messages) > 1 else messages
        for messages in chosen
    ]
    replies = await asyncio.gather(*(_ask(door, key, messages, leave=draw.random() < 0.3) for messages in asked))
    texts = []
    for messages, reply in zip(asked, replies, strict=True):
        if reply is not None:
            conversations.append([*messages, reply])
            texts.append(str(reply["content"]))
    return texts


async def _ask(door: Door, key: str, messages: Messages, leave: bool) -> dict[str, Any] | None:
    body = {"messages": messages, "tools": TOOLS, "stream": True}
    headers = {"Authorization": f"Bearer {key}"}
    async with door.http.post(f"{door.url}/v1/chat/completions", json=body, headers=headers) as response:
        assert response.status == 200, await response.text()
        if leave:
            with contextlib.suppress(aiohttp.ClientError, asyncio.IncompleteReadError):
                await response.content.readuntil(b"\n\n")
            response.close()
            return None
        lines = [line[6:] for line in (await response.text()).splitlines() if line.startswith("data: {")]
    deltas = [json.loads(line)["choices"][0]["delta"].get("content") or "" for line in lines]
    return {"role": "assistant", "content": "".join(deltas)}


pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
