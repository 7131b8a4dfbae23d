"""`rollmill eval`: measure a version of a run on held-out tasks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollmill.cli.rollout import SERVED_MODEL, KeyOption, ModelNameOption, ModelOption
from rollmill.cli.target import VersionOption

if TYPE_CHECKING:
    from rich.table import Table

    from rollmill.cli.settings import Settings
    from rollmill.evals.run import EvalResult
    from rollmill.evals.suite import EvalConfig
    from rollmill.rollouts.endpoint import Endpoint


def evaluate(
    directory: Annotated[
        Path, typer.Argument(metavar="RUN", help="a run directory; with --model also a RUN.toml", show_default=False)
    ],
    version: VersionOption = None,
    tasks: Annotated[
        int | None, typer.Option(min=1, help="at most this many tasks per split; default: as the run is configured")
    ] = None,
    attempts: Annotated[int | None, typer.Option(min=1, help="sampled attempts per task")] = None,
    model: ModelOption = None,
    model_name: ModelNameOption = SERVED_MODEL,
    key: KeyOption = None,
) -> None:
    """Evaluate a version on held-out tasks and print solve rates with 95 % intervals.

    Works beside a run that is training. The attempts are recorded like any rollout: `rollmill trajectories list` shows
    them. For example:

        rollmill eval runs/demo
        rollmill eval runs/demo --version 10 --tasks 32
        rollmill eval runs/demo --version live

    With --model it evaluates any OpenAI-compatible endpoint on the same tasks with the same statistics:

        rollmill eval examples/micro.toml --model http://127.0.0.1:8000/v1 --tasks 16
    """
    from rich.console import Console

    from rollmill.cli.progress import Progress
    from rollmill.cli.target import find_target
    from rollmill.cluster.naming import open_with_index
    from rollmill.cluster.service import evaluate, serving

    if model is not None:
        from rollmill.cli.settings import read_settings
        from rollmill.rollouts.endpoint import Endpoint

        _evaluate_endpoint(read_settings(directory), Endpoint(model, key or "", model_name), tasks, attempts)
        return
    run = open_with_index(directory)
    suite = limited_suite(run.config.evals, tasks, attempts)
    target = find_target(run, version).pinned()
    try:
        with (
            serving(run, target, "eval") as (service, cluster),
            Progress(service.events, [f"evaluate {target}"], title=f"rollmill · {directory}") as progress,
        ):
            results = evaluate(service, cluster, suite, target.version, progress.update)
    except KeyboardInterrupt:
        typer.echo("stopped; nothing was recorded as a result", err=True)
        raise typer.Exit(130) from None
    Console().print(_table(str(target), results))


def _evaluate_endpoint(config: Settings, endpoint: Endpoint, tasks: int | None, attempts: int | None) -> None:
    import asyncio

    from rich.console import Console
    from rich.progress import Progress

    from rollmill.environments.environment import build_tasks, open_environment
    from rollmill.evals import run as evals
    from rollmill.evals.endpoint import evaluate_endpoint
    from rollmill.rollouts.endpoint import EndpointProxy

    suite = limited_suite(config.evals, tasks, attempts)
    examination = evals.Examination(config.name, "endpoint", 0, config.rollouts.max_answer_tokens, config.seed)

    async def work(bar: Progress) -> list[EvalResult]:
        shown = bar.add_task(f"evaluate {endpoint.url}", total=None)

        def tell(progress: evals.Progress) -> None:
            bar.update(shown, completed=progress.done, total=progress.total)

        async with EndpointProxy(endpoint) as proxy:
            await proxy.check()
            async with open_environment(config) as environment:
                return await evaluate_endpoint(
                    environment, build_tasks(config), suite, proxy, examination, config.rollouts, tell
                )

    console = Console(stderr=True)
    with Progress(*Progress.get_default_columns(), console=console) as bar:
        results = asyncio.run(work(bar))
    Console().print(_table(endpoint.url, results))


def limited_suite(configured: EvalConfig, tasks: int | None, attempts: int | None) -> EvalConfig:
    """The configured suite with fewer tasks or other attempts, as the command line says."""
    changes: dict[str, int] = {} if attempts is None else {"attempts": attempts}
    if tasks is not None:
        limited = {name: getattr(configured, name) for name in ("family_tasks", "fresh_tasks")}
        changes |= {"tasks": tasks, **{name: min(tasks, count) for name, count in limited.items() if count is not None}}
    return configured.model_copy(update=changes)


def _table(title: str, results: list[EvalResult]) -> Table:
    from rich.table import Table

    table = Table(title=title)
    for column in ("split", "mode", "solved", "rate", "95 % interval"):
        table.add_column(column)
    for result in results:
        interval = f"{result.low:.3f} – {result.high:.3f}"
        table.add_row(result.split, result.mode, f"{result.solved}/{result.attempts}", f"{result.rate:.3f}", interval)
    return table
