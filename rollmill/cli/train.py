"""`rollmill train`: run a configuration from its checkpoint or mid-training through RL to the report."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rollmill.cluster.run import RunDirectory


def train(
    source: Annotated[Path, typer.Argument(help="a RUN.toml, or with --resume a run directory", show_default=False)],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="settings laid over the file: `key.path=value`, values as in TOML")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="go on with the run in that directory")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="print the whole configuration as commented TOML and stop")
    ] = False,
    root: Annotated[Path, typer.Option(help="where run directories lie")] = Path("runs"),
) -> None:
    """Train a model: mid-training, then asynchronous RL, then a report.

    Every process may be killed at any moment; `--resume` goes on with what the stores hold. For example:

        rollmill train examples/micro.toml steps=20 max_staleness=0
        rollmill train --resume runs/micro
    """
    from rollmill.cli.config import print_config
    from rollmill.cluster.checkpoint import check_checkpoint
    from rollmill.cluster.ranks import begin_run
    from rollmill.cluster.run import RunConfig, RunDirectory
    from rollmill.config import load_config
    from rollmill.errors import ConfigError

    if resume:
        if overrides or dry_run:
            raise ConfigError(
                "--resume goes on with the run's own configuration: it takes no overrides and no --dry-run",
                hint="start a new run to change settings",
            )
        run = RunDirectory.open(source)
    else:
        if source.is_dir():
            hint = f"`rollmill train --resume {source}` goes on with a run"
            raise ConfigError(f"{source} is a directory, not a RUN.toml", hint=hint)
        config = load_config(RunConfig, source, overrides or ())
        if dry_run:
            print_config(config)
            return
        if config.checkpoint is not None:
            check_checkpoint(config)
        run = begin_run(root, config)
    run_to_report(run)


def run_to_report(run: RunDirectory) -> None:
    """Drive the run with a live display, write its report, and say where it lies."""
    from rich.console import Console

    from rollmill.cli.progress import Progress
    from rollmill.cluster.drive import drive, follow
    from rollmill.cluster.ranks import outside_rank
    from rollmill.cluster.report import report_run
    from rollmill.cluster.run import PHASES

    if outside_rank() > 0:
        follow(run)
        return
    with Progress(run.events, list(PHASES), title=f"rollmill · {run.config.name}") as progress:
        try:
            drive(run, on_tick=progress.update)
        except KeyboardInterrupt:
            typer.echo(f"stopped; `rollmill train --resume {run.path}` goes on", err=True)
            raise typer.Exit(130) from None
    report = report_run(run)
    console = Console(soft_wrap=True)
    console.print(f"\n{_verdict(report.with_suffix('.json'))}", highlight=False)
    console.print(f"report: [link=file://{report.resolve()}]{report}[/link]", highlight=False)


def _verdict(figures: Path) -> str:
    """The run in one line; a run without RL steps has nothing to compare."""
    import json

    report = json.loads(figures.read_text())
    before, after = report["solve_rate_before"], report["solve_rate_after"]
    if before is None or after is None:
        return f"finished in {report['seconds']:.0f} s"
    low, high = report["gain_interval"]
    gain = f"{100 * (after - before):+.1f} points, 95 % interval {100 * low:+.1f} to {100 * high:+.1f}"
    return f"held-out solve rate {before:.1%} → {after:.1%} ({gain}) in {report['seconds']:.0f} s"
