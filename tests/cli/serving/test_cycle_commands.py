"""`rollmill cycle history | explain` tell what the journal has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from rollmill.cli.serving.gate_command import metrics_table
from rollmill.evals.gate import GateVerdict, Metric
from rollmill.evals.statistics import Interval
from rollmill.feedback.distil import Population
from rollmill.runs.cycle_journal import Journal
from rollmill.runs.run import RunDirectory
from rollmill.storage.database import open_database
from tests.cli.conftest import Told
from tests.runs.conftest import make_config

LONG = "8 conversations have a reward: 8 trainable, 2 without consent [of 10], and this reason is longer than a line"
VERDICT = GateVerdict(
    "hold",
    "cycle-12@4",
    "midtrain@300",
    32,
    64,
    (
        Metric("tokens_per_solved", 141234.5, float("inf"), Interval(1.5, 0.61, 12.2), "ratio", 2.0, False, True),
        Metric("malformed", 0.012, 0.104, Interval(-0.092, -0.145, -0.044), "difference", -0.125, True, False),
    ),
    ("malformed: too many",),
)


def test_the_gates_table_fits_a_terminal_and_a_log_of_80_columns() -> None:
    console = Console(width=80, highlight=False)
    with console.capture() as caught:
        console.print(metrics_table(VERDICT.describe()))
    lines = [line.split() for line in caught.get().splitlines()]
    assert lines[2:] == [
        ["tokens_per_solved", "141234", "–", "×", "1.500", "0.610", "to", "12.2", "≤", "2.000", "ok"],
        ["malformed", "0.012", "0.104", "-0.092", "-0.145", "to", "-0.044", "≥", "-0.125", "FAILS"],
    ]


def test_history_and_explain(tmp_path: Path, rollmill: Callable[..., Told]) -> None:
    run = RunDirectory.create(tmp_path, make_config())
    assert "no cycle yet" in rollmill("cycle", "history", run.path).out
    for number in ((), (9,)):
        told = rollmill("cycle", "explain", run.path, *number)
        assert told.code == 1 and " ".join([f"{run.path} has no cycle", *map(str, number)]) in told.err
    journal = Journal(open_database(run.database_url), run.id)
    cycle = journal.move(journal.begin({"since": 0.0}, "waiting for 8 conversations"), "distilling", "8 came")
    populations = [Population("fix", "rl@4", 3, 0.5, 0.25), Population("", "rl@4", 5, 1.0, 0.0)]
    facts = {"counts": {"trainable": 8, "no consent": 2}, "populations": [asdict(each) for each in populations]}
    cycle = journal.move(cycle, "training", LONG, **facts, rule={"version": "2", "digest": "abc"})
    cycle = journal.move(cycle, "gating", "rl@5 is the candidate", gate=VERDICT.describe())
    journal.move(cycle, "held", "no conversation was admitted")
    journal.begin({"since": 1.0}, "waiting again")
    told = rollmill("cycle", "history", run.path)
    assert told.code == 0
    assert told.out.splitlines() == [
        "cycle 1: held: no conversation was admitted",
        "cycle 2: collecting: waiting again",
    ]
    lines = rollmill("cycle", "explain", run.path, 1).out.splitlines()
    reasons = ["waiting for 8 conversations", "8 came", LONG, "rl@5 is the candidate", "no conversation was admitted"]
    states = ["collecting", "distilling", "training", "gating", "held"]
    assert [line.rstrip().split("  ", 1)[1].split(maxsplit=1) for line in lines[:5]] == [
        [state, reason] for state, reason in zip(states, reasons, strict=True)
    ]
    assert lines[5:10] == [
        "rule: version 2, digest abc",
        "conversations: 8 trainable",
        "conversations: 2 no consent",
        "population fix under rl@4: 3 conversations, mean reward 0.500, variance 0.250",
        "population of all kinds under rl@4: 5 conversations, mean reward 1.000, variance 0.000",
    ]
    assert [line.split()[0] for line in lines[12:]] == ["tokens_per_solved", "malformed"]
    assert "waiting again" in rollmill("cycle", "explain", run.path).out, "the newest, if none is named"
