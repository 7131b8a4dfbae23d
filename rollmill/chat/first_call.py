"""The end of an answer's first tool call, for clients that want one call at a time.

A format names the mark that ends each of its calls, or that begins a further one: `call_mark`. The answer is cut behind
the first call, unless the model ends it there by itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from rollmill.chat.format import ChatFormat, Tool
from rollmill.chat.tokenizer import Tokenizer


class FirstCall:
    """Looks for the end of the first call while tokens arrive. For formats that have a `call_mark`."""

    def __init__(self, format: ChatFormat, tokenizer: Tokenizer, tools: Sequence[Tool]) -> None:
        self._format = format
        self._tokenizer = tokenizer
        self._tools = tools
        assert format.call_mark is not None
        self._mark, self._ends = format.call_mark
        self._reach = 4 * len(self._mark)  # in tokens: a character is at most four
        self._end: int | None = None  # the number of tokens up to the end of the first call

    def cut(self, tokens: Sequence[int], count: int) -> int | None:
        """How many tokens are kept, if token number `count` is the first behind the first call. Call it for each."""
        if self._end is not None:
            return None if tokens[count - 1] in self._format.stop_tokens else self._end
        window = tokens[max(0, count - self._reach) : count]
        if self._found(window) == self._found(window[:-1]):
            return None
        calls = len(self._format.parse(tokens[:count], self._tools).get("tool_calls") or ())
        if not self._ends:
            return count - 1 if calls > 1 else None
        self._end = count if calls else None  # none: a mark in the reasoning
        return None

    def _found(self, tokens: Sequence[int]) -> int:
        return self._tokenizer.decode(tokens).count(self._mark)
