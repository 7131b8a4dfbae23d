"""Mixture: the documents of several sources as one endless stream. Document i follows from the seed and i alone.

    sources ─► equal documents but the first are left out ─► held-out ones are set apart ─► weights ─► epochs, permuted

Documents are equal if their contents have equal hashes (exact: one changed character makes another document), within a
source and across sources. A document is held out if its hash falls into the share of its source. Its duplicates are
left out, so no content is both held out and trained on. Only numbers are kept in memory: 8 bytes per document.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rollmill import telemetry
from rollmill.errors import ConfigError, RollmillError, TrainingError
from rollmill.kinds import build
from rollmill.training.pretraining.document_order import Mix, permuted
from rollmill.training.pretraining.source import Document, Documents, Source, SourceContext, SourceSection

if TYPE_CHECKING:
    from rollmill.training.stage import StageContext

_NONE = np.empty(0, np.int64)


@dataclass(frozen=True)
class Part:
    """One opened source, with the settings that every source has."""

    name: str
    documents: Documents
    weight: float = 1.0
    heldout: float = 0.0
    overlap: int = 1
    vocab_size: int = 1 << 31

    @property
    def unused(self) -> str:
        """The records that the source cannot use, in words. Empty if there are none."""
        reasons = ", ".join(f"{count} {reason}" for reason, count in self.documents.skipped.items())
        first = f"; the first: {self.documents.problems[0]}" if self.documents.problems else ""
        return f": records are not used: {reasons}{first}" if reasons else ""

    def read(self, number: int, epoch: int) -> Document:
        """A document. TrainingError if the source, which may be the user's code, raises or returns nonsense."""
        try:
            document = Document(*self.documents.read(number, epoch))
            tokens, learnt = np.asarray(document.tokens, np.int64), np.asarray(document.learnt, np.bool_)
        except RollmillError:
            raise
        except Exception as error:
            raise TrainingError(
                f"the source {self.name!r}: reading document {number} raised {type(error).__name__}: {error}",
                hint="`read` returns a rollmill.Document",
            ) from error
        if tokens.ndim != 1 or tokens.shape != learnt.shape:
            problem = f"{tokens.shape} tokens with a mask of {learnt.shape}"
        elif tokens.size and not 0 <= int(tokens.min()) <= int(tokens.max()) < self.vocab_size:
            problem = f"tokens from {tokens.min()} to {tokens.max()} in a vocabulary of {self.vocab_size}"
        else:
            return document
        raise TrainingError(f"the source {self.name!r}: document {number} has {problem}")


@dataclass(frozen=True)
class DocumentSplit:
    """Numbers of the documents of a part, by what they are for."""

    training: np.ndarray | None  # None: every document of an endless source
    heldout: np.ndarray
    duplicates: int


def open_mixture(sections: Sequence[SourceSection], context: StageContext) -> Mixture:
    """Open the sources of a stage. Collective: the first rank builds the indexes, then the others read them."""

    def opened() -> list[Part]:
        return [_open(section, number, context) for number, section in enumerate(sections)]

    made: list[Part] = []
    context.ranks.from_first_slowly(lambda: made.extend(opened()))
    mixture = Mixture(made or opened(), context.seed)
    if context.ranks.first:
        mixture.report()
    return mixture


def _open(section: SourceSection, number: int, context: StageContext) -> Part:
    name, longest = section.name or f"{number + 1} {section.kind}", context.model.max_context
    if section.overlap > longest // 2:
        raise ConfigError(
            f"the source {name!r} has overlap = {section.overlap}, more than half of the context of {longest} tokens",
            hint="lower overlap",
        )
    source: Source = build(section)
    for_source = SourceContext(
        tokenizer=context.tokenizer,
        format=context.format,
        max_context=longest,
        overlap=section.overlap,
        seed=context.seed,
        directory=context.directory / "sources" / str(number + 1),
        begin_token=section.begin,
        end_token=section.end,
    )
    try:
        documents = source.documents(for_source)
    except RollmillError:
        raise
    except Exception as error:  # code of the user
        raise TrainingError(f"the source {name!r} cannot be opened: {type(error).__name__}: {error}") from error
    if not isinstance(documents, Documents):
        raise TrainingError(
            f"the source {name!r}: {type(documents).__name__} is no rollmill.Documents",
            hint=f"class {type(documents).__name__}(rollmill.Documents)",
        )
    return Part(name, documents, section.weight, section.heldout, section.overlap, context.model.vocab_size)


class Mixture:
    def __init__(self, parts: Sequence[Part], seed: int) -> None:
        self.parts = parts
        self.chosen = choose(parts)
        self._seed = seed
        self._mix = Mix([part.weight for part in parts], seed)
        for part, chosen in zip(parts, self.chosen, strict=True):
            if chosen.training is not None and len(chosen.training) == 0:
                raise TrainingError(
                    f"the source {part.name!r} has no document to train on: {part.documents.count} were found, "
                    f"{chosen.duplicates} equal another one, {len(chosen.heldout)} are held out{part.unused}",
                    hint="look at its path, lower heldout, or leave the source out",
                )

    def read(self, index: int) -> tuple[Document, Part]:
        """Document `index` of the stream, and the part it comes from."""
        number, before = self._mix.locate(index)
        part, training = self.parts[number], self.chosen[number].training
        if training is None:
            return part.read(before, 0), part
        epoch, place = divmod(before, len(training))
        at = permuted(place, len(training), f"{self._seed} source {number} epoch {epoch}")
        return part.read(int(training[at]), epoch), part

    def heldout(self, number: int, place: int) -> Document:
        """The held-out document of a part at `place` of a fixed order."""
        part, held = self.parts[number], self.chosen[number].heldout
        return part.read(int(held[permuted(place, len(held), "heldout")]), 0)

    def report(self) -> None:
        """Emit what each source has."""
        for part, chosen in zip(self.parts, self.chosen, strict=True):
            if part.unused:
                telemetry.emit("warning", text=f"source {part.name!r}{part.unused}")
            telemetry.emit(
                "source",
                source=part.name,
                documents=part.documents.count,
                training=None if chosen.training is None else len(chosen.training),
                heldout=len(chosen.heldout),
                duplicates=chosen.duplicates,
                skipped=dict(part.documents.skipped),
                problems=list(part.documents.problems),
            )


def choose(parts: Sequence[Part]) -> list[DocumentSplit]:
    """Leave out all but the first of equal documents, and set held-out ones apart."""
    digests = [part.documents.digests() for part in parts]
    for part, own in zip(parts, digests, strict=True):
        if own is None and part.heldout:
            raise TrainingError(
                f"the source {part.name!r} cannot hold documents out: it does not compare them",
                hint="remove heldout, or return digests from its documents",
            )
        if own is not None and (own.dtype != np.uint64 or own.shape != (part.documents.count, 2)):
            raise TrainingError(
                f"the source {part.name!r}: digests are {own.dtype} {own.shape} for {part.documents.count} documents",
                hint="they must be uint64 [count, 2]",
            )
    first = _first(np.concatenate([np.empty((0, 2), np.uint64), *(own for own in digests if own is not None)]))
    found, start = [], 0
    for part, own in zip(parts, digests, strict=True):
        if own is None:
            count = part.documents.count
            found.append(DocumentSplit(None if count is None else np.arange(count), _NONE, 0))
            continue
        mine = first[start : start + len(own)]
        start += len(own)
        held = own[:, 0] / np.float64(2**64) < part.heldout
        found.append(DocumentSplit(np.flatnonzero(mine & ~held), np.flatnonzero(mine & held), int((~mine).sum())))
    return found


def _first(keys: np.ndarray) -> np.ndarray:
    """For each document, whether it is the first with its content."""
    order = np.lexsort((keys[:, 1], keys[:, 0]))  # stable: equal keys stay in the order of the sources
    ordered = keys[order]
    differs = np.ones(len(keys), np.bool_)
    differs[1:] = (ordered[1:] != ordered[:-1]).any(1)
    first = np.zeros(len(keys), np.bool_)
    first[order[differs]] = True
    return first


def windows(document: Document, longest: int, overlap: int) -> list[Document]:
    """The document in parts of at most `longest` tokens.

    Each part after the first begins with the last `overlap` tokens of the part before, as context only. So every token
    is learnt once."""
    tokens, learnt = document.tokens, document.learnt
    found = [Document(tokens[:longest], learnt[:longest])]
    start = longest - overlap
    while start + overlap < len(tokens):
        own = learnt[start + overlap : start + longest]
        found.append(Document(tokens[start : start + longest], [False] * overlap + list(own)))
        start += longest - overlap
    return found
