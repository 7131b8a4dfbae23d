"""`rollmill rewards replay`: stored trajectories are graded again on real machines."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from rollmill.config import load_config
from rollmill.demo import CONFIG as DEMO
from rollmill.environments.harness import HarnessResult
from rollmill.environments.task import Task
from rollmill.rollouts.hand_in import HandIn, store_hand_in
from rollmill.runs.run import RunConfig, RunDirectory
from rollmill.storage.database import open_database, writing
from rollmill.storage.objects import Objects
from rollmill.storage.tables import trajectories
from rollmill.trajectories.ledger import Ledger
from rollmill.trajectories.payload import encode_trajectory, seal_facts
from rollmill.trajectories.staleness import Pace
from rollmill.trajectories.trajectory_store import TrajectoryStore
from rollmill.types import Grade
from tests.cli.conftest import Told
from tests.cli.test_own_agent import Endpoint, endpoint  # noqa: F401
from tests.trajectories import build
from tests.trajectories.build import start_group

TASK = {
    "id": "add",
    "instruction": "add",
    "submission": ["main.py"],
    "grading": {"kind": "calls", "module": "main.py", "function": "f", "cases": [[[1], 2], [[5], 6]]},
}
ANSWERS = {"right": "def f(x):\n    return x + 1\n", "half": "def f(x):\n    return 2\n"}
MESSAGES = [{"role": "user", "content": "add"}, {"role": "assistant", "content": "Is that right?"}]
OWN = """
from rollmill import Grade, Reward
class Seen(Reward):
    name = "seen"
    async def grade(self, episode):
        result = episode.result
        assert (result.stop, result.turns, episode.seconds, episode.tokens) == ("answer", 3, 4.5, 6), episode
        assert episode.messages[-1]["content"] == "Is that right?"
        if b"return 2" in episode.submission["main.py"] and episode.task.id == FAILING:
            raise ValueError("no verdict")
        return Grade(0.25)
FAILING = "none"
"""


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """Two groups of the task `add`, graded; and one that still runs."""
    (tmp_path / "t.jsonl").write_text(json.dumps(TASK))
    text = DEMO.read_text().replace('kind = "rollmill.demo.micro_repos:MicroRepos"', 'kind = "jsonl"\npath = "t.jsonl"')
    (tmp_path / "run.toml").write_text(text)
    run = RunDirectory.create(tmp_path / "runs", load_config(RunConfig, tmp_path / "run.toml", ['name="r"']))
    engine, objects = open_database(run.database_url), Objects.open(run.home_store)
    store, ledger = TrajectoryStore(engine, objects), Ledger(engine, run.id)
    for group in ("g0", "g1", "g2"):
        ids = [f"{group}-{name}" for name in ANSWERS]
        start_group(ledger, group, "add", 2, pace=Pace(9, 2, 0), ids=ids, provenance={"split": "train"})
        for id, answer in zip(ids, ANSWERS.values(), strict=True) if group != "g2" else ():
            trajectory = build.trajectory(id, segments=[build.segment()], messages=MESSAGES)
            objects.create(f"trajectories/{id}", encode_trajectory(trajectory))
            result = HarnessResult("answer", turns=3, tool_calls=0)
            key = store_hand_in(objects, id, HandIn(files={"main.py": answer.encode()}, result=result, seconds=4.5))
            store.finish(id, f"trajectories/{id}", key, **seal_facts(trajectory))
            store.grade(id, Grade(0.0, grader="broken"))
    return run


def rewards_of(run: RunDirectory) -> dict[str, list[float]]:
    store = TrajectoryStore(open_database(run.database_url), Objects.open(run.home_store))
    ids = [row.id for row in store.list(state="graded")]
    return {id: [reward.value for _, reward in graded] for id, graded in sorted(store.rewards(ids).items())}


def test_replay_records_a_grading_beside_the_old_one(rollmill: Callable[..., Told], run: RunDirectory) -> None:
    told = rollmill("rewards", "replay", run.path, "--dry-run")
    assert told.code == 0 and "4 trajectories in 2 of 2 groups, 2 with another reward; nothing is rec" in told.out, told
    assert "g0-right  0 → 1" in told.out and rewards_of(run)["g0-right"] == [0.0]
    mean = next(line for line in told.out.splitlines() if "mean reward" in line)
    assert "0.000" in mean and "0.500" in mean
    told = rollmill("rewards", "replay", run.path, "--group", "g0")
    assert told.code == 0 and "2 trajectories in 1 of 1 groups" in told.out and "recorded as grading 1" in told.out
    assert rewards_of(run) == {"g0-half": [0, 0], "g0-right": [0, 1], "g1-half": [0], "g1-right": [0]}
    assert "no graded trajectory matches" in rollmill("rewards", "replay", run.path, "--task", "other").out


def test_a_look_into_a_finished_episode(rollmill: Callable[..., Told], run: RunDirectory) -> None:
    told = rollmill("machines", "shell", "--run", run.path, "--episode", "g0-right", "-c", "cat main.py")
    assert (told.code, told.out) == (0, ANSWERS["right"])
    assert "absent" in rollmill("machines", "shell", "--run", run.path, "--episode", "absent", "-c", "pwd").err


def test_a_task_that_has_changed_since_it_was_played(
    rollmill: Callable[..., Told], run: RunDirectory, tmp_path: Path
) -> None:
    """The hidden cases are others today. A new tag makes no other task."""
    played = Task("", "add", submission=("main.py",), grading=TASK["grading"]).digest  # type: ignore[arg-type]
    engine = open_database(run.database_url)
    stored = trajectories.update().where(trajectories.c.group_id == "g0")
    values = {"provenance": json.dumps({"split": "train", "task_digest": played})}
    writing(engine, lambda connection: connection.execute(stored, values))
    (tmp_path / "t.jsonl").write_text(json.dumps({**TASK, "tags": {"level": "easy"}}))
    assert "4 trajectories in 2 of 2 groups" in rollmill("rewards", "replay", run.path, "--dry-run").out

    (tmp_path / "t.jsonl").write_text(json.dumps({**TASK, "grading": {**TASK["grading"], "cases": [[[1], 3]]}}))  # type: ignore[dict-item]
    told = rollmill("rewards", "replay", run.path)
    assert told.code == 1 and "task add has changed since it was played" in told.out, told
    assert "--changed-tasks" in told.out and rewards_of(run)["g0-right"] == [0.0]
    assert rewards_of(run)["g1-right"] == [0.0, 0.0], "nobody knows which task g1 was played with"
    told = rollmill("rewards", "replay", run.path, "--group", "g0", "--changed-tasks")
    assert told.code == 0 and rewards_of(run)["g0-right"] == [0.0, 0.0]
    store = TrajectoryStore(engine, Objects.open(run.home_store))
    evidence = store.rewards(["g0-right"])["g0-right"][-1][1].evidence
    assert evidence["task_changed"]["played"] == played != evidence["task_changed"]["graded"]


def test_replay_with_other_rewards_gives_them_the_whole_episode(
    rollmill: Callable[..., Told], run: RunDirectory, tmp_path: Path
) -> None:
    (tmp_path / "seen_again.py").write_text(OWN)
    (tmp_path / "other.toml").write_text(
        '[[rewards]]\nkind = "calls"\n[[rewards]]\nkind = "seen_again:Seen"\n[[rewards]]\nkind = "behaviour"\n'
    )
    told = rollmill("rewards", "replay", run.path, "--rewards", tmp_path / "other.toml")
    assert told.code == 0 and "recorded as grading 1" in told.out, told
    assert rewards_of(run)["g0-right"] == [0.0, 1.0 + 0.25 - 0.5] and rewards_of(run)["g0-half"] == [0.0, 0.25 - 0.5]
    store = TrajectoryStore(open_database(run.database_url), Objects.open(run.home_store))
    assert store.get("g0-right").solved and not store.get("g0-half").solved


def test_a_group_that_cannot_be_graded_stays_as_it_was(
    rollmill: Callable[..., Told], run: RunDirectory, tmp_path: Path
) -> None:
    (tmp_path / "seen_fails.py").write_text(OWN.replace('"none"', '"add"'))
    (tmp_path / "other.toml").write_text('[[rewards]]\nkind = "seen_fails:Seen"\n')
    Objects.open(run.home_store).delete("submissions/g1-right")
    told = rollmill("rewards", "replay", run.path, "--rewards", tmp_path / "other.toml")
    assert told.code == 1 and "left as it was: g0: ValueError: no verdict" in told.out, told
    assert "left as it was: g1:" in told.out and "0 trajectories in 0 of 2 groups" in told.out
    assert all(values == [0.0] for values in rewards_of(run).values())


def test_stages_and_evaluations_of_the_run_are_graded_too_but_no_other_run(
    rollmill: Callable[..., Told], run: RunDirectory
) -> None:
    engine, objects = open_database(run.database_url), Objects.open(run.home_store)
    store = TrajectoryStore(engine, objects)
    for key in (f"{run.id}/eval-before", f"{run.id}/rl", f"{run.id}-2", "other"):
        id = f"in-{key}"
        store.create(key, "g9", "add", [id], {"split": "heldout"})
        trajectory = build.trajectory(id, segments=[build.segment()], messages=MESSAGES)
        objects.create(f"trajectories/{id}", encode_trajectory(trajectory))
        given = store_hand_in(objects, id, HandIn(files={"main.py": ANSWERS["right"].encode()}))
        store.finish(id, f"trajectories/{id}", given, **seal_facts(trajectory))
        store.grade(id, Grade(0.0))
    told = rollmill("rewards", "replay", run.path, "--split", "heldout")
    assert told.code == 0 and "2 trajectories in 2 of 2 groups, 2 with another reward" in told.out, told
    graded = {id for id, values in rewards_of(run).items() if values == [0.0, 1.0]}
    assert graded == {f"in-{run.id}/eval-before", f"in-{run.id}/rl"}


def test_bias_asks_a_judge_about_stored_trajectories(
    rollmill: Callable[..., Told],
    run: RunDirectory,
    tmp_path: Path,
    endpoint: str,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Endpoint, "answer", '{"reason": "fine", "score": 5}')
    judge = (
        f'[[rewards]]\nkind = "judge"\nbase_url = "{endpoint}"\nmodel = "m"\ndimension = "style"\nrubric = "10: good"\n'
    )
    (tmp_path / "judge.toml").write_text(judge)
    told = rollmill("rewards", "bias", run.path, "--rewards", tmp_path / "judge.toml")
    assert told.code == 0 and "position" in told.out and "+0.000" in told.out, told
    assert "no reward of the kind" in rollmill("rewards", "bias", run.path).err
    assert all(values == [0.0] for values in rewards_of(run).values())
