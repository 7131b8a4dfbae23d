"""Tasks are reproducible, splits are disjoint, and only the right function scores."""

from __future__ import annotations

import hashlib
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from rollmill.demo.coding_tools import OK, apply_edit, render_run
from rollmill.demo.functions import NUMBERS, OPERATORS, Function, Step
from rollmill.demo.micro_repos import (
    HELDOUT_SPLITS,
    MAIN,
    TEST,
    MicroRepos,
    Repository,
    repositories,
    repository_of,
)
from rollmill.errors import TaskError

SPLITS = ("train", "heldout", "fresh", "heldout_family")


@pytest.fixture(scope="module")
def drawn() -> dict[str, list[Repository]]:
    return {split: list(islice(repositories(split, seed=3), 300)) for split in SPLITS}


@pytest.fixture
def every(drawn: dict[str, list[Repository]]) -> list[Repository]:
    return [repository for split in SPLITS for repository in drawn[split]]


def load_f(source: str) -> Callable[[int], object]:
    namespace: dict[str, Callable[[int], object]] = {}
    exec(compile(source, MAIN, "exec"), namespace)  # type: ignore[arg-type]
    return namespace["f"]


def grade(repository: Repository, source: str) -> bool:
    f = load_f(source)
    return all(f(*arguments) == y for arguments, y in repository.task.grading["cases"])


def with_body(repository: Repository, body: str) -> str:
    return apply_edit(repository.main, repository.edit_line, body)


def test_train_is_endless_and_reproducible() -> None:
    tasks = MicroRepos()
    first, again, other = (list(islice(tasks.train(seed), 50)) for seed in (7, 7, 8))
    assert first == again
    assert {task.id for task in first} != {task.id for task in other}
    assert {task.split for task in first} == {"train"}


@pytest.mark.parametrize("split", ["heldout", "fresh", "heldout_family"])
def test_heldout_lists_are_distinct_and_grow_at_the_end(split: str) -> None:
    tasks = MicroRepos().heldout(split, 300)
    assert len({task.id for task in tasks}) == 300
    assert {task.split for task in tasks} == {split}
    assert MicroRepos().heldout(split, 20) == tasks[:20]


def test_unknown_split_is_refused() -> None:
    with pytest.raises(TaskError, match="validation"):
        MicroRepos().heldout("validation", 1)


def test_an_id_rebuilds_its_task(every: list[Repository]) -> None:
    for repository in every:
        assert MicroRepos().get(repository.id) == repository.task


@pytest.mark.parametrize(
    "task_id",
    [
        "",
        "fix",
        "fix/add-8",
        "fix/add-8/1000",  # a variant of `fresh`, and add-8 is in training
        "fix/add-8/2000",
        "fix/add-8/01",
        "fix/add-8/-1",
        "fix/add-08/1",
        "fix/add--8/1",
        "fix/add-60/1",
        "fix/power-8/1",
        "break/add-8/1",
        "fix/above-8/1",
        "fix/add-8+add-8+add-8/1",
        "fix/add-8/1/../../etc",
        "pairs/add-8/1",
    ],
)
def test_an_unknown_task_id_is_refused(task_id: str) -> None:
    with pytest.raises(TaskError) as caught:
        MicroRepos().get(task_id)
    assert caught.value.hint


def test_an_id_that_mixes_splits_is_refused() -> None:
    steps = [Step(OPERATORS["add"], number) for number in NUMBERS]
    trained = next(step for step in steps if not step.heldout)
    heldout = next(step for step in steps if step.heldout)
    with pytest.raises(TaskError):
        MicroRepos().get(f"fix/{Function((trained, heldout)).key}/1")


def test_splits_share_neither_parameters_nor_the_held_out_family(drawn: dict[str, list[Repository]]) -> None:
    parameters = {
        split: {step.words for repository in drawn[split] for step in repository.function.steps} for split in SPLITS
    }
    assert not parameters["train"] & (parameters["heldout"] | parameters["fresh"] | parameters["heldout_family"])

    def operators(split: str) -> set[tuple[str, ...]]:
        return {tuple(step.operator.name for step in repository.function.steps) for repository in drawn[split]}

    assert not operators("heldout_family") & (operators("train") | operators("heldout") | operators("fresh"))
    assert {repository.task.family for repository in drawn["heldout_family"]} == {"pairs"}
    assert {repository.task.family for repository in drawn["train"]} == {"fix", "write", "test"}


def test_the_fresh_list_has_no_task_of_the_list_that_the_recipe_was_tuned_on() -> None:
    tuned, fresh = ({task.id for task in MicroRepos().heldout(split, 1000)} for split in ("heldout", "fresh"))
    assert not tuned & fresh


def test_heldout_lists_never_change() -> None:
    """Reported figures are about these lists: with other lists they would not be comparable."""
    digests = {
        split: hashlib.sha256("\n".join(task.id for task in MicroRepos().heldout(split, 128)).encode()).hexdigest()[:16]
        for split in HELDOUT_SPLITS
    }
    assert digests == {
        "heldout": "eeb81aeaf7d5187a",
        "fresh": "7e74a00ace4841dc",
        "heldout_family": "d1c009b19ba19a99",
    }


def test_a_fifth_is_held_out() -> None:
    steps = [Step(operator, number) for operator in OPERATORS.values() for number in NUMBERS]
    assert sum(step.heldout for step in steps) / len(steps) == pytest.approx(0.2, abs=0.03)


def test_the_right_function_passes_hidden_cases(every: list[Repository]) -> None:
    for repository in every:
        assert grade(repository, with_body(repository, f"return {repository.function.code}")), repository.id


def test_the_initial_repository_scores_zero(every: list[Repository]) -> None:
    for repository in every:
        assert not grade(repository, repository.main), repository.id


def test_every_constant_scores_zero(every: list[Repository]) -> None:
    for repository in every:
        values = {y for _, y in repository.task.grading["cases"]}
        for constant in (*values, 0, 1, True, False, None):
            assert not grade(repository, with_body(repository, f"return {constant}")), (repository.id, constant)


def test_every_near_mistake_scores_zero(every: list[Repository]) -> None:
    for repository in every:
        function = repository.function
        for index, step in enumerate(function.steps):
            confused = function.with_step(index, replace(step, operator=OPERATORS[step.operator.confusable]))
            assert not grade(repository, with_body(repository, f"return {confused.code}")), (repository.id, confused)
        for mistake in function.mistakes():
            assert any(mistake.value(x) != function.value(x) for x in repository.hidden), (repository.id, mistake)


def test_hidden_cases_are_not_the_visible_one_and_do_not_enter_the_repository(every: list[Repository]) -> None:
    for repository in every:
        assert repository.visible not in repository.hidden
        assert len(set(repository.hidden)) == len(repository.hidden)
        assert repository.task.files == {MAIN: repository.main.encode(), TEST: repository.test.encode()}


def test_the_visible_case_reveals_some_mistakes_but_not_all(every: list[Repository]) -> None:
    revealed = [
        confused.value(repository.visible) != repository.function.value(repository.visible)
        for repository in every
        for index, step in enumerate(repository.function.steps)
        for confused in [
            repository.function.with_step(index, replace(step, operator=OPERATORS[step.operator.confusable]))
        ]
    ]
    assert 0.4 < sum(revealed) / len(revealed) < 0.9


def test_code_means_what_value_computes(every: list[Repository]) -> None:
    for repository in every:
        for x in random.Random(repository.id).sample(range(-50, 500), 5):
            assert eval(repository.function.code, {"x": x}) == repository.function.value(x)


@pytest.mark.parametrize("shape", ["fix", "write", "test"])
def test_the_visible_test_really_runs(shape: str, drawn: dict[str, list[Repository]], tmp_path: Path) -> None:
    repository = next(each for each in drawn["train"] if each.blueprint.shape == shape)
    for path, data in repository.task.files.items():
        (tmp_path / path).write_bytes(data)

    def run() -> str:
        # -B: a cached main.pyc of the same second and size would hide the edit
        process = subprocess.run([sys.executable, "-B", TEST], cwd=tmp_path, capture_output=True, check=False)
        return render_run(process.returncode, process.stdout + process.stderr)

    assert run() == repository.failure
    (tmp_path / MAIN).write_text(with_body(repository, f"return {repository.function.code}"))
    assert run() == OK


def test_the_words_of_the_function_are_where_the_shape_says(every: list[Repository]) -> None:
    for repository in every:
        documented = repository.blueprint.shape != "test"
        assert (repository.function.words in repository.main) == documented
        assert (repository.function.words in repository.test) != documented


def test_repository_of_gives_the_cases_the_task_is_graded_by(every: list[Repository]) -> None:
    repository = every[0]
    assert repository_of(repository.id) == repository
