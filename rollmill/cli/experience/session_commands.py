"""`rollmill sessions list | show`: the sessions of a run's gateways that are open, and those that ended last."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollmill.cli import display
from rollmill.cli.runs import age
from rollmill.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from rollmill.gateway.sessions.sessions import Session
    from rollmill.runs.run import RunDirectory

app = typer.Typer()

RunDir = Annotated[Path, typer.Argument(metavar="RUN", help="a run directory", show_default=False)]
_COLUMNS = ("session", "state", "traffic", "key", "turns", "tokens", "segments", "last answer")


@app.command("list")
def list_sessions(
    run_dir: RunDir,
    recent: Annotated[int, typer.Option(min=0, help="also this many sessions that have ended")] = 10,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object per line, with every field")] = False,
) -> None:
    """List open sessions, of the run and of `rollmill serve`, and the last ones that have ended.

    Sessions whose users did not agree to storing them are not listed. For example:

        rollmill sessions list runs/demo
    """
    from rollmill.gateway.sessions.session_overview import describe_session
    from rollmill.runs.opening import open_with_index

    run = open_with_index(run_dir)
    found = [describe_session(session) for session in _open_sessions(run)]
    found += _ended(run, recent, {each["trajectory"] for each in found})
    if as_json:
        for each in found:
            typer.echo(json.dumps(each))
        return
    if not found:
        typer.echo("no session yet; `rollmill serve` or a training opens them")
        return
    rows = [{**each, "session": each["name"], "last answer": _since(each["answered_at"])} for each in found]

    def make(columns: list[str]) -> Table:
        table = display.table(*columns, numbers=("turns", "tokens", "segments"))
        for row in rows:
            table.add_row(*(display.safe("" if row[column] is None else row[column]) for column in columns))
        return table

    out = display.console()
    out.print(display.fitted(out, make, list(_COLUMNS), ("segments", "key", "tokens", "traffic")))


@app.command()
def show(
    run_dir: RunDir,
    session: Annotated[
        str, typer.Argument(metavar="SESSION", help="the session's name or its trajectory", show_default=False)
    ],
) -> None:
    """Show an open session: its facts and its segments, without what was said.

    For example:

        rollmill sessions show runs/demo chat-7

    `rollmill trajectories show` shows the conversation.
    """
    from rollmill.gateway.sessions.session_overview import describe_segments, describe_session
    from rollmill.runs.opening import open_with_index
    from rollmill.types import CUT

    for each in _open_sessions(open_with_index(run_dir)):
        if session in (each.name, each.facts.trajectory):
            for name, value in describe_session(each).items():
                typer.echo(f"{name:15} {'' if value is None else value}")
            for segment in describe_segments(each):
                parent = segment["parent"]
                origin = f", after {segment['shared_tokens']} tokens of {parent}" if parent else ""
                typer.echo(
                    f"segment {segment['segment']} ({segment['cause']}{origin}): {segment['turns']} turns, "
                    f"{segment['tokens']} tokens, {CUT if segment['finish'] == 'length' else segment['finish']}"
                )
            return
    raise ConfigError(
        f"{run_dir} has no open session {session!r}",
        hint="`rollmill sessions list` shows them; `rollmill trajectories show` those that have ended",
    )


def _open_sessions(run: RunDirectory) -> list[Session]:
    from rollmill.gateway.recording.replaying import read_sessions

    places = [run.path, *sorted((run.path / "services").glob("*"))]
    logs = [place / role for place in places for role in run.config.gateways]
    return [session for log in logs for session in read_sessions(log)]


def _ended(run: RunDirectory, count: int, still_open: set[str]) -> list[dict[str, Any]]:
    from rollmill.storage.objects import Objects
    from rollmill.trajectories.trajectory_store import TrajectoryStore

    if not count or (run.config.database is None and not (run.path / "mill.db").exists()):
        return []
    rows = TrajectoryStore(run.database(), Objects.open("memory://")).list(limit=count * 4)
    return [
        {
            "trajectory": row.id,
            "name": row.provenance.get("session") or row.id,
            "traffic": row.traffic,
            "run": row.run,
            "task": row.task_id,
            "key": row.provenance.get("key"),
            "segments": row.segments,
            "turns": row.turns,
            "tokens": row.tokens,
            "sampled_tokens": row.sampled_tokens,
            "answered_at": row.finished_at,
            "state": row.state.value,
        }
        for row in rows
        if row.id not in still_open and row.finished_at is not None
    ][:count]


def _since(at: float | None) -> str:
    return "" if at is None else f"{age(max(0.0, time.time() - at))} ago"
