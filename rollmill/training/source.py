"""Source: where a stage's documents come from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar, Protocol

from rollmill.chat.format import ChatFormat
from rollmill.chat.tokenizer import Tokenizer
from rollmill.kinds import KindSection, Slot

Document = tuple[Sequence[int], Sequence[bool]]  # token ids, and for each whether to learn to predict it


class Documents(Protocol):
    """An endless stream of documents: document i depends only on (seed, i)."""

    def __call__(self, seed: int, start: int) -> Iterator[Document]: ...


class Source(Protocol):
    def documents(self, tokenizer: Tokenizer, format: ChatFormat) -> Documents: ...


class SourceSection(KindSection):
    _slot: ClassVar[Slot] = Slot("stages.sources", Source, {}, "rollmill.sources")
