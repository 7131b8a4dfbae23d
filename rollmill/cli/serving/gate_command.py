"""`rollmill gate`: may a version become live? For people and for CI."""

from __future__ import annotations

from collections.abc import Mapping
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollmill.cli.evaluate import limited_suite
from rollmill.cli.target import find_target

if TYPE_CHECKING:
    from rich.table import Table

HELD = 3  # exit code


def gate(
    directory: Annotated[Path, typer.Argument(metavar="RUN", help="a run directory", show_default=False)],
    candidate: Annotated[
        str, typer.Argument(metavar="VERSION", help="the version that may become live: rl@7, 7, or a channel")
    ],
    against: Annotated[str, typer.Option(help="the version it is compared with")] = "live",
    tasks: Annotated[
        int | None, typer.Option(min=1, help="at most this many tasks per split; default: as the run is configured")
    ] = None,
    attempts: Annotated[int | None, typer.Option(min=1, help="sampled attempts per task")] = None,
    again: Annotated[bool, typer.Option("--again", help="measure again what is measured already")] = False,
    json: Annotated[bool, typer.Option("--json", help="for programs: JSON instead of a table")] = False,
) -> None:
    """Compare a version with the live one on held-out tasks, and say whether it may become live.

    Both make the same attempts. Quality (solve rate, or mean reward where rewards are not 0 or 1), pass@k, tokens and
    engine seconds (on GPUs: GPU-seconds), seconds per attempt, malformed tool calls and questions are compared, each
    with an interval and a bound of the section [gate]; seconds only if both were measured at the same time. The whole
    interval must be within the bound, unless gate.alpha is 0.5. Quality is also compared with the yardstick, the best
    version that was ever promoted. Exit code 0 means promote, and 3 means hold: the reasons are printed. A run with a
    section [gate] refuses other versions as `live`. While there is no live version, only the bar decides. A verdict
    counts for `live` only if the whole suite was used, against the version that is live. For example:

        rollmill gate runs/demo rl@28 --against rl@0
        rollmill gate runs/demo candidate --json > gate.json
    """
    from rich.console import Console

    from rollmill.evals.gate_config import GateConfig
    from rollmill.realtime.gate_run import LIVE, require_gate, run_gate
    from rollmill.runs.opening import open_with_index
    from rollmill.weights.reading.channels import Channels

    run = open_with_index(directory)
    suite = limited_suite(run.config.evals, tasks, attempts)
    wanted = find_target(run, candidate)
    now = Channels(run.objects()).get(LIVE)
    # the first live version is compared with itself: only the bar decides
    live = wanted if against == LIVE and now is None else find_target(run, against)
    counts = suite == run.config.evals and live.version == (now or wanted.version)
    if run.config.gate is not None:
        require_gate(run.objects())
    with Console(stderr=True).status(f"{wanted.version} against {live.version}"):
        verdict = run_gate(run, live, wanted, suite, run.config.gate or GateConfig(), again=again, record=counts)
    if not counts:
        what = f"{wanted.version} against {now or 'itself'} on the whole suite"
        typer.echo(f"this verdict does not count for `live`: that takes {what}", err=True)
    if json:
        typer.echo(dumps(verdict.describe()))
    else:
        console = Console(highlight=False)
        console.print(metrics_table(verdict.describe()))
        for note in verdict.notes:
            console.print(f"note: {note}", soft_wrap=True, markup=False)
        for reason in verdict.reasons:
            console.print(f"{verdict.verdict}: {reason}", soft_wrap=True, markup=False)
    if not verdict.promotes:
        raise typer.Exit(HELD)


def metrics_table(verdict: Mapping[str, Any]) -> Table:
    """What the gate measured, as `GateVerdict.describe` has it. It fits 80 columns, which is what CI logs have."""
    from rich.table import Table

    sides = f"{verdict['candidate']} against {verdict['live']}"
    table = Table(
        title=f"{sides}: {verdict['tasks']} tasks, {verdict['attempts']} attempts",
        title_justify="left",
        box=None,
        padding=(0, 2, 0, 0),
        pad_edge=False,
    )
    table.add_column("metric", no_wrap=True)
    for column in ("live", "candidate", "change", f"{100 * verdict['confidence']:.0f} % interval", "bound"):
        table.add_column(column, no_wrap=True, justify="right")
    table.add_column("", no_wrap=True)
    for metric in verdict["metrics"]:
        value, low, high = map(_figure, metric["change"])
        table.add_row(
            metric["name"],
            _figure(metric["live"]),
            _figure(metric["candidate"]),
            {"ratio": f"× {value}", "difference": value if value.startswith("-") else f"+{value}"}.get(
                metric["compared"], ""
            ),
            f"{low} to {high}",
            f"{'≥' if metric['at_least'] else '≤'} {_figure(metric['bound'])}",
            {True: "ok", False: "FAILS", None: "–"}[metric["holds"]],
        )
    return table


def _figure(value: float | None) -> str:
    if value is None:  # not finite
        return "–"
    return f"{value:.{0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 3}f}"
