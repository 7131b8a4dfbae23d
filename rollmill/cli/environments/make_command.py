"""`rollmill tasks make`: tasks from a repository."""

from __future__ import annotations

import json
from collections import Counter
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollmill.cli.environments.rollout_command import SERVED_MODEL, KeyOption, ModelNameOption

if TYPE_CHECKING:
    from rollmill.rollouts.factory.kept_changes import Sessions
    from rollmill.rollouts.factory.make import Wishes, Yield


class Kind(StrEnum):
    removal = "removal"
    bug = "bug"
    history = "history"


def make(
    repository: Annotated[
        str, typer.Argument(metavar="REPO", help="a directory, a git URL, or a PyPI name", show_default=False)
    ],
    out: Annotated[Path, typer.Option(help="folder for the tasks; a run that was stopped continues in it")],
    kind: Annotated[list[Kind], typer.Option(help="only this kind of task; may be given again")] = list(Kind),  # noqa: B006
    most: Annotated[int, typer.Option(min=1, help="tasks of each kind")] = 50,
    runs: Annotated[int, typer.Option(min=2, help="runs of the suite; tests that pass in all of them are stable")] = 3,
    repeat: Annotated[int, typer.Option(min=1, help="grade each task this many times; no verdict may change")] = 3,
    suite_timeout: Annotated[float, typer.Option(min=1, help="seconds that one run of the suite may take")] = 600.0,
    requirements: Annotated[Path | None, typer.Option(help="file with more packages that the tests need")] = None,
    not_in: Annotated[
        list[Path], typer.Option(help="file or directory: no task whose solution is in it; may be given again")
    ] = [],  # noqa: B006
    from_sessions: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="make tasks only of what users of this run asked for, and of what they kept"),
    ] = None,
    instructions: Annotated[
        str | None,
        typer.Option(metavar="URL", help="an OpenAI-compatible endpoint, up to and with /v1, that writes instructions"),
    ] = None,
    model_name: ModelNameOption = SERVED_MODEL,
    key: KeyOption = None,
    seed: Annotated[int, typer.Option(help="draws the bugs and the order of candidates")] = 0,
    at_once: Annotated[int, typer.Option(min=1, help="candidates that are tried at the same time")] = 2,
    as_json: Annotated[bool, typer.Option("--json", help="print the yield as JSON")] = False,
) -> None:
    """Make tasks from a repository: functions removed, bugs, and commits to make again.

    The project is installed into an image and its suite runs in machines. A task is kept if its reference passes,
    doing nothing earns nothing, and no verdict changes. Prints how many candidates became tasks, and why others did
    not. For example:

        rollmill tasks make ./shop --out tasks/shop
        rollmill tasks make toolz --out tasks/toolz --kind removal --most 20 --not-in heldout.jsonl
        rollmill tasks make ./shop --out tasks/asked --from-sessions runs/live
    """
    import asyncio

    from rollmill.errors import TaskError
    from rollmill.rollouts.factory.instruct import Writer
    from rollmill.rollouts.factory.make import Wishes

    try:
        needed = requirements.read_text() if requirements is not None else ""
    except OSError as error:
        raise TaskError(f"--requirements: {requirements} cannot be read: {error.strerror}") from None
    sessions = _read_sessions(from_sessions) if from_sessions is not None else None
    kinds = [each.value for each in kind] if sessions is None else []
    writer = Writer(instructions, model_name, key or "") if instructions is not None else None
    wishes = Wishes(kinds, most, runs, repeat, suite_timeout, seed, needed, not_in, sessions, writer, at_once)
    found = asyncio.run(_make(repository, out, wishes))
    if as_json:
        typer.echo(json.dumps(vars(found)))
    else:
        _show(found, out)


def _read_sessions(run_dir: Path) -> Sessions:
    from rollmill.kinds import build
    from rollmill.rollouts.factory.kept_changes import read_sessions
    from rollmill.runs.opening import open_with_index
    from rollmill.trajectories.trajectory_store import TrajectoryStore

    run = open_with_index(run_dir)
    store = TrajectoryStore(run.database(), run.objects())
    return read_sessions(store, run.id, build(run.config.gateway.redaction))


async def _make(repository: str, out: Path, wishes: Wishes) -> Yield:
    from rich.console import Console

    from rollmill.cli.display import progress
    from rollmill.config import validate_config
    from rollmill.kinds import build
    from rollmill.machines.machine import MachineHost, MachineSection
    from rollmill.rollouts.factory.make import make_tasks

    machines: MachineHost = build(validate_config(MachineSection, {"kind": "namespace"}, "the kind of machine"))
    console = Console(stderr=True)
    with progress(console, sizes=False) as bars:
        bar = bars.add_task("start", total=None)

        def tell(what: str, decided: int, total: int, admitted: int) -> None:
            made = f"{what}: {admitted}" if total else what
            bars.update(bar, description=made, completed=decided, total=total or None)
            if not console.is_terminal and not total:
                console.print(made)

        try:
            return await make_tasks(repository, out, wishes, machines, tell)
        finally:
            await machines.close()
            if wishes.writer is not None:
                await wishes.writer.close()


def _show(found: Yield, out: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    dropped = "".join(f"; {count} not used: {why}" for why, count in found.dropped_tests.items())
    typer.echo(f"{found.project}: {found.stable} stable tests, {found.apart} of them run apart{dropped}")
    table = Table("kind", "candidates", "tried", "tasks", "why not")
    for kind, count in found.candidates.items():
        counts = found.decided.get(kind, Counter())
        why = "\n".join(f"{number} {reason}" for reason, number in counts.most_common() if reason)
        table.add_row(kind, str(count), str(sum(counts.values())), str(found.admitted(kind)), why)
    Console(highlight=False, markup=False).print(table)
    for who, number in found.instructions.items() if set(found.instructions) != {"plain"} else ():
        typer.echo(f"{number} instructions: {who}")
    tasks = sum(map(found.admitted, found.candidates))
    typer.echo(f"{tasks} tasks in {out / 'made.jsonl'}; `rollmill tasks check {out / 'run.toml'}` checks them again")
