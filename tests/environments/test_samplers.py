"""Samplers. What the policy does is SIMULATED here: each task is solved with a probability of its own."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Mapping

import pytest

from rollmill.environments.sampler import Draw, Sampler, TaskResults
from rollmill.environments.samplers.frontier import Frontier, FrontierConfig
from rollmill.environments.samplers.uniform import Uniform
from rollmill.environments.task import Task
from rollmill.environments.tasks.listed import ListedTasks
from rollmill.errors import ConfigError

RATES = {"solved": 1.0, "easy": 0.75, "even": 0.5, "hard": 0.25, "hopeless": 0.0}
TASKS = ListedTasks(Task(f"{name}/{number}", "do it") for name in RATES for number in range(8))
GROUPS, SIZE = 400, 8


def simulate(sampler: Sampler, rates: Mapping[str, float] = RATES) -> list[str]:
    """The kinds of the tasks that were chosen. A group's results are seen by the groups that start four later."""
    draw, results, chosen = random.Random(1), dict[str, TaskResults](), list[str]()
    unseen: list[tuple[str, list[bool]]] = []
    for index in range(GROUPS):
        task = sampler.choose(TASKS, Draw(index, 7, index / GROUPS, results))
        kind = task.id.partition("/")[0]
        chosen.append(kind)
        unseen.append((task.id, [draw.random() < rates[kind] for _ in range(SIZE)]))
        if len(unseen) > 4:
            id, outcomes = unseen.pop(0)
            for solved in outcomes:
                results.setdefault(id, TaskResults()).add(solved=solved, turns=3, tokens=100)
    return chosen


def test_uniform_is_the_stream_of_the_task_set() -> None:
    stream = [task.id for task in itertools.islice(TASKS.train(3), 50)]
    sampler = Uniform()
    assert [sampler.choose(TASKS, Draw(index, 3, 0.0, {})).id for index in range(50)] == stream
    # the same index again, an earlier one, and a sampler that begins in the middle after a restart
    assert sampler.choose(TASKS, Draw(49, 3, 0.5, {})).id == stream[49]
    assert sampler.choose(TASKS, Draw(7, 3, 0.5, {})).id == stream[7]
    assert Uniform().choose(TASKS, Draw(31, 3, 0.5, {})).id == stream[31]


def test_frontier_prefers_what_teaches_and_harder_tasks_later() -> None:
    chosen = simulate(Frontier(FrontierConfig()))
    assert chosen == simulate(Frontier(FrontierConfig())), "the same seed and results give the same choices"
    early, late = Counter(chosen[80:200]), Counter(chosen[280:])
    for part in (early, late):
        teaching = part["easy"] + part["even"] + part["hard"]
        assert teaching > 5 * (part["solved"] + part["hopeless"]), part
        assert part["solved"] and part["hopeless"], "they are looked at again"
    assert late["hard"] > late["easy"] and late["hard"] / late.total() > early["hard"] / early.total()
    # the bias when it is off: two fifths of the rollouts go to tasks that teach nothing
    uniform = Counter(simulate(Uniform()))
    assert uniform["solved"] + uniform["hopeless"] == pytest.approx(0.4 * GROUPS, rel=0.05)


def test_a_hopeless_task_that_becomes_solvable_comes_back() -> None:
    sampler = Frontier(FrontierConfig())
    results = TaskResults()
    for _ in range(32):
        results.add(solved=False, turns=1, tokens=1)
    assert sampler.weight(results, 0.5) == pytest.approx(0.05, abs=0.05)
    for solved in [True, False] * 4:
        results.add(solved=solved, turns=1, tokens=1)
    assert sampler.weight(results, 0.5) > 0.8 and sampler.weight(None, 0.5) == 1.0


def test_a_recheck_of_one_is_uniform() -> None:
    counts = Counter(simulate(Frontier(FrontierConfig(recheck=1.0))))
    assert min(counts.values()) > 0.7 * GROUPS / len(RATES)


def test_an_endless_task_set_is_refused_with_the_remedy() -> None:
    class Endless:
        name = "endless"

        def train(self, seed: int) -> itertools.repeat[Task]:
            return itertools.repeat(Task("one", "do it"))

        def heldout(self, split: str, count: int) -> list[Task]:
            return []

        def get(self, task_id: str) -> Task:
            return Task(task_id, "do it")

    assert Uniform().choose(Endless(), Draw(5, 0, 0.0, {})).id == "one"
    with pytest.raises(ConfigError, match="train_ids"):
        Frontier(FrontierConfig()).choose(Endless(), Draw(0, 0, 0.0, {}))
