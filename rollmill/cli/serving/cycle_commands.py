"""`rollmill cycle run | status | history | explain`: learn from live users, behind a gate and a canary."""

from __future__ import annotations

import datetime
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollmill.cli.serving.gate_command import metrics_table
from rollmill.errors import RollmillError

if TYPE_CHECKING:
    from rollmill.runs.cycle_journal import Cycle, Journal

app = typer.Typer()
UNFOLDED = 10_000  # columns: a file or a program gets one line per move
Run = Annotated[Path, typer.Argument(metavar="RUN", help="a run directory", show_default=False)]


@app.command("run")
def run_cycles(
    directory: Run,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE",
            help="settings of [cycle] and [gate] from now on: `cycle.share=0.1`; the run keeps them",
        ),
    ] = None,
    cycles: Annotated[int | None, typer.Option(min=1, help="stop after this many; default: run until stopped")] = None,
) -> None:
    """Drive cycles: learn from what users did with the answers of the live version.

    Production is served by another process, and products report signals to it; docs/guides/learn-from-your-users.md
    shows both. It may be killed at any moment; started again, it goes on. For example:

        rollmill weights channel set runs/demo live rl@28
        rollmill serve runs/demo --version live --canary
        rollmill cycle run runs/demo --cycles 1
        rollmill cycle run runs/demo cycle.enough=64 cycle.share=0.1
    """
    from rich.console import Console

    from rollmill.launch.extend import change_cycle
    from rollmill.realtime.cycle import CycleDriver, left_out
    from rollmill.runs.opening import open_with_index

    console = Console(highlight=False, soft_wrap=True, markup=False)
    run = change_cycle(open_with_index(directory), overrides or ())
    told: set[tuple[int, str]] = set()

    def tell(cycle: Cycle) -> None:
        before = len(told)
        told.add((cycle.number, cycle.state))
        if len(told) > before:
            console.print(f"cycle {cycle.number}: {cycle.state}: {driver.journal.history(cycle.number)[-1].reason}")
        elif cycle.state == "collecting" and not told.issuperset(new := {(cycle.number, why) for why in driver.found}):
            told.update(new)  # once for each reason, and once when the first can be trained on
            console.print(f"cycle {cycle.number}: {left_out(driver.found)}")

    driver = CycleDriver(run, tell)
    done = 0
    try:
        while cycles is None or done < cycles:
            driver.run_cycle()
            done += 1
    except KeyboardInterrupt:
        console.print("stopped; `rollmill cycle run` goes on from here")


@app.command()
def status(directory: Run) -> None:
    """Show the newest cycle: its state, since when, and why.

    For example:

        rollmill cycle status runs/demo
    """
    journal = _journal(directory)
    cycle = journal.current()
    if cycle is None:
        return typer.echo("no cycle yet; `rollmill cycle run` begins one")
    minutes = (time.time() - cycle.updated_at) / 60
    typer.echo(f"cycle {cycle.number}: {cycle.state} for {minutes:.1f} minutes")
    typer.echo(journal.history(cycle.number)[-1].reason)


@app.command()
def history(directory: Run) -> None:
    """List all cycles, with how each ended and why.

    For example:

        rollmill cycle history runs/demo
    """
    last = {move.number: move for move in _journal(directory).history()}
    for number, move in last.items():
        typer.echo(f"cycle {number}: {move.state}: {move.reason}")
    if not last:
        typer.echo("no cycle yet; `rollmill cycle run` begins one")


@app.command()
def explain(
    directory: Run,
    number: Annotated[
        int | None, typer.Argument(metavar="NUMBER", help="which cycle; default: the newest", show_default=False)
    ] = None,
) -> None:
    """Explain one cycle: every state with its reason, what was trained on, what the gate and the canary measured.

    For example:

        rollmill cycle explain runs/demo 3
    """
    from rich.console import Console
    from rich.table import Table

    journal = _journal(directory)
    found = journal.get(number) if number is not None else journal.current()
    if found is None:
        raise RollmillError(
            f"{directory} has no cycle{'' if number is None else f' {number}'}",
            hint=f"`rollmill cycle history {directory}` lists them; `rollmill cycle run {directory}` begins one",
        )
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = UNFOLDED
    moves = Table.grid(padding=(0, 2, 0, 0))
    for move in journal.history(found.number):
        at = datetime.datetime.fromtimestamp(move.at).astimezone().strftime("%Y-%m-%d %H:%M:%S")
        moves.add_row(at, move.state, move.reason)
    console.print(moves)
    for line in _figures(found.facts):
        console.print(line, soft_wrap=True)
    if "gate" in found.facts:
        console.print(metrics_table(found.facts["gate"]))


def _figures(facts: dict[str, Any]) -> list[str]:
    lines = [f"rule: version {facts['rule']['version']}, digest {facts['rule']['digest']}"] if "rule" in facts else []
    lines += [f"conversations: {count} {what}" for what, count in facts.get("counts", {}).items()]
    lines += [
        f"population {each['kind'] or 'of all kinds'} under {each['version']}: {each['count']} conversations, "
        f"mean reward {each['mean']:.3f}, variance {each['variance']:.3f}"
        for each in facts.get("populations", [])
    ]
    lines += [f"gate: {note}" for note in facts.get("gate", {}).get("notes", [])]
    return lines


def _journal(directory: Path) -> Journal:
    from rollmill.runs.cycle_journal import Journal
    from rollmill.runs.opening import open_with_index

    run = open_with_index(directory)
    return Journal(run.database(), run.id)
