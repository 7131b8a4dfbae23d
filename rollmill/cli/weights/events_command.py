"""`rollmill weights events`: every version of a run, its size, and when each region served it."""

from __future__ import annotations

import json as json_module
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from rollmill.cli import display
from rollmill.errors import WeightsError
from rollmill.telemetry import EventTail

_POLL_SECONDS = 0.5


def events(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="run directory")],
    follow: Annotated[bool, typer.Option("--follow", "-f", help="keep printing new events; Ctrl-C stops")] = False,
    json: Annotated[bool, typer.Option("--json", help="one JSON object per line, for a dashboard")] = False,
) -> None:
    """Print bytes, ratio and density of every version, the time to each region, and the longest pause.

    A time in brackets: the version is in the region's store, but no engine serves it yet. With ~, clocks disagree.

    With --follow a version is printed again whenever more is known, for example when another region serves it.

    For example:

        rollmill weights events runs/demo --follow --json
    """
    from rollmill.weights.regions.arrivals import Arrivals

    if not (run / "events").is_dir():
        raise WeightsError(f"{run} has no events", hint="give a run directory, for example runs/demo")
    tail, arrivals = EventTail(run / "events"), Arrivals()
    _print(arrivals.fold(tail.poll()), json, follow)
    try:
        while follow:
            time.sleep(_POLL_SECONDS)
            _print(arrivals.fold(tail.poll()), json, follow)
    except KeyboardInterrupt:
        return


def _print(rows: list[dict[str, Any]], as_json: bool, lines: bool) -> None:
    if as_json:
        for row in rows:
            print(json_module.dumps(row, allow_nan=False), flush=True)
    elif lines:
        for row in rows:
            display.console().print(display.safe(_line(row)), soft_wrap=True)
    elif not rows:
        display.console().print("no version yet")
    else:
        display.console().print(_table(rows))


def _line(row: dict[str, Any]) -> str:
    from rollmill.cli.weights import version_figures as figures

    words = [f"{row['line']}@{row['version']}"]
    if row["bytes"] is not None:
        ratio = f" ({figures.ratio(row['ratio'])})" if row["ratio"] else ""
        words.append(display.size(row["bytes"]) + ratio)
    if row["density"] is not None:
        words.append(f"{display.share(row['density'])} changed")
    for name, region in row["regions"].items():
        words.append(f"{name} {figures.region(region)}".strip())
    return "  ".join(words)


def _table(rows: list[dict[str, Any]]) -> Any:
    from rollmill.cli.weights import version_figures as figures

    regions = sorted({name for row in rows for name in row["regions"]})
    numbers = ("bytes", "ratio", "density", "publish", "pause", *(f"→ {name}" for name in regions))
    made = display.table("version", *numbers[:4], *numbers[5:], "pause", numbers=numbers)
    for row in rows:
        there = row["regions"]
        pauses = [one["pause_ms_max"] for one in there.values() if one["pause_ms_max"] is not None]
        made.add_row(
            display.safe(f"{row['line']}@{row['version']}"),
            "" if row["bytes"] is None else display.size(row["bytes"]),
            "" if row["ratio"] is None else figures.ratio(row["ratio"]),
            display.share(row["density"]),
            display.seconds(row["publish_seconds"]),
            *(figures.region(there[name]) if name in there else "" for name in regions),
            display.milliseconds(max(pauses, default=None)),
        )
    return made
