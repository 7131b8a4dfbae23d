"""Credit by answers (`credit = "answers"`): what users said about an answer is credited to that answer's tokens.

A cycle stores the advantage of each answer that users said something about (feedback/distil.py):

    parts["answer.live-1.0/2"] = -0.6     of the third answer of segment live-1.0
    parts["answer.live-1.1"]   =  0.2     of all answers of a segment
    parts["answer."]           =  0.3     of the whole conversation

An answer's work has its advantage too: the answers that led to it since its user last asked, such as the calls of tools
before it, the summaries in between and sub-agents that it used. Of several answers, work belongs to the next one.

    asked  A1  result  A2     asked  A3     asked  A4  result  A5        accepted: A2, A5; undone: A3
           +           +             −             +           +

What was said about the whole conversation goes to the other answers on the way to its outcome (training/rl/credit.py).
An abandoned answer, one that the end of its own conversation does not follow from, learns only from a negative
advantage: it was asked again because it was not good.

    a  [P A1]            A1 was refused        A1 learns −
    b  [P|A2]  retry     A2 was accepted       A2 learns +
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rollmill.training.rl.credit import Reach, Ways
from rollmill.types import ANSWER, Grade, Segment, Span


@dataclass(frozen=True)
class _Answer:
    index: int  # of its segment
    segment: Segment
    spans: Sequence[Span]

    @property
    def names(self) -> tuple[str, str]:
        return f"{self.segment.id}/{self.spans[0].answer}", self.segment.id

    @property
    def started_at(self) -> float:
        return self.spans[0].started_at

    def is_on(self, way: Reach) -> bool:
        return self.spans[-1].end <= way.get(self.segment.id, 0)


def answer_advantages(segments: Sequence[Segment], reward: Grade) -> list[np.ndarray]:
    """float32 [T] for each segment; 0 where nothing is learnt."""
    ways, answers = Ways(segments), _answers_of(segments)
    said = {part.removeprefix(ANSWER): value for part, value in reward.parts.items() if part.startswith(ANSWER)}
    whole = said.pop("", 0.0) if said else reward.value  # a reward that names no answer is about all of it
    outcome = ways.to_outcome()
    advantages = [whole if answer.is_on(outcome) else 0.0 for answer in answers]
    named = {
        number: said[name]
        for number, answer in enumerate(answers)
        if (name := next((name for name in answer.names if name in said), None)) is not None
    }
    for number in sorted(named, key=lambda number: answers[number].started_at, reverse=True):
        answer = answers[number]
        end = ways.to_end_of(answer.segment)
        abandoned = not answer.is_on(end)
        work = _work(ways.to(answer.segment, answer.spans[-1]), answers, answer)
        for each in work:
            if abandoned and (answers[each].is_on(end) or named[number] > 0):
                continue
            if each == number or each not in named:
                advantages[each] = named[number]
    found = [np.zeros(len(segment.tokens), np.float32) for segment in segments]
    for answer, advantage in zip(answers, advantages, strict=True):
        for span in answer.spans:
            found[answer.index][span.start : span.end] = advantage
    return found


def _answers_of(segments: Sequence[Segment]) -> list[_Answer]:
    found = []
    for index, segment in enumerate(segments):
        by_number: dict[int, list[Span]] = {}
        for span in segment.spans:
            by_number.setdefault(span.answer, []).append(span)
        found += [_Answer(index, segment, spans) for spans in by_number.values()]
    return found


def _work(way: Reach, answers: Sequence[_Answer], last: _Answer) -> list[int]:
    """The numbers of the answers on the way to `last` that began when its user had last asked, or later."""
    segments = {answer.segment.id: answer.segment for answer in answers}
    chain, segment = [last.segment], last.segment
    while segment.cause != "sub_agent" and segment.parent is not None and segment.parent[0] in segments:
        segment = segments[segment.parent[0]]
        chain.append(segment)
    summarised = {each.parent[0] for each in chain if each.cause == "summary" and each.parent is not None}
    asked_at = last.started_at
    for segment in chain:  # the newest first
        own = [answer for answer in answers if answer.segment is segment and answer.is_on(way)]
        for number, answer in reversed(list(enumerate(own))):
            if answer.started_at > last.started_at:
                continue
            asked_at = min(asked_at, answer.started_at)
            # around a summary no user asks: it ends its segment, and the next one begins by going on from it
            is_summary = segment.id in summarised and number == len(own) - 1
            after_summary = segment.cause == "summary" and number == 0
            if not (answer.spans[0].after_tools or is_summary or after_summary):
                return _between(answers, way, asked_at, last.started_at)
    return _between(answers, way, asked_at, last.started_at)


def _between(answers: Sequence[_Answer], way: Reach, first: float, last: float) -> list[int]:
    return [number for number, each in enumerate(answers) if each.is_on(way) and first <= each.started_at <= last]
