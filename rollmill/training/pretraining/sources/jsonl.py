"""JSONL: each line is a JSON object, and one of its fields is the text of a document.

    [[stages.sources]]
    kind = "jsonl"
    path = "corpus/*.jsonl"
    field = "text"

A broken line is skipped and counted; the first ones are named with file and line. Files that end in `.gz` or `.zst` are
unpacked into the run's directory first.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pydantic_core
from pydantic import Field

from rollmill.config import LocalPath
from rollmill.training.pretraining.source import SourceContext
from rollmill.training.pretraining.sources.files import MAX_LINE, Index, IndexRow, SkippedRecord, lines, open_index
from rollmill.training.pretraining.sources.text import TextDocuments, TextSettings, part_bytes, text_rows


class JsonlSettings(TextSettings):
    path: LocalPath = Field(
        description="A JSONL file, a directory of them or a glob such as `corpus/*.jsonl`; "
        "`.gz`, `.zst` and `.parquet` too. Or hf://datasets/OWNER/NAME@COMMIT/GLOB, or s3://BUCKET/FILE."
    )
    field: str = Field("text", min_length=1, description="The field of each line that holds the text.")


class Jsonl:
    def __init__(self, config: JsonlSettings) -> None:
        self._config = config

    def documents(self, context: SourceContext) -> TextDocuments:
        longest = part_bytes(context)
        settings = [self._config.field, longest]
        index = open_index(context.directory, self._config.path, settings, partial(self._scan, longest))
        return TextDocuments(index, context, self._config, self._read)

    def _scan(self, longest: int, number: int, path: str) -> Iterator[IndexRow | SkippedRecord]:
        for line in lines(path):
            place = f"{path}:{line.number}"
            if line.data is None:
                yield SkippedRecord("line too long", place, f"over {MAX_LINE} bytes")
                continue
            try:
                text = self._text(line.data)
            except ValueError as error:
                yield SkippedRecord("broken line", place, str(error))
                continue
            if text.strip():
                yield from text_rows(text, number, line.offset, len(line.data), longest)
            else:
                yield SkippedRecord("empty", place)

    def _text(self, line: bytes) -> bytes:
        """ValueError says what is wrong with the line."""
        try:
            found: Any = pydantic_core.from_json(line)
        except ValueError as error:
            raise ValueError(f"not valid JSON: {error}") from None
        if not isinstance(found, dict):
            raise ValueError("not a JSON object")
        text = found.get(self._config.field)
        if not isinstance(text, str):
            have = ", ".join(list(found)[:5]) or "none"
            raise ValueError(f"the field {self._config.field!r} is not text; its fields: {have}")
        return text.encode("utf-8", "replace")

    def _read(self, index: Index, row: IndexRow, start: int, stop: int) -> bytes:
        return self._text(index.bytes(row))[start:stop]
