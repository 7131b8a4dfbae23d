"""The `rollmill` command. Wiring only: a command lives in a module of its own and imports what it needs when called."""

from __future__ import annotations

import sys
from importlib import metadata
from typing import Annotated

import typer

from rollmill.cli import config, demo, doctor, evaluate, model, runs, serve, train, trajectories, weights
from rollmill.errors import RollmillError

app = typer.Typer(
    name="rollmill",
    help="Train your own agent model inside your own product.\n\nStart with `rollmill demo`: the whole circle on this "
    "machine's CPU in a few minutes, with a report to open in the browser.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
app.command("demo")(demo.demo)
app.command("train")(train.train)
app.command("eval")(evaluate.evaluate)
app.command("serve")(serve.serve)
app.command("runs")(runs.runs)
app.command("status")(runs.status)
app.command("logs")(runs.logs)
app.command("stop")(runs.stop)
app.command("rm")(runs.remove)
app.add_typer(model.app, name="model")
app.add_typer(weights.app, name="weights")
app.add_typer(trajectories.app, name="trajectories")
app.command("config")(config.show_settings)
app.command("doctor")(doctor.doctor)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"rollmill {metadata.version('rollmill')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="print the version and exit")
    ] = False,
) -> None:
    """Options of `rollmill` itself."""


def main() -> None:
    try:
        app()
    except RollmillError as error:
        # The message says what went wrong and what to do: no traceback.
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
