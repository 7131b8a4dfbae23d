"""`rollmill demo`: mid-training, RL and evaluation on a laptop's CPU."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollmill.cli.config import print_config
from rollmill.cli.train import print_result, run_to_report
from rollmill.demo import CONFIG

if TYPE_CHECKING:
    from rollmill.runs.run import RunDirectory


def demo(
    seed: Annotated[int, typer.Option(help="everything random follows from it")] = 0,
    name: Annotated[
        str, typer.Option(help="the run's name and directory under runs/", show_default="demo, demo-2, …")
    ] = "",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="print the whole configuration as commented TOML and stop")
    ] = False,
    live: Annotated[
        bool,
        typer.Option(
            "--live",
            help="a second act: learn from simulated users, behind a gate and a canary. Of a run that is finished: "
            "only this",
        ),
    ] = False,
    root: Annotated[Path, typer.Option(help="the directory that holds the runs")] = Path("runs"),
) -> None:
    """Mid-train a small mixture of experts, train it with RL on coding tasks, and report what it learned.

    Takes a few minutes on two cores. A trainer, two engines in two regions, a gateway and isolated machines all run
    for real. The report opens in a browser.

    With --live, a second act of at most five more minutes follows: one whole cycle of real-time RL with simulated
    users, in a window so small that every conversation is summarised. Its result is added to the report.

    For example:

        rollmill demo
        rollmill demo --seed 1 --name second
        rollmill demo --live
    """
    from rollmill.config import load_config
    from rollmill.runs.opening import open_run
    from rollmill.runs.run import RunConfig, RunDirectory
    from rollmill.runs.status import is_finished

    name = name or unused_name(root)
    config = load_config(RunConfig, CONFIG, [f'name="{name}"', f"seed={seed}"])
    if dry_run:
        print_config(config)
        return
    if live and (root / name / "run.json").exists():
        run = open_run(root / name)
    else:
        run = RunDirectory.create(root, config)
    if not is_finished(run):
        run_to_report(run)
    if live:
        play_second_act(run)


def play_second_act(run: RunDirectory) -> None:
    """One cycle of real-time RL with simulated users. Adds it to the report of the run."""
    from rich.console import Console

    from rollmill.cli.progress import Progress
    from rollmill.dashboard.report_run import read_living, report_run
    from rollmill.demo.second_act import MIDTRAIN, live_cycle, make_run, midtrain

    console = Console(highlight=False, soft_wrap=True, markup=False)
    try:
        second = make_run(run)
        with Progress(second.events, [MIDTRAIN], title="rollmill · second act: users (simulated)") as progress:
            midtrain(second, progress.update)
        live_cycle(second, console.print)
    except KeyboardInterrupt:
        typer.echo(f"stopped; `rollmill demo --live --name {run.config.name}` goes on", err=True)
        raise typer.Exit(130) from None
    report = report_run(run)
    living, _ = read_living(second)
    assert living is not None, "its cycle is over"
    console.print(_told(living))
    print_result(report)


def _told(living: dict[str, Any]) -> str:
    """The second act in one line."""
    before, after, gain = (living[name] for name in ("before", "after", "gain"))
    change = f"{100 * gain['value']:+.1f} points, 95 % interval {100 * gain['low']:+.1f} to {100 * gain['high']:+.1f}"
    ended = living["cycles"][-1]["ended"].replace("_", " ")
    rates = f"{before['value']:.1%} → {after['value']:.1%}"
    return f"simulated users: the cycle was {ended}; true acceptance {rates} ({change})"


def unused_name(root: Path) -> str:
    number = 1
    while (root / (name := "demo" if number == 1 else f"demo-{number}")).exists():
        number += 1
    return name
