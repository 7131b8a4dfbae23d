"""Distillation from hints (`hint_factor`): where a turn went wrong, the model that sees a hint teaches the model that
does not. Composer 2.5 reports this as textual feedback.

A reward names the turns in its evidence, and what would have helped (turns: training/rl/turn_credit.py):

    evidence = {"hints": [{"turn": 1, "text": "The test file is tests/test_add.py."}]}

For the tokens of that turn there are two contexts, and the same weights compute both:

    student   [P P A T|G]          A' A' A'     as it was sampled; G is the generation prompt
    teacher   [P P A T|H H H G]    A' A' A'     H is the hint, as a message of the user

The advantage of each of these tokens gets `hint_factor` · (log teacher − log student) more. In expectation over what
the student samples, that is the gradient of −hint_factor · KL(student ‖ teacher), token by token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rollmill.chat.format import ChatFormat, Message
from rollmill.training.batching import PackedSequence
from rollmill.training.rl.turn_credit import turns_of
from rollmill.types import Grade, Segment

_OPENING: Message = {"role": "user", "content": "Hello."}
_MOST_TEXT = 4000  # characters of a hint
_MOST_HINTS = 16  # of one reward


def hints_of(reward: Grade) -> dict[int, str]:
    """Turn → hint. Where several rewards add up, the evidence of each has a name. Evidence may hold anything."""
    found: dict[int, str] = {}
    for evidence in (reward.evidence, *reward.evidence.values()):
        given = evidence.get("hints") if isinstance(evidence, Mapping) else None
        for each in given[:_MOST_HINTS] if isinstance(given, list | tuple) else ():
            turn, text = (each.get("turn"), each.get("text")) if isinstance(each, Mapping) else (None, None)
            if isinstance(turn, int) and not isinstance(turn, bool) and isinstance(text, str) and text:
                found.setdefault(turn, text[:_MOST_TEXT])
    return found


def hinted(format: ChatFormat, context: Sequence[int], text: str) -> list[int] | None:
    """The context with the hint before its generation prompt. None if the format cannot write it there.

    A short conversation is written without the hint and with it. The context ends like the first one, from where the
    two differ on, and is given the end of the second one:

        without  U H E A        with  U H E U T T E A        so  …  X E A  becomes  … X E U T T E A
    """
    message: dict[str, Any] = {"role": "user", "content": text}
    try:
        without, told = format.render_start([_OPENING], []), format.render_start([_OPENING, message], [])
    except (
        Exception
    ):  # a template is a program of the checkpoint; the step is recorded, so a restart would meet it again
        return None
    pairs = zip(without, told, strict=False)
    start = next((place for place, (old, new) in enumerate(pairs) if old != new), len(without) - 1)
    end = len(context) - len(without[start:])
    if end < 0 or list(context[end:]) != without[start:] or told[start:] == without[start:]:
        return None
    return [*context[:end], *told[start:]]


@dataclass
class HintedTurns:
    """The hinted turns of a step, as sequences for the teacher. `targets` tokens have a place in its answer."""

    format: ChatFormat
    longest: int  # tokens of a context
    sequences: list[PackedSequence] = field(default_factory=list)
    targets: int = 0
    refused: int = 0  # hints that could not be written into a context

    def mark(
        self, segments: Sequence[Segment], sequences: Sequence[PackedSequence | None], reward: Grade
    ) -> list[PackedSequence | None]:
        """The sequences of a trajectory's segments, with the places of the tokens that a teacher will see."""
        marked, hints = list(sequences), hints_of(reward)
        for turn, (index, start, end) in enumerate(turns_of(segments) if hints else ()):
            sequence = marked[index]
            if turn not in hints or sequence is None or sequence.facts is None:
                continue
            context = hinted(self.format, segments[index].tokens[:start].tolist(), hints[turn])
            if context is None or len(context) + end - start > self.longest or sequence.facts.shapes is not None:
                self.refused += 1
                continue
            marked[index] = self._add(segments[index], sequence, start, end, context)
        return marked

    def _add(
        self, segment: Segment, sequence: PackedSequence, start: int, end: int, context: Sequence[int]
    ) -> PackedSequence:
        assert sequence.facts is not None
        places = sequence.rows + 1  # of the targets, in the segment
        chosen = np.flatnonzero((places >= start) & (places < end))
        if chosen.size == 0:
            return sequence
        known = sequence.facts.hint
        hint_M = np.full(len(places), -1, np.int64) if known is None else known.copy()
        hint_M[chosen] = self.targets + np.arange(chosen.size)
        self.targets += chosen.size
        marked = replace(sequence, facts=replace(sequence.facts, hint=hint_M))
        assert marked.facts is not None
        tokens = np.array([*context, *segment.tokens[start : end - 1].tolist()], np.int64)
        rows = len(context) + places[chosen] - start - 1
        self.sequences.append(PackedSequence(tokens, rows, sequence.targets[chosen], facts=marked.facts.picked(chosen)))
        return marked
