"""A session: one conversation with the model, recorded as one trajectory. Requests are matched with its segments.

request extends a segment            only the new messages are rendered and appended
request repeats the last one         answered again from the record if that answer may not have arrived,
                                     otherwise a new segment, cause "retry"
the template rewrites the history    a new segment, cause "template": the tokens from there on cannot be kept
a sub-agent or a summary begins      a new segment with that cause, see gateway.causes
anything else                        a new segment, cause "edit", which branches off after the longest shared history

Requests run in parallel. Each is planned against what is recorded when it arrives. If its segment has grown until its
answer is complete, the answer becomes a new segment, cause "fork". The order of the log decides.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import ConfigDict, TypeAdapter

from rollmill.chat.format import ChatFormat, HistoryRewritten, Message, Tool
from rollmill.errors import GatewayError, TrajectoryError
from rollmill.gateway.sessions.causes import Declared, DeclaredCause, is_within, proven_cause
from rollmill.gateway.sessions.flights import Asked, Flight
from rollmill.gateway.sessions.segments import Continued, Mark, OpenSegment, Turn
from rollmill.gateway.sessions.waits import Waits
from rollmill.gateway.wire.answer import Answer
from rollmill.strict import parse_json
from rollmill.trajectories.facts import STRICT, Int31
from rollmill.trajectories.storable import to_key, to_object
from rollmill.types import Cause, TrafficClass, Trajectory

_ID = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")


@dataclass(frozen=True)
class SessionFacts:
    """The facts that the caller gave when it opened the session."""

    __pydantic_config__ = ConfigDict(**STRICT, extra="forbid")

    trajectory: str
    traffic: TrafficClass = "rollout"
    run: str = ""
    task_id: str = ""
    group_id: str = ""
    min_version: Int31 = 0
    line: str = ""  # of `min_version`
    provenance: dict[str, Any] = field(default_factory=dict)


_FACTS = TypeAdapter(SessionFacts)


def parse_facts(tree: dict[str, Any]) -> SessionFacts:
    """The body of POST /sessions. Values that could not be stored later are refused now, while the caller waits."""
    try:
        given = {name: value for name, value in tree.items() if value is not None}
        facts = parse_json(json.dumps(given), _FACTS)
        for name in ("run", "task_id", "group_id", "line"):
            to_key(name, getattr(facts, name))
        to_object("provenance", {"run": facts.run, **facts.provenance})  # as `Session.provenance`
    except TrajectoryError as error:
        raise GatewayError(error.message, hint=error.hint) from None
    except ValueError as error:
        known = ", ".join(SessionFacts.__dataclass_fields__)
        raise GatewayError(str(error), hint=f"the fields are {known}") from None
    check_id(facts.trajectory)
    return facts


def check_id(text: object) -> str:
    """Checks the id of a session, which is part of URLs and object keys."""
    if not isinstance(text, str) or not is_id(text):
        raise GatewayError(f"{text!r:.80} is not an id", hint="1 to 128 letters, digits, dots, dashes or underscores")
    return text


def is_id(text: object) -> bool:
    return isinstance(text, str) and _ID.fullmatch(text) is not None


@dataclass
class Plan:
    """How a request continues the session: `tokens` go to the engine, `prompt` is the new part of them."""

    segment: str
    cache: str  # the name of its KV cache at the engines: of the segment, or its own if another answer is in flight
    tokens: Sequence[int]
    prompt: list[int]
    messages: list[Message]
    tools: list[Tool]
    opens: bool  # whether it starts a new segment
    inherited: int = 0  # number of recorded messages that come before `messages`
    parent: tuple[str, int] | None = None
    cause: Cause = "start"
    encoded: bytes | None = None  # JSON of `tokens`, if there is one

    def turn(self, answer: Answer) -> Turn:
        return Turn(
            segment=self.segment,
            messages=self.messages,
            prompt=self.prompt,
            answer=answer,
            tools=self.tools if self.opens else [],
            parent=self.parent,
            cause=self.cause,
            inherited=self.inherited if self.opens else 0,
        )


class Session:
    def __init__(self, facts: SessionFacts) -> None:
        self.facts = facts
        self.segments: dict[str, OpenSegment] = {}  # oldest first
        self.latest: OpenSegment | None = None  # the segment of the last answer
        self.flights: list[Flight] = []
        self.lock = asyncio.Lock()  # one at a time writes to its log: an answer is placed after those before it
        self.engine: str | None = None  # URL of the engine that holds its KV cache
        self.used_at = time.time()  # time of the last request or answer
        self.logged = False  # whether it is in the log
        self.listed: str | None = None  # its state in the index, as last written by the gateway
        self.ending = False  # it is being sealed: a new request opens a new session instead of waiting
        self.sealing = False  # the log says that no more turns follow
        self.given_up: str | None = None  # why it is forgotten without a seal
        self.submission_key: str | None = None
        self.unrecorded: str | None = None  # why its later answers are not in the log
        self.waits = Waits()
        self.cache_key = ""  # see gateway.registry; a restart forgets it

    @property
    def name(self) -> str:
        """What a client sends to continue this session: its own name for it, or the trajectory."""
        own = self.facts.provenance.get("session")
        return own if self.facts.traffic == "production" and isinstance(own, str) else self.facts.trajectory

    @property
    def closed(self) -> bool:
        """Whether no more turns may be recorded."""
        return self.sealing or self.given_up is not None

    @property
    def stored(self) -> bool:
        """False: the user did not agree, so nothing of it is written."""
        return self.facts.provenance.get("consent") != "none"

    @property
    def provenance(self) -> dict[str, Any]:
        return {"run": self.facts.run, **self.facts.provenance}

    def append(self, turn: Turn) -> OpenSegment:
        segment = self.segments.get(turn.segment)
        if segment is None:
            segment = OpenSegment(turn, self.segments[turn.parent[0]] if turn.parent else None)
            self.segments[turn.segment] = segment
        segment.append(turn)
        self.latest = segment
        self.used_at = time.time()
        return segment

    @contextlib.contextmanager
    def flight(self, plan: Plan, asked: Asked, is_abandoned: Callable[[], bool]) -> Iterator[Flight]:
        """While the answer to a planned request is in flight. `is_abandoned`: whether its client has disconnected."""
        flight = Flight(plan.cache, asked, is_abandoned)
        self.flights.append(flight)
        try:
            yield flight
        finally:
            self.flights.remove(flight)
            flight.end()

    async def wait_for_abandoned(self, asked: Asked) -> None:
        """Wait for an answer in flight to this request whose client has disconnected: this request repeats it."""
        for flight in list(self.flights):
            if flight.is_abandoned() and flight.asked.same_as(asked):
                await flight.wait()

    def undelivered(self, asked: Asked) -> OpenSegment | None:
        """The newest segment whose last answer this request asks for, if that answer may not have arrived. An answer
        that was cut is not given again."""
        for segment in reversed(self.segments.values()):
            count, answer = len(segment.messages) - 1, segment.turns[-1].answer
            if (
                segment.has_arrived
                or answer.finish == "abort"
                or any(span.sampling.grammar != asked.grammar for span in answer.spans)
                or count != len(asked.messages)
                or segment.tools != asked.tools
            ):
                continue
            if segment.shared_messages(asked.messages) == count:
                return segment
        return None

    def plan(
        self, messages: list[Message], tools: list[Tool], format: ChatFormat, declared: Declared | None = None
    ) -> Plan:
        if not self.segments:
            prompt, id = format.render_start(messages, tools), self._next_id()
            return Plan(id, id, prompt, prompt, messages, tools, opens=True)
        base, shared = self._nearest(messages, tools)
        found = self._new_context(base, shared, messages, declared)
        if found is not None:
            cause, base = found
            shared = base.shared_messages(messages) if base.tools == tools else 0
            return self._branch(base, shared, messages, tools, format, cause)
        if base.tools == tools and shared == len(base.messages):
            new = messages[shared:]
            try:
                prompt = _render_after(base, -1, new, tools, format)
            except HistoryRewritten:  # recorded messages hold reasoning that clients do not send back
                return self._branch(base, shared, base.messages + new, tools, format, "template")
            cache = self._next_id() if any(flight.cache == base.id for flight in self.flights) else base.id
            return Plan(
                base.id,
                cache,
                Continued(base, prompt),
                prompt,
                new,
                tools,
                opens=False,
                inherited=shared,
                encoded=base.encoded_with(prompt),
            )
        return self._branch(base, shared, messages, tools, format)

    def plan_tokens(self, tokens: list[int], decode: Callable[[list[int]], str]) -> Plan:
        """The plan for a request that gives its context as tokens: they alone decide what it continues."""
        base, shared = None, 0
        for segment in self.segments.values():
            common = _common(segment.tokens, tokens)
            if base is None or common > shared or common == shared == len(segment.tokens):
                base, shared = segment, common
        id = self._next_id()
        if base is None:
            return Plan(id, id, tokens, tokens, [{"role": "prompt", "content": decode(tokens)}], [], opens=True)
        if shared == len(base.tokens) < len(tokens):
            new = [{"role": "prompt", "content": decode(tokens[shared:])}]
            cache = id if any(flight.cache == base.id for flight in self.flights) else base.id
            inherited = len(base.messages)
            return Plan(base.id, cache, tokens, tokens[shared:], new, base.tools, opens=False, inherited=inherited)
        mark = max((mark for mark in base.marks if mark.tokens <= shared), key=lambda mark: mark.tokens)
        new = [{"role": "prompt", "content": decode(tokens[mark.tokens :])}] if len(tokens) > mark.tokens else []
        return Plan(
            segment=id,
            cache=id,
            tokens=tokens,
            prompt=tokens[shared:],
            messages=new,
            tools=[],
            opens=True,
            parent=(base.id, shared),
            cause="edit" if new else "retry",
            inherited=mark.messages,
        )

    def _new_context(
        self, base: OpenSegment, shared: int, messages: list[Message], declared: Declared | None
    ) -> tuple[DeclaredCause, OpenSegment] | None:
        """The cause and the parent, if these messages begin a sub-agent or a summary."""
        asked_again = shared == len(messages) == len(base.messages) - 1
        continues = asked_again or any(message["role"] == "assistant" for message in messages[:shared])
        if declared is None or declared.implied:
            proven = None if continues else proven_cause(messages[shared:], reversed(self.segments.values()))
            if proven is not None or declared is None:
                return proven
        if continues and is_within(base, declared.cause):
            return None
        parent = self.latest if declared.parent is None else self.segments.get(declared.parent)
        if parent is None:
            raise GatewayError("this session has no such parent segment", hint="answers name their segment")
        return declared.cause, base if continues else parent  # shared answers keep their tokens

    def place(self, plan: Plan, answer: Answer) -> Turn:
        """The turn of a planned answer. Answers recorded since the plan was made decide where it goes."""
        if plan.opens and (plan.parent is not None or not self.segments):
            free = plan.segment not in self.segments
            return (plan if free else replace(plan, segment=self._next_id())).turn(answer)
        base = next(iter(self.segments.values())) if plan.opens else self.segments[plan.segment]
        start = len(plan.tokens) - len(plan.prompt)
        if not plan.opens and base.length == start:
            return plan.turn(answer)
        return self._fork(base, start, plan).turn(answer)

    def build(self) -> Trajectory:
        facts = self.facts
        return Trajectory(
            id=facts.trajectory,
            segments=[segment.build() for segment in self.segments.values()],
            task_id=facts.task_id,
            group_id=facts.group_id,
            traffic=facts.traffic,
            messages=self.latest.messages if self.latest else [],
            provenance=self.provenance | ({"tools": self.latest.tools} if self.latest and self.latest.tools else {}),
        )

    def _nearest(self, messages: list[Message], tools: list[Tool]) -> tuple[OpenSegment, int]:
        """The segment that shares most with these messages. Of equals: one they extend, then the one used last."""

        def rank(segment: OpenSegment) -> tuple[int, bool, bool]:
            shared = segment.shared_messages(messages) if segment.tools == tools else 0
            return shared, shared == len(segment.messages), segment is self.latest

        ranks = {segment.id: rank(segment) for segment in self.segments.values()}
        best = max(reversed(self.segments.values()), key=lambda segment: ranks[segment.id])
        return best, ranks[best.id][0]

    def _branch(
        self,
        base: OpenSegment,
        shared: int,
        messages: list[Message],
        tools: list[Tool],
        format: ChatFormat,
        cause: Cause = "edit",
    ) -> Plan:
        index, rendered = _render_branch(base, shared, messages, tools, format)
        mark, new = base.marks[index], messages[base.marks[index].messages :]
        # Tokens may agree beyond the mark, up to the base's next answer: an edited message may keep its beginning.
        inner = mark.kind != "prompt" and index + 1 < len(base.marks)
        following = base.marks[index + 1].tokens if inner else mark.tokens
        agreed = _common(rendered, base.slice(mark.tokens, following))
        asked_again = not new and mark == base.marks[-2]
        id = self._next_id()
        return Plan(
            segment=id,
            cache=id,
            tokens=base.slice(0, mark.tokens) + rendered,
            prompt=rendered[agreed:],
            messages=new,
            tools=tools,
            opens=True,
            parent=(base.id, mark.tokens + agreed),
            cause="retry" if asked_again and cause == "edit" else cause,
            inherited=mark.messages,
        )

    def _fork(self, base: OpenSegment, start: int, plan: Plan) -> Plan:
        """The plan for an answer whose base has grown since token `start`. It shares the tokens of its prompt too, as
        far as the base got the same ones."""
        places = [(mark.messages, mark.tokens) if mark.kind != "prompt" else None for mark in base.marks]
        following = base.marks[places.index((plan.inherited, start)) + 1].tokens
        agreed = _common(plan.prompt, base.slice(start, following))
        return replace(
            plan,
            segment=self._next_id() if plan.cache in self.segments else plan.cache,
            prompt=plan.prompt[agreed:],
            opens=True,
            parent=(base.id, start + agreed),
            cause="fork",
        )

    def _next_id(self) -> str:
        taken = self.segments.keys() | {flight.cache for flight in self.flights}
        numbered = (f"{self.facts.trajectory}.{number}" for number in itertools.count(len(self.segments)))
        return next(id for id in numbered if id not in taken)


def _usable(mark: Mark, shared: int, messages: list[Message]) -> bool:
    """A branch may start at a mark inside the shared history. After a generation prompt only an answer can follow."""
    if mark.messages > shared:
        return False
    return mark.kind != "prompt" or mark.messages == len(messages) or messages[mark.messages]["role"] == "assistant"


def _render_branch(
    base: OpenSegment, shared: int, messages: list[Message], tools: list[Tool], format: ChatFormat
) -> tuple[int, list[int]]:
    """The last mark from which a branch can start, and what follows it. The template may rewrite the history before
    `messages`; then an earlier mark is the last one whose tokens can be kept. It is found by bisection: a template
    that rewrites a message rewrites the text up to every later mark."""
    usable = [at for at, mark in enumerate(base.marks) if _usable(mark, shared, messages)]
    found: tuple[int, list[int]] | None = None
    low, high, place = 0, len(usable), len(usable) - 1  # marks below `low` can be kept, those from `high` on cannot
    while low < high:
        index = usable[place]
        try:
            found = index, _render_after(base, index, messages[base.marks[index].messages :], tools, format)
            low = place + 1
        except HistoryRewritten:
            high = place
        place = (low + high) // 2
    assert found is not None, "the start of a segment can always be rendered"
    return found


def _render_after(
    base: OpenSegment, index: int, new: list[Message], tools: list[Tool], format: ChatFormat
) -> list[int]:
    """The tokens of `new` behind a mark of the segment."""
    mark = base.marks[index]
    history = base.messages[: mark.messages]
    if mark.kind == "start":
        return format.render_start(new, tools)
    if mark.kind == "answer":
        answer = base.slice(base.marks[index - 1].tokens, mark.tokens)
        return format.render_turn(new, tools, answer_closed=mark.closed, history=history, answer=answer)
    if not new:
        return []
    replaced = format.render_answer(new[0], tools, history=history)  # the client replaced the answer with its own text
    return replaced + format.render_turn(
        new[1:], tools, answer_closed=True, history=[*history, new[0]], answer=replaced
    )


def _common(left: list[int], right: list[int]) -> int:
    count = 0
    for mine, theirs in zip(left, right, strict=False):
        if mine != theirs:
            break
        count += 1
    return count
