"""`rollmill train`: take a run through its stages to the report."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollmill.cli.config import print_config
from rollmill.cli.target import start_settings
from rollmill.errors import ConfigError, RollmillError
from rollmill.launch.launcher import Cluster

if TYPE_CHECKING:
    from rollmill.runs.run import RunDirectory

Source = Annotated[
    Path,
    typer.Argument(
        metavar="RUN",
        help="a RUN.toml; with --resume: a run directory, or the URL of its objects",
        show_default=False,
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="settings that override the file: `key.path=value`, values as in TOML"),
]


def train(
    source: Source,
    overrides: Overrides = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="continue the run in that directory; `steps=N` gives its last stage more steps"),
    ] = False,
    start: Annotated[
        tuple[Path, str] | None,
        typer.Option(
            "--from",
            metavar="RUN VERSION",
            help="start from a version of another run: a number (7), a stage and a number (rl@7), or a channel (live)",
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="check everything, print the whole configuration as commented TOML, and stop"),
    ] = False,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="leave the run in the background; `status`, `logs`, `stop` find it")
    ] = False,
    root: Annotated[Path, typer.Option(help="the directory that holds the runs")] = Path("runs"),
) -> None:
    """Train a model: every stage of the run in order, then a report.

    Every process may be killed at any moment; `--resume` continues from what the stores hold. For example:

        rollmill train examples/micro.toml stages.rl.steps=20 stages.rl.max_staleness=0
        rollmill train --resume runs/micro
        rollmill train --resume runs/micro steps=64
        rollmill train next.toml --from runs/micro live
        rollmill train examples/micro.toml --detach
    """
    from rollmill.config import load_config
    from rollmill.kinds import build
    from rollmill.launch.extend import extend
    from rollmill.launch.rank_processes import begin_run
    from rollmill.runs.opening import open_run
    from rollmill.runs.preflight import check_here, check_parts, check_stores
    from rollmill.runs.run import RunConfig
    from rollmill.runs.saved import url_of
    from rollmill.runs.status import is_finished

    if resume:
        if start or dry_run:
            raise ConfigError(
                f"--resume continues a run from where it is: it takes no {'--from' if start else '--dry-run'}",
                hint="start a new run to change more than `steps`",
            )
        run = open_run(source)
        for name in run.changed_code():
            typer.echo(f"note: the code of [{name}] is not what the run began with", err=True)
        run = extend(run, overrides or ())
        if is_finished(run):
            typer.echo(f"{url_of(source) or source} is finished: nothing is left to do")
            show_finished(run)
            return
        check_stores(run.config)  # it may have begun on another host
        check_parts(run.config)
    else:
        if source.is_dir():
            raise ConfigError(f"{source} is a directory, not a RUN.toml", hint=_meant(source))
        config = load_config(RunConfig, source, [*(overrides or ()), *(start_settings(*start) if start else ())])
        if not config.stages:
            raise ConfigError(f"{source} has no [[stages]]: there is nothing to train", hint="`rollmill serve` serves")
        for warning in check_here(config, dry_run=dry_run):
            typer.echo(f"warning: {warning}", err=True)
        if dry_run:
            print_config(config)
            return
        run = begin_run(root, config)
    if detach:
        build(run.config.cluster).submit(run)
        tell_detached(run)
        return
    run_to_report(run)


def _meant(directory: Path) -> str:
    if (directory / "run.json").exists():
        return f"`rollmill train --resume {directory}` continues the run in it"
    file = directory / "run.toml"  # as `rollmill init` writes it
    return f"did you mean {file}?" if file.is_file() else "`rollmill init DIR` writes one to begin with"


def tell_detached(run: RunDirectory) -> None:
    name = run.home_store if isinstance(run.home_store, str) else run.path  # the URL works on every host
    typer.echo(f"{run.path} trains in the background; `rollmill status {name}` shows it, `stop` stops it")


def run_to_report(run: RunDirectory) -> None:
    """Drive the run with a live display, write its report, and print where it is."""
    from rollmill.cli.progress import Progress
    from rollmill.dashboard.report_run import report_run
    from rollmill.kinds import build
    from rollmill.launch import supervise
    from rollmill.launch.rank_processes import outside_rank
    from rollmill.runs.stages import phases

    if outside_rank() > 0:
        supervise.follow(run)
        return
    cluster: Cluster = build(run.config.cluster)
    if cluster.elsewhere:
        cluster.submit(run)
        watch(run, cluster)
        return
    try:
        title = f"rollmill · {run.config.name}"
        with Progress(run.events, phases(run.config), title, continues=True) as progress:
            supervise.drive(run, on_tick=progress.update)
    except KeyboardInterrupt:
        # after the display has closed, which would draw over it
        typer.echo(f"stopped; `rollmill train --resume {run.path}` continues the run", err=True)
        raise typer.Exit(130) from None
    print_result(report_run(run))


def watch(run: RunDirectory, cluster: Cluster) -> None:
    """Show a run whose supervisor lives in a cluster, until it ends, and feed its sinks. Ctrl-C leaves it running."""
    from rollmill.cli.progress import Progress
    from rollmill.runs.open_sinks import Sinks
    from rollmill.runs.stages import phases
    from rollmill.runs.status import is_finished

    sinks = Sinks(run)
    try:
        with Progress(run.events, phases(run.config), title=f"rollmill · {run.config.name}") as progress:
            while cluster.collect(run) is not None:
                progress.update()
                sinks.poll()
                time.sleep(1.0)
            progress.update()
    except KeyboardInterrupt:
        typer.echo(f"{run.path} goes on in the cluster; `rollmill stop {run.path}` stops it", err=True)
        raise typer.Exit(130) from None
    finally:
        sinks.close()
        for problem in sinks.problems:
            typer.echo(f"warning: {problem}", err=True)
    if not is_finished(run):
        raise RollmillError(
            f"{run.path} has stopped",
            hint=f"`rollmill logs {run.path} supervisor` says why; `train --resume` continues",
        )
    print_result(run.path / "report.html")


def show_finished(run: RunDirectory) -> None:
    from rollmill.dashboard.report_run import share_report

    share_report(run)  # its store may not have answered when it was written
    print_result(run.path / "report.html")


def print_result(report: Path) -> None:
    from rich.console import Console

    console = Console(soft_wrap=True)
    console.print(f"\n{_verdict(report.with_suffix('.json'))}", highlight=False)
    console.print(f"report: [link=file://{report.resolve()}]{report}[/link]", highlight=False)


def _verdict(figures: Path) -> str:
    """The run in one line; a run without RL steps has nothing to compare."""
    try:
        report = json.loads(figures.read_text())
    except ValueError as error:
        raise ConfigError(f"{figures} is damaged: {error}", hint="delete it: --resume writes it again") from None
    before, after = report["solve_rate_before"], report["solve_rate_after"]
    if before is None or after is None:
        return f"finished in {report['seconds']:.0f} s"
    low, high = report["gain_interval"]
    gain = f"{100 * (after - before):+.1f} points, 95 % interval {100 * low:+.1f} to {100 * high:+.1f}"
    return f"held-out solve rate {before:.1%} → {after:.1%} ({gain}) in {report['seconds']:.0f} s"
