"""Trajectories of another run and of production are admitted to a stage, as far as their staleness has a bound."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from rollmill.cli.experience.trajectory_commands import experience_of
from rollmill.cli.main import app
from rollmill.config import load_config
from rollmill.demo import CONFIG as DEMO
from rollmill.environments.environment import build_tasks
from rollmill.errors import ConfigError
from rollmill.models.host_tensors import to_host
from rollmill.runs.admit_experience import admit_trajectories
from rollmill.runs.run import RunConfig, RunDirectory
from rollmill.storage.database import open_database
from rollmill.storage.objects import Objects
from rollmill.trajectories.ledger import Ledger
from rollmill.trajectories.payload import encode_trajectory, seal_facts
from rollmill.trajectories.query import TrajectoryQuery
from rollmill.trajectories.trajectory_store import TrajectoryStore
from rollmill.types import Grade, LedgerState, PolicyRef, TrafficClass, Version
from rollmill.weights.reading.weight_store import WeightStore
from rollmill.weights.writing.publisher import Publisher
from tests.trajectories import build
from tests.trajectories.build import start_group

SMALL = ("stages.rl.groups_per_step=2", "stages.rl.max_staleness=1")


class Mill:
    """A run with versions of its line `rl` and with trajectories, as if it had been trained."""

    def __init__(self, root: Path, name: str, *overrides: str) -> None:
        self.run = RunDirectory.create(root, load_config(RunConfig, DEMO, [f"name={name}", *SMALL, *overrides]))
        self.objects = Objects.open(self.run.home_store)
        self.weights = WeightStore(self.objects)
        engine = open_database(self.run.database_url)
        self.store = TrajectoryStore(engine, self.objects)
        self.ledger = Ledger(engine, f"{self.run.id}/rl")

    def publish(self, line: str, number: int, value: float, parent: Version | None = None) -> None:
        tensors = to_host({"w": torch.full((2, 2), value, dtype=torch.bfloat16)})
        Publisher(self.weights, line).publish(number, tensors, parent)

    def add_group(
        self,
        group: str,
        versions: Sequence[str],
        *,
        run: str = "rl",
        split: str = "train",
        task: str = "bug/7",
        user: str = "",
        of: str = "",
        consent: str = "train",
    ) -> list[str]:
        """A graded group; trajectory n was sampled by version n. `run` is a part of its key, or `production`,
        which is `of` a run: not given, of this one."""
        ids = [f"{group or 'live'}-{number}" for number in range(len(versions))]
        for number, (id, version) in enumerate(zip(ids, versions, strict=True)):
            line, _, at = version.partition("@")
            digest = self.weights.manifest(Version(line, int(at))).digest
            segment = build.segment(routes=None)
            segment.policies = [PolicyRef(line, int(at), "bf16", digest)] * 2
            made = build.trajectory(id, group_id=group, task_id=task, segments=[segment])
            self.objects.put(f"trajectories/{id}.zst", encode_trajectory(made))
            key = run if run == "production" else f"{self.run.id}/{run}"
            facts = {"split": split, "user": user, "run": (of or self.run.id) if run == "production" else ""}
            facts |= {"consent": consent} if run == "production" else {}
            traffic: TrafficClass = "production" if run == "production" else "rollout"
            provenance = {name: value for name, value in facts.items() if value}
            self.store.create(key, group, task, [id], provenance, traffic)
            self.store.finish(id, f"trajectories/{id}.zst", None, **seal_facts(made))
            self.store.grade(id, Grade(float(number)))
        return ids


def admitted(mill: Mill, source: Mill | None = None, **named: bool) -> dict[str, tuple[str, str]]:
    from_run = (source or mill).run
    rows = experience_of((source or mill).store, TrajectoryQuery(state="graded"), from_run.id)
    verdicts = admit_trajectories(mill.run, None, rows, from_run, **named)
    return {each.group_id: (each.decision, each.reason) for each in verdicts}


@pytest.fixture
def first(tmp_path: Path) -> Mill:
    """Versions 0 to 3 of `rl`, and a group sampled by each."""
    mill = Mill(tmp_path, "first")
    mill.publish("midtrain", 0, -1.0)
    for number in range(4):
        mill.publish("rl", number, float(number), Version("midtrain", 0) if number == 0 else None)
        mill.add_group(f"first-{number}", [f"rl@{number}"] * 2)
    return mill


def continued(root: Path, first: Mill, number: int) -> Mill:
    """A run that started from a version of `first`."""
    start = {"run": str(first.run.path), "id": first.run.id, "version": f"rl@{number}"}
    mill = Mill(root, "second", *(f"start.{name}={value}" for name, value in start.items()))
    parent = Version(mill.run.config.checkpoint_line, number)
    mill.publish(parent.line, number, float(number))
    mill.publish("rl", 0, float(number), parent)
    return mill


def test_of_the_run_that_a_run_started_from(tmp_path: Path, first: Mill) -> None:
    """`second` starts from rl@2. rl@1 is one version older than that; rl@3 is of another branch."""
    second = continued(tmp_path, first, 2)
    expected = {"first-0": "stale", "first-1": "admitted", "first-2": "admitted", "first-3": "refused"}
    found = admitted(second, first, dry_run=True)
    assert {group: decision for group, (decision, _) in found.items()} == expected
    assert second.store.find(TrajectoryQuery()) == [], "a dry run changes nothing"
    found = admitted(second, first)
    assert {group: decision for group, (decision, _) in found.items()} == expected
    assert "rl@3 sampled a part of it, which is no ancestor" in found["first-3"][1]
    # the copy names the weights as the second run does: its own rl@1 will be other weights
    line = second.run.config.checkpoint_line
    assert {policy.line for policy in second.store.load("first-1-0").segments[0].policies} == {line}
    assert (row := second.store.get("first-1-0")).line == line and row.run == first.run.stage_key(
        first.run.config.stage("rl")
    )
    assert first.store.load("first-1-0").segments[0].policies[0].line == "rl", "the original stays"
    assert {group.id: group.min_version for group in second.ledger.untaken_groups()} == {"first-1": -1, "first-2": 0}
    again = admitted(second, first)
    assert again["first-1"] == ("refused", "in the ledger already: admitted")
    assert again["first-0"] == ("refused", "in the ledger already: stale") and second.ledger.open_groups() == 2


def test_equal_weights_of_an_unrelated_run_count_and_equal_names_do_not(tmp_path: Path, first: Mill) -> None:
    second = Mill(tmp_path, "second")
    second.publish("midtrain", 0, -1.0)
    second.publish("rl", 0, 0.0, Version("midtrain", 0))  # the same bytes as those of `first`
    second.publish("rl", 1, 7.0)
    found = admitted(second, first)
    assert found["first-0"][0] == "admitted" and found["first-1"][0] == "refused"


def test_production_needs_the_population_baseline(tmp_path: Path, first: Mill) -> None:
    (id,) = first.add_group("", ["rl@3"], run="production", split="")
    verdicts = admit_trajectories(first.run, "rl", [first.store.get(id)])
    assert verdicts[0].decision == "refused" and 'baseline = "population"' in verdicts[0].reason
    alone = Mill(tmp_path, "alone", "stages.rl.baseline=population")
    alone.publish("midtrain", 0, -1.0)
    alone.publish("rl", 0, 0.0, Version("midtrain", 0))
    (id,) = alone.add_group("said-nothing", ["rl@0"], run="production", split="", consent="")
    (verdict,) = admit_trajectories(alone.run, "rl", [alone.store.get(id)])
    assert (verdict.decision, verdict.reason) == ("refused", "its user did not agree to training")
    (id,) = alone.add_group("", ["rl@0"], run="production", split="")
    (verdict,) = admit_trajectories(alone.run, "rl", [alone.store.get(id)])
    assert verdict.decision == "admitted" and verdict.group_id == id, "it becomes a group of one"
    assert alone.store.get(id).payload_key == f"trajectories/{id}.zst"


def test_a_conversation_of_a_user_is_not_copied_to_another_run(tmp_path: Path, first: Mill) -> None:
    """Forgetting the user in the run that recorded it would not reach the copy."""
    second = Mill(tmp_path, "second", "stages.rl.baseline=population")
    second.publish("midtrain", 0, -1.0)
    second.publish("rl", 0, 0.0, Version("midtrain", 0))  # the same bytes as those of `first`
    (id,) = first.add_group("", ["rl@0"], run="production", split="", user="u-1")
    (verdict,) = admit_trajectories(second.run, "rl", [first.store.get(id)], first.run)
    assert verdict.decision == "refused" and "admit it to a stage of the run that recorded it" in verdict.reason
    assert second.objects.head(f"trajectories/{id}.zst") is None
    (id,) = second.add_group("", ["rl@0"], run="production", split="", user="u-1")
    (verdict,) = admit_trajectories(second.run, "rl", [second.store.get(id)])
    assert verdict.decision == "admitted", "its own is no copy"


def test_evaluations_and_heldout_tasks_are_never_admitted(first: Mill) -> None:
    held = build_tasks(first.run.config).heldout("heldout", 1)[0].id
    first.add_group("e", ["rl@3"] * 2, run="eval-after")
    first.add_group("h", ["rl@3"] * 2, run="other", split="heldout")
    first.add_group("t", ["rl@3"] * 2, run="other", task=held)
    found = admitted(first)
    assert [found[name] for name in "eht"] == [
        ("refused", "of an evaluation: training on it would spoil the measurement"),
        ("refused", "of a held-out task"),
        ("refused", "of a held-out task"),
    ]


def test_one_broken_payload_stops_no_other_group(first: Mill) -> None:
    first.add_group("b", ["rl@3"] * 2, run="other")
    first.add_group("g", ["rl@3"] * 2, run="other")
    first.objects.put("trajectories/b-0.zst", b"damaged")
    found = admitted(first)
    assert found["b"][0] == "refused" and "damaged" in found["b"][1] and found["g"][0] == "admitted"


def test_the_group_is_admitted_whole_and_waits_for_its_members(first: Mill) -> None:
    first.add_group("g", ["rl@3", "rl@2"], run="other")
    (verdict,) = admit_trajectories(first.run, "rl", [first.store.get("g-0")])
    assert (verdict.decision, verdict.ids) == ("admitted", ["g-0", "g-1"])
    assert first.ledger.untaken_groups()[0].min_version == 2, "the oldest token decides"
    first.add_group("r", ["rl@3"] * 2, run="other")
    first.store.create(f"{first.run.id}/other", "r", "bug/7", ["r-9"], {})
    (verdict,) = admit_trajectories(first.run, "rl", [first.store.get("r-0")])
    assert (verdict.decision, verdict.reason) == ("refused", "running, not graded")


def test_the_command(tmp_path: Path, first: Mill) -> None:
    second = continued(tmp_path, first, 2)

    def call(*arguments: object) -> str:
        command = ["trajectories", "admit", str(second.run.path), *map(str, arguments)]
        result = CliRunner().invoke(app, command, catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result.output

    assert "2 of 4 groups would be admitted" in call("--from", first.run.path, "--dry-run")
    assert call("first-2-0", "--from", first.run.path).splitlines() == [
        "admitted: 1 groups, 2 trajectories: by step 2",
        "1 of 1 groups admitted",
    ]
    found = call("--from", first.run.path, "--version", "rl@..2")
    assert "stale: 1 groups, 2 trajectories: its oldest token is of version -2" in found
    assert "refused: 1 groups, 2 trajectories: in the ledger already: admitted" in found and "1 of 3 groups" in found
    shown = CliRunner().invoke(app, ["trajectories", "show", "first-1-0", str(second.run.path)], env={"COLUMNS": "300"})
    assert f"{second.run.id}/rl · admitted · admitted from {first.run.id}/rl" in shown.output
    listed = CliRunner().invoke(app, ["trajectories", "list", str(second.run.path)], env={"COLUMNS": "300"})
    assert all(f"first-{group}-{member}" in listed.output for group in range(3) for member in range(2))
    with pytest.raises(ConfigError, match="which trajectories"):
        call()


def test_it_waits_for_room(first: Mill) -> None:
    first.add_group("g", ["rl@3"] * 2, run="other")
    pace = first.run.config.stage("rl").pace(32)  # type: ignore[attr-defined]
    for name in "abcd":
        assert start_group(first.ledger, name, "task", 1, pace=pace, ids=[name]) is not None
    rows = [first.store.get("g-0")]
    assert admit_trajectories(first.run, "rl", rows)[0].decision == "no_room"
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(admit_trajectories, first.run, "rl", rows, wait_s=60.0)
        first.ledger.close_group("a", {"a": (LedgerState.dropped, "failed")}, 1)
        assert waiting.result()[0].decision == "admitted" and first.ledger.open_groups() == 4


def test_a_stage_that_cannot_admit(tmp_path: Path, first: Mill) -> None:
    with pytest.raises(ConfigError, match=r"no stage 'midtrain' that learns from rollouts[\s\S]*one of: rl"):
        admit_trajectories(first.run, "midtrain", [])
    with pytest.raises(ConfigError, match="has no version yet"):
        admit_trajectories(Mill(tmp_path, "empty").run, None, [])
    assert admit_trajectories(first.run, None, []) == []


def test_production_of_another_run_in_the_same_database_is_not_taken(first: Mill) -> None:
    """Both runs may call their versions the same."""
    for number, of in enumerate(("", "another-run", "")):
        first.add_group(f"live{number}", ["rl@3"] * 2, run="production", split="", of=of)
    rows = experience_of(first.store, TrajectoryQuery(state="graded", line="rl", limit=12), first.run.id)
    assert {row.group_id for row in rows if row.run == "production"} == {"live0", "live2"}
    assert len(experience_of(first.store, TrajectoryQuery(state="graded", limit=9), first.run.id)) == 9
