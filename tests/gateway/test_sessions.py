"""How requests are matched with the recorded segments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rollmill.chat.formats.compact import CompactFormat
from rollmill.chat.tokenizer import Tokenizer
from rollmill.errors import GatewayError
from rollmill.gateway.recording.entries import decode_turn, encode_turn
from rollmill.gateway.sessions.causes import Declared, read_declared
from rollmill.gateway.sessions.segments import OpenSegment, Turn
from rollmill.gateway.sessions.sessions import Plan, Session, SessionFacts
from rollmill.gateway.wire.answer import Answer, same_message
from rollmill.training.rl.credit import credit_of
from rollmill.trajectories.invariants import check_trajectory
from rollmill.types import PolicyRef, Sampling, Segment, Span
from tests.chat.conftest import TOOLS
from tests.gateway.conftest import USER, Answers, read_entries

POLICY = PolicyRef("main", 1, "bf16", "d")


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answered(
    session: Session,
    format: CompactFormat,
    messages: list[Any],
    tokens: list[int],
    tools: Any = TOOLS,
    append: Callable[[Session, Turn], OpenSegment] = Session.append,
    declared: Declared | None = None,
) -> Plan:
    """Plans a request and records these tokens as its answer."""
    plan = session.plan(messages, tools, format, declared)
    start = len(plan.tokens)
    span = Span(start, start + len(tokens), Sampling(), "stop", "e", "home", "rollout", 0.0, 1.0, 0)
    answer = Answer(
        tokens=tokens,
        logprobs=[-0.5] * len(tokens),
        policy=[0] * len(tokens),
        policies=[POLICY],
        spans=[span],
        routes=[],
        finish="stop",
        closed=tokens[-1:] == list(format.stop_tokens),
        message=format.parse(tokens, tools),
    )
    (_, _, record), *_ = read_entries(encode_turn("t", plan.turn(answer)))
    append(session, decode_turn(record))  # through the bytes of the log: replay and live recording are the same
    assert session.latest is not None
    assert session.latest.tokens == list(plan.tokens) + tokens
    session.latest.delivered = True
    return plan


def new_session() -> Session:
    return Session(SessionFacts("t", "rollout"))


def test_only_new_messages_are_rendered(format: CompactFormat, answers: Answers) -> None:
    session = new_session()
    answered(session, format, [USER], answers.text("one"))
    history = [USER, {"role": "assistant", "content": " one\n"}]  # a client that adds blanks
    plan = session.plan([*history, user("more")], TOOLS, format)
    assert plan.prompt == format.render_turn([user("more")], TOOLS, answer_closed=True)
    assert (plan.segment, plan.opens, plan.messages) == ("t.0", False, [user("more")])


def test_the_same_question_again_is_a_retry_only_of_the_last_answer(format: CompactFormat, answers: Answers) -> None:
    session = new_session()
    answered(session, format, [USER], answers.text("one"))
    again = session.plan([USER], TOOLS, format)
    assert (again.cause, again.prompt, again.messages) == ("retry", [], [])
    history = [USER, {"role": "assistant", "content": "one"}, user("more")]
    answered(session, format, history, answers.text("two"))
    assert session.plan([USER], TOOLS, format).cause == "edit"


def test_an_edited_message_shares_the_tokens_before_it(
    format: CompactFormat, answers: Answers, tokenizer: Tokenizer
) -> None:
    session = new_session()
    system = {"role": "system", "content": "Be brief."}
    answered(session, format, [system, user("x")], answers.text("one"))
    plan = answered(session, format, [system, user("y")], answers.text("two"))
    assert plan.parent == ("t.0", len(tokenizer.encode("Be brief.")) + 2)  # <system> … <user>
    assert (plan.cause, plan.opens) == ("edit", True)
    assert list(plan.tokens) == format.render_start([system, user("y")], TOOLS)


def test_a_dropped_answer_branches_off_before_its_request(format: CompactFormat, answers: Answers) -> None:
    session = new_session()
    one = {"role": "assistant", "content": "one"}
    answered(session, format, [USER], answers.text("one"))
    answered(session, format, [USER, one, user("a")], answers.text("two"))
    plan = answered(session, format, [USER, one, user("a"), user("b")], answers.text("three"))
    assert list(plan.tokens) == (
        format.render_start([USER], TOOLS)
        + answers.text("one")
        + format.render_turn([user("a"), user("b")], TOOLS, answer_closed=True)
    )
    assert plan.cause == "edit"
    extended = session.plan(
        [USER, one, user("a"), user("b"), {"role": "assistant", "content": "three"}, USER], TOOLS, format
    )
    assert (extended.segment, extended.opens) == (plan.segment, False)


def test_credit_reaches_what_a_program_summarised_or_shortened(format: CompactFormat, answers: Answers) -> None:
    """A summary contains an answer. An edit shows by its tokens which answers were kept: they led to the outcome."""
    summary = "the parser fails on nested lists, and the change belongs into main.py near line two"
    session = new_session()
    answered(session, format, [USER], answers.text("look at it"))
    asked = [USER, {"role": "assistant", "content": "look at it"}, user("Summarise.")]
    answered(session, format, asked, answers.text(summary))
    answered(session, format, [user(f"What is known: {summary}. Go on.")], answers.text("done"))
    summarised = session.build().segments
    assert [segment.cause for segment in summarised] == ["start", "summary"]
    assert all(credit_T[segment.sampled].all() for segment, credit_T in zip(summarised, path(summarised), strict=True))

    session = new_session()
    one, two = ({"role": "assistant", "content": text} for text in ("one is here", "two is here"))
    answered(session, format, [USER], answers.text("one is here"))
    answered(session, format, [USER, one, user("a long output")], answers.text("two is here"))
    answered(session, format, [USER, one, user("a long output"), two, user("x")], answers.text("abandoned"))
    answered(session, format, [USER, one, user("cut"), two, user("y")], answers.text("done"))
    first, last = session.build().segments
    credit_T, _ = path([first, last])
    kept = len(answers.text("one is here")) + len(answers.text("two is here"))
    assert credit_T[first.sampled].tolist() == [1.0] * kept + [0.0] * len(answers.text("abandoned"))


def test_a_request_aside_takes_no_credit(format: CompactFormat, answers: Answers) -> None:
    """The last request of the session asks for a title, with a prompt of its own."""
    session = new_session()
    answered(session, format, [USER], answers.text("look at it"))
    asked = [USER, {"role": "assistant", "content": "look at it"}, user("go on")]
    answered(session, format, asked, answers.text("fixed, all tests pass"))
    system = {"role": "system", "content": "You write titles."}
    answered(session, format, [system, user("A title for a conversation about lists")], answers.text("lists"), tools=[])
    main, title = session.build().segments
    of_main, of_title = path([main, title])
    assert of_main[main.sampled].all() and not of_title[title.sampled].any()


def test_answers_to_tool_results_are_marked(format: CompactFormat, answers: Answers) -> None:
    session = new_session()
    answered(session, format, [USER], answers.call("read", path="a.py"))
    call = session.segments["t.0"].messages[-1]
    asked = [USER, call, {"role": "tool", "tool_call_id": call["tool_calls"][0].get("id"), "content": "x"}]
    answered(session, format, asked, answers.text("done"))
    answered(session, format, asked, answers.text("again"))
    answered(session, format, [*asked, {"role": "assistant", "content": "again"}, USER], answers.text("more"))
    marks = {segment.cause: [span.after_tools for span in segment.spans] for segment in session.build().segments}
    assert marks == {"start": [False, True], "retry": [True, False]}


def path(segments: list[Segment]) -> list[np.ndarray]:
    return credit_of(segments, "path")


def test_answers_replaced_by_the_client_are_not_sampled(format: CompactFormat, answers: Answers) -> None:
    session = new_session()
    answered(session, format, [USER], answers.text("one"))
    forged = [USER, {"role": "assistant", "content": "two"}, user("a")]
    answered(session, format, forged, answers.text("three"))
    first, second = session.build().segments
    assert second.tokens[second.sampled].tolist() == answers.text("three")
    assert first.tokens[first.sampled].tolist() == answers.text("one")


def test_other_tools_are_another_context(format: CompactFormat, answers: Answers) -> None:
    session = new_session()
    answered(session, format, [USER], answers.text("one"))
    plan = session.plan([USER, {"role": "assistant", "content": "one"}, USER], TOOLS[:1], format)
    assert plan.opens and plan.cause == "edit"


def test_two_agents_in_one_session_keep_their_own_segments(format: CompactFormat, answers: Answers) -> None:
    session = new_session()
    main, sub = [USER], [user("You are a helper.")]
    answered(session, format, main, answers.text("one"))
    answered(session, format, sub, answers.text("uno"))
    main += [{"role": "assistant", "content": "one"}, USER]
    sub += [{"role": "assistant", "content": "uno"}, USER]
    assert answered(session, format, main, answers.text("two")).segment == "t.0"
    assert answered(session, format, sub, answers.text("dos")).segment == "t.1"


def test_declared_sub_agents_and_summaries(format: CompactFormat, answers: Answers) -> None:
    session = new_session()
    sub, summary = Declared("sub_agent"), Declared("summary", "t.0")
    answered(session, format, [USER], answers.text("one"), declared=sub)  # the first context has no parent
    helper: list[Any] = [USER, user("You are a helper.")]
    first = answered(session, format, helper, answers.text("uno"), declared=sub)
    assert (first.cause, first.parent and first.parent[0]) == ("sub_agent", "t.0")
    again = session.plan(helper, TOOLS, format, sub)
    assert (again.cause, again.parent and again.parent[0]) == ("retry", first.segment)
    helper += [{"role": "assistant", "content": "uno"}, USER]
    assert answered(session, format, helper, answers.text("dos"), declared=sub).segment == first.segment
    # a sub-agent that gets the whole conversation of its caller
    whole = [USER, {"role": "assistant", "content": "one"}, user("Help.")]
    plan = answered(session, format, whole, answers.text("three"), declared=Declared("sub_agent", "t.0"))
    assert (plan.cause, plan.opens, list(plan.tokens)[: len(session.segments["t.0"].tokens)]) == (
        "sub_agent",
        True,
        session.segments["t.0"].tokens,
    )
    last = answered(session, format, [user("So far: x")], answers.text("four"), declared=summary)
    assert (last.cause, last.parent and last.parent[0]) == ("summary", "t.0")
    with pytest.raises(GatewayError, match="no such parent"):
        session.plan([user("y")], TOOLS, format, Declared("summary", "t.9"))
    check_trajectory(session.build())


def test_headers_declare_a_cause() -> None:
    assert read_declared({}) is None
    headers = {"x-rollmill-cause": "summary", "x-rollmill-parent": "t.0"}
    assert read_declared(headers) == Declared("summary", "t.0")
    for wrong in ({"x-rollmill-cause": "edit"}, {"x-rollmill-parent": "t.0"}):
        with pytest.raises(GatewayError, match="hint"):
            read_declared(wrong)


def test_undeclared_causes_need_exact_containment(format: CompactFormat, answers: Answers) -> None:
    session = new_session()
    task = "read the parser and list the functions in it"
    answered(session, format, [USER], answers.call("edit", path="a", line=1, text=task))
    plan = session.plan([user(f"Task: {task}.")], TOOLS, format)
    assert (plan.cause, plan.parent and plan.parent[0]) == ("sub_agent", "t.0")
    part = "read the parser and list the functions, then tell me which of them are recursive"
    for text in ("Task: read the parser.", part):
        assert session.plan([user(text)], TOOLS, format).cause == "edit"
    long = "the parser has two functions, both are recursive"
    answered(session, format, [user("x")], answers.text(long))
    answered(session, format, [user("y")], answers.text("ok"))
    plan = session.plan([user(f"{task}: {long}")], TOOLS, format)  # an answer proves more than arguments
    assert (plan.cause, plan.parent and plan.parent[0]) == ("summary", "t.1")
    assert session.plan([user("Is it ok? " * 10)], TOOLS, format).cause == "edit"  # too short to prove anything


def test_messages_are_compared_by_meaning() -> None:
    def call(arguments: str, id: str = "a", name: str = "f") -> dict[str, Any]:
        function = {"name": name, "arguments": arguments}
        return {"role": "assistant", "content": None, "tool_calls": [{"id": id, "function": function}]}

    assert same_message(call('{"a": 1, "b": 2}'), call('{"b":2,"a":1}', id="b"))
    assert same_message(call("not json"), call("not json"))
    assert not same_message(call('{"a": 1}'), call('{"a": 2}'))
    assert not same_message(call("{}"), call("{}", name="g"))
    assert not same_message(call("not json"), call("{}"))
    assert not same_message(call("[" * 10_000), call("[" * 10_001))
    assert not same_message(user("a"), user("a "))
    assert not same_message(user("a"), {"role": "tool", "content": "a"})
