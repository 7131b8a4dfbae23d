"""`rollmill demo`: mid-training, RL and evaluation on a laptop's CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def demo(
    seed: Annotated[int, typer.Option(help="everything random follows from it")] = 0,
    name: Annotated[
        str, typer.Option(help="the run's name and directory under runs/", show_default="demo, demo-2, …")
    ] = "",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="print the whole configuration as commented TOML and stop")
    ] = False,
    root: Annotated[Path, typer.Option(help="the directory that holds the runs")] = Path("runs"),
) -> None:
    """Mid-train a small mixture of experts, train it with RL on coding tasks, and report what it learned.

    Takes a few minutes on two cores. A trainer, two engines in two regions, a gateway and isolated machines all run
    for real. The report opens in a browser.

    For example:

        rollmill demo
        rollmill demo --seed 1 --name second
    """
    from rollmill.cli.config import print_config
    from rollmill.cli.train import run_to_report
    from rollmill.cluster.run import RunConfig, RunDirectory
    from rollmill.config import load_config
    from rollmill.demo import CONFIG

    name = name or unused_name(root)
    config = load_config(RunConfig, CONFIG, [f'name="{name}"', f"seed={seed}"])
    if dry_run:
        print_config(config)
        return
    run_to_report(RunDirectory.create(root, config))


def unused_name(root: Path) -> str:
    number = 1
    while (root / (name := "demo" if number == 1 else f"demo-{number}")).exists():
        number += 1
    return name
