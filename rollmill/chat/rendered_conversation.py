"""A whole conversation as tokens, rendered with the calls that the gateway makes during a real session:

    render_start([system, user])    answer    render_turn([tool])    answer
    not learnt                      learnt    not learnt             learnt

So training on a conversation and serving it use the same tokens. Where the model's template rewrites the history (drops
earlier reasoning), serving starts a new segment with the rewritten history; so here, answers before that place are
context only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rollmill.chat.format import ChatFormat, HistoryRewritten, Message, Tool


class RenderedConversation(NamedTuple):
    tokens: list[int]
    learnt: list[bool]  # True for tokens of answers, their closing token included
    ends: list[int]  # number of tokens up to the end of each answer
    rewritten: int = 0  # number of answers that are context only because the template rewrites them

    def cut(self, longest: int) -> RenderedConversation:
        """Up to the last answer that ends within `longest` tokens. Empty if there is none."""
        ends = [end for end in self.ends if end <= longest]
        stop = ends[-1] if ends else 0
        return RenderedConversation(self.tokens[:stop], self.learnt[:stop], ends, self.rewritten)


def render_conversation(
    messages: Sequence[Message],
    tools: Sequence[Tool],
    format: ChatFormat,
    ignored: Sequence[int] = (),
    longest: int | None = None,
) -> RenderedConversation:
    """Up to the last answer, or to the first one that ends behind `longest` tokens: each answer costs a rendering of
    all that precedes it. `ignored`: places in `messages` of answers that are context only."""
    places = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    answers: list[list[int]] = []
    tokens: list[int] = []
    learnt: list[bool] = []
    ends: list[int] = []  # of the first answers that are kept
    kept: list[int] = []
    for number, place in enumerate(places):
        answers.append(format.render_answer(messages[place], tools, history=messages[:place]))
        kept, prompt = _prompt(messages, place, places, kept, answers, tools, format)
        stop = ends[len(kept) - 1] if kept else 0
        tokens, learnt, ends = tokens[:stop], learnt[:stop], ends[: len(kept)]
        tokens += prompt + answers[number]
        learnt += [False] * len(prompt) + [place not in ignored] * len(answers[number])
        ends.append(len(tokens))
        kept.append(number)
        if longest is not None and len(tokens) > longest:
            # a template that drops earlier reasoning may make the whole conversation shorter than its beginning
            if len(format.render_start(messages[: places[-1]], tools)) > longest:
                break
            longest = None
    return RenderedConversation(tokens, learnt, ends, len(answers) - len(kept))


def _prompt(
    messages: Sequence[Message],
    place: int,
    places: Sequence[int],
    kept: list[int],
    answers: Sequence[list[int]],
    tools: Sequence[Tool],
    format: ChatFormat,
) -> tuple[list[int], list[int]]:
    """The first of the `kept` answers whose tokens stay, and the prompt from there to the answer at `place`."""
    while kept:
        last = places[kept[-1]] + 1
        new, history = messages[last:place], messages[:last]
        try:
            answer = answers[kept[-1]]
            return kept, format.render_turn(new, tools, answer_closed=True, history=history, answer=answer)
        except HistoryRewritten:
            kept = kept[:-1]
    return kept, format.render_start(messages[:place], tools)
