"""Decontamination: whose solution is already in a training source or an eval suite.

A text is cut into words and signs; spaces do not count. Every run of 12 of them is a gram. A candidate is dropped if at
least half of its solution's grams are in the sources. Solutions shorter than 12 are one gram. JSON and JSONL are
searched in their strings, everything else as text. Memory does not grow with the sources.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from rollmill.errors import TaskError

_WORD = re.compile(r"\w+|[^\w\s]")
_GRAM = 12
_SHARE = 0.5
_LEAST_LINE = 4  # words and signs; shorter lines of code are in any text


def grams(text: str) -> set[tuple[str, ...]]:
    words = _WORD.findall(text)
    return {tuple(words[start : start + _GRAM]) for start in range(max(len(words) - _GRAM + 1, 1))} if words else set()


def overlapping(solutions: Iterable[str], sources: Iterable[Path]) -> set[str]:
    """Those of `solutions` that are in the sources: files, or directories of them."""
    wanted = {solution: grams(solution) for solution in solutions}
    everything = set().union(*wanted.values()) if wanted else set()
    lengths = {len(gram) for gram in everything}
    seen: set[tuple[str, ...]] = set()
    for text in _texts(sources):
        words = _WORD.findall(text)
        for length in lengths:
            seen |= everything & {tuple(words[at : at + length]) for at in range(len(words) - length + 1)}
    return {text for text, found in wanted.items() if found and len(found & seen) >= _SHARE * len(found)}


def shows(text: str, solution: str, known: str) -> bool:
    """Whether a text has a gram or a whole line of a solution that is not in what is `known` anyway."""
    found, before = _spaced(text), _spaced(known)
    lines = [_spaced(line.partition(" #")[0]) for line in solution.splitlines()]
    runs = (grams(solution) - grams(known)) & grams(text)
    return bool(runs) or any(
        len(line.split()) >= _LEAST_LINE and line in found and line not in before for line in lines
    )


def _spaced(text: str) -> str:
    return f" {' '.join(_WORD.findall(text))} "


def _texts(sources: Iterable[Path]) -> Iterator[str]:
    for source in sources:
        if not source.exists():
            raise TaskError(f"--not-in: {source} does not exist", hint="a file or a directory with text, JSON or JSONL")
        for path in sorted(source.rglob("*")) if source.is_dir() else [source]:
            if not path.is_file():
                continue
            with path.open(encoding="utf-8", errors="replace") as file:
                if path.suffix == ".jsonl":
                    for line in file:
                        yield from _strings(line)
                elif path.suffix == ".json":
                    yield from _strings(file.read())
                else:
                    yield file.read()


def _strings(text: str) -> Iterator[str]:
    """The strings of JSON; text that is none as it is."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        yield text
        return

    def walk(value: Any) -> Iterator[str]:
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict | list):
            for inner in value.values() if isinstance(value, dict) else value:
                yield from walk(inner)

    yield from walk(value)
