"""The functions micro-repositories are about: one or two steps on a number, said in words and written in Python.

A step is an operator and a number; `subtract-8` then `at_most-28` is

    words       x minus 8 then at most 28       what a docstring or a failing test says
    code        (x - 8) <= 28                   what the agent has to write
    value(30)   True                            by Python's own semantics
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from rollmill.errors import TaskError

NUMBERS = range(2, 60)  # one token each in the demo's vocabulary
HELDOUT_SHARE = 0.2
_NUMBER_NAMES = frozenset(map(str, NUMBERS))


@dataclass(frozen=True)
class Operator:
    name: str
    symbol: str
    apply: Callable[[int, int], int]
    phrase: str
    confusable: str  # the operator that people who misread the phrase write instead
    final: bool = False  # a comparison: nothing sensible can be computed from its result, so it only stands last


OPERATORS: dict[str, Operator] = {
    entry.name: entry
    for entry in (
        Operator("add", "+", operator.add, "plus", "or"),
        Operator("subtract", "-", operator.sub, "minus", "xor"),
        Operator("multiply", "*", operator.mul, "times", "add"),
        Operator("divide", "//", operator.floordiv, "over", "remainder"),
        Operator("remainder", "%", operator.mod, "mod", "divide"),
        Operator("xor", "^", operator.xor, "xor", "or"),
        Operator("and", "&", operator.and_, "mask", "remainder"),
        Operator("or", "|", operator.or_, "or", "and"),
        Operator("above", ">", operator.gt, "above", "at_least", final=True),
        Operator("below", "<", operator.lt, "below", "at_most", final=True),
        Operator("at_least", ">=", operator.ge, "at least", "above", final=True),
        Operator("at_most", "<=", operator.le, "at most", "below", final=True),
    )
}


def _held_out(name: str) -> bool:
    """A hash and not a draw, so that the split is the same for every seed, machine and version of Python."""
    digest = hashlib.blake2s(name.encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") < HELDOUT_SHARE * 2**32


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
        """A fixed fifth of all pairs of phrase and number; no training task of any seed contains one of them."""
        return _held_out(self.key)

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
        if len(function.steps) > 2 or any(step.operator.final for step in function.steps[:-1]):
            raise TaskError(
                f"{key!r} is not a function", hint="one or two steps, and a comparison only as the last one"
            )
        return function

    @property
    def heldout_pair(self) -> bool:
        """A fixed fifth of all ordered pairs of operators; no training task of any seed combines them."""
        return len(self.steps) == 2 and _held_out(" then ".join(step.operator.name for step in self.steps))

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
        last = index + 1 == len(self.steps)
        return [
            other
            for other in OPERATORS.values()
            if other is not self.steps[index].operator and (last or not other.final)
        ]

    def mistakes(self) -> Iterator[Function]:
        """What someone who nearly understood would write: any other operator, a near number, a step left out."""
        for index, step in enumerate(self.steps):
            for other in self.rivals(index):
                yield self.with_step(index, replace(step, operator=other))
            for shift in (-2, -1, 1, 2):
                if step.number + shift > 0:
                    yield self.with_step(index, replace(step, number=step.number + shift))
        if len(self.steps) > 1:
            yield Function(self.steps[:1])
            yield Function(self.steps[1:])
