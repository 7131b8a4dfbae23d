"""`rollmill serve`: an OpenAI-compatible endpoint on the weights of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def serve(
    directory: Annotated[Path, typer.Argument(help="a run directory")],
    version: Annotated[
        int | None, typer.Option(min=0, help="serve this version; default: follow the newest one")
    ] = None,
) -> None:
    """Serve a run's model: the gateway with its engines, production traffic, every conversation recorded.

    Prints the address and where the key lies; anything that speaks OpenAI chat completions can talk to it.
    Ctrl-C stops it.
    """
    import time

    from rich.console import Console

    from rollmill.cluster.drive import serving
    from rollmill.cluster.run import RunDirectory

    run = RunDirectory.open(directory)
    console = Console()
    with serving(run, version) as cluster:
        console.print(f"serving {run.config.line}@{'newest' if version is None else version} of {directory}")
        console.print(f"  base URL  {run.url('gateway')}/v1")
        console.print(f"  API key   `production_key` in {directory / 'run.json'}", highlight=False)
        console.print("Ctrl-C stops it.")
        try:
            while True:
                cluster.watch()
                time.sleep(0.5)
        except KeyboardInterrupt:
            console.print("stopped")
