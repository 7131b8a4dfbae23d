"""Sections that name their class: what loads, and what each mistake is answered with."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

import rollmill
from rollmill.config import load_config
from rollmill.demo import CONFIG as DEMO
from rollmill.errors import ConfigError
from rollmill.kinds import build, code_of
from rollmill.runs.run import RunConfig, RunDirectory

OWN = """
    from collections.abc import Iterator
    from pydantic import Field
    from rollmill import Config, Episode, Grade, Harness, MachineHost, Reward, Task, TaskSet

    class TicketsConfig(Config):
        path: str
        name: str = Field("tickets", description="a name that the loader uses too")
        limits: tuple[int, ...] = (1, 2)

    class Tickets(TaskSet):
        name = "tickets"
        def __init__(self, config: TicketsConfig) -> None:
            self.config = config
        def train(self, seed: int) -> Iterator[Task]:
            yield Task("a", "do it")
        def heldout(self, split: str, count: int) -> list[Task]:
            return []
        def get(self, task_id: str) -> Task:
            return Task(task_id, "do it")

    class Tone(Reward):
        name = "tone"
        async def grade(self, episode: Episode) -> Grade:
            return Grade(0.5)

    class Halfway(TaskSet):
        name = "halfway"
        def train(self, seed): ...
        def heldout(self, split): ...

    class Slow(Reward):
        name = "slow"
        def grade(self, episode): ...

    class Loose(Reward):
        name = "loose"
        def __init__(self, path): ...
        async def grade(self, episode): ...

    class Taken(Reward):
        class Settings(Config):
            weight: int = 1
        name = "taken"
        def __init__(self, config: Settings): ...
        async def grade(self, episode): ...

    class Bare:
        async def create(self, image, files=None, *, snapshot=None): ...
        async def close(self): ...

    class Rack(MachineHost):
        async def create(self, image, files=None, *, snapshot=None): ...
        def expct(self, image, count): ...
    class Typo(Reward):
        name = "typo"
        want_final_state = True
        async def grade(self, episode: Episode) -> Grade: ...

    class Nameless(Reward):
        async def grade(self, episode: Episode) -> Grade: ...

    class Eager(Harness):
        name = "eager"
        resumeable = True
        async def run(self, task, machine, *, base_url, api_key, sampling): ...

    class Alone:
        name = "alone"
        async def grade(self, episode: Episode) -> Grade: ...

    nothing = 3
"""


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    """A directory with a run's TOML and a module beside it."""
    (tmp_path / "own_kinds.py").write_text(textwrap.dedent(OWN))
    (tmp_path / "broken_kinds.py").write_text("x = 1\nraise ValueError('no licence')\n")
    text = DEMO.read_text().replace('[tasks]\nkind = "rollmill.demo.micro_repos:MicroRepos"', "")
    (tmp_path / "run.toml").write_text(text)
    path = list(sys.path)
    yield tmp_path
    sys.path[:] = path
    for name in ("own_kinds", "broken_kinds"):
        sys.modules.pop(name, None)


def load(directory: Path, *overrides: str) -> RunConfig:
    return load_config(RunConfig, directory / "run.toml", overrides)


def test_a_class_beside_the_configuration_gets_its_own_settings(directory: Path) -> None:
    rewards = "rewards=[{kind = 'calls'}, {kind = 'own_kinds:Tone', weight = 0.2}]"
    config = load(directory, "tasks.kind=own_kinds:Tickets", "tasks.path=t.jsonl", "tasks.limits=[7]", rewards)
    tasks = build(config.tasks)
    assert (tasks.config.path, tasks.config.name, tasks.config.limits) == ("t.jsonl", "tickets", (7,))
    assert [(section.kind, section.weight) for section in config.rewards] == [("calls", 1.0), ("own_kinds:Tone", 0.2)]
    assert build(config.rewards[1]).name == "tone" and build(config.harness).name == "coding"


def test_a_run_keeps_its_code_and_finds_it_again(directory: Path) -> None:
    config = load(directory, "tasks.kind=own_kinds:Tickets", "tasks.path=t.jsonl")
    run = RunDirectory.create(directory / "runs", config)
    sys.path.remove(str(directory))
    again = RunDirectory.open(run.path)
    assert again.config == config and str(directory) in sys.path and again.changed_code() == []
    kept = json.loads((run.path / "run.json").read_text())["code"]
    assert kept["tasks"]["class"] == "own_kinds:Tickets" and kept["harness"]["version"] == rollmill.__version__
    with (directory / "own_kinds.py").open("a") as file:
        file.write("# changed\n")
    assert code_of(config.tasks) != kept["tasks"] and again.changed_code() == ["tasks"]


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("tasks.kind=own_kinds:Tickts", "did you mean Tickets"),
        ("tasks.kind=own_kinds:nothing", "nothing is not a class"),
        ("tasks.kind=no_such:Class", "there is no module 'no_such'"),
        ("tasks.kind=broken_kinds:Class", r"importing broken_kinds raised ValueError: no licence \(line 2\)"),
        ("tasks.kind=own_kinds:Halfway", "it has no `get`: get.*`heldout` does not take"),
        ("tasks.kind=tickets", "kind = 'tickets' is unknown"),
        ("tasks.kind=own_kinds:Tickets", "path: Field required"),
        ("tasks={kind='own_kinds:Tickets', pth='x'}", "unknown key 'pth'; did you mean 'path'"),
        ("tasks=3", "tasks must be a table, got 3"),
        ("tasks={}", r"\[tasks\] needs a kind"),
        ("seed=1", r"there is no \[tasks\], but stage 'rl' needs tasks"),
        ("rewards=[{kind='own_kinds:Slow'}]", "`grade` must be `async def`"),
        ("rewards=[{kind='own_kinds:Loose'}]", "must take one parameter that is annotated"),
        ("rewards=[{kind='own_kinds:Taken'}]", "setting 'weight' has a name that every kind has"),
        ("machine.kind=own_kinds:Bare", "Bare is no MachineHost: it is not derived from .*MachineHost"),
        ("machine.kind=own_kinds:Rack", "`expct` is nearly `expect`, which it inherits.*it has no `close`: close"),
        ("rewards=[{kind='own_kinds:Typo'}]", "`want_final_state` is nearly `wants_final_state`"),
        ("rewards=[{kind='own_kinds:Nameless'}]", "it has no `name`"),
        ("harness={kind='own_kinds:Eager'}", "`resumeable` is nearly `resumable`"),
        (
            "rewards=[{kind='own_kinds:Alone'}]",
            "Alone is no Reward: it is not derived from .*reward.Reward",
        ),
        ("harness.kind=shel", "did you mean 'shell'"),
        ("harness.kind=coding", "kind = 'coding' was removed.*shell.*rollmill.demo.coding:CodingHarness"),
        ("harness.max_turn=3", "unknown key 'max_turn'; did you mean 'max_turns'"),
    ],
)
def test_a_mistake_is_named_before_anything_starts(directory: Path, override: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        load(directory, override)


def test_an_entry_point_is_a_kind(directory: Path) -> None:
    metadata = directory / "acme-1.2.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.2\n")
    (metadata / "entry_points.txt").write_text("[rollmill.tasks]\nacme = own_kinds:Tickets\n")
    config = load(directory, "tasks.kind=acme", "tasks.path=x")
    assert type(build(config.tasks)).__name__ == "Tickets"


def test_everything_public_is_there() -> None:
    for name in rollmill.PUBLIC:
        assert getattr(rollmill, name).__name__ == name and name in dir(rollmill)
    with pytest.raises(AttributeError, match="no attribute 'Nope'"):
        rollmill.Nope  # noqa: B018
