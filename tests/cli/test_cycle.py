"""`rollmill cycle history | explain` tell what the journal has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from rollmill.cluster.run import RunDirectory
from rollmill.realtime.distil import Population
from rollmill.realtime.journal import Journal
from rollmill.storage.database import open_database
from tests.cli.conftest import Told
from tests.cluster.conftest import make_config


def test_history_and_explain(tmp_path: Path, rollmill: Callable[..., Told]) -> None:
    run = RunDirectory.create(tmp_path, make_config())
    assert "no cycle yet" in rollmill("cycle", "history", run.path).out
    told = rollmill("cycle", "explain", run.path)
    assert told.code == 1 and "there is no such cycle" in told.err
    journal = Journal(open_database(run.database_url), run.id)
    cycle = journal.move(journal.begin({"since": 0.0}, "waiting for 8 conversations"), "distilling", "8 came")
    populations = [Population("fix", "rl@4", 3, 0.5, 0.25), Population("", "rl@4", 5, 1.0, 0.0)]
    facts = {"counts": {"trainable": 8, "no consent": 2}, "populations": [asdict(each) for each in populations]}
    cycle = journal.move(cycle, "training", "8 have a reward", **facts, rule={"version": "2", "digest": "abc"})
    journal.move(cycle, "held", "no conversation was admitted")
    journal.begin({"since": 1.0}, "waiting again")
    told = rollmill("cycle", "history", run.path)
    assert told.code == 0
    assert told.out.splitlines() == [
        "cycle 1: held: no conversation was admitted",
        "cycle 2: collecting: waiting again",
    ]
    lines = rollmill("cycle", "explain", run.path, 1).out.splitlines()
    reasons = ["waiting for 8 conversations", "8 came", "8 have a reward", "no conversation was admitted"]
    states = ["collecting", "distilling", "training", "held"]
    assert [line.split("  ", 1)[1].split(maxsplit=1) for line in lines[:4]] == [
        [state, reason] for state, reason in zip(states, reasons, strict=True)
    ]
    assert lines[4:] == [
        "rule: version 2, digest abc",
        "conversations: 8 trainable",
        "conversations: 2 no consent",
        "population fix under rl@4: 3 conversations, mean reward 0.500, variance 0.250",
        "population of all kinds under rl@4: 5 conversations, mean reward 1.000, variance 0.000",
    ]
    assert "waiting again" in rollmill("cycle", "explain", run.path).out, "the newest, if none is named"
