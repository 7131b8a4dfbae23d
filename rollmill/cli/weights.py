"""`rollmill weights log | verify | channel`: look at the versions in a run directory or an object store."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from rollmill.storage.objects import Objects
    from rollmill.weights import WeightStore

app = typer.Typer(help="Versions of the weights: what was published, and whether every byte of it is still right.")

Where = Annotated[str, typer.Argument(help="run directory, store directory, or object store URL (s3://…, http://…)")]
Line = Annotated[str | None, typer.Option("--line", help="only this line")]
Token = Annotated[str | None, typer.Option("--token", envvar="ROLLMILL_STORE_TOKEN", help="for an http(s):// store")]
_NUMBERS = ("version", "bytes", "ratio", "density")


@app.command()
def log(where: Where, line: Line = None, token: Token = None) -> None:
    """List the versions of every line."""
    from rich.console import Console

    from rollmill.weights import WeightStore

    store = WeightStore(_open(where, token))
    for name, form in _chosen(store, line):
        Console().print(_table(store, name, form))


@app.command()
def verify(where: Where, line: Line = None, token: Token = None) -> None:
    """Read every version back and check every digest. Exits with 1 when something is wrong."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from rollmill.weights import WeightStore

    store = WeightStore(_open(where, token))
    console = Console()
    checked = wrong = 0
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        for name, form in _chosen(store, line):
            task = progress.add_task(f"{name} ({form})", total=len(store.numbers(name, form)))
            for version, ok, why in store.verify(name, form):
                checked, wrong = checked + 1, wrong + (not ok)
                if not ok or why:
                    verdict = "[yellow]note[/]" if ok else "[bold red]wrong[/]"
                    console.print(f"{verdict} {version} ({form}):", why, markup=True, highlight=False, soft_wrap=True)
                progress.advance(task)
    if wrong:
        console.print(f"[bold red]{wrong} of {checked} versions cannot be restored[/] from {store.objects.url}")
        raise typer.Exit(1)
    console.print(f"[green]all {checked} versions verified[/], every chunk and every root digest")


@app.command()
def channel(where: Where, name: Annotated[str, typer.Argument(help="for example live")], token: Token = None) -> None:
    """Show where a channel points and where it pointed before."""
    from rich.console import Console
    from rich.table import Table

    from rollmill.errors import WeightsError
    from rollmill.weights import Channels

    channels = Channels(_open(where, token))
    entries = channels.history(name)
    if not entries:
        raise WeightsError(f"no channel {name!r}", hint=f"channels here: {', '.join(channels.names()) or 'none'}")
    table = Table("entry", "version", "when", title=f"channel {name}")
    for entry in reversed(entries):
        table.add_row(str(entry.number), str(entry.version), _when(entry.at))
    Console().print(table)


def _open(where: str, token: str | None) -> Objects:
    from rollmill.errors import WeightsError
    from rollmill.storage.objects import Objects

    if "://" in where:
        return Objects.open(where, token=token)
    path = Path(where)
    if (path / "store").is_dir():
        path = path / "store"
    if not (path / "weights").is_dir():
        raise WeightsError(f"no weights in {where}", hint="give a run directory (runs/NAME) or an object store")
    return Objects.open(path)


def _chosen(store: WeightStore, line: str | None) -> list[tuple[str, str]]:
    from rollmill.errors import WeightsError

    lines = store.lines()
    if line is not None and line not in lines:
        raise WeightsError(f"no line {line!r} in {store.objects.url}", hint=f"lines here: {', '.join(lines) or 'none'}")
    return [(name, form) for name in ([line] if line else lines) for form in store.forms(name)]


def _table(store: WeightStore, line: str, form: str) -> Table:
    from rich import box, filesize
    from rich.markup import escape
    from rich.table import Table

    from rollmill.errors import RollmillError
    from rollmill.types import Version

    table = Table(title=f"{line} ({form})", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("version", "parent", "kind", "bytes", "ratio", "density", "digest", "when"):
        table.add_column(column, justify="right" if column in _NUMBERS else "left", no_wrap=column != "digest")
    for number in store.numbers(line, form):
        try:
            manifest = store.manifest(Version(line, number), form)
        except RollmillError as error:
            table.add_row(str(number), "", "[red]damaged[/]", "", "", "", escape(error.message), "")
            continue
        density = "" if manifest.density is None else f"{manifest.density:.1%}"
        ratio = f"{manifest.full_bytes / max(manifest.bytes, 1):.1f}×"
        parent = str(manifest.parent or "")
        cells = filesize.decimal(manifest.bytes), ratio, density, manifest.digest[:8], _when(manifest.created_at)
        table.add_row(str(number), parent, manifest.kind, *cells)
    return table


def _when(at: float) -> str:
    return datetime.fromtimestamp(at).astimezone().strftime("%m-%d %H:%M")
