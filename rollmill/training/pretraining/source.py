"""Source: where the documents of a stage come from. Implementations are in `sources/`.

    [[stages.sources]]
    kind = "text"                    built in, an entry point of `rollmill.sources`, or a class of your own
    path = "src/**/*.py"
    weight = 3                       three documents of this source for each one of a source with weight 1
    heldout = 0.01                   1 % of its documents are never trained on; the loss on them is measured

A source only lists and reads documents. Their order, the mixture, de-duplication and held-out documents are the same
for every source (training/pretraining/mixture.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol

from pydantic import Field

from rollmill.errors import ConfigError
from rollmill.kinds import KindSection, Slot

if TYPE_CHECKING:
    import numpy as np

    from rollmill.chat.format import ChatFormat
    from rollmill.chat.tokenizer import Tokenizer


class Document(NamedTuple):
    tokens: Sequence[int]
    learnt: Sequence[bool]  # for each token, whether to learn to predict it
    notes: Sequence[str] = ()  # what was done to it, such as "conversation cut"; counted in the figures of the step


@dataclass(frozen=True)
class SourceContext:
    """What a source may need of the run."""

    tokenizer: Tokenizer
    format: ChatFormat
    max_context: int
    overlap: int  # tokens that two parts of a long document share
    seed: int
    directory: Path  # the source's own, for an index; empty when the run begins
    begin_token: str | None = None  # as the settings of the source name them
    end_token: str | None = None

    @property
    def begin(self) -> list[int]:
        """The tokens that each document of plain text begins with; they are context only. Empty for many models."""
        return self._named(self.begin_token, self.format.document.begin)

    @property
    def end(self) -> list[int]:
        """The tokens that each document of plain text ends with."""
        return self._named(self.end_token, self.format.document.end)

    def _named(self, name: str | None, otherwise: int | None) -> list[int]:
        if name is None:
            return [] if otherwise is None else [otherwise]
        found = self.tokenizer.find_token(name)
        if name and found is None:
            raise ConfigError(
                f"a source names the token {name!r}, which the tokenizer does not have",
                hint='name one of its special tokens, "" for none, or leave begin and end out',
            )
        return [] if found is None or not name else [found]


class Documents(ABC):
    """The documents of an opened source. Document `number` is the same whenever it is read, on every rank.

    `skipped`: the records that cannot be used, by reason. `problems`: the first of them in words. Both are shown.
    """

    skipped: Mapping[str, int] = {}
    problems: Sequence[str] = ()

    @property
    @abstractmethod
    def count(self) -> int | None:
        """How many there are. None: endless, so there are no epochs and nothing is held out."""

    def digests(self) -> np.ndarray | None:
        """uint64 [count, 2]: equal rows are equal documents. The first column decides whether a document is held out.
        None: documents are not compared."""
        return None

    @abstractmethod
    def read(self, number: int, epoch: int) -> Document:
        """`epoch`: how often it was read before. A document longer than the context is cut by the caller.

        Documents are read one step ahead, in a thread: all calls come from that one thread, never two at a time."""


class Source(Protocol):
    """Constructed with its settings. Its constructor imports no torch and reads no documents."""

    def documents(self, context: SourceContext) -> Documents:
        """Called once per process. The first rank is done before the others begin, so an index is built once."""
        ...


class SourceSection(KindSection):
    _slot: ClassVar[Slot] = Slot(
        "stages.sources",
        Source,
        {
            "text": "rollmill.training.pretraining.sources.text:Text",
            "jsonl": "rollmill.training.pretraining.sources.jsonl:Jsonl",
            "conversations": "rollmill.training.pretraining.sources.conversations:Conversations",
            "trajectories": "rollmill.training.pretraining.sources.trajectories:Trajectories",
        },
        "rollmill.sources",
    )

    name: str = Field("", description="Name of the source in events and reports. Not set: its place and its kind.")
    weight: float = Field(
        1.0,
        gt=0,
        allow_inf_nan=False,
        description="Share of documents relative to the other sources. A small source with a large weight is repeated.",
    )
    heldout: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Share of documents that are never trained on. The stage measures the loss on them.",
    )
    begin: str | None = Field(
        None,
        description="Token that each document of text begins with. Not set: the one that the checkpoint names; empty: "
        "none.",
    )
    end: str | None = Field(
        None,
        description="Token that each document of text ends with. Not set: the checkpoint's end of a text, which is not "
        "the end of a chat's turn; empty: none.",
    )
    overlap: int = Field(
        16,
        ge=1,
        description="A document longer than the context is cut; each part begins with this many tokens of the part "
        "before, as context only.",
    )
