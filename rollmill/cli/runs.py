"""Housekeeping: `rollmill runs`, `status`, `logs`, `stop` and `rm`."""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollmill.cli.display import console
from rollmill.errors import ConfigError, RollmillError

if TYPE_CHECKING:
    from rich.table import Table

    from rollmill.runs.run import RunDirectory
    from rollmill.runs.status import RunState

STOP_PATIENCE_S = 60.0
Directory = Annotated[
    Path,
    typer.Argument(
        metavar="RUN", help="a run directory, for example runs/demo; or the URL of the run's objects: `store`/ID"
    ),
]
Root = Annotated[Path, typer.Option(help="the directory that holds the runs")]


def runs(
    root: Root = Path("runs"), as_json: Annotated[bool, typer.Option("--json", help="one JSON object per run")] = False
) -> None:
    """List the runs: state, stage and step, result, age and size.

    The result is the solve rate on held-out tasks at each evaluation.

    For example:

        rollmill runs
    """
    from rich.table import Table

    rows = [_summary(path.parent) for path in sorted(root.glob("*/run.json"))]
    if as_json:
        for row in rows:
            print(json.dumps(row))
        return
    if not rows:
        raise ConfigError(f"there is no run under {root}", hint="`rollmill demo` makes one; --root looks elsewhere")
    table = Table(box=None, pad_edge=False)
    for column in ("run", "state", "stage", "held-out solve rate", "age", "size"):
        table.add_column(column, justify="right" if column in ("age", "size") else "left", overflow="fold")
    for row in rows:
        size = _size(row["bytes"])
        table.add_row(row["run"], row["state"], row["progress"], row["result"], age(row["age_s"]), size)
    console().print(table)


def status(directory: Directory) -> None:
    """Show one run: its state, the processes that use it, its figures and files.

    For example:

        rollmill status runs/demo
    """
    from rich.console import Console

    from rollmill.launch.autoscaler import read_decisions
    from rollmill.runs.configuration.autoscale_rule import describe
    from rollmill.runs.status import bytes_of, state_of

    run, given = _open(directory)
    state = state_of(run)
    table = _facts_table()
    table.add_row("run", f"{run.config.name} (id {run.id})")
    if isinstance(run.home_store, str):
        table.add_row("from any host", run.home_store)
    table.add_row("state", state.word)
    table.add_row("stage", _progress(state))
    table.add_row("held-out solve rate", state.result or "not evaluated yet")
    for name, result in state.environments.items():
        table.add_row(f"  {name}", result)
    for name, by in state.processes.items():
        table.add_row(name, by)
    if decisions := read_decisions(run):
        table.add_row("balance", describe(decisions[-1]))
    table.add_row("age, size", f"{age(state.age_s)}, {_size(bytes_of(run.path))}")
    for name in ("report.html", "logs"):
        if (run.path / name).exists():
            table.add_row(name.partition(".")[0], str(run.path / name))
    if state.word == "stopped":
        table.add_row("to continue", f"rollmill train --resume {given}")
    Console(highlight=False, soft_wrap=True).print(table)


def logs(
    directory: Directory,
    role: Annotated[
        str | None, typer.Argument(metavar="ROLE", help="a role (trainer, gateway, …); default: list the logs")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="keep printing new lines until Ctrl-C")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="how many of the last lines to print")] = 50,
) -> None:
    """Print the end of a role's log. Without a role, list the logs.

    For example:

        rollmill logs runs/demo
        rollmill logs runs/demo trainer -f
        rollmill logs runs/demo serve-1/gateway
    """
    from rollmill.kinds import build

    run, given = _open(directory)
    cluster = build(run.config.cluster)
    cluster.collect(run)
    found = dict(_log_files(run))
    if role is None:
        if not found:
            print(f"{given} has no logs yet")
        for name, path in found.items():
            print(f"{name:24} {_size(path.stat().st_size):>9}  {path}")
        return
    if role not in found:
        raise ConfigError(f"{given} has no log {role!r}", hint=f"logs here: {', '.join(found) or 'none yet'}")
    with found[role].open(errors="replace") as file:
        kept = deque(file, maxlen=lines)
        print("".join(kept), end="", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            while follow:
                print(file.read(), end="", flush=True)
                time.sleep(1.0 if cluster.elsewhere else 0.2)
                cluster.collect(run)


def stop(directory: Directory) -> None:
    """Stop everything that uses a run: its training, and what `serve` and `eval` run beside it.

    Nothing is lost: `rollmill train --resume RUN` continues the run.

    For example:

        rollmill stop runs/demo
    """
    from rollmill.kinds import build
    from rollmill.runs.lock import terminate
    from rollmill.runs.status import state_of

    run, given = _open(directory)
    state = state_of(run)
    if not state.processes:
        print(f"nothing uses {given}")
        return
    for name, by in state.processes.items():
        print(f"stopping {name}: {by}")
        if name in state.services:
            terminate(state.services[name])  # a service is always on this host
        else:
            build(run.config.cluster).halt(run)
    deadline = time.monotonic() + STOP_PATIENCE_S
    while left := state_of(run).processes:
        if time.monotonic() > deadline:
            names = ", ".join(f"{name} ({by})" for name, by in left.items())
            raise RollmillError(f"still running after {STOP_PATIENCE_S:.0f} s: {names}", hint="`kill -9` ends it")
        time.sleep(0.1)
    print("stopped")


def scale(
    directory: Directory,
    settings: Annotated[
        list[str], typer.Argument(metavar="REGION=N", help="engines=N in the home region, REGION=N in another")
    ],
) -> None:
    """Change how many engines a run has, while it trains.

    New engines join when they have loaded the weights. An engine that is removed takes no new requests; other
    engines continue the answers that it has begun. The number stays until the next `scale`, also when the run is
    resumed.

    For example:

        rollmill scale runs/demo engines=2
        rollmill scale runs/demo engines=4 away=2
    """
    from rollmill.launch.rescale import ask_scale
    from rollmill.runs.status import state_of

    run, given = _open(directory)
    for region, count in ask_scale(run, settings).items():
        print(f"{region}: {count} engine{'s' if count > 1 else ''}")
    state = state_of(run)
    if state.word != "training":
        more = " steps=N" if state.word == "finished" else ""
        print(f"the run is {state.word}: nothing trains now, and the number holds from its next start")
        print(f"hint: `rollmill train --resume {given}{more}` starts it")


def remove(directory: Directory, yes: Annotated[bool, typer.Option("--yes", "-y", help="do not ask")] = False) -> None:
    """Delete a run directory with all its weights and trajectories. A run that is in use is refused.

    Rows in a PostgreSQL database stay. So do the objects of a run whose `store` is a URL.

    For example:

        rollmill rm runs/demo
    """
    from rollmill.runs.status import bytes_of, state_of

    run, given = _open(directory)
    if given != str(directory):
        raise RollmillError(
            f"{given} is not a directory: rm leaves objects of a run where they are",
            hint=f"`rollmill rm {run.path}` deletes what is on this host",
        )
    used = state_of(run).processes
    if used:
        by = ", ".join(f"{name}: {holder}" for name, holder in used.items())
        raise RollmillError(f"{given} is in use: {by}", hint=f"`rollmill stop {given}` stops it")
    size = _size(bytes_of(run.path))
    if not yes and not typer.confirm(f"Delete {given} ({size}) forever?"):
        print("nothing was deleted")
        raise typer.Exit(1)
    try:
        shutil.rmtree(directory)
    except OSError as error:
        hint = f"check the owner and the permissions of {given}; some of it may be deleted"
        raise RollmillError(f"{given} cannot be deleted: {error.filename}: {error.strerror}", hint=hint) from None
    print(f"deleted {given} ({size})")
    if isinstance(run.home_store, str):
        print(f"its objects stay in {run.home_store}")


def _summary(path: Path) -> dict[str, Any]:
    """One row of `rollmill runs`. A run that cannot be opened is listed too."""
    from rollmill.runs.opening import open_run
    from rollmill.runs.status import bytes_of, state_of

    row: dict[str, Any] = {"run": path.name, "bytes": bytes_of(path)}
    try:
        run = open_run(path)
        state = state_of(run)
    except RollmillError as error:
        age = time.time() - (path / "run.json").stat().st_mtime
        return {**row, "state": "unreadable", "progress": "", "result": "", "age_s": age, "error": error.message}
    word = ", ".join([state.word, *state.services])
    return {
        **row,
        "id": run.id,
        "state": word,
        "progress": _progress(state),
        "result": state.result,
        "environments": state.environments,
        "age_s": state.age_s,
    }


def _progress(state: RunState) -> str:
    """The stage and its newest published step."""
    return f"{state.stage} {state.step or 0}/{state.steps}" if state.stage else ""


def _log_files(run: RunDirectory) -> Iterator[tuple[str, Path]]:
    from rollmill.runs.status import service_paths

    for path in sorted(run.logs.glob("*.log")):
        yield path.stem, path
    for service in service_paths(run):
        for path in sorted((service / "logs").glob("*.log")):
            yield f"{service.name}/{path.stem}", path


def _open(directory: Path) -> tuple[RunDirectory, str]:
    """The run, and what the user called it."""
    from rollmill.runs.opening import open_run
    from rollmill.runs.saved import url_of

    return open_run(directory), url_of(directory) or str(directory)


def _facts_table() -> Table:
    from rich.table import Table

    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    return table


def age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
