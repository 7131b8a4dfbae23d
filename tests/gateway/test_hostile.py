"""Any client input is served or refused with a GatewayError: recorded, replayed after a crash, sealed and read.

The requests are fuzzed through the real parser, chat format, log and payload codec; only sampling is left out.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from rollmill.chat.formats.compact import CompactFormat
from rollmill.errors import GatewayError
from rollmill.gateway.recording.entries import encode_entry, encode_open, encode_turn
from rollmill.gateway.recording.replaying import replay
from rollmill.gateway.sessions.registry import Registry
from rollmill.gateway.sessions.sessions import Session, parse_facts
from rollmill.gateway.wire.answer import Answer
from rollmill.gateway.wire.body import _parse_slowly, parse_object, to_bytes
from rollmill.gateway.wire.dialect import Limits
from rollmill.gateway.wire.dialects.openai_chat import OpenAIChat
from rollmill.storage.database import open_database
from rollmill.storage.objects import Objects
from rollmill.trajectories.payload import decode_trajectory, encode_trajectory
from rollmill.trajectories.trajectory_store import TrajectoryStore
from rollmill.types import PolicyRef, Span
from tests.chat.conftest import TOOLS, tokenizer  # noqa: F401
from tests.gateway.conftest import read_entries

TEXT = st.text(st.characters(), max_size=10) | st.sampled_from(["\0", "\ud800", "\udc00x", "x" * 300, "<|im_end|>"])
LEAVES = st.none() | st.booleans() | st.floats() | st.integers() | st.sampled_from([10**400, 1e300]) | TEXT
JSON = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3))
CALLS = st.lists(st.fixed_dictionaries({"function": st.fixed_dictionaries({"name": TEXT, "arguments": TEXT})}))
MESSAGES = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": TEXT | JSON},
    optional={"tool_calls": CALLS | JSON},
)
REQUESTS = st.fixed_dictionaries(
    {"messages": st.lists(MESSAGES, min_size=1, max_size=3) | JSON},
    optional={
        **dict.fromkeys(("temperature", "top_p", "top_k", "max_tokens", "seed", "stop", "n"), JSON),
        "tools": st.lists(st.fixed_dictionaries({"function": st.fixed_dictionaries({"name": TEXT})})) | JSON,
        **dict.fromkeys(("user", "model", "stream", "stream_options", "tool_choice"), JSON),
    },
)
EXAMPLES = settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@EXAMPLES
@given(tree=REQUESTS | JSON)
def test_any_request_is_refused_or_recorded(format: CompactFormat, tree: Any) -> None:
    facts = parse_facts({"trajectory": "a"})
    try:
        chat = OpenAIChat().parse(
            json.dumps(tree).encode(), Limits(stop_tokens=(1,), default_max_tokens=8, max_messages=64)
        )
        plan = Session(facts).plan(chat.messages, chat.tools, format)
    except GatewayError:
        return
    tokens = format.stop_tokens[:1]
    span = Span(len(plan.tokens), len(plan.tokens) + 1, chat.sampling, "stop", "e", "home", "rollout", 1.0, 2.0, 0)
    answer = Answer(
        tokens=list(tokens),
        logprobs=[-1.0],
        policy=[0],
        policies=[PolicyRef("main", 1, "bf16", "digest")],
        spans=[span],
        routes=[],
        finish="stop",
        closed=True,
        message=format.parse(list(tokens), plan.tools),
    )
    turn = plan.turn(answer)
    registry = Registry("secret")
    replay(registry, (record for _, _, record in read_entries(encode_open(facts) + encode_turn("a", turn))))
    replayed = registry.get("a")
    assert replayed is not None and replayed.segments["a.0"].turns == [turn]
    decode_trajectory(encode_trajectory(replayed.build()))


@EXAMPLES
@given(
    tree=st.dictionaries(st.sampled_from(["run", "task_id", "group_id", "traffic", "min_version", "provenance"]), JSON)
)
def test_any_facts_of_a_session_are_refused_or_stored(store: TrajectoryStore, tree: dict[str, Any]) -> None:
    try:
        facts = parse_facts(parse_object(json.dumps({"trajectory": "a", **tree}).encode()))
    except GatewayError:
        return
    store.create(facts.run, facts.group_id, facts.task_id, [f"a{len(store.list())}"], facts.provenance, facts.traffic)
    [(_, _, record)] = read_entries(encode_open(facts))
    assert record.header["facts"] == vars(facts)


@EXAMPLES
@given(tree=JSON)
@example([float("nan"), float("-inf"), -0.0, 1e22, 2**64, "\ud800", "\0\u2028\ufdd0é"])
@example(functools.reduce(lambda inner, _: [inner], range(400), "deep"))
def test_the_log_and_answers_hold_anything_as_json_would(tree: Any) -> None:
    [(_, _, entry)] = read_entries(encode_entry("turn", "a", {"tree": tree}))
    assert (entry.op, entry.session) == ("turn", "a")
    assert json.dumps(entry.header) == json.dumps({"tree": tree})
    sent = to_bytes(tree)  # to a client
    assert sent.isascii() and json.dumps(json.loads(sent)) == json.dumps(tree)


@pytest.fixture
def store(database_url: str, tmp_path: Any) -> TrajectoryStore:
    return TrajectoryStore(open_database(database_url), Objects.open(tmp_path / "store"))


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b'{"a": NaN}', "finite"),
        (b'{"a": [1e999]}', "1e999 is not a finite number"),
        (b'{"a": -Infinity}', "finite"),
        (b'{"a":' + b"[" * 100 + b"]" * 100 + b"}", "nested"),
        (b"[" * 100_000, "not JSON"),
        (b'{"a":' + b"9" * 5000 + b"}", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[]", "must be a JSON object"),
    ],
)
def test_a_body_that_could_not_be_recorded_is_refused(body: bytes, says: str) -> None:
    with pytest.raises(GatewayError, match=says):
        parse_object(body)


@given(tree=JSON, cut=st.integers(0, 40), ascii=st.booleans())
@example([float("inf"), 1e22, -0.0, 2**64, "\ud800", "\0\u2028é"], 0, True)
@example(functools.reduce(lambda inner, _: [inner], range(61), "deep"), 0, True)
@example(functools.reduce(lambda inner, _: {"a": inner}, range(62), {}), 0, True)
@example(functools.reduce(lambda inner, _: [inner], range(63), [1]), 0, True)
def test_the_quick_parser_and_the_slow_one_agree(tree: Any, cut: int, ascii: bool) -> None:
    text = json.dumps({"a": tree}, ensure_ascii=ascii).encode(errors="replace")
    body = text[: max(1, len(text) - cut)]

    def outcome(parse: Callable[[bytes], Any]) -> str:
        try:
            return repr(parse(body))
        except GatewayError as error:
            return error.message

    assert outcome(parse_object) == outcome(_parse_slowly)


def test_lone_surrogates_are_replaced() -> None:
    """A tool may print anything. Refusing it would end the agent's episode."""
    assert parse_object(rb'{"a\ud800": ["\udfff b", "\ud83d\ude00"]}') == {"a?": ["? b", "\N{GRINNING FACE}"]}
