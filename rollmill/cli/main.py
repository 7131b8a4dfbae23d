"""The `rollmill` command. Wiring only: a command lives in a module of its own and imports what it needs when called."""

from __future__ import annotations

import sys

import typer

from rollmill.cli import config, demo, doctor, evaluate, model, serve, train, trajectories, weights
from rollmill.errors import RollmillError

app = typer.Typer(
    name="rollmill",
    help="Train your own agent model inside your own product.\n\nStart with `rollmill demo`: the whole circle on this "
    "machine's CPU in a few minutes, with a report to open in the browser.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
app.command("demo")(demo.demo)
app.command("train")(train.train)
app.command("eval")(evaluate.evaluate)
app.command("serve")(serve.serve)
app.add_typer(model.app, name="model")
app.add_typer(weights.app, name="weights")
app.add_typer(trajectories.app, name="trajectories")
app.command("config")(config.show_settings)
app.command("doctor")(doctor.doctor)


def main() -> None:
    try:
        app()
    except RollmillError as error:
        # What went wrong and what to do about it; a traceback would help nobody here.
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
