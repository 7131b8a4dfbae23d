"""The report of a run with a cycle of real-time RL, its own or that of the run of the demo's second act."""

from __future__ import annotations

import json
import time
from pathlib import Path

from rollmill import telemetry
from rollmill.dashboard.report_run import ACCEPTANCE, SECOND_ACT, read_living, report_run
from rollmill.evals.evaluation import Conduct
from rollmill.evals.gate import judge
from rollmill.evals.gate_config import GateConfig
from rollmill.events import EVENTS
from rollmill.feedback.collect import PRODUCTION
from rollmill.runs.cycle_journal import Journal
from rollmill.runs.run import RunDirectory
from rollmill.storage.database import open_database
from rollmill.storage.objects import Objects
from rollmill.trajectories.payload import encode_trajectory, seal_facts
from rollmill.trajectories.staleness import Pace
from rollmill.trajectories.trajectory_store import TrajectoryStore
from rollmill.types import Version
from tests.e2e.test_kill import stores
from tests.launch.served import published_run
from tests.trajectories import build
from tests.trajectories.build import start_group
from tests.trajectories.test_ledger import record, settle

STATES = ("distilling", "training", "gating", "canary", "promoting", "promoted")


def play_cycle(run: RunDirectory) -> None:
    journal = Journal(open_database(run.database_url), run.id)
    attempts = {"heldout a": [Conduct(True, 10, 1.0, 1, 0, False, engine_seconds=0.5)]}
    verdict = judge(attempts, attempts, GateConfig(), ("rl@0", "cycle-1@4"))
    cycle = journal.begin({"since": 0.0}, "waiting for 96 conversations")
    for state in STATES:
        cycle = journal.move(cycle, state, f"why <{state}>", counts={"trainable": 3}, gate=verdict.describe())


def add_conversation(run: RunDirectory, id: str = "talk", said: str = "my secret") -> None:
    objects = Objects.open(run.home_store)
    store = TrajectoryStore(open_database(run.database_url), objects)
    store.create(PRODUCTION, "", "", [id], {"run": run.id}, "production")
    talk = build.trajectory(id, segments=[build.segment()], messages=[{"role": "user", "content": said}])
    objects.create(f"trajectories/{id}", encode_trajectory(talk))
    store.finish(id, f"trajectories/{id}", None, **seal_facts(talk))


def test_the_cycle_of_the_second_act_is_in_the_report(tmp_path: Path) -> None:
    run = published_run(tmp_path, 1)
    assert json.loads(report_run(run).with_suffix(".json").read_text())["living"] is None
    second = published_run(run.path, 1, f'name="{SECOND_ACT}"')
    play_cycle(second)
    sure = {f"t{number}": [number < 4] for number in range(16)}, {f"t{number}": [number < 8] for number in range(16)}
    kept = {"users": "simulated", "population": "steady", "before": sure[0], "after": sure[1]}
    add_conversation(second)
    time.sleep(0.05)  # the clock of files is some milliseconds late
    (second.path / ACCEPTANCE).write_text(json.dumps(kept))
    add_conversation(second, "later", "said by somebody real")
    page = report_run(run)
    assert "said by somebody real" not in page.read_text()
    living = json.loads(page.with_suffix(".json").read_text())["living"]
    (cycle,) = living["cycles"]
    assert [move["state"] for move in cycle["moves"]] == ["collecting", *STATES] and cycle["ended"] == "promoted"
    assert (living["before"]["value"], living["after"]["value"], living["gain"]["value"]) == (0.25, 0.5, 0.25)
    assert living["gain"]["low"] > 0 and living["users"] == "simulated"
    text = page.read_text()
    for words in (
        "What users taught it",
        "This second act has a model of its own",
        "These users are simulated",
        "Read one of the conversations",
        "my secret",
        "why &lt;canary&gt;",
        "+25.0 points",
        "Malformed tool calls",
        "Engine seconds",
    ):
        assert words in text


def test_of_a_run_and_its_second_act_the_report_has_the_latest_cycle(tmp_path: Path) -> None:
    run = published_run(tmp_path, 1)
    second = published_run(run.path, 1, f'name="{SECOND_ACT}"')
    for each in (run, second, run):
        play_cycle(each)
        living, _ = read_living(run)
        assert living is not None and living["second_act"] == (each is second)
        assert [cycle["number"] for cycle in living["cycles"]] in ([1], [1, 2])
    living, _ = read_living(second)
    assert living is not None and len(living["cycles"]) == 1, "what the demo tells is of the second act"


def test_a_run_of_its_own_users_has_no_measured_acceptance(tmp_path: Path) -> None:
    run = published_run(tmp_path, 1)
    play_cycle(run)
    add_conversation(run)
    page = report_run(run)
    assert "my secret" not in page.read_text(), "what real users said is no part of a report"
    living = json.loads(page.with_suffix(".json").read_text())["living"]
    assert living["gain"] is None and living["cycles"][0]["counts"] == {"trainable": 3}
    assert "simulated" not in page.read_text() and "second act" not in page.read_text()


def test_a_step_whose_trainer_was_killed_before_it_told_is_in_the_report(tmp_path: Path) -> None:
    run = published_run(tmp_path, 3)
    _, ledger, trajectories = stores(run)
    for number in (1, 2):
        group = f"group-{number}"
        start_group(ledger, group, "task", 2, pace=Pace(2, 2, 1, 20), ids=[f"{group}-0", f"{group}-1"])
        settle(trajectories, ledger, group)
        ledger.write_step(record(ledger, number, group))
        ledger.commit_step(number, Version("rl", number), f"digest {number}")
    telemetry.append_events(run.events, "trainer", [{"at": 1.0, "kind": "step", "stage": "rl", "step": 1, "groups": 1}])
    for _ in range(2):  # the second time there is nothing left to tell
        figures = json.loads(report_run(run).with_suffix(".json").read_text())["training"]
        assert figures["steps"] == 2 and figures["groups"] == 2 and figures["reward_last"] == 0.5
    [written] = (run.events / "ledger.jsonl").read_text().splitlines()
    event = json.loads(written)
    assert event["from_ledger"] and event["step"] == 2 and event["version"] == 2 and event["stage"] == "rl"
    assert set(event) - {"at", "process", "kind", "stage"} <= set(EVENTS["step"].fields)
