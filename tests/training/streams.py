"""Documents that a function makes, as a mixture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rollmill.training.pretraining.mixture import Mixture, Part
from rollmill.training.pretraining.source import Document, Documents


@dataclass(frozen=True)
class Generated(Documents):
    """An endless source."""

    make: Callable[[int], tuple[Sequence[int], Sequence[bool]]]
    count: None = None

    def read(self, number: int, epoch: int) -> Document:
        return Document(*self.make(number))


def generated(make: Callable[[int], tuple[Sequence[int], Sequence[bool]]]) -> Mixture:
    return Mixture([Part("generated", Generated(make))], seed=0)
