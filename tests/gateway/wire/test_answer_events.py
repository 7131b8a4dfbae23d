"""An answer while it is sampled, and its way through the log."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np

from rollmill.chat.formats.choice import format_of
from rollmill.demo.tokenizer import demo_tokenizer
from rollmill.gateway.config import EngineEndpoint
from rollmill.gateway.recording.entries import decode_turn, encode_turn
from rollmill.gateway.routing.answer_builder import AnswerBuilder
from rollmill.gateway.routing.engines import EngineState
from rollmill.gateway.sessions.segments import Turn
from rollmill.inference.engine import GenerateChunk, GenerateRequest
from rollmill.types import PolicyRef, Sampling
from tests.gateway.conftest import read_entries

OLD, NEW = PolicyRef("main", 0, "bf16", "a"), PolicyRef("main", 1, "bf16", "b")


def chunk(tokens: list[int], policies: list[PolicyRef], policy: list[int], **more: object) -> GenerateChunk:
    logprobs = [-0.5 - index for index in range(len(tokens))]
    return GenerateChunk(tokens, logprobs, policy, policies, **more)  # type: ignore[arg-type]


def test_tokens_that_come_together_are_cut_behind_the_stop_string_with_all_their_facts() -> None:
    tokenizer = demo_tokenizer(512)
    before, stop, after = (tokenizer.encode(text) for text in ("some words ", "STOP", " and more"))
    request = GenerateRequest("s", [1, 2, 3], Sampling(max_tokens=100), top_logprobs=1)
    builder = AnswerBuilder(request, tokenizer, ["STOP"])
    engine = EngineState(EngineEndpoint("http://engine", "home"))
    builder.add(engine, chunk(before, [OLD], [0] * len(before)))  # no token was excluded here
    rest = [*stop, *after]
    best = [[(token, -0.1)] for token in rest]
    kept = [bytes([index]) for index in range(len(rest))]
    switched = [0] * len(stop) + [1] * len(after)
    builder.add(engine, chunk(rest, [OLD, NEW], switched, kept=kept, top_logprobs=best))
    answer = builder.build(format_of(tokenizer), [])
    assert list(answer.tokens) == [*before, *stop] and answer.stop == "STOP" and answer.finish == "stop"
    assert answer.kept == [*[b""] * len(before), *kept[: len(stop)]]
    assert len(answer.logprobs) == len(answer.policy) == len(answer.top_logprobs) == len(answer.tokens)
    assert (answer.spans[-1].start, answer.spans[-1].end) == (3, 3 + len(answer.tokens))


def test_a_turn_is_the_same_after_the_log() -> None:
    """The masks of grammars and the routes too: a session that is replayed is trained on like any other."""
    tokenizer = demo_tokenizer(512)
    tokens = tokenizer.encode("an answer")
    builder = AnswerBuilder(GenerateRequest("s", [1, 2], Sampling(temperature=0.7, grammar="g")), tokenizer, [])
    routes = np.arange(len(tokens) * 4, dtype=np.uint8).reshape(len(tokens), 2, 2)
    kept = [b"", *(bytes([index, 7]) for index in range(1, len(tokens)))]
    more = {"finish": "stop", "oldest_kv_policy": OLD, "cached_tokens": 1, "missing": "something"}
    numbers = [0] * (len(tokens) - 1) + [1]
    sampled = chunk(tokens, [OLD, NEW], numbers, routes=routes, routes_start=2, kept=kept, **more)
    builder.add(EngineState(EngineEndpoint("http://engine", "home")), sampled)
    message = {"role": "user", "content": "a question"}
    turn = Turn("s.0", [message], [1, 2], builder.build(format_of(tokenizer), []), parent=("s.1", 1), cause="edit")
    ((_, _, entry),) = read_entries(encode_turn("s", turn))
    replayed = decode_turn(entry)
    (first, rows), (first_again, rows_again) = turn.answer.routes[0], replayed.answer.routes[0]
    assert first == first_again and np.array_equal(rows, rows_again) and rows.dtype == rows_again.dtype
    turn.answer.routes = replayed.answer.routes = []
    assert replayed.answer.kept == kept
    assert np.allclose(replayed.answer.logprobs, turn.answer.logprobs)  # float32 in the log
    replayed.answer.logprobs = turn.answer.logprobs
    assert asdict(replayed) == asdict(turn)
