"""Streams calls while they are sampled: `<tool_call>⏎{"name": …, "arguments": {…}}⏎</tool_call>`.

Arguments are sent as the model writes them, so what is streamed always begins the arguments that the whole answer has,
also if the call turns out to be malformed. Held back is what may still end the call: a part of a mark, and blanks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rollmill.chat.call_family import CALL_HEAD, CallFamily, parse_call
from rollmill.chat.format import CallPiece, overlap

_LONGEST_HEAD = 1024  # characters in which a name and the beginning of the arguments are looked for


class CallStream:
    def __init__(self, start: str, end: str, closings: Sequence[str] = ()) -> None:
        """`start` and `end`: the marks around a call. `closings`: marks that end an answer."""
        self._start, self._end, self._closings = start, end, closings
        self._held = ""  # the body of the open call, or what may begin the next one
        self._open = False
        self._number = -1
        self._begin()

    def push(self, text: str) -> list[CallPiece]:
        """`text` follows the text of the answer. If no call begins there, there is nothing to tell early."""
        self._held += text
        if self._number < 0 and not self._held.lstrip().startswith(self._start):
            return []
        pieces: list[CallPiece] = []
        while self._open or self._enter():
            at, mark = self._find_end()
            if not mark:
                self._partial(at, pieces)
                break
            self._tell(pieces, *parse_call(self._held[:at].strip()), done=True)
            self._held, self._open = self._held[at:].removeprefix(self._end), False
        return pieces

    def _begin(self) -> None:
        self._head = -1  # where the arguments begin; -1: not known yet
        self._name = ""
        self._sent = -1  # characters of the arguments; -1: not even the name
        self._scanned, self._depth, self._in_text, self._escaped = 0, 0, False, False
        self._ended = False  # whether the JSON object of the arguments has ended

    def _enter(self) -> bool:
        """Whether the mark of the next call has been found."""
        before, mark, behind = self._held.partition(self._start)
        if not mark:
            self._held = before[-len(self._start) :]
            return False
        self._held, self._open, self._number = behind, True, self._number + 1
        self._begin()
        return True

    def _find_end(self) -> tuple[int, str]:
        """Where the body ends and the mark that ends it; without a mark, how much of it cannot be part of one."""
        since = max(0, self._scanned - len(self._end))
        found = [(at, mark) for mark in (self._end, self._start) if (at := self._held.find(mark, since)) >= 0]
        if found:
            return min(found)
        safe = len(self._held)
        for mark in (self._end, self._start, *self._closings):
            at = self._held.find(mark, since)
            safe = min(safe, at if at >= 0 else len(self._held) - overlap(self._held, mark))
        return safe, ""

    def _partial(self, safe: int, pieces: list[CallPiece]) -> None:
        """Tells the name and the arguments as far as they are sure."""
        if self._head < 0:
            begun = CALL_HEAD.match(self._held, 0, _LONGEST_HEAD)
            if begun is None:
                return
            self._name, self._head, self._scanned = begun[1], begun.end(), begun.end()
        while not self._ended and self._scanned < safe:
            self._scan(self._held[self._scanned])
            self._scanned += 1
        arguments = self._held[self._head : self._scanned]
        self._tell(pieces, self._name, arguments if self._ended else arguments.rstrip())

    def _scan(self, char: str) -> None:
        if self._escaped:
            self._escaped = False
        elif self._in_text:
            self._in_text, self._escaped = char != '"', char == "\\"
        elif char == '"':
            self._in_text = True
        elif char in "{[":
            self._depth += 1
        elif char in "]}":
            self._depth -= 1
            self._ended = self._depth == 0

    def _tell(self, pieces: list[CallPiece], name: str, arguments: str, done: bool = False) -> None:
        if done or len(arguments) > self._sent:
            pieces.append(CallPiece(self._number, name, arguments[max(self._sent, 0) :], done))
            self._sent = len(arguments)


def call_stream(family: CallFamily, closings: Sequence[str]) -> Callable[[str], list[CallPiece]] | None:
    """Reads the calls of an answer while it is sampled; None if the family's calls are only known at their end."""
    return None if family.streamed is None else CallStream(*family.streamed, closings).push
