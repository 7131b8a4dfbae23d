"""`rollmill plan`: how to divide GPUs between training and serving, before any is rented."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollmill.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from rollmill.runs.plan import Plan


def plan_run(
    source: Annotated[Path, typer.Argument(metavar="RUN", help="a RUN.toml")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="changes to it")] = None,
    gpus: Annotated[int, typer.Option(min=1, help="how many GPUs there are")] = 1,
    gpu: Annotated[str, typer.Option(help="which: h200 (measured) or h100 (scaled from it)")] = "h200",
    rollout_tokens: Annotated[
        int | None, typer.Option(min=1, help="mean tokens of a rollout", show_default="half of the context")
    ] = None,
) -> None:
    """Estimate memory, tokens per second and weight traffic of a run's RL stage on GPUs, and divide them.

    The estimates follow from measurements on one H200. That speed grows with the number of GPUs is assumed. Nothing is
    started.

    For example:

        rollmill plan examples/micro.toml --gpus 8
        rollmill plan run.toml --gpus 64 --rollout-tokens 6000 engine.max_batch=256
    """
    from rich.console import Console

    from rollmill.config import load_config
    from rollmill.runs.plan import GPUS, plan
    from rollmill.runs.run import RunConfig

    if gpu not in GPUS:
        raise ConfigError(f"there are no figures for --gpu {gpu}", hint=f"known: {', '.join(GPUS)}")
    config = load_config(RunConfig, source, overrides or ())
    planned = plan(config, GPUS[gpu], gpus, rollout_tokens)
    console = Console(highlight=False)
    console.print(_head(planned, gpus))
    console.print(_table(planned))
    if not GPUS[gpu].measured:
        console.print(f"{gpu}: scaled from the H200 by its memory and bandwidth, not measured.")


def _head(plan: Plan, gpus: int) -> str:
    from rollmill.models.counts import active_parameters, all_parameters

    total, active = all_parameters(plan.model), active_parameters(plan.model)
    parameters = f"{_count(total)} parameters, {_count(active)} active per token"
    if plan.shared:
        return f"1 × {plan.gpu.name}: trainer and engine share it · {parameters}"
    engines = f"{plan.engine.engines} engine{'s' if plan.engine.engines > 1 else ''}"
    each = f" of {plan.engine.gpus} GPUs (needs an engine with tensor parallelism)" if plan.engine.gpus > 1 else ""
    return f"{gpus} × {plan.gpu.name}: {plan.trainer.ranks} for the trainer, {engines}{each} · {parameters}"


def _table(plan: Plan) -> Table:
    from rich.table import Table

    trainer, engine = plan.trainer, plan.engine
    memory = plan.gpu.memory / (2 if plan.shared else 1)
    table = Table("", "estimate", "from")
    table.add_row(
        "trainer, memory per GPU",
        f"{_gib(trainer.bytes)} of {_gib(memory)}",
        f"state {_gib(trainer.state_bytes)}, activations of {trainer.tokens_per_pass:,} tokens "
        f"{_gib(trainer.kept_bytes)}; state fits on {trainer.least_ranks} or more",
    )
    table.add_row("trainer, tokens/s", f"{trainer.tokens_per_second:,.0f}", f"ranks: {trainer.ranks}")
    table.add_row(
        "engine, memory",
        f"{_gib(engine.weight_bytes)} of weights",
        f"beside them {engine.cache_tokens:,} tokens of KV cache fit",
    )
    table.add_row(
        "engines, tokens/s",
        f"{engine.tokens_per_second * engine.engines:,.0f}",
        f"{engine.engines} with {engine.batch} requests at a time (engine.max_batch)",
    )
    table.add_row(
        "one step",
        _seconds(plan.step_seconds),
        f"{plan.step_tokens:,.0f} tokens: training {_seconds(plan.train_seconds)}, "
        f"sampling {_seconds(plan.generate_seconds)}",
    )
    for size, regions in _by_size(plan).items():
        hourly = size * 3600 / plan.step_seconds
        table.add_row(
            "weights, per region",
            f"{size / 1e6:,.1f} MB per step",
            f"{hourly / 1e9:,.1f} GB per hour to each of {', '.join(regions)}; {_seconds(size / 125e6)} at 1 Gbit/s",
        )
    return table


def _by_size(plan: Plan) -> dict[float, list[str]]:
    """Bytes per step → the regions that get so many: those whose engines serve the same forms."""
    found: dict[float, list[str]] = {}
    for region, size in plan.region_bytes.items():
        found.setdefault(size, []).append(region)
    return found


def _gib(count: float) -> str:
    return f"{count / 2**30:,.1f} GiB"


def _count(number: int) -> str:
    return f"{number / 1e9:,.1f}B" if number >= 1e9 else f"{number / 1e6:,.1f}M"


def _seconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f} ms" if seconds < 1 else f"{seconds:,.1f} s"
