"""Samplers. What the policy does is SIMULATED here: each task is solved with a probability of its own."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from rollmill.environments.mixed_sampler import MixedSampler
from rollmill.environments.sampler import Draw, Results, Sampler, TaskResults
from rollmill.environments.samplers import frontier
from rollmill.environments.samplers.frontier import Frontier, FrontierConfig
from rollmill.environments.samplers.uniform import Uniform
from rollmill.environments.task import Task, TaskSet
from rollmill.environments.tasks.listed import ListedTasks
from rollmill.environments.tasks.mixed import MixedTasks
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
                results.setdefault(id, TaskResults()).add(reward=float(solved), solved=solved, turns=3, tokens=100)
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


@pytest.mark.parametrize("several", [False, True])
def test_a_choice_looks_at_what_is_new_and_not_at_every_task(several: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted: tasks that are measured, results that are read, and how often weights are made."""
    looked = Counter[str]()

    class Counted(Results):
        def __getitem__(self, id: str) -> TaskResults:
            looked["results"] += 1
            return super().__getitem__(id)

        def __iter__(self) -> Iterator[str]:
            looked["results"] += len(self)
            return super().__iter__()

    def counting(name: str, function: Any) -> Any:
        def counted(*arguments: Any) -> Any:
            looked[name] += 1
            return function(*arguments)

        return counted

    monkeypatch.setattr(frontier, "_measure", counting("measured", frontier._measure))
    monkeypatch.setattr(Frontier, "_weigh", counting("weighed", Frontier._weigh))
    counts = []
    for size in (1_000, 100_000):
        listed: TaskSet = ListedTasks(Task(f"t{number}", "do it", family=f"f{number % 9}") for number in range(size))
        sampler: Sampler = Frontier(FrontierConfig())
        if several:
            listed, sampler = MixedTasks({"one": listed}, {"one": 1.0}), MixedSampler({"one": sampler})
        sampler.choose(listed, Draw(0, 7, 0.0, Counted()))
        looked.clear()
        results = Counted()
        for index in range(160):  # eight groups per step
            task = sampler.choose(listed, Draw(index, 7, index // 8 / 20, results))
            if index % 8 == 7:
                for attempt in range(4):
                    results.of(task.id).add(reward=attempt % 2, solved=False, turns=1, tokens=1)
        counts.append(dict(looked))
        assert looked["measured"] == 19 and looked["weighed"] == 19
        assert looked["results"] <= 19 * 2 * (1 + 4 * several)
        resumed: Sampler = Frontier(FrontierConfig())  # it meets all results at once
        resumed = MixedSampler({"one": resumed}) if several else resumed
        assert all(
            sampler.choose(listed, draw) == resumed.choose(listed, draw)
            for draw in (Draw(index, 7, 1.0, results) for index in range(160, 180))
        )
    assert counts[0] == counts[1]


def test_a_hopeless_task_that_becomes_solvable_comes_back() -> None:
    sampler = Frontier(FrontierConfig())
    results = TaskResults()
    for _ in range(32):
        results.add(reward=0.0, solved=False, turns=1, tokens=1)
    assert sampler.weight(results, 0.5) == pytest.approx(0.05, abs=0.05)
    for solved in [True, False] * 4:
        results.add(reward=float(solved), solved=solved, turns=1, tokens=1)
    assert sampler.weight(results, 0.5) > 0.8


def weigh(rewards: list[float], progress: float = 0.0) -> float:
    results = TaskResults()
    for reward in rewards:
        results.add(reward=reward, solved=reward >= 1, turns=1, tokens=1)
    return Frontier(FrontierConfig()).weight(results, progress)


def test_partial_rewards_weigh_by_their_spread() -> None:
    assert weigh([0.2, 0.5, 0.9, 0.3, 0.7, 0.4, 0.8, 0.6] * 2) == pytest.approx(0.4, abs=0.05)
    assert weigh([0.0, 1.0] * 8) == pytest.approx(1.0)
    assert weigh([1.0] * 16) == pytest.approx(weigh([0.0] * 16)) == pytest.approx(0.06, abs=0.01)
    assert weigh([0.5] * 16) == 0.05 and weigh([0.9] * 16) < 0.06, "all the same: nothing to learn from"
    assert weigh([-3.0, 5.0] * 8) == 1.0, "rewards of other sizes weigh at most as much"
    for progress in (0.0, 0.5, 1.0):  # with rewards of 0 and 1 it is p · (1 − p)^(1 + hardness · progress)
        rate, power = (5 + 0.25) / 16.5, 1 + 2 * progress
        best = 1 / (1 + power)
        expected = rate * (1 - rate) ** power / (best * (1 - best) ** power)
        assert weigh([1.0] * 5 + [0.0] * 11, progress) == pytest.approx(expected)


def test_new_tasks_weigh_what_their_family_does() -> None:
    """With more tasks than groups it would be uniform for the whole run."""
    names = ("mixed", "hopeless", "unknown")
    tasks = ListedTasks(Task(f"{name}/{number}", "do it", family=name) for name in names for number in range(500))
    results = dict[str, TaskResults]()
    sampler = Frontier(FrontierConfig())
    first = Counter(sampler.choose(tasks, Draw(index, 7, 0.0, results)).family for index in range(600))
    assert min(first.values()) > 150, "before there are results it is uniform"
    for number in range(20):
        for attempt in range(8):
            results.setdefault(f"mixed/{number}", TaskResults()).add(
                reward=float(attempt % 2), solved=attempt % 2 == 1, turns=1, tokens=1
            )
            results.setdefault(f"hopeless/{number}", TaskResults()).add(reward=0.0, solved=False, turns=1, tokens=1)
    chosen = [sampler.choose(tasks, Draw(index, 7, 0.0, results)) for index in range(600)]
    new = Counter(task.family for task in chosen if task.id not in results)
    assert new["mixed"] > 4 * new["hopeless"] and new["mixed"] > 1.5 * new["unknown"] > 3 * new["hopeless"]
    again = [Frontier(FrontierConfig()).choose(tasks, Draw(index, 7, 0.0, results)) for index in range(20)]
    assert again == chosen[:20], "the same in a process that starts in the middle"


def test_a_recheck_of_one_is_uniform() -> None:
    counts = Counter(simulate(Frontier(FrontierConfig(recheck=1.0))))
    assert min(counts.values()) > 0.7 * GROUPS / len(RATES)


def test_an_endless_task_set_is_refused_with_the_remedy() -> None:
    class Endless(TaskSet):
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
