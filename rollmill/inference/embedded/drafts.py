"""Prompt lookup: guesses the next tokens from text that the context repeats, so that one pass checks several of them.

The guess is what followed the last three tokens where they occurred before. One pass computes the distribution after
each guessed token. Every position is drawn with its own random number, as it would be without a guess, and the draws
count up to the first that is not the guessed token. So tokens and log-probs are those of the model, whatever is
guessed, and keys and values of wrong guesses are overwritten by the next step.

On a CPU a guess is looked for after every token. On CUDA tokens come in bursts, and looking costs the device a pause:
it is done soon after a guess was right, and ever less often after that (`next_look`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

_MATCH = 3  # tokens that must occur before
_LONGEST_PAUSE = 64  # tokens without a guess, after guesses that were all wrong, or where nothing repeats
_SHORTEST_PAUSE = 4  # tokens without a look, in bursts


class Drafts:
    """The guesses for one context. They get longer while they are right, and rarer while they are wrong."""

    def __init__(self) -> None:
        self._followed: dict[tuple[int, ...], int] = {}  # three tokens → where the token after their last occurrence is
        self._indexed = _MATCH
        self._length = 2
        self._wrong = 0  # guesses in a row
        self._resume = 0  # the length of the context before which there is no guess
        self._fitted = 0  # the length up to which the last right guess reached; at first, where the answer begins
        self.next_look = 0  # the length at which a burst should end, for the next guess

    def guess(self, tokens: Sequence[int], most: int, *, grows: bool = True) -> tuple[int, ...]:
        """Up to `most` tokens that may follow. With `grows`, only as many as are likely to be right."""
        length = len(tokens)
        if length < self._resume:
            return ()
        self._fitted = self._fitted or length
        self.next_look = length + min(max((length - self._fitted) // 4, _SHORTEST_PAUSE), _LONGEST_PAUSE)
        for place in range(self._indexed, length):
            self._followed[tuple(tokens[place - _MATCH : place])] = place
        self._indexed = max(_MATCH, length)
        first = self._followed.get(tuple(tokens[-_MATCH:]))
        if first is None:
            return ()
        period = length - first  # a guess that reaches the end of the context goes on with itself
        return tuple(tokens[first + index % period] for index in range(min(most, self._length) if grows else most))

    def learn(self, guessed: int, right: int, most: int) -> None:
        """`right` of `guessed` tokens were right: those of the last guess."""
        self._length = min(most, 2 * self._length) if right == guessed else right + 1
        if right:
            self._wrong, self._fitted = 0, self._indexed + right
        else:
            self._wrong += 1
            self._resume = self.next_look = self._indexed + 1 + min(_LONGEST_PAUSE, 2**self._wrong)


def count_right(drawn: Sequence[int], guessed: Sequence[int], stop_tokens: Collection[int]) -> int:
    """How many guesses are right. A stop token that is guessed right ends the answer, so it is not counted."""
    for index, token in enumerate(guessed):
        if drawn[index] != token or token in stop_tokens:
            return index
    return len(guessed)
