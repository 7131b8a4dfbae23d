"""Generated families of micro-repositories: main.py with one function f, test.py with one visible case.

    family  the agent is asked   where it finds what f should do          steps of f
    fix     "fix main.py"        docstring of f, whose body is wrong      1 or 2
    write   "write main.py"      docstring of f, which has no body        1 or 2
    test    "pass test.py"       what the failing test prints             1 or 2
    pairs   any of these ways    either place                             2, a pair of operators not in training

    split           its tasks
    train           what training uses
    heldout         no step of f (a phrase with a number) occurs in training; the recipe was tuned on the first 128
    fresh           tasks like `heldout`, another draw with variants of its own; nothing was ever tuned on them
    heldout_family  the family `pairs`

A task's id says everything it is made of, so `get` rebuilds it anywhere:

    fix/subtract-8+remainder-3/17       shape / steps of f / variant (which bug, which visible case)

Hidden cases are added until they refute the initial repository, every constant and every near mistake. A function for
which no such cases exist does not become a task.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from rollmill.demo.functions import NUMBERS, OPERATORS, Function, Step
from rollmill.environments.task import Task, TaskSet
from rollmill.errors import TaskError

NAME = "micro-repos"
IMAGE = "host-python"
MAIN, TEST = "main.py", "test.py"
HELDOUT_FAMILY = "pairs"
TWO_STEP_SHARE = 0.5
OPERATOR_BUG_SHARE = 0.7  # the other bugs are wrong numbers
HELDOUT_SPLITS = ("heldout", "fresh", "heldout_family")
VARIANTS = 1000  # per shape and function; the split `fresh` has its own, which start here
_VARIANT_NAMES = frozenset(map(str, range(2 * VARIANTS)))
PROBES = (*range(-8, 130), *range(130, 4000, 61))  # inputs that hidden cases are drawn from
RANDOM_CASES = 6


@dataclass(frozen=True)
class Shape:
    """How a repository asks for its function."""

    prompt: str
    documented: bool  # f has a docstring; otherwise only the failing test says what f should do
    body: bool  # f has a (wrong) body at first


SHAPES = {
    "fix": Shape(f"fix {MAIN}", documented=True, body=True),
    "write": Shape(f"write {MAIN}", documented=True, body=False),
    "test": Shape(f"pass {TEST}", documented=False, body=True),
}


class MicroRepos(TaskSet):
    """The task set. It has no state: tasks follow from seeds and ids."""

    name = NAME

    def train(self, seed: int) -> Iterator[Task]:
        return (repository.task for repository in repositories("train", seed))

    def heldout(self, split: str, count: int) -> list[Task]:
        if split not in HELDOUT_SPLITS:
            raise TaskError(f"no held-out split {split!r}", hint=f"there are {', '.join(HELDOUT_SPLITS)}")
        distinct: dict[str, Task] = {}
        for repository in repositories(split, seed=0):
            if len(distinct) == count:
                break
            distinct.setdefault(repository.id, repository.task)
        return list(distinct.values())

    def get(self, task_id: str) -> Task:
        return repository_of(task_id).task


@dataclass(frozen=True)
class Blueprint:
    """The parts of a task's id."""

    shape: str
    function: Function
    variant: int

    @property
    def id(self) -> str:
        return f"{self.shape}/{self.function.key}/{self.variant}"

    @property
    def family(self) -> str:
        return HELDOUT_FAMILY if self.function.heldout_pair else self.shape

    @property
    def split(self) -> str | None:
        """None if it mixes training with held-out parts: no such task exists."""
        heldout = {step.heldout for step in self.function.steps}
        if heldout == {True} and self.variant >= VARIANTS:
            return None if self.function.heldout_pair else "fresh"
        if heldout == {True}:
            return "heldout_family" if self.function.heldout_pair else "heldout"
        trained = heldout == {False} and not self.function.heldout_pair and self.variant < VARIANTS
        return "train" if trained else None

    def build(self) -> Repository | None:
        """None if no cases distinguish its function from every near mistake."""
        generator = random.Random(self.id)
        bug = _bug(self.function, generator) if SHAPES[self.shape].body else None
        visible = _visible_input(self.function, bug, generator)
        if visible is None:
            return None
        hidden = _hidden_inputs(self.function, bug, visible, generator)
        return None if hidden is None else Repository(self, bug, visible, tuple(hidden))


@dataclass(frozen=True)
class Repository:
    """A blueprint with its bug and its cases."""

    blueprint: Blueprint
    bug: Function | None  # None: f has no body at first
    visible: int  # input of the one case in test.py
    hidden: tuple[int, ...]  # inputs of the hidden cases, which decide the reward

    @property
    def id(self) -> str:
        return self.blueprint.id

    @property
    def shape(self) -> Shape:
        return SHAPES[self.blueprint.shape]

    @property
    def function(self) -> Function:
        return self.blueprint.function

    @property
    def edit_line(self) -> int:
        """The line of main.py that holds the body of f."""
        return 3 if self.shape.documented else 2

    @property
    def failure(self) -> str:
        """What test.py prints when the visible case fails."""
        return "fail" if self.shape.documented else f"fail {self.function.words}"

    @property
    def main(self) -> str:
        docstring = f'    "{self.function.words}"\n' if self.shape.documented else ""
        body = "pass" if self.bug is None else f"return {self.bug.code}"
        return f"def f(x):\n{docstring}    {body}\n"

    @property
    def test(self) -> str:
        check = f"if f({self.visible}) != {self.function.value(self.visible)}:"
        return f'from main import f\n\n{check}\n    raise SystemExit("{self.failure}")\n'

    @property
    def task(self) -> Task:
        assert self.blueprint.split is not None, "draws and ids are checked"
        return Task(
            id=self.id,
            family=self.blueprint.family,
            split=self.blueprint.split,
            instruction=self.shape.prompt,
            image=IMAGE,
            files={MAIN: self.main.encode(), TEST: self.test.encode()},
            submission=(MAIN,),
            grading={
                "kind": "calls",
                "module": MAIN,
                "function": "f",
                "cases": [[[x], self.function.value(x)] for x in self.hidden],
            },
        )


def repository_of(task_id: str) -> Repository:
    """The repository of an id. Ids come from configurations and records, so only exact ids are accepted."""
    shape, _, rest = task_id.partition("/")
    steps, _, variant = rest.partition("/")
    if shape in SHAPES and variant in _VARIANT_NAMES:
        blueprint = Blueprint(shape, Function.from_key(steps), int(variant))
        repository = None if blueprint.split is None else blueprint.build()
        if repository is not None:
            return repository
    hint = "a task is SHAPE/STEP[+STEP]/VARIANT, for example fix/add-8/17"
    raise TaskError(f"{task_id!r} names no task of {NAME}", hint=hint)


def repositories(split: str, seed: int) -> Iterator[Repository]:
    """An endless, reproducible stream of repositories of one split."""
    generator = random.Random(f"{NAME} {split} {seed}")
    while True:
        yield draw_repository(split, generator)


def draw_repository(split: str, generator: random.Random) -> Repository:
    first_variant = VARIANTS if split == "fresh" else 0
    while True:
        shape = generator.choice(tuple(SHAPES))
        length = 2 if split == "heldout_family" or generator.random() < TWO_STEP_SHARE else 1
        function = _draw_function(length, generator, heldout=split != "train")
        blueprint = Blueprint(shape, function, generator.randrange(VARIANTS) + first_variant)
        if blueprint.split == split:
            repository = blueprint.build()
            if repository is not None:
                return repository


def _draw_function(length: int, generator: random.Random, *, heldout: bool) -> Function:
    """Uniform over the operators and numbers that are held out, or over those that are not."""
    steps: list[Step] = []
    while len(steps) < length:
        operators = list(OPERATORS.values())
        step = Step(generator.choice(operators), generator.choice(NUMBERS))
        if step.heldout == heldout:
            steps.append(step)
    return Function(tuple(steps))


def _bug(function: Function, generator: random.Random) -> Function:
    """The function with one operator or one number wrong."""
    index = generator.randrange(len(function.steps))
    step = function.steps[index]
    if generator.random() < OPERATOR_BUG_SHARE:
        return function.with_step(index, replace(step, operator=generator.choice(function.rivals(index))))
    number = generator.choice([number for number in NUMBERS if number != step.number])
    return function.with_step(index, replace(step, number=number))


def _visible_input(function: Function, bug: Function | None, generator: random.Random) -> int | None:
    """One input that the initial repository gets wrong, half the time near a number of the function. It reveals many
    mistakes, but by far not all."""
    anywhere = generator.sample(NUMBERS, len(NUMBERS))
    if generator.random() < 0.5:
        near = [step.number + shift for step in function.steps for shift in (-1, 0, 1)]
        anywhere = generator.sample(near, len(near)) + anywhere
    return next((x for x in anywhere if bug is None or bug.value(x) != function.value(x)), None)


def _hidden_inputs(
    function: Function, bug: Function | None, visible: int, generator: random.Random
) -> list[int] | None:
    """Inputs that refute the bug, every near mistake and every constant; the visible input is not one of them."""
    probes = [x for x in PROBES if x != visible]
    chosen = generator.sample(probes, RANDOM_CASES)
    constant = function.value(chosen[0])
    rivals = [mistake.value for mistake in function.mistakes()]
    rivals += [lambda x: constant] if bug is None else [lambda x: constant, bug.value]
    for rival in rivals:
        if all(rival(x) == function.value(x) for x in chosen):
            refuting = next((x for x in probes if rival(x) != function.value(x)), None)
            if refuting is None:
                return None
            chosen.append(refuting)
    return sorted(chosen)
