"""Text files: each file is a document.

    [[stages.sources]]
    kind = "text"
    path = "src/**/*.py"        a file, a directory or a glob; relative to the configuration file

A long file is read in parts of about one context. Files that are binary, too large or not of the encoding are skipped
and counted. Files that end in `.gz` or `.zst` are unpacked into the run's directory first.
"""

from __future__ import annotations

import codecs
import os
from collections.abc import Iterator
from functools import partial
from typing import Protocol

from pydantic import Field, field_validator

from rollmill.config import Config, LocalPath
from rollmill.training.pretraining.source import Document, SourceContext
from rollmill.training.pretraining.sources.files import (
    Index,
    IndexedDocuments,
    IndexRow,
    SkippedRecord,
    digest,
    open_index,
    parts,
)
from rollmill.training.pretraining.sources.infill import Infill

_BYTES_PER_TOKEN = 3  # roughly: a part of this many bytes per token of the context mostly fits into one context
_LEAD = 8  # bytes that are read for each token of overlap
_LOOKED_AT = 8192  # bytes in which a NUL makes a file binary


class TextSettings(Config):
    fill_in_middle: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Share of documents that are rearranged so that the model learns to fill in the middle: prefix, "
        "suffix, middle. The tokenizer must have the tokens for it.",
    )


class TextFileSettings(TextSettings):
    path: LocalPath = Field(description="A file, a directory or a glob such as `src/**/*.py`; `.gz` and `.zst` too.")
    encoding: str = Field("utf-8", description="Encoding of the files. A file that is not in it is skipped.")
    max_bytes: int = Field(1 << 26, ge=1, description="Larger files are skipped.")

    @field_validator("encoding")
    @classmethod
    def _known(cls, value: str) -> str:
        try:
            return codecs.lookup(value).name
        except LookupError:
            raise ValueError(f"there is no encoding {value!r}") from None


class Text:
    def __init__(self, config: TextFileSettings) -> None:
        self._config = config

    def documents(self, context: SourceContext) -> TextDocuments:
        longest = part_bytes(context)
        settings = [self._config.encoding, self._config.max_bytes, longest]
        index = open_index(context.directory, self._config.path, settings, partial(self._scan, longest))
        return TextDocuments(index, context, self._config, self._text)

    def _scan(self, longest: int, number: int, path: str) -> Iterator[IndexRow | SkippedRecord]:
        size = os.path.getsize(path)
        if size > self._config.max_bytes:
            yield SkippedRecord("too large", path, f"{size} bytes, over max_bytes = {self._config.max_bytes}")
            return
        with open(path, "rb") as file:
            data = file.read()
        try:
            text = data.decode(self._config.encoding).removeprefix("\ufeff").encode()
        except UnicodeError as error:
            binary = b"\0" in data[:_LOOKED_AT]
            reason = "binary" if binary else f"not {self._config.encoding}"
            yield SkippedRecord(reason, path, str(error))
            return
        if b"\0" in text[:_LOOKED_AT]:
            yield SkippedRecord("binary", path, "it has a NUL byte")
        elif not text.strip():
            yield SkippedRecord("empty", path)
        else:
            yield from text_rows(text, number, 0, len(data), longest)

    def _text(self, index: Index, row: IndexRow, start: int, stop: int) -> bytes:
        """UTF-8 is read in place, other encodings from the beginning of the file."""
        if self._config.encoding == "utf-8":
            mark = 3 if index.bytes(row, 0, min(row.length, 3)) == codecs.BOM_UTF8 else 0
            return index.bytes(row, mark + start, mark + stop)
        return index.bytes(row).decode(self._config.encoding).removeprefix("\ufeff").encode()[start:stop]


def part_bytes(context: SourceContext) -> int:
    return max(64, _BYTES_PER_TOKEN * context.max_context)


def text_rows(text: bytes, file: int, offset: int, length: int, longest: int) -> Iterator[IndexRow]:
    """The rows of a record with this text."""
    high, low = digest(text)
    for part, (start, stop) in enumerate(parts(text, longest)):
        yield IndexRow(file, offset, length, start, stop, high, low | part)


class TextReader(Protocol):
    def __call__(self, index: Index, row: IndexRow, start: int, stop: int) -> bytes:
        """Bytes [start, stop) of the text of a row's record."""
        ...


class TextDocuments(IndexedDocuments):
    """Parts of texts, as tokens."""

    def __init__(self, index: Index, context: SourceContext, config: TextSettings, text: TextReader) -> None:
        super().__init__(index)
        self._context, self._text = context, text
        self._begin, self._end = context.begin, context.end
        self._infill = Infill(context, config.fill_in_middle) if config.fill_in_middle else None

    def read(self, number: int, epoch: int) -> Document:
        row = self._index.row(number)
        overlap = self._context.overlap
        back = min(row.start, _LEAD * overlap)
        data = self._text(self._index, row, row.start - back, row.stop)
        text = data[back:].decode("utf-8", "replace")
        last = number + 1 == self.count or self._index.row(number + 1).start == 0
        begin, end = [] if row.start else self._begin, self._end if last else []
        notes = [] if row.start == 0 and last else ["part of a long document"]
        if self._infill is not None and self._infill.chosen(number, epoch):
            tokens = self._infill.rearranged(text, number, epoch) + end
            if len(begin) + len(tokens) <= self._context.max_context:
                learnt = [False] * len(begin) + [True] * len(tokens)
                return Document(begin + tokens, learnt, [*notes, "middle to fill in"])
            notes.append("too long to fill in its middle")
        lead, tokens = self._context.tokenizer.encode_many([data[:back].decode("utf-8", "ignore"), text])
        before, tokens = begin + lead[-overlap:], tokens + end
        return Document(before + tokens, [False] * len(before) + [True] * len(tokens), notes)
