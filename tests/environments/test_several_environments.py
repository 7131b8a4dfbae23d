"""Several environments in one run: their settings, their tasks, and whose turn it is."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import pytest

from rollmill.config import load_config, validate_config
from rollmill.environments.environment import build_tasks, each_environment, open_environments
from rollmill.environments.sampler import Draw, TaskResults
from rollmill.environments.samplers.frontier import Frontier, FrontierConfig
from rollmill.environments.samplers.mixed import MixedSampler
from rollmill.environments.samplers.uniform import Uniform
from rollmill.environments.task import Task
from rollmill.environments.tasks.listed import ListedTasks
from rollmill.environments.tasks.mixed import MixedTasks
from rollmill.errors import ConfigError, TaskError
from rollmill.reference import to_toml
from rollmill.runs.configuration.settings import RunConfig

RUN = """
name = "two"
checkpoint = "checkpoint"
model = {vocab_size = 128}
evals = {family_tasks = 0}
stages = [{kind = "rl", steps = 2}]
"""
TWO = f"""{RUN}
[[environments]]
name = "repairs"
weight = 3
timeout_s = 60.0
tasks = {{kind = "jsonl", path = "repairs.jsonl"}}
rewards = [{{kind = "script"}}]

[[environments]]
name = "functions"
tasks = {{kind = "jsonl", path = "functions.jsonl"}}
harness = {{kind = "chat"}}
"""


def read(toml: str, directory: Path, *overrides: str) -> RunConfig:
    path = directory / "run.toml"
    path.write_text(toml)
    return load_config(RunConfig, path, overrides)


def test_each_environment_has_settings_of_its_own(tmp_path: Path) -> None:
    config = read(TWO, tmp_path, "environments.functions.weight=2.0")
    repairs, functions = each_environment(config)
    assert (repairs.weight, functions.weight) == (3, 2)
    assert repairs.harness.kind == "shell" and functions.harness.kind == "chat"
    assert [each.kind for each in repairs.rewards] == ["script"]
    assert functions.tasks.path == str(tmp_path / "functions.jsonl")  # type: ignore[attr-defined]


def test_a_run_with_several_is_the_same_when_it_is_read_again(tmp_path: Path) -> None:
    config = read(TWO, tmp_path)
    assert validate_config(RunConfig, config.model_dump(mode="json"), "run.json") == config
    assert read(to_toml(config), tmp_path) == config


def test_the_sections_of_a_run_are_one_environment_without_a_name(tmp_path: Path) -> None:
    tasks = '[tasks]\nkind = "jsonl"\npath = "tasks.jsonl"\n'
    (one,) = each_environment(read(f"{RUN}{tasks}", tmp_path))
    assert one.name == "" and one.harness.kind == "shell" and [each.kind for each in one.rewards] == ["calls"]


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ('[harness]\nkind = "chat"\n', "environments.NAME.harness"),
        ('[[environments]]\nname = "repairs"\ntasks = {kind = "jsonl", path = "t"}\n', "are called 'repairs'"),
        ('[[environments]]\nname = "Two words"\ntasks = {kind = "jsonl", path = "t"}\n', "environments.2.name"),
        ('[[environments]]\nname = "third"\n', "environments.2.tasks"),
        ('[[environments]]\nname = "third"\ntask = 1\n', "did you mean 'environments.2.tasks'"),
    ],
)
def test_what_is_refused_names_the_place_and_the_remedy(more: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        read(TWO + more, tmp_path)
    assert says in f"{raised.value.message} {raised.value.hint}"


# --- tasks and samplers

WEIGHTS = {"repairs": 3.0, "functions": 1.0}


def some(count: int, heldout: int, family: str = "") -> ListedTasks:
    tasks = [Task(f"t/{number}", "Do it.", family=family) for number in range(count)]
    return ListedTasks([*tasks, *(Task(f"h{number}", "Do it.", split="heldout") for number in range(heldout))])


def mixed() -> MixedTasks:
    return MixedTasks({"repairs": some(8, 2, "loops"), "functions": some(50, 5)}, WEIGHTS)


def test_tasks_carry_their_environment_and_are_found_by_it() -> None:
    tasks = mixed()
    task = tasks.get("repairs/t/3")
    assert (task.id, task.environment, task.family) == ("repairs/t/3", "repairs", "repairs/loops")
    assert tasks.get("functions/t/3").family == "functions"
    assert task.digest == some(8, 0).get("t/3").digest  # what is played and graded is the same
    listed = tasks.listed()
    assert listed is not None and len(list(listed)) == 65
    assert len(tasks.train_ids() or ()) == 58
    for unknown in ("other/t/3", "t", "repairs/x"):
        with pytest.raises(TaskError):
            tasks.get(unknown)


def test_streams_are_mixed_by_weight_and_the_same_again() -> None:
    first = [task.id for task in itertools.islice(mixed().train(7), 400)]
    assert Counter(id.partition("/")[0] for id in first) == {"repairs": 300, "functions": 100}
    assert Counter(id.partition("/")[0] for id in first[:8]) == {"repairs": 6, "functions": 2}  # in every few groups
    assert first == [task.id for task in itertools.islice(mixed().train(7), 400)]
    assert first != [task.id for task in itertools.islice(mixed().train(8), 400)]


def test_every_environment_has_its_share_of_the_held_out_tasks() -> None:
    ids = [task.id for task in mixed().heldout("heldout", 5)]
    assert Counter(id.partition("/")[0] for id in ids) == {"repairs": 2, "functions": 3}
    assert ids[:3] == [task.id for task in mixed().heldout("heldout", 3)]


def test_the_sampler_of_each_environment_sees_its_own_groups_only() -> None:
    tasks, stream = mixed(), [task.id for task in itertools.islice(mixed().train(3), 40)]
    sampler = MixedSampler({name: Uniform() for name in WEIGHTS})
    chosen = [sampler.choose(tasks, Draw(index, 3, 0.0, {})).id for index in range(40)]
    assert chosen == stream
    assert sampler.choose(tasks, Draw(11, 3, 0.0, {})).id == stream[11]  # as after a restart
    assert sampler.choose(tasks, Draw(30, 3, 0.0, {})).id == stream[30]


def test_the_frontier_of_one_environment_takes_nothing_from_another() -> None:
    """In both, all but one task are always solved. The weights hold, and inside each the frontier."""
    tasks = mixed()
    sampler = MixedSampler({name: Frontier(FrontierConfig(recheck=0.001)) for name in WEIGHTS})
    sampler.check(tasks)
    results: dict[str, TaskResults] = {}
    for id in tasks.train_ids() or ():
        results[id] = TaskResults()
        for attempt in range(8):
            half = id in ("functions/t/1", "repairs/t/1")
            reward = float(attempt % 2) if half else 1.0
            results[id].add(reward=reward, solved=bool(reward), turns=1, tokens=1)
    chosen = Counter(sampler.choose(tasks, Draw(index, 3, 0.0, results)).id for index in range(400))
    shares = Counter(id.partition("/")[0] for id in chosen.elements())
    assert shares == {"repairs": 300, "functions": 100}
    assert chosen["repairs/t/1"] > 5 * chosen["repairs/t/2"] and chosen["functions/t/1"] > 10


async def test_parts_are_those_of_the_task_and_equal_machines_share_a_pool(tmp_path: Path) -> None:
    for name in ("repairs", "functions"):
        (tmp_path / f"{name}.jsonl").write_text('{"id": "one", "instruction": "Do it."}\n')
    third = '[[environments]]\nname = "large"\ntasks = {kind = "jsonl", path = "repairs.jsonl"}\npool = {most = 2}\n'
    config = read(TWO + third, tmp_path)
    tasks = build_tasks(config)
    async with open_environments(config) as environments:
        repairs, functions, large = (
            environments.of(tasks.get(f"{name}/one")) for name in ("repairs", "functions", "large")
        )
        assert (repairs.harness.name, functions.harness.name) == ("shell", "chat")
        assert (repairs.settings.timeout_s, functions.settings.timeout_s) == (60, None)
        assert repairs.machines is functions.machines and repairs.machines is not large.machines
        with pytest.raises(TaskError, match="does not have"):
            environments.of(Task("one", "Do it."))
