"""The report of a run, from its stores and events."""

from __future__ import annotations

from pathlib import Path

from rollmill.chat.tokenizer import Tokenizer
from rollmill.cluster.run import RunDirectory
from rollmill.evals.report import example_trajectories, write_report
from rollmill.storage.database import open_database
from rollmill.storage.objects import Objects
from rollmill.trajectories.store import TrajectoryStore


def report_run(run: RunDirectory) -> Path:
    """Write `report.html` and `report.json` into the run's directory."""
    store = TrajectoryStore(open_database(run.database_url), Objects.open(run.home_store))
    return write_report(
        run.path,
        seed=run.config.seed,
        trajectories={title: store.load(id) for title, id in example_trajectories(run.path).items()},
        decode=Tokenizer.load(run.tokenizer).decode,
    )
