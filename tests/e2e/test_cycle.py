"""Real-time RL with every process real, the driver killed in every state; and the guide, word by word.

The users are simulated. Everything else is real: gateway, engines, machines, trainer, database.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import time
import tomllib
import urllib.request
from collections import Counter
from pathlib import Path

import pytest

from rollmill.config import load_config
from rollmill.demo import CONFIG as DEMO
from rollmill.demo.production import open_production
from rollmill.demo.simulated_users import load_population
from rollmill.gateway.routing.traffic_splits import SplitStore
from rollmill.launch.extend import change_cycle
from rollmill.launch.launchers.local import COMMAND
from rollmill.runs.cycle_journal import Journal
from rollmill.runs.prepare import restore_tokenizer
from rollmill.runs.run import RunConfig, RunDirectory
from rollmill.storage.database import open_database
from rollmill.storage.objects import Objects
from rollmill.trajectories.ledger import Ledger
from rollmill.trajectories.query import TrajectoryQuery
from rollmill.types import LedgerState, Version
from rollmill.weights.reading.channels import Channels
from tests.cli.test_service import served
from tests.e2e.small_run import ONE_REGION, copy_store, small_run
from tests.e2e.test_kill import stores
from tests.test_repo import ROOT

GUIDE = (ROOT / "docs" / "guides" / "learn-from-your-users.md").read_text()
LAST = f"rl@{load_config(RunConfig, DEMO).stage('rl').steps}"  # what a newcomer who ran the demo has
SETTINGS = (
    *ONE_REGION,
    "gateway.seal_idle_s=1.0",
    "gateway.consent=train",
    "cycle.settle_s=1.0",
    "cycle.enough=12",
    "cycle.steps=2",
    "cycle.share=0.5",
    "cycle.canary_sessions=4",
    "cycle.max_loss=1.0",
    "evals.tasks=8",
    "evals.attempts=1",
    "evals.fresh_tasks=3",
    "evals.family_tasks=0",
    *(f"gate.max_more_{name}=1.0" for name in ("malformed", "questions")),
    *(f"gate.max_more_{name}=1000.0" for name in ("tokens", "engine_seconds", "seconds")),
    "gate.max_quality_loss=1.0",
    "gate.alpha=0.5",
    "gate.least_tasks=1",
)
# a process that kills itself in a state, after some ticks of it
DRIVER = """
import os, signal, sys
from pathlib import Path
from rollmill.realtime.cycle import CycleDriver
from rollmill.runs.run import RunConfig, RunDirectory
from rollmill.config import load_config
from rollmill.demo import CONFIG as DEMO
seen = 0
def tick(cycle):
    global seen
    seen += cycle.state == sys.argv[2]
    if seen > int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)
CycleDriver(RunDirectory.open(Path(sys.argv[1])), tick).run_cycle()
"""
KILLS = [
    ("collecting", 0),
    ("distilling", 0),
    ("training", 0),
    ("training", 5),
    ("gating", 0),
    ("gating", 5),
    ("canary", 0),
    ("canary", 1),
    ("promoting", 0),
]


def guide_commands(number: int) -> list[str]:
    """The commands of a console block of the guide."""
    block = re.findall(r"```console\n(.*?)```", GUIDE, re.S)[number]
    return [line.removeprefix("$ ") for line in block.splitlines()]


def guide_words(command: str, run: RunDirectory) -> list[str]:
    """What follows `rollmill` in a command of the guide, for this run and its live version."""
    return shlex.split(command.replace("runs/demo", str(run.path)).replace(LAST, f"midtrain@{_head(run)}"))[1:]


def guide_run(command: str, run: RunDirectory) -> str:
    """Execute a command of the guide to its end."""
    words = [sys.executable, "-c", COMMAND, *guide_words(command, run)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _head(run: RunDirectory) -> int:
    head = stores(run)[0].head("midtrain")
    assert head is not None
    return head


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_cycle_goes_on_after_a_kill_in_every_state(tmp_path: Path, midtrained: RunDirectory) -> None:
    run = small_run(tmp_path, "live", *SETTINGS)
    copy_store(midtrained, run)
    restore_tokenizer(run)
    gate, set_live, serve = guide_commands(0)
    assert "promote: all 1 measured metrics" in guide_run(gate, run)
    _check_that_the_gate_has_both_suites(run)
    guide_run(set_live, run)
    with served(tmp_path / "served", *guide_words(serve, run)[1:]) as serving:
        assert serving.ask()["role"] == "assistant"
    _begin_with_other_settings(run)
    live, channels = Version("midtrain", _head(run)), Channels(Objects.open(run.home_store))
    steady = load_population("steady")
    with open_production(run, batch=12) as production:
        _follow_the_python_block(production.service)
        for seed, (state, ticks) in enumerate(KILLS):
            child = subprocess.Popen([sys.executable, "-c", DRIVER, str(run.path), state, str(ticks)])
            visits = 0
            while child.poll() is None:
                visits += 1
                production.receive(steady, 12, 100 * seed + visits)
            cycle = production.journal.current()
            assert child.returncode == -9 and cycle is not None and cycle.state == state, f"{state}: {cycle}"
        assert "cycle 1: promoted" in guide_run(guide_commands(3)[0], run)
    states = [move.state for move in production.journal.history(1)]
    assert states == [*dict.fromkeys(state for state, _ in KILLS), "promoted"], "every state once, whatever was killed"
    candidate = Version("cycle-1", 2)
    assert [entry.version for entry in channels.history("live")] == [live, candidate]
    assert SplitStore(open_database(run.database_url), run.id).get() == {"rollmill": {"live": 1.0}}
    _check_what_was_trained_on(run)
    status, explain = guide_commands(3)[1:]
    assert "cycle 1: promoted" in guide_run(status, run)
    told = guide_run(explain, run)
    assert "\nmalformed " in told and "FAILS" not in told


def _check_that_the_gate_has_both_suites(run: RunDirectory) -> None:
    """Also the suite `fresh` was played by real attempts."""
    objects = Objects.open(run.home_store)
    (key,) = objects.list("gates/measured")
    attempts = json.loads(objects.get(key))["attempts"]
    assert Counter(name.split()[0] for name in attempts) == {"heldout": 8, "fresh": 3}
    assert all(len(made) == 1 and made[0]["tokens"] > 0 for made in attempts.values())


def _begin_with_other_settings(run: RunDirectory) -> None:
    """The guide's `cycle run` with settings: they are kept. It goes on for ever, so it is killed while it collects."""
    (change,) = guide_commands(2)
    child = subprocess.Popen([sys.executable, "-c", COMMAND, *guide_words(change, run)])
    journal = Journal(open_database(run.database_url), run.id)
    while journal.current() is None:
        assert child.poll() is None
        time.sleep(0.05)
    child.kill()
    child.wait()
    cycle, changed = journal.current(), RunDirectory.open(run.path).config.cycle
    assert cycle is not None and cycle.state == "collecting" and (changed.enough, changed.share) == (64, 0.1)
    change_cycle(RunDirectory.open(run.path), [setting for setting in SETTINGS if setting.startswith("cycle.")])


def _follow_the_python_block(service: RunDirectory) -> None:
    key, url = service.secrets["production_key"], service.url("gateway")
    body = json.dumps({"messages": [{"role": "user", "content": "fix it"}], "max_tokens": 4}).encode()
    request = urllib.request.Request(f"{url}/v1/chat/completions", body, {"Authorization": f"Bearer {key}"})
    with urllib.request.urlopen(request, timeout=60) as response:
        answer = json.loads(response.read())
    (block,) = re.findall(r"```python\n(.*?)```", GUIDE, re.S)
    exec(block.replace("http://127.0.0.1:8000", url), {"key": key, "answer": answer})
    said = stores(service)[2].feedback(answer["rollmill"]["trajectory"])
    assert [row.kind for row in said] == ["task", "accepted", "edited", "reverted"]


def _check_what_was_trained_on(run: RunDirectory) -> None:
    """Every distilled conversation is trained on exactly once, under the live version, with a reward of the rule."""
    ledger = Ledger(open_database(run.database_url), f"{run.id}/cycle-1")
    store = stores(run)[2]
    ids = json.loads(Objects.open(run.home_store).get(f"cycles/{run.id}/1/distilled.json"))["ids"]
    steps = [ledger.step(number) for number in (1, 2)]
    trained = [id for step in steps if step is not None for id in step.trajectories]
    assert sorted(trained) == sorted(ids) and len(ids) >= 12 and ledger.counts()[LedgerState.trained] == len(ids)
    for step in steps:
        assert step is not None
        assert all(reward == advantage for _, reward, advantage in step.trajectories.values())
    rows = [row for row in store.find(TrajectoryQuery(run="production")) if row.id in ids]
    assert {row.line for row in rows} == {"midtrain"}
    cycle = Journal(open_database(run.database_url), run.id).get(1)
    assert cycle is not None and cycle.facts["tokens"]["trained on"] > len(ids)
    rewards = store.rewards(ids)
    assert all(given[-1][1].evidence["rule"] == "1" for given in rewards.values())


def test_the_settings_of_the_guide_load(tmp_path: Path) -> None:
    assert GUIDE.count("```") == 2 * 6, "a new block must be executed or loaded too"
    assert GUIDE.count(LAST) == GUIDE.count("rl@") == 3, "the guide names the last version of the demo"
    (block,) = re.findall(r"```toml\n(.*?)```", GUIDE, re.S)
    tree = tomllib.loads(block)
    settings = [f"cycle.{name}={tree['cycle'][name]}" for name in ("enough", "share")]
    rule = tree["cycle"]["rule"]
    settings += [f'cycle.rule.version="{rule["version"]}"', f"gate.offline_bar={tree['gate']['offline_bar']}"]
    settings += [f"cycle.rule.weights.{kind}={weight}" for kind, weight in rule["weights"].items()]
    run = small_run(tmp_path, "guide", *settings)
    (change,) = guide_commands(2)
    changed = change_cycle(run, [word for word in change.split() if "=" in word]).config
    assert (changed.cycle.enough, changed.cycle.share) == (64, 0.1) and RunDirectory.open(run.path).config == changed
    config = run.config
    assert config.cycle.enough == 256 and config.gate is not None and config.cycle.rule.weights["reverted"] == -1.0
