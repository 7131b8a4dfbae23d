"""`rollmill eval`: measure a version of a run on held-out tasks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollmill.cli.environments.rollout_command import SERVED_MODEL, KeyOption, ModelNameOption, ModelOption
from rollmill.cli.target import VersionOption, find_target

if TYPE_CHECKING:
    from rich.progress import Progress as Bars
    from rich.table import Table

    from rollmill.cli.environment_settings import Settings
    from rollmill.evals import evaluation as evals
    from rollmill.evals.evaluation import Conduct, EvalResult
    from rollmill.evals.suite import EvalConfig, SuiteConfig
    from rollmill.rollouts.agent_endpoint import Endpoint

SHOWN = 40  # tasks in the table
PARTS = ("environments", "tasks", "harness", "machine", "pool", "rewards")  # that describe environments


def evaluate(
    directory: Annotated[
        Path, typer.Argument(metavar="RUN", help="a run directory; with --model also a RUN.toml", show_default=False)
    ],
    version: VersionOption = None,
    tasks: Annotated[
        int | None, typer.Option(min=1, help="at most this many tasks per split; default: as the run is configured")
    ] = None,
    attempts: Annotated[int | None, typer.Option(min=1, help="sampled attempts per task")] = None,
    suite: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.toml",
            help="evaluate on the environment of this file: its [tasks], [harness], [machine], [[rewards]], [rollouts] "
            "and [evals]",
            show_default=False,
        ),
    ] = None,
    model: ModelOption = None,
    model_name: ModelNameOption = SERVED_MODEL,
    key: KeyOption = None,
    json: Annotated[
        bool, typer.Option("--json", help="for programs: JSON instead of tables, every attempt too")
    ] = False,
) -> None:
    """Evaluate a version on held-out tasks: pass@1 and mean reward with 95 % intervals, pass@k, by family and by task.

    Works beside a run that is training. The attempts are recorded like any rollout: `rollmill trajectories list` shows
    them. For example:

        rollmill eval runs/demo
        rollmill eval runs/demo --version 10 --tasks 32
        rollmill eval runs/demo --version live
        rollmill eval runs/demo --suite other.toml

    With --model it evaluates any OpenAI-compatible endpoint on the same tasks with the same statistics:

        rollmill eval examples/micro.toml --model http://127.0.0.1:8000/v1 --tasks 16
    """
    from rollmill.cli.environment_settings import read_settings
    from rollmill.cli.progress import Progress
    from rollmill.errors import ConfigError
    from rollmill.launch import services
    from rollmill.rollouts.agent_endpoint import Endpoint
    from rollmill.runs.opening import open_with_index

    if model is not None:
        if suite is not None:
            raise ConfigError("--suite and --model exclude each other", hint="name the file in place of RUN")
        endpoint = Endpoint(model, key or "", model_name)
        _show(endpoint.url, _evaluate_endpoint(read_settings(directory), endpoint, tasks, attempts), json)
        return
    run = open_with_index(directory)
    settings = read_settings(suite) if suite is not None else run.config
    changed = {part: getattr(settings, part) for part in (*PARTS, "rollouts")}
    limited = limited_suite(settings.evals, tasks, attempts)
    target = find_target(run, version).pinned()
    try:
        with (
            services.serving(run, target, "eval") as (service, cluster),
            Progress(service.events, [f"evaluate {target}"], title=f"rollmill · {directory}") as progress,
        ):
            asked = replace(service, config=service.config.model_copy(update=changed))
            name = "" if suite is None else settings.name
            results = services.evaluate(asked, cluster, limited, target.version, progress.update, name=name)
    except KeyboardInterrupt:
        typer.echo("stopped; nothing was recorded as a result", err=True)
        raise typer.Exit(130) from None
    _show(str(target), results, json)


def _evaluate_endpoint(
    config: Settings, endpoint: Endpoint, tasks: int | None, attempts: int | None
) -> list[EvalResult]:
    import asyncio

    from rich.console import Console
    from rich.progress import Progress as Bars

    from rollmill.environments.environment import build_tasks, open_environments
    from rollmill.evals import evaluation as evals
    from rollmill.rollouts.agent_endpoint import EndpointProxy

    suite = limited_suite(config.evals, tasks, attempts)
    examination = evals.Examination(config.name, "endpoint", 0, config.rollouts.max_answer_tokens, config.seed)

    async def work(bar: Bars) -> list[EvalResult]:
        shown = bar.add_task(f"evaluate {endpoint.url}", total=None)

        def tell(progress: evals.Progress) -> None:
            bar.update(shown, completed=progress.done, total=progress.total)

        async with EndpointProxy(endpoint) as proxy:
            await proxy.check()
            async with open_environments(config) as environments:
                return await evals.evaluate_endpoint(
                    environments, build_tasks(config), suite, proxy, examination, config.rollouts, tell
                )

    console = Console(stderr=True)
    with Bars(*Bars.get_default_columns(), console=console) as bar:
        return asyncio.run(work(bar))


def limited_suite(configured: EvalConfig, tasks: int | None, attempts: int | None) -> EvalConfig:
    """The configured suite with fewer tasks or other attempts, as the command line says."""
    changes: dict[str, object] = {} if attempts is None else {"attempts": attempts}
    if tasks is not None:
        limited = {name: getattr(configured, name) for name in ("family_tasks", "fresh_tasks")}
        changes |= {"tasks": tasks, **{name: min(tasks, count) for name, count in limited.items() if count is not None}}
    suites = tuple(_limited(each, tasks, attempts) for each in configured.suites)
    return configured.model_copy(update={**changes, "suites": suites})


def _limited(suite: SuiteConfig, tasks: int | None, attempts: int | None) -> SuiteConfig:
    count = suite.count if tasks is None else min(tasks, suite.count)
    return suite.model_copy(update={"count": count, "attempts": attempts or suite.attempts})


def _show(title: str, results: list[EvalResult], json: bool) -> None:
    from rich.console import Console

    if json:
        typer.echo(dumps({"evaluated": title, "results": [asdict(result) for result in results]}))
        return
    console = Console()
    console.print(_table(title, results))
    families, tasks = _family_rows(results), _task_rows(results)
    if len(families) > 1:
        console.print(_rows("by family", ("family", "tasks", "attempts", "pass@1", "mean reward"), families))
    if tasks:
        console.print(_rows("by task, hardest first", ("task", "family", "solved", "mean reward"), tasks[:SHOWN]))
    if len(tasks) > SHOWN:
        console.print(f"{len(tasks) - SHOWN} more tasks: --json has every attempt")


def _table(title: str, results: list[EvalResult]) -> Table:
    rows = [
        (
            f"{result.split}, {result.mode}",
            f"{result.solved}/{result.attempts}",
            f"{result.rate:.3f} ({result.low:.3f} – {result.high:.3f})",
            f"{result.solved_once:.3f} (k = {result.k})" if result.k > 1 and result.solved_once is not None else "–",
            f"{result.reward:.3f} ({result.reward_low:.3f} – {result.reward_high:.3f})",
        )
        for result in results
    ]
    return _rows(f"{title}: 95 % intervals", ("split or suite", "solved", "pass@1", "pass@k", "mean reward"), rows)


def _family_rows(results: list[EvalResult]) -> list[tuple[str, ...]]:
    """The sampled attempts of all splits; those of a suite apart. Tasks without a family are one."""
    made: dict[str, dict[str, list[Conduct]]] = {}
    for task, family, attempts in _sampled(results):
        made.setdefault(family, {})[task] = attempts
    return [
        (family or "–", str(len(tasks)), *_figures([each for of in tasks.values() for each in of]))
        for family, tasks in sorted(made.items())
    ]


def _task_rows(results: list[EvalResult]) -> list[tuple[str, ...]]:
    known = [found for found in _sampled(results) if found[2]]
    known.sort(key=lambda found: sum(each.earned for each in found[2]) / len(found[2]))
    return [
        (task, family or "–", f"{sum(each.solved for each in made)}/{len(made)}", _figures(made)[2])
        for task, family, made in known
    ]


def _sampled(results: list[EvalResult]) -> list[tuple[str, str, list[Conduct]]]:
    """Task, family and graded attempts. Those of a suite begin with its name: two may have one id."""
    from rollmill.evals.suite import SPLITS

    return [
        (
            f"{suite}{task}",
            f"{suite}{result.families.get(task, '')}".removesuffix(": "),
            [each for each in made if not each.lost],
        )
        for result in results
        if result.mode == "sampled"
        for suite in ["" if result.split in SPLITS else f"{result.split}: "]
        for task, made in result.conduct.items()
    ]


def _figures(made: list[Conduct]) -> tuple[str, str, str]:
    if not made:
        return "0", "–", "–"
    solved, earned = (sum(each) / len(made) for each in ([one.solved for one in made], [one.earned for one in made]))
    return str(len(made)), f"{solved:.3f}", f"{earned:.3f}"


def _rows(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, overflow="fold", justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    return table
