"""`rollmill trajectories list | show`: read what agents did, which weights sampled it, and how it was graded."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollmill.errors import ConfigError, StorageError, TrajectoryError

if TYPE_CHECKING:
    from rich.text import Text

    from rollmill.chat.tokenizer import Tokenizer
    from rollmill.trajectories.store import TrajectoryRow, TrajectoryStore

app = typer.Typer(help="Read what agents did, which weights sampled it, and how it was graded.", no_args_is_help=True)

RunDir = Annotated[Path | None, typer.Argument(help="run directory; default: the newest one under runs/")]
Database = Annotated[str | None, typer.Option(help="read this database instead: sqlite:///… or postgresql://…")]
Store = Annotated[str | None, typer.Option("--objects", help="object store of that database: directory or URL")]

_COLUMNS = ("id", "state", "reward", "task", "split", "tokens", "sampled by", "age", "reason")
_LONGEST = 4000  # characters of one message, unless --full


@app.command("list")
def list_trajectories(
    run_dir: RunDir = None,
    state: Annotated[str | None, typer.Option(help="running, finished, graded, failed, quarantined, deleted")] = None,
    split: Annotated[str | None, typer.Option(help="train, heldout, …")] = None,
    limit: Annotated[int, typer.Option(min=1, help="at most so many")] = 50,
    database: Database = None,
) -> None:
    """List trajectories, newest first. Tokens are sampled/all.

    For example:

        rollmill trajectories list runs/demo
        rollmill trajectories list runs/demo --state failed
    """
    from rich.console import Console
    from rich.table import Table

    from rollmill.types import TrajectoryState

    if state is not None and state not in set(TrajectoryState):
        raise ConfigError(f"there is no state {state!r}", hint=f"one of {', '.join(TrajectoryState)}")
    store, _ = _open(run_dir, database, "memory://")  # the index alone: no payload is read
    if split is not None and split not in (splits := store.splits()):
        raise ConfigError(f"no trajectory has the split {split!r}", hint=f"splits here: {', '.join(splits) or 'none'}")
    rows = store.list(state=state, split=split, limit=limit + 1)
    table = Table(box=None, header_style="dim", pad_edge=False)
    for name in _COLUMNS:
        numeric = name in ("reward", "tokens", "age")
        table.add_column(name, justify="right" if numeric else "left", no_wrap=True, min_width=len(name))
    for row in rows[:limit]:
        table.add_row(*_cells(row))
    console = Console()
    console.print(table if rows else "no trajectories match")
    if len(rows) > limit:
        console.print(f"and older ones: --limit {limit * 4} shows more", style="dim")


@app.command()
def show(
    id: Annotated[str, typer.Argument(help="the id, or any beginning of it that only one trajectory has")],
    run_dir: RunDir = None,
    tokens: Annotated[bool, typer.Option("--tokens", help="the exact tokens instead, coloured by probability")] = False,
    full: Annotated[bool, typer.Option("--full", help="do not cut long messages")] = False,
    tokenizer: Annotated[Path | None, typer.Option(help="tokenizer.json for --tokens; default: the run's")] = None,
    database: Database = None,
    objects: Store = None,
) -> None:
    """Print one trajectory to read: its conversation, which weights sampled each answer, its rewards.

    For example:

        rollmill trajectories show ID runs/demo
        rollmill trajectories show ID runs/demo --tokens
    """
    from rich.console import Console

    from rollmill.cli import transcript

    store, run_tokenizer = _open(run_dir, database, objects)
    row = _find(store, id)
    longest = math.inf if full else _LONGEST
    console = Console(highlight=False)
    group = store.list(run=row.run, group_id=row.group_id) if row.group_id else []
    transcript.print_facts(console, row, sorted(group, key=lambda member: member.id))
    if row.payload_key is not None and row.state != "deleted":
        try:
            trajectory = store.load(row.id)
        except (TrajectoryError, StorageError) as error:  # the index is still worth reading
            console.print(transcript.safe(f"\nits payload cannot be read: {error}", "red"))
        else:
            if tokens:
                transcript.print_tokens(console, trajectory, _load_tokenizer(tokenizer or run_tokenizer))
            else:
                transcript.print_conversation(console, trajectory, longest)
    transcript.print_grades(console, store.rewards([row.id])[row.id], store.feedback(row.id), longest)


def _open(run_dir: Path | None, database: str | None, objects: str | None) -> tuple[TrajectoryStore, Path | None]:
    """The store to read and, in a run directory, its tokenizer."""
    from rollmill.cluster.run import RunDirectory
    from rollmill.storage.database import open_database
    from rollmill.storage.objects import Objects
    from rollmill.trajectories.store import TrajectoryStore

    if database is not None:
        if objects is None or run_dir is not None:
            raise ConfigError("--database needs --objects and no run directory", hint="or give a run directory alone")
        file = Path(database.removeprefix("sqlite:///"))
        if database.startswith("sqlite:///") and not file.exists():
            raise ConfigError(f"{file} does not exist", hint="a relative path has three slashes, an absolute one four")
        return TrajectoryStore(open_database(database), Objects.open(objects)), None
    run = RunDirectory.open(run_dir or _newest_run())
    if run.config.database is None and not (run.path / "mill.db").exists():
        raise ConfigError(f"{run.path} has no trajectories yet", hint="they appear when its first rollouts start")
    return TrajectoryStore(open_database(run.database_url), Objects.open(objects or run.home_store)), run.tokenizer


def _newest_run() -> Path:
    found = sorted(Path("runs").glob("*/run.json"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise ConfigError("there is no run under runs/", hint="name a run directory, or --database and --objects")
    return found[-1].parent


def _find(store: TrajectoryStore, prefix: str) -> TrajectoryRow:
    rows = sorted(store.list(id_prefix=prefix), key=lambda row: row.id)
    if not rows:
        raise TrajectoryError(f"no trajectory begins with {prefix!r}", hint="`rollmill trajectories list` shows them")
    if len(rows) > 1 and rows[0].id != prefix:
        some = ", ".join(row.id for row in rows[:4])
        raise TrajectoryError(f"{len(rows)} trajectories begin with {prefix!r}: {some}, …", hint="give more of the id")
    return rows[0]


def _load_tokenizer(path: Path | None) -> Tokenizer:
    from rollmill.chat.tokenizer import Tokenizer

    if path is None or not path.exists():
        raise ConfigError("--tokens needs the model's tokenizer", hint="name it: --tokenizer PATH/tokenizer.json")
    return Tokenizer.load(path)


def _cells(row: TrajectoryRow) -> Iterator[Text]:
    from rollmill.cli.transcript import STATES, duration, reward_text, safe, versions

    yield safe(row.id, "bold")
    yield safe(row.state, STATES[row.state])
    yield reward_text(row.reward)
    yield safe(row.task_id)
    yield safe(row.split or "")
    yield safe("" if row.tokens is None else f"{row.sampled_tokens}/{row.tokens}")
    yield safe(versions(row), "dim")
    yield safe(duration(time.time() - row.created_at), "dim")
    yield safe(" ".join((row.reason or "").split()))
