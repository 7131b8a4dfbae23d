"""Wraps the prose of documents at 120 characters: python -m tests.documents FILE...

Tables, code, headings and links that are longer than a line stay as they are.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

WIDTH = 120
_JOINED = "\N{NULL}"  # stands for a space that must not become a line break
_ITEM = re.compile(r"(\s*)([-*]|\d+\.) ")


def prose(text: str) -> Iterator[tuple[bool, list[str]]]:
    """The lines of a document in pieces; of each, whether it is a paragraph or an item of a list."""
    piece: list[str] = []
    fenced, after_blank, indent = False, True, 0

    def end() -> Iterator[tuple[bool, list[str]]]:
        if piece:
            yield True, piece.copy()
            piece.clear()

    for line in text.splitlines():
        item = _ITEM.match(line)
        margin = len(line) - len(line.lstrip())
        code = fenced or line.startswith("```") or (margin >= 4 and after_blank and not item and margin > indent)
        if line.lstrip().startswith("```"):
            fenced = not fenced
            code = True
        if code or not line.strip() or re.match(r"\s*(\||#|!\[|<|>|---)", line):
            yield from end()
            yield False, [line]
        else:
            if item:
                yield from end()
                indent = len(item[0])
            piece.append(line)
        if line.strip() and not line.startswith(" ") and not item:
            indent = 0
        after_blank = code or not line.strip()
    yield from end()


def wrap(text: str) -> str:
    lines: list[str] = []
    for is_prose, piece in prose(text):
        if not is_prose:
            lines += piece
            continue
        item = _ITEM.match(piece[0])
        first = item[0] if item else re.match(r"\s*", piece[0])[0]  # type: ignore[index]
        words = " ".join(line.strip() for line in piece)[len(first.strip()) :].strip()
        words = re.sub("`[^`]+`", lambda code: code[0].replace(" ", _JOINED), words)  # a test reads each span of code
        words = re.sub(r" (\d+\.|[-+*#]) ", _JOINED + r"\1 ", words)  # would begin an item of a list
        wrapped = textwrap.wrap(
            words,
            WIDTH,
            initial_indent=first,
            subsequent_indent=" " * len(first),
            break_long_words=False,
            break_on_hyphens=False,
        )
        lines += [line.replace(_JOINED, " ") for line in wrapped]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    for name in sys.argv[1:]:
        Path(name).write_text(wrap(Path(name).read_text(encoding="utf-8")), encoding="utf-8")
