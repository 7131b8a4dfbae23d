"""`rollmill tasks list | show | check | make`: look at the tasks of a run, check them on real machines, make others."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollmill.cli.environments.make_command import make
from rollmill.environments.task import Task, TaskSet
from rollmill.errors import ConfigError

if TYPE_CHECKING:
    from rollmill.cli.environment_settings import Settings
    from rollmill.environments.reward import Reward
    from rollmill.rollouts.check_task import TaskCheck

app = typer.Typer()
app.command()(make)

Source = Annotated[Path, typer.Argument(metavar="RUN", help="a RUN.toml or a run directory", show_default=False)]
Count = Annotated[
    int, typer.Option(min=1, help="tasks per split of a generated task set; a list of tasks is always complete")
]
Split = Annotated[str | None, typer.Option(help="only this split: train, heldout, …")]
_AT_ONCE = 4  # tasks that are checked at the same time


@app.command("list")
def list_tasks(
    source: Source,
    split: Split = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object per line")] = False,
    count: Count = 20,
) -> None:
    """List tasks: id, split, family, tags.

    For example:

        rollmill tasks list run.toml --split heldout
    """
    from rich.console import Console
    from rich.table import Table

    _, tasks = _open(source)
    table = Table("id", "split", "family", "tags")
    for task in _every(tasks, split, count):
        facts = {"id": task.id, "split": task.split, "family": task.family, "tags": dict(task.tags)}
        if as_json:
            typer.echo(json.dumps(facts))
        tags = ", ".join(f"{key}={value}" for key, value in task.tags.items())
        table.add_row(*(_plain(each) for each in (task.id, task.split, task.family, tags)))
    if not as_json:
        Console(highlight=False, markup=False).print(table)


@app.command("show")
def show_task(
    source: Source,
    task_id: Annotated[str, typer.Argument(metavar="ID", help="the task", show_default=False)],
    grading: Annotated[bool, typer.Option("--grading", help="also print the hidden grading and the reference")] = False,
) -> None:
    """Show one task: what the agent is asked, its files, what is handed in, how it is graded.

    For example:

        rollmill tasks show run.toml greet --grading
    """
    _, tasks = _open(source)
    task = tasks.get(task_id)
    limit = "as the run says" if task.timeout_s is None else f"{task.timeout_s:g} s"
    typer.echo(
        f"{_plain(task.id)}  split {task.split}, family {task.family or '-'}, image {task.image}, time {limit}\n"
    )
    for message in task.messages:
        typer.echo(f"{message['role']}: {_plain(str(message['content']))}\n")
    for path, data in task.files.items():
        typer.echo(f"file {_plain(path)} ({len(data)} bytes)")
    whole = not isinstance(task.submission, Sequence)
    typer.echo(f"handed in: {'the whole diff' if whole else ', '.join(map(_plain, task.paths)) or 'nothing'}")
    kind = task.grading.get("kind", "-")
    typer.echo(f"graded by: {kind} ({', '.join(task.grading) or 'no grading'}); reference: {len(task.reference)} files")
    if grading:
        typer.echo(json.dumps(dict(task.grading), indent=2, default=str))
        for path, data in task.reference.items():
            typer.echo(f"\nreference {_plain(path)}:\n{_plain(data.decode('utf-8', 'replace'))}")


@app.command("check")
def check_tasks(
    source: Source,
    task_id: Annotated[str | None, typer.Option("--task", metavar="ID", help="only this task")] = None,
    repeat: Annotated[int, typer.Option(min=1, help="grade this many times; the verdict must not change")] = 2,
    split: Split = None,
    count: Count = 20,
) -> None:
    """Check tasks on real machines: the reference solves it, doing nothing does not, hidden parts cannot be read.

    Each result is printed as it comes; Ctrl-C keeps those that are there. Ends with exit code 1 if a task fails or
    could not be loaded. For example:

        rollmill tasks check run.toml
        rollmill tasks check run.toml --task greet --repeat 5
    """
    import asyncio

    config, tasks = _open(source, quiet=True)
    chosen = [tasks.get(task_id)] if task_id is not None else list(_every(tasks, split, count))
    width = max((len(task.id) for task in chosen), default=4)
    typer.echo(f" {'task':<{width}}  reference  nothing  result")
    checks: list[TaskCheck] = []

    def show(check: TaskCheck) -> None:
        checks.append(check)
        values = ["-" if value is None else f"{value:g}" for value in (check.reference, check.nothing)]
        typer.echo(f" {_plain(check.task):<{width}}  {values[0]:>9}  {values[1]:>7}  {_plain(_result(check))} ")

    stopped = False
    try:
        asyncio.run(_check(config, chosen, repeat, show))
    except KeyboardInterrupt:
        stopped = True
    unread: list[str] = [] if task_id is not None else list(tasks.problems)
    for problem in unread:
        typer.echo(f"left out: {_plain(problem)}", err=True)
    for weakness in [*_weaknesses(config), *_weak_tasks(checks)]:
        typer.echo(weakness)
    failed = sum(bool(check.problems) for check in checks)
    typer.echo(
        f"{len(checks) - failed} of {len(checks)} tasks are all right, {len(unread)} problems while reading them"
    )
    if stopped:
        typer.echo(f"stopped: {len(chosen) - len(checks)} of {len(chosen)} tasks were not checked", err=True)
        raise typer.Exit(130)
    if failed or unread:
        raise typer.Exit(1)


async def _check(config: Settings, tasks: list[Task], repeat: int, show: Callable[[TaskCheck], None]) -> None:
    import asyncio

    from rich.console import Console
    from rich.progress import Progress

    from rollmill.environments.environment import open_environments
    from rollmill.rollouts.check_task import check_task

    slots = asyncio.Semaphore(_AT_ONCE)
    async with open_environments(config) as environments:
        with Progress(transient=True, console=Console(stderr=True)) as progress:
            bar = progress.add_task("check", total=len(tasks))

            async def one(task: Task) -> None:
                async with slots:
                    chosen = environments.of(task)
                    show(await check_task(task, chosen.machines, chosen.grader, repeat))
                progress.advance(bar)

            await asyncio.gather(*map(one, tasks))


def _result(check: TaskCheck) -> str:
    if check.problems:
        return "; ".join(check.problems)
    return "ok" if check.reference is not None else "ok, but without a reference nothing shows that it can be solved"


def _weak_tasks(checks: list[TaskCheck]) -> list[str]:
    """What is not protected in single tasks, with their names."""
    named: dict[str, list[str]] = {}
    for check in checks:
        if check.weak:
            named.setdefault(check.weak, []).append(_plain(check.task))
    most = 5
    return [
        f"{len(tasks)} tasks ({', '.join(tasks[:most])}{' …' if len(tasks) > most else ''}): {weak}"
        for weak, tasks in named.items()
    ]


def _weaknesses(config: Settings) -> list[str]:
    """What each reward cannot protect, as it says itself."""
    from rollmill.environments.environment import each_environment
    from rollmill.kinds import build

    own = [section for each in each_environment(config) for section in each.rewards]
    rewards: list[Reward] = [build(section) for section in own]
    unsaid = "it does not say (`cannot_protect`)"
    return list(
        dict.fromkeys(f"reward {each.name} cannot protect: {each.cannot_protect or unsaid}" for each in rewards)
    )


def _open(source: Path, *, quiet: bool = False) -> tuple[Settings, TaskSet]:
    """With `quiet`, the caller shows the problems of the tasks, so that they are not logged."""
    from rollmill.cli.environment_settings import read_settings
    from rollmill.environments.environment import build_tasks, each_environment

    config = read_settings(source)
    if not each_environment(config):
        raise ConfigError(f"{source} has no [tasks]", hint="`rollmill config tasks` explains the section")
    log = logging.getLogger("rollmill.environments.tasks.listed")
    log.disabled = quiet
    try:
        tasks = build_tasks(config)
    finally:
        log.disabled = False
    return config, tasks


def _every(tasks: TaskSet, split: str | None, count: int) -> list[Task]:
    """All tasks of a list; the first `count` per split of a generated task set."""
    listed = tasks.listed()
    if listed is not None:
        return [task for task in listed if split in (None, task.split)]
    found: dict[str, Any] = {}
    if split in (None, "train"):
        found |= {task.id: task for task in itertools.islice(tasks.train(0), count)}
    if split != "train":
        found |= {task.id: task for task in tasks.heldout(split or "heldout", count)}
    return list(found.values())


def _plain(text: str) -> str:
    """Text of a task without characters that steer a terminal."""
    return "".join(each if each.isprintable() or each in "\n\t" else "\ufffd" for each in text)
