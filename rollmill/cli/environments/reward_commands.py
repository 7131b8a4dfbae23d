"""`rollmill rewards replay | bias`: grade stored trajectories again; measure what a judge prefers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollmill.errors import ConfigError

if TYPE_CHECKING:
    from rollmill.environments.part_sections import RewardSection
    from rollmill.environments.rewards.judge import Bias
    from rollmill.rollouts.regrade import Regraded
    from rollmill.runs.run import RunDirectory
    from rollmill.trajectories.query import TrajectoryQuery

app = typer.Typer()

_SHOWN = 20  # trajectories with another reward that are listed


@app.command()
def replay(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="a run directory", show_default=False)],
    rewards: Annotated[
        Path | None, typer.Option(help="a TOML file with [[rewards]]; default: those of the run, as their code is now")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="only show what would change")] = False,
    task: Annotated[str | None, typer.Option(help="the task, or the beginning of its id")] = None,
    split: Annotated[str | None, typer.Option(help="train, heldout, …")] = None,
    group: Annotated[str | None, typer.Option(help="only this group")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="at most this many trajectories, the newest first")] = None,
    changed_tasks: Annotated[
        bool, typer.Option("--changed-tasks", help="also grade by tasks that are no longer as they were played")
    ] = False,
) -> None:
    """Grade the stored trajectories of a run again, and record a new grading beside the old one.

    Groups are graded whole: the filters choose trajectories, and all graded ones of their groups are graded again. A
    step that has trained on a group keeps the rewards it used; later steps use the new ones. Attempts of evaluations
    are graded again too; `--split train` leaves them out. If a task has changed since it was played, its groups are
    left as they were. For example:

        rollmill rewards replay runs/demo --dry-run
        rollmill rewards replay runs/demo --rewards stricter.toml --task fix/
    """
    import asyncio

    from rollmill.runs.opening import open_with_index
    from rollmill.trajectories.query import TrajectoryQuery

    run = open_with_index(run_dir)
    sections = None if rewards is None else _read_rewards(rewards)
    query = TrajectoryQuery(None, "graded", group, split, task_prefix=task, of_run=run.id, limit=limit)
    number, graded = asyncio.run(_replay(run, sections, query, dry_run, changed_tasks))
    _print(graded, number)
    if any(each.problem for each in graded):
        raise typer.Exit(1)


@app.command()
def bias(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="a run directory", show_default=False)],
    rewards: Annotated[
        Path | None, typer.Option(help="a TOML file with [[rewards]]; default: those of the run")
    ] = None,
    count: Annotated[int, typer.Option(min=1, help="measure on this many trajectories, the newest first")] = 20,
    filler: Annotated[int, typer.Option(min=1, help="characters that the longer text has more")] = 2000,
) -> None:
    """Measure whether a judge prefers long texts, or what it reads first.

    Each judge among the rewards is asked again about stored trajectories: with the same text, with the files before
    the transcript, and with sentences added that say nothing. Nothing is recorded. For example:

        rollmill rewards bias runs/demo --rewards judge.toml --count 50
    """
    import asyncio

    from rich.console import Console
    from rich.table import Table

    from rollmill.environments.environment import each_environment
    from rollmill.runs.opening import open_with_index

    run = open_with_index(run_dir)
    own = (section for each in each_environment(run.config) for section in each.rewards)
    sections = tuple(own) if rewards is None else _read_rewards(rewards)
    table = Table("judge", "shown", "change of the value", "error", "")
    for dimension, found in asyncio.run(_measure(run, sections, count, filler)):
        for each in found:
            table.add_row(dimension, each.name, f"{each.change:+.3f}", f"{each.error:.3f}", "bias" * each.clear)
    Console(highlight=False, markup=False).print(table)


async def _measure(
    run: RunDirectory, sections: tuple[RewardSection, ...], count: int, filler: int
) -> list[tuple[str, list[Bias]]]:
    from rollmill.environments.environment import build_tasks, each_environment
    from rollmill.environments.rewards.judge import Judge, measure_bias
    from rollmill.kinds import build
    from rollmill.rollouts.hand_in import graded_episode, load_hand_in
    from rollmill.trajectories.query import TrajectoryQuery

    judges = [each for each in map(build, sections) if isinstance(each, Judge)]
    objects, store = run.objects(), run.trajectories()
    rows = [
        row for row in store.find(TrajectoryQuery(state="graded", of_run=run.id, limit=count)) if row.submission_key
    ]
    if not judges or not rows:
        missing = "no reward of the kind `judge`" if not judges else "no graded trajectory"
        raise ConfigError(f"there is {missing}", hint="--rewards names a file with one; trajectories come from a run")
    tasks = build_tasks(run.config)
    machines = build(each_environment(run.config)[0].machine)  # a judge starts no machine
    episodes = [
        graded_episode(
            load_hand_in(objects, str(row.submission_key)), tasks.get(row.task_id), machines, store.load(row.id)
        )
        for row in rows
    ]
    return [(judge.config.dimension, await measure_bias(judge, episodes, filler)) for judge in judges]


def _read_rewards(path: Path) -> tuple[RewardSection, ...]:
    from rollmill.config import load_config
    from rollmill.environments.part_sections import RewardsFile

    return load_config(RewardsFile, path).rewards


async def _replay(
    run: RunDirectory,
    sections: tuple[RewardSection, ...] | None,
    query: TrajectoryQuery,
    dry_run: bool,
    changed_tasks: bool,
) -> tuple[int | None, list[Regraded]]:
    """The number of the new grading, and its groups. Without `sections`, each environment's own rewards grade."""
    from rich.progress import Progress

    from rollmill.environments.environment import build_tasks, each_environment, open_environments
    from rollmill.rollouts.regrade import Regrading
    from rollmill.trajectories.gradings import begin_grading

    engine, objects, store = run.database(), run.objects(), run.trajectories()
    tasks = build_tasks(run.config)
    groups = list(dict.fromkeys((row.run, row.group_id) for row in store.find(query)))
    number = None
    if groups and not dry_run:
        own = (section for each in each_environment(run.config) for section in each.rewards)
        used = [section.model_dump(mode="json") for section in sections or own]
        number = begin_grading(engine, run.id, used)
    async with open_environments(run.config, sections) as environments:
        with Progress(transient=True) as progress:
            bar = progress.add_task("grade", total=len(groups))
            parts = (engine, store, objects, tasks, environments, run.config.rollouts)
            regrading = Regrading(*parts, grading=number, changed_tasks=changed_tasks)
            return number, await regrading.grade(groups, lambda: progress.advance(bar))


def _print(graded: list[Regraded], number: int | None) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False)
    pairs = [pair for each in graded if not each.problem for pair in zip(each.old, each.new, strict=True)]
    if not graded:
        return console.print("no graded trajectory matches")
    table = Table("", "before", "after")
    before: list[Any] = [row.reward for row, _ in pairs]
    after = [reward.value for _, reward in pairs]
    table.add_row("mean reward", _mean(before), _mean(after))
    table.add_row("solved", _mean([bool(row.solved) for row, _ in pairs]), _mean([new.solved for _, new in pairs]))
    console.print(table)
    changed = [(row, new) for row, new in pairs if row.reward != new.value]
    for row, new in changed[:_SHOWN]:
        console.print(f"{row.id}  {row.reward:g} → {new.value:g}")
    if len(changed) > _SHOWN:
        console.print(f"and {len(changed) - _SHOWN} more")
    for each in graded:
        if each.problem:
            console.print(f"left as it was: {each.group}: {each.problem}")
    done = sum(not each.problem for each in graded)
    recorded = "nothing is recorded" if number is None else f"recorded as grading {number}"
    console.print(
        f"{len(pairs)} trajectories in {done} of {len(graded)} groups, {len(changed)} with another reward; {recorded}"
    )


def _mean(values: list[Any]) -> str:
    return f"{sum(values) / len(values):.3f}" if values else "-"
