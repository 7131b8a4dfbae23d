"""`rollmill eval`: measure a version of a run on held-out tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def evaluate(
    directory: Annotated[Path, typer.Argument(help="a run directory")],
    version: Annotated[
        int | None, typer.Option(min=0, help="which version of the run's line; default: the newest")
    ] = None,
    tasks: Annotated[
        int | None, typer.Option(min=1, help="held-out tasks; default: as the run's configuration says")
    ] = None,
    attempts: Annotated[int | None, typer.Option(min=1, help="sampled attempts a task")] = None,
) -> None:
    """Evaluate a version on held-out tasks and print solve rates with 95 % intervals.

    The attempts are recorded like any rollout: `rollmill trajectories list` shows them.
    """
    from rich.console import Console
    from rich.table import Table

    from rollmill.cluster.drive import evaluate_version
    from rollmill.cluster.run import RunDirectory

    run = RunDirectory.open(directory)
    chosen = {key: value for key, value in (("tasks", tasks), ("attempts", attempts)) if value is not None}
    suite = run.config.evals.model_copy(update=chosen)
    console = Console()
    with console.status("evaluating"):
        results = evaluate_version(run, suite, version)
    table = Table(title=f"{run.config.line}@{results[0].version}")
    for column in ("split", "mode", "solved", "rate", "95 % interval"):
        table.add_column(column)
    for result in results:
        interval = f"{result.low:.3f} – {result.high:.3f}"
        table.add_row(result.split, result.mode, f"{result.solved}/{result.attempts}", f"{result.rate:.3f}", interval)
    console.print(table)
