"""Credit assignment: the share of a trajectory's advantage that each of its sampled tokens gets.

path          1 on the way to the outcome, 0 elsewhere
decayed       as path, times decay^n; n is how many answers on the way started later. The last answer gets all of it
per_segment   as path, but the segments on the way share equally, however long they are. The sum over all tokens is that
              of path: n tokens of S segments get n / (S · tokens of their segment) each
turns         as path; training/rl/turn_credit.py says what each answer is compared with
answers       what users said about single answers (training/rl/answer_credit.py); as path where a reward does not say
it all           1 everywhere

This divides the advantage within one trajectory. `aggregation` sets how trajectories weigh against each other: with
`sequence_mean` a chain of segments weighs as one sample, otherwise by its tokens.

The outcome is the last answer of the main conversation, or the answer that a client declared (x-rollmill-outcome).

A segment continues the conversation of another one if it is its summary, its retry or the same text by another
template, if it shares its first prompt up to the first answer, or if it quotes one of its answers. Every other segment
begins a conversation of its own: a sub-agent, or an aside such as a request for a title. The main conversation is the
first one with more than one answer, or the first one if each has only one: agents also ask aside before they begin. A
sub-agent is never the main conversation.

The way to the outcome goes from each segment to its parent:

    edit, retry, fork    the tokens that the child shares with its parent led to it, and the parent up to the last of
                         its answers that the child quotes; what follows was abandoned
    summary              all of the parent led to it: the summary was made of it
    template             all of the parent led to it: the same conversation, which the chat template now
                         writes differently (without earlier reasoning, for example)
    sub_agent            what the caller had sampled before it called the sub-agent

A segment quotes an answer if the answer's tokens are in its context as text that was not sampled there. Programs that
summarise, shorten old tool results or ask a sub-agent do this, and the gateway cannot always tell why they edit.

A sub-agent is on the way too if its result was used: the answer that called it is on the way, and the way goes on after
the sub-agent's last answer; or its last answer is quoted on the way.

An example (a retry, then a summary; the last answer is in d):

    a  [P A1 T A2]           parent of b, shares P A1 T      A1 learns; A2 was asked again: it learns nothing
    b  [P A1 T|A2' T A3 S]   parent of d by summary          A2' A3 S learn
    c  [P' A4]               sub-agent of b, between A3, S   A4 learns
    d  [P S|A5]              the outcome                     A5 learns

Without this rule, abandoned answers are rewarded for an outcome that they had no part in.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from rollmill.training.config import CreditName
from rollmill.types import Segment, Span

_SHORTEST_QUOTE = 3  # tokens: fewer may be in a context by chance
_LONG_ANSWER = 12


def credit_of(segments: Sequence[Segment], policy: CreditName, decay: float = 1.0) -> list[np.ndarray]:
    """float32 [T] for each segment; only values at sampled tokens mean something."""
    if policy == "all":
        return [np.ones(len(segment.tokens), np.float32) for segment in segments]
    reach = Ways(segments).to_outcome()
    credits = [(np.arange(len(segment.tokens)) < reach.get(segment.id, 0)).astype(np.float32) for segment in segments]
    if policy == "decayed":
        _decay(segments, credits, decay)
    if policy == "per_segment":
        _share_equally(segments, credits)
    return credits


def _share_equally(segments: Sequence[Segment], credits: Sequence[np.ndarray]) -> None:
    counts = [int((credit_T * segment.sampled).sum()) for segment, credit_T in zip(segments, credits, strict=True)]
    share = sum(counts) / max(1, sum(count > 0 for count in counts))
    for credit_T, count in zip(credits, counts, strict=True):
        credit_T *= share / max(1, count)


def _decay(segments: Sequence[Segment], credits: Sequence[np.ndarray], decay: float) -> None:
    for later, (index, start, end) in enumerate(reversed(credited_answers(segments, credits))):
        credits[index][start:end] *= decay**later


def credited_answers(segments: Sequence[Segment], credits: Sequence[np.ndarray]) -> list[tuple[int, int, int]]:
    """Segment, start and end of each answer that has credit, in the order in which they began."""
    answers = [
        (span.started_at, index, span.start, span.end)
        for index, segment in enumerate(segments)
        for span in segment.spans
        if credits[index][span.start : span.end].any()
    ]
    return [(index, start, end) for _, index, start, end in sorted(answers)]


Reach = dict[str, int]  # segment id → its first tokens, as a number, that are on the way


class Ways:
    """The ways to the answers of a trajectory."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self._segments = {segment.id: segment for segment in segments}
        self._reach: Reach = {}
        # tokens that a segment has added to its parent's, −1 where they were sampled
        self._contexts = {
            segment.id: np.where(segment.sampled, -1, segment.tokens)[segment.parent[1] if segment.parent else 0 :]
            for segment in segments
        }
        self._conversations: dict[str, list[Segment]] = {}  # segment id → the segments of its conversation
        for segment in segments:  # parents come before their children
            before = self._continued(segment, self._conversations)
            self._conversations[segment.id] = [] if before is None else self._conversations[before.id]
            self._conversations[segment.id].append(segment)

    def to_outcome(self) -> Reach:
        outcome = self._declared() or self._last_answer()
        return {} if outcome is None else self.to(*outcome)

    def to_end_of(self, segment: Segment) -> Reach:
        """The way to the last answer of the conversation that the segment belongs to."""
        declared = self._declared()
        if declared is not None and declared[0] in self._conversations[segment.id]:
            return self.to(*declared)
        tail = _latest([each for each in self._conversations[segment.id] if each.spans])
        return self.to(tail, tail.spans[-1])

    def to(self, segment: Segment, last: Span) -> Reach:
        """The way to the answer that `last` ends."""
        self._reach = {}
        self._follow(segment, last)
        answered = [each for each in self._segments.values() if each.spans]
        while used := next((each for each in answered if self._is_quoted(each)), None):
            self._follow(used, used.spans[-1])
        return self._reach

    def _declared(self) -> tuple[Segment, Span] | None:
        found = [(segment, span) for segment in self._segments.values() for span in segment.spans if span.outcome]
        return max(found, key=lambda each: each[1].started_at, default=None)

    def _last_answer(self) -> tuple[Segment, Span] | None:
        """The last answer of the main conversation."""
        answered = [
            [segment for segment in each if segment.spans]
            for id, each in self._conversations.items()
            if each[0].id == id and each[0].cause != "sub_agent"
        ]
        first = next((each for each in answered if each), None)
        if first is None:
            return None
        tail = _latest(next((each for each in answered if _length(each) > 1), first))
        return tail, tail.spans[-1]

    def _continued(self, segment: Segment, earlier: Iterable[str]) -> Segment | None:
        """The segment whose conversation this one continues; None if it begins one."""
        if segment.parent is None or segment.cause == "sub_agent":
            return None
        parent, shared = self._segments[segment.parent[0]], segment.parent[1]
        if segment.cause in ("summary", "template", "retry"):
            return parent
        if shared >= min((start for start, _ in self._answers(parent)), default=0):
            return parent
        if self._last_quoted(parent, segment, len(segment.tokens)):
            return parent
        others = (self._segments[id] for id in reversed(list(earlier)))
        return next((other for other in others if self._quotes_any(segment, other)), None)

    def _quotes_any(self, segment: Segment, other: Segment) -> bool:
        answers = (other.tokens[span.start : span.end] for span in other.spans)
        return any(self._quotes(segment, len(segment.tokens), answer) for answer in answers)

    def _is_quoted(self, segment: Segment) -> bool:
        """Whether the last answer of a segment is not on the way, but quoted there."""
        last = segment.spans[-1]
        if last.end <= self._reach.get(segment.id, 0):
            return False
        on_the_way = (self._segments[id] for id in self._reach if id != segment.id)
        return any(
            self._quotes(each, self._reach[each.id], segment.tokens[last.start : last.end]) for each in on_the_way
        )

    def _last_quoted(self, parent: Segment, child: Segment, end: int) -> int:
        """The end of the last answer in `parent`, inherited ones too, that the first `end` tokens of `child` quote."""
        quoted = (stop for start, stop in self._answers(parent) if self._quotes(child, end, parent.tokens[start:stop]))
        return max(quoted, default=0)

    def _answers(self, segment: Segment) -> list[tuple[int, int]]:
        """Start and end of the answers in a segment, inherited ones too."""
        answers, shared = list[tuple[int, int]](), len(segment.tokens)
        while True:
            answers += [(span.start, span.end) for span in segment.spans if span.end <= shared]
            if segment.parent is None:
                return answers
            shared = min(shared, segment.parent[1])
            segment = self._segments[segment.parent[0]]

    def _quotes(self, segment: Segment, end: int, answer: np.ndarray) -> bool:
        """Whether the answer's tokens are among the first `end` tokens of the segment, added there and not sampled.

        The first and last tokens of a long answer may be others where its text stands in another message.
        """
        if len(answer) < _SHORTEST_QUOTE:
            return False
        needle = answer if len(answer) < _LONG_ANSWER else answer[2:-2]
        context = self._contexts[segment.id][: max(0, end - (segment.parent[1] if segment.parent else 0))]
        begins = np.flatnonzero(context[: max(0, len(context) - len(needle) + 1)] == needle[0]).tolist()
        return any(np.array_equal(context[at : at + len(needle)], needle) for at in begins)

    def _follow(self, tail: Segment, last: Span) -> None:
        """Add the way to the answer `last` of `tail`, and the sub-agents that it used."""
        until = last.started_at
        segment, end = tail, last.end
        while end > self._reach.get(segment.id, 0):
            self._reach[segment.id] = end
            self._add_sub_agents(segment, end, until)
            if segment.parent is None:
                return
            parent, shared = self._segments[segment.parent[0]], segment.parent[1]
            if segment.cause in ("summary", "sub_agent", "template"):
                end = _end_before(parent, segment)
            else:
                end = max(min(end, shared), self._last_quoted(parent, segment, end))
            segment = parent

    def _add_sub_agents(self, caller: Segment, end: int, until: float) -> None:
        for segment in self._segments.values():
            if segment.cause != "sub_agent" or segment.parent is None or segment.parent[0] != caller.id:
                continue
            answered = [each for each in self._continuations(segment) if each.spans]
            if not answered or _end_before(caller, segment) > end:
                continue
            tail = _latest(answered)
            if tail.spans[-1].ended_at <= until:
                self._follow(tail, tail.spans[-1])

    def _continuations(self, first: Segment) -> list[Segment]:
        """`first` and the segments that continue it. Parents come before their children."""
        found = {first.id: first}
        for segment in self._segments.values():
            if segment.parent is not None and segment.parent[0] in found and segment.cause != "sub_agent":
                found[segment.id] = segment
        return list(found.values())


def _length(conversation: Sequence[Segment]) -> int:
    """The number of answers; those to one request count as one, and so do the parts that several engines sampled."""
    begun = sum(span.answered == 0 for segment in conversation for span in segment.spans)
    return begun - sum(segment.cause in ("retry", "fork") for segment in conversation)


def _latest(segments: Sequence[Segment]) -> Segment:
    return max(reversed(segments), key=lambda segment: segment.spans[-1].started_at)


def _end_before(parent: Segment, child: Segment) -> int:
    """The end of what `parent` had sampled before the first answer of `child`."""
    if not child.spans:
        return 0
    earlier: list[Span] = [span for span in parent.spans if span.started_at <= child.spans[0].started_at]
    return max((span.end for span in earlier), default=0)
