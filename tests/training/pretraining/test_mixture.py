"""The order of documents, the mixture of sources, duplicates and held-out documents."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from rollmill.errors import TrainingError
from rollmill.training.pretraining.document_order import BLOCK, Mix, permuted
from rollmill.training.pretraining.mixture import DocumentSplit, Mixture, Part, choose, windows
from rollmill.training.pretraining.source import Document, Documents
from rollmill.training.pretraining.sources.files import digest
from tests.training.streams import Generated


@dataclass(frozen=True)
class Listed(Documents):
    """Documents of one token each."""

    contents: list[int]

    @property
    def count(self) -> int:
        return len(self.contents)

    def digests(self) -> np.ndarray:
        return np.array([digest(str(content).encode()) for content in self.contents], np.uint64).reshape(-1, 2)

    def read(self, number: int, epoch: int) -> Document:
        return Document([self.contents[number]], [True])


def _training(chosen: DocumentSplit) -> np.ndarray:
    assert chosen.training is not None
    return chosen.training


def drawn(mixture: Mixture, start: int, stop: int) -> list[int]:
    return [mixture.read(index)[0].tokens[0] for index in range(start, stop)]


@pytest.mark.parametrize("count", [1, 2, 3, 17, 64, 1000, 4097])
def test_a_permutation_has_every_number_once(count: int) -> None:
    found = [permuted(place, count, "key") for place in range(count)]
    assert sorted(found) == list(range(count))
    if count > 16:
        assert found != sorted(found) and found != [permuted(place, count, "other") for place in range(count)]


def test_the_order_of_a_seed_never_changes() -> None:
    """A run that is resumed after an update must go on in the same order."""
    assert [permuted(place, 10, "0 source 0 epoch 0") for place in range(10)] == [4, 0, 6, 8, 1, 5, 3, 9, 2, 7]


def test_each_epoch_has_every_document_once_in_another_order() -> None:
    mixture = Mixture([Part("numbers", Listed(list(range(50))))], seed=1)
    first, second = drawn(mixture, 0, 50), drawn(mixture, 50, 100)
    assert sorted(first) == sorted(second) == list(range(50)) and first != second
    assert drawn(mixture, 30, 70) == (first + second)[30:70], "it can be resumed anywhere"
    assert drawn(Mixture(mixture.parts, seed=2), 0, 50) != first


def test_every_block_has_exactly_the_share_of_each_source() -> None:
    weights = [3.0, 1.0, 0.5]
    mix = Mix(weights, seed=4)
    seen: Counter[int] = Counter()
    orders = []
    for block in range(3):
        sources = []
        for index in range(block * BLOCK, (block + 1) * BLOCK):
            source, before = mix.locate(index)
            assert before == seen[source], "documents of a source are counted without gaps"
            seen[source] += 1
            sources.append(source)
        counts = Counter(sources)
        assert [counts[source] for source in range(3)] == [667, 222, 111]
        orders.append(sources)
    assert orders[0] != orders[1]
    assert min(Mix([1.0, 1e-9], 0).quotas) == 1, "no source is lost"
    assert sum(Mix([1.0] + [1e-9] * 400, 0).quotas) == BLOCK
    with_few = Mix([1, 1, 1], 0).quotas
    assert sum(with_few) == BLOCK and max(with_few) - min(with_few) <= 1


def test_equal_documents_are_trained_on_once() -> None:
    parts = [Part("one", Listed([1, 2, 1, 3])), Part("two", Listed([3, 4, 2, 4]))]
    one, two = choose(parts)
    assert one.training is not None and one.training.tolist() == [0, 1, 3] and one.duplicates == 1
    assert two.training is not None and two.training.tolist() == [1] and two.duplicates == 3
    with pytest.raises(TrainingError, match=r"'two' has no document to train on: 2 were found, 2 equal another one"):
        Mixture([parts[0], Part("two", Listed([1, 2]))], 0)


def test_no_content_is_both_held_out_and_trained_on() -> None:
    """Sources share documents and hold out different shares."""
    contents = [list(range(0, 400)) * 2, list(range(200, 600)), list(range(300, 700))]
    parts = [
        Part(str(share), Listed(each), heldout=share) for share, each in zip((0.3, 0.0, 0.1), contents, strict=True)
    ]
    chosen = choose(parts)
    training = {parts[n].documents.read(int(i), 0).tokens[0] for n in range(3) for i in chosen[n].training}  # type: ignore[union-attr]
    held = {parts[n].documents.read(int(i), 0).tokens[0] for n in range(3) for i in chosen[n].heldout}
    assert not training & held and training | held == set(range(700))
    assert 80 < len(chosen[0].heldout) < 160
    again = choose([Part("1", Listed(contents[0][::-1]), heldout=0.3)])[0]
    assert sorted(again.heldout % 400) == sorted(399 - each for each in chosen[0].heldout), "the content decides"


def test_an_endless_source_holds_nothing_out() -> None:
    with pytest.raises(TrainingError, match="cannot hold documents out"):
        choose([Part("endless", Generated(lambda index: ([1], [True])), heldout=0.1)])


@pytest.mark.parametrize(("length", "longest", "overlap"), [(5, 8, 2), (8, 8, 2), (9, 8, 2), (100, 8, 3), (23, 4, 1)])
def test_parts_of_a_long_document_teach_every_token_once(length: int, longest: int, overlap: int) -> None:
    document = Document(list(range(length)), [place % 5 != 0 for place in range(length)])
    cut = windows(document, longest, overlap)
    assert all(len(part.tokens) == len(part.learnt) <= longest for part in cut)
    learnt = [token for part in cut for token, flag in zip(part.tokens, part.learnt, strict=True) if flag]
    assert learnt == [token for token in range(length) if token % 5]
    for before, after in itertools.pairwise(cut):
        assert before.tokens[-overlap:] == after.tokens[:overlap] and not any(after.learnt[:overlap])


@pytest.mark.parametrize(
    ("returned", "problem"),
    [
        (ValueError("gone"), r"'own': reading document 7 raised ValueError: gone"),
        ("nonsense", "reading document 7 raised TypeError"),
        (([1, 2], [True]), r"document 7 has \(2,\) tokens with a mask of \(1,\)"),
        (([1, 99], [True, True]), "tokens from 1 to 99 in a vocabulary of 50"),
        ((["a"], [True]), "raised ValueError"),
    ],
)
def test_a_source_that_raises_or_returns_nonsense_is_named(returned: Any, problem: str) -> None:
    def make(index: int) -> Any:
        if isinstance(returned, Exception):
            raise returned
        return returned

    mixture = Mixture([Part("own", Generated(make), vocab_size=50)], 0)
    with pytest.raises(TrainingError, match=problem):
        mixture.read(7)


def test_digests_that_do_not_fit_are_refused() -> None:
    class Odd(Listed):
        def digests(self) -> np.ndarray:
            return np.zeros((2, 2))

    with pytest.raises(TrainingError, match=r"'odd': digests are float64 \(2, 2\) for 3 documents"):
        choose([Part("odd", Odd([1, 2, 3]))])
