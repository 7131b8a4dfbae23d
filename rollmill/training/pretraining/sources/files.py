"""Files of a source: which ones, and an index of the records in them.

A record is a whole file, or a line of one. The index has one row per part of a record, on disk, so that memory does not
grow with the text:

    file, offset, length     where the record is
    start, stop              the part of its text, in bytes of UTF-8; both 0 if the record is not cut
    digest, digest           of the record's content, and of the part: see Documents.digests

It is built once, when the stage begins, and kept in the run's directory. A resumed run checks that its files are still
those of the index. Compressed files are unpacked there (unpack.py).
"""

from __future__ import annotations

import glob
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import blake3
import numpy as np

from rollmill.errors import ConfigError, TrainingError
from rollmill.storage.fetched import local_path
from rollmill.training.pretraining.source import Documents
from rollmill.training.pretraining.sources.unpack import DamagedFile, is_packed, unpack

_ROWS, _FACTS, _UNPACKED = "index.u64", "index.json", "unpacked"
_COLUMNS = 7
_BUFFERED = 1 << 14  # rows
_KEPT_PROBLEMS = 20  # that are kept in words; all are counted


class IndexRow(NamedTuple):
    file: int
    offset: int
    length: int
    start: int = 0
    stop: int = 0
    digest: int = 0
    part: int = 0


class SkippedRecord(NamedTuple):
    """A record that is not used."""

    reason: str  # few words: skipped records are counted by it
    place: str  # file, or file:line
    detail: str = ""  # what exactly is wrong


@dataclass
class Index:
    files: list[str]  # as they are read: compressed ones are unpacked
    rows: np.ndarray  # uint64 [count, 7], see Row
    skipped: Counter[str] = field(default_factory=Counter)  # records that are not used, by reason
    problems: list[str] = field(default_factory=list)  # the first of them in words

    @property
    def count(self) -> int:
        return len(self.rows)

    def digests(self) -> np.ndarray:
        return np.array(self.rows[:, 5:7])

    def row(self, number: int) -> IndexRow:
        return IndexRow(*map(int, self.rows[number]))

    def bytes(self, row: IndexRow, start: int = 0, stop: int | None = None) -> bytes:
        """Bytes of the record of a row. TrainingError if the file is gone or shorter than it was."""
        path = self.files[row.file]
        wanted = (row.length if stop is None else stop) - start
        try:
            with open(path, "rb") as file:
                file.seek(row.offset + start)
                data = file.read(wanted)
        except OSError as error:
            raise TrainingError(f"{path} cannot be read: {error.strerror}", hint=_CHANGED) from None
        if len(data) < wanted:
            raise TrainingError(f"{path} is shorter than when the stage began", hint=_CHANGED)
        return data


_CHANGED = "a run reads its files until it ends: restore them, or start a run with another name"


def list_files(pattern: str) -> list[str]:
    """The files that a path means: itself, all files below a directory, or the matches of a glob. Sorted. Those of a
    dataset of a hub are loaded first.

    Names that begin with a dot are left out, unless the path itself names them.
    """
    pattern = local_path(pattern)
    if os.path.isfile(pattern):
        return [pattern]
    if os.path.isdir(pattern):
        return sorted(_walk(pattern))
    return sorted(path for path in glob.glob(pattern, recursive=True) if os.path.isfile(path))


def _walk(directory: str) -> Iterator[str]:
    for parent, folders, names in os.walk(directory):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (os.path.join(parent, name) for name in names if not name.startswith("."))


def open_index(
    directory: Path, pattern: str, settings: Any, scan: Callable[[int, str], Iterable[IndexRow | SkippedRecord]]
) -> Index:
    """The index in `directory`; built with `scan(number of the file, path)` if it is not there.

    `settings`: anything in JSON that the rows depend on.
    """
    files = list_files(pattern)
    if not files:
        raise ConfigError(f"no file matches {pattern!r}", hint="a file, a directory or a glob such as src/**/*.py")
    facts: dict[str, Any] = {"settings": settings, "files": [[path, *_stamp(path)] for path in files]}
    kept = _read_facts(directory)
    if kept is not None and {name: kept.get(name) for name in facts} == facts:
        return _opened(directory, kept)
    draft = directory / "draft"
    shutil.rmtree(draft, ignore_errors=True)  # of a process that was killed
    (draft / _UNPACKED).mkdir(parents=True)
    try:
        skipped, problems = _build(draft, files, scan)
        if kept is not None and not _same(draft / _ROWS, directory / _ROWS):
            raise TrainingError(f"the files of {pattern!r} have changed since the stage began", hint=_CHANGED)
        shutil.rmtree(directory / _UNPACKED, ignore_errors=True)
        for name in (_UNPACKED, _ROWS):
            os.replace(draft / name, directory / name)
        facts |= {"skipped": dict(skipped), "problems": problems}
        (draft / _FACTS).write_text(json.dumps(facts))
        os.replace(draft / _FACTS, directory / _FACTS)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return _opened(directory, facts)


def _stamp(path: str) -> tuple[int, int]:
    found = os.stat(path)
    return found.st_size, found.st_mtime_ns


def _read_facts(directory: Path) -> dict[str, Any] | None:
    try:
        return dict(json.loads((directory / _FACTS).read_text()))
    except FileNotFoundError:
        return None


def _opened(directory: Path, facts: dict[str, Any]) -> Index:
    path = directory / _ROWS
    empty = path.stat().st_size == 0  # which cannot be mapped
    rows = np.empty(0, "<u8") if empty else np.memmap(path, "<u8", "r")
    files = [_readable(directory, number, file[0]) for number, file in enumerate(facts["files"])]
    return Index(files, rows.reshape(-1, _COLUMNS), Counter(facts["skipped"]), facts["problems"])


def _same(one: Path, other: Path) -> bool:
    digests = [blake3.blake3().update_mmap(path).digest() for path in (one, other)]
    return digests[0] == digests[1]


def _readable(directory: Path, number: int, path: str) -> str:
    return str(directory / _UNPACKED / str(number)) if is_packed(path) else path


def _build(
    target: Path, files: list[str], scan: Callable[[int, str], Iterable[IndexRow | SkippedRecord]]
) -> tuple[Counter[str], list[str]]:
    """Write the rows of all files. Returns how many records are not used, by reason, and the first ones in words."""
    skipped: Counter[str] = Counter()
    problems: list[str] = []
    buffer: list[IndexRow] = []
    with (target / _ROWS).open("wb") as out:
        for number, path in enumerate(files):
            readable = _readable(target, number, path)
            for found in _scan_file(scan, number, path, readable):
                if isinstance(found, IndexRow):
                    buffer.append(found)
                else:
                    skipped[found.reason] += 1
                    if len(problems) < _KEPT_PROBLEMS:
                        place = path + found.place.removeprefix(path).removeprefix(readable)
                        problems.append(f"{place}: {found.reason}{found.detail and f': {found.detail}'}")
                if len(buffer) == _BUFFERED:
                    out.write(np.array(buffer, "<u8").tobytes())
                    buffer.clear()
        out.write(np.array(buffer, "<u8").tobytes())
    return skipped, problems


def _scan_file(
    scan: Callable[[int, str], Iterable[IndexRow | SkippedRecord]], number: int, path: str, readable: str
) -> Iterator[IndexRow | SkippedRecord]:
    try:
        if readable != path:
            unpack(path, Path(readable))
        yield from scan(number, readable)
    except OSError as error:
        yield SkippedRecord("cannot be read", path, str(error.strerror))
    except DamagedFile as error:
        yield SkippedRecord("cannot be unpacked", path, str(error))


# lines and parts

MAX_LINE = 1 << 26  # bytes


class Line(NamedTuple):
    number: int  # from 1
    offset: int
    data: bytes | None  # None: too long


def lines(path: str) -> Iterator[Line]:
    """Lines with where they are. Blank lines are left out."""
    with open(path, "rb") as file:
        number = offset = 0
        while data := file.readline(MAX_LINE):
            number, start, size = number + 1, offset, len(data)
            if size == MAX_LINE and not data.endswith(b"\n"):
                while rest := file.readline(MAX_LINE):
                    size += len(rest)
                    if rest.endswith(b"\n"):
                        break
                yield Line(number, start, None)
            elif data.strip():
                yield Line(number, start, data)
            offset += size


def digest(data: bytes) -> tuple[int, int]:
    """96 bits of a content's hash: 64, and 32 as the high half of a second number. The low half is for a part."""
    found = blake3.blake3(data).digest(12)
    return int.from_bytes(found[:8], "little"), int.from_bytes(found[8:], "little") << 32


def parts(text: bytes, longest: int) -> Iterator[tuple[int, int]]:
    """Cut UTF-8 text into parts of at most `longest` bytes: at the end of a line in the second half, else between two
    characters."""
    start = 0
    while len(text) - start > longest:
        stop = text.rfind(b"\n", start + longest // 2, start + longest) + 1
        if stop == 0:
            stop = start + longest
            while text[stop] & 0xC0 == 0x80:
                stop -= 1
        yield start, stop
        start = stop
    yield start, len(text)


class IndexedDocuments(Documents):
    """What all documents of an index have in common; how one is read is the source's own."""

    def __init__(self, index: Index) -> None:
        self._index, self.skipped, self.problems = index, index.skipped, index.problems

    @property
    def count(self) -> int:
        return self._index.count

    def digests(self) -> np.ndarray:
        return self._index.digests()
