"""The functions micro-repositories are about: one or two steps on a number, said in words and written in Python.

A step is an operator and a number; `subtract-8` then `remainder-3` is

    words       x minus 8 then mod 3       what a docstring or a failing test says
    code        (x - 8) % 3                what the agent has to write
    value(30)   1                          by Python's own semantics
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from rollmill.errors import TaskError

NUMBERS = range(2, 30)  # one token each in the demo's vocabulary
HELDOUT_SHARE = 0.2
_NUMBER_NAMES = frozenset(map(str, NUMBERS))


@dataclass(frozen=True)
class Operator:
    name: str
    symbol: str
    apply: Callable[[int, int], int]
    phrase: str
    confusable: str  # what the demonstrations' teacher mostly writes when it misreads the phrase


OPERATORS: dict[str, Operator] = {
    entry.name: entry
    for entry in (
        Operator("add", "+", operator.add, "plus", "or"),
        Operator("subtract", "-", operator.sub, "minus", "add"),
        Operator("multiply", "*", operator.mul, "times", "add"),
        Operator("or", "|", operator.or_, "or", "add"),
        # each of these is mistaken for one of the operators above, never for one of its own kind: two operators that
        # are mistaken for each other can only be learnt together
        Operator("divide", "//", operator.floordiv, "over", "multiply"),
        Operator("remainder", "%", operator.mod, "mod", "subtract"),
        Operator("xor", "^", operator.xor, "xor", "or"),
        Operator("and", "&", operator.and_, "mask", "add"),
    )
}


def _fifth(names: Iterable[str]) -> frozenset[str]:
    """A fixed fifth of `names`, chosen by hash: the same for every seed, machine and version of Python."""
    ranked = sorted(names, key=lambda name: hashlib.blake2s(name.encode()).digest())
    return frozenset(ranked[: round(HELDOUT_SHARE * len(ranked))])


# a fifth of the numbers of each operator, and a fifth of all ordered pairs of operators
HELDOUT_STEPS = frozenset().union(*(_fifth(f"{name}-{number}" for number in NUMBERS) for name in OPERATORS))
HELDOUT_PAIRS = _fifth(f"{first} then {second}" for first in OPERATORS for second in OPERATORS)


@dataclass(frozen=True)
class Step:
    operator: Operator
    number: int

    @property
    def words(self) -> str:
        return f"{self.operator.phrase} {self.number}"

    @property
    def key(self) -> str:
        return f"{self.operator.name}-{self.number}"

    @property
    def heldout(self) -> bool:
        """No training task of any seed contains a held-out step."""
        return self.key in HELDOUT_STEPS

    @staticmethod
    def from_key(key: str) -> Step:
        name, _, number = key.partition("-")
        if name in OPERATORS and number in _NUMBER_NAMES:
            return Step(OPERATORS[name], int(number))
        raise TaskError(f"{key!r} is not a step", hint="a step is OPERATOR-NUMBER, for example add-8")


@dataclass(frozen=True)
class Function:
    steps: tuple[Step, ...]  # one or two

    @property
    def key(self) -> str:
        return "+".join(step.key for step in self.steps)

    @staticmethod
    def from_key(key: str) -> Function:
        function = Function(tuple(map(Step.from_key, key.split("+"))))
        if len(function.steps) > 2:
            raise TaskError(f"{key!r} is not a function", hint="a function has one or two steps")
        return function

    @property
    def heldout_pair(self) -> bool:
        """No training task of any seed combines the operators of a held-out pair."""
        return " then ".join(step.operator.name for step in self.steps) in HELDOUT_PAIRS

    @property
    def words(self) -> str:
        return "x " + " then ".join(step.words for step in self.steps)

    @property
    def code(self) -> str:
        text = "x"
        for index, step in enumerate(self.steps):
            text = f"({text})" if index else text
            text = f"{text} {step.operator.symbol} {step.number}"
        return text

    def value(self, x: int) -> int:
        for step in self.steps:
            x = step.operator.apply(x, step.number)
        return x

    def with_step(self, index: int, step: Step) -> Function:
        return Function((*self.steps[:index], step, *self.steps[index + 1 :]))

    def rivals(self, index: int) -> list[Operator]:
        """The other operators that may stand in step `index`."""
        return [other for other in OPERATORS.values() if other is not self.steps[index].operator]

    def mistakes(self) -> Iterator[Function]:
        """Near mistakes: any other operator, a near number, a step left out."""
        for index, step in enumerate(self.steps):
            for other in self.rivals(index):
                yield self.with_step(index, replace(step, operator=other))
            for shift in (-2, -1, 1, 2):
                if step.number + shift > 0:
                    yield self.with_step(index, replace(step, number=step.number + shift))
        if len(self.steps) > 1:
            yield Function(self.steps[:1])
            yield Function(self.steps[1:])
