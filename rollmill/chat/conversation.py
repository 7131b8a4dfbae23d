"""A whole conversation as tokens, rendered with the calls that the gateway makes during a real session:

    render_start([system, user])    answer    render_turn([tool])    answer
    not learnt                      learnt    not learnt             learnt

So training on a conversation and serving it use the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rollmill.chat.format import ChatFormat, Message, Tool


class Rendered(NamedTuple):
    tokens: list[int]
    learnt: list[bool]  # True for tokens of answers, their closing token included
    ends: list[int]  # number of tokens up to the end of each answer

    def cut(self, longest: int) -> Rendered:
        """Up to the last answer that ends within `longest` tokens. Empty if there is none."""
        ends = [end for end in self.ends if end <= longest]
        stop = ends[-1] if ends else 0
        return Rendered(self.tokens[:stop], self.learnt[:stop], ends)


def render_conversation(
    messages: Sequence[Message], tools: Sequence[Tool], format: ChatFormat, ignored: Sequence[int] = ()
) -> Rendered:
    """Up to the last answer. `ignored`: places in `messages` of answers that are context only."""
    places = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    tokens: list[int] = []
    learnt: list[bool] = []
    ends: list[int] = []
    for number, place in enumerate(places):
        if number == 0:
            prompt = format.render_start(messages[:place], tools)
        else:
            new = messages[places[number - 1] + 1 : place]
            prompt = format.render_turn(new, tools, answer_closed=True)
        answer = format.render_answer(messages[place], tools)
        tokens += prompt + answer
        learnt += [False] * len(prompt) + [place not in ignored] * len(answer)
        ends.append(len(tokens))
    return Rendered(tokens, learnt, ends)
