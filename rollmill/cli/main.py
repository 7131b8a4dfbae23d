"""The `rollmill` command. Wiring only: each command has its own module, which imports what it needs when called."""

from __future__ import annotations

import errno
import inspect
import re
import sys
from textwrap import TextWrapper, dedent, indent
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from rollmill import __version__
from rollmill.cli import config, dashboard, demo, doctor, evaluate, init, model, plan, runs, train, weights
from rollmill.cli.environments import image_commands as images
from rollmill.cli.environments import machine_commands as machines
from rollmill.cli.environments import reward_commands as rewards
from rollmill.cli.environments import rollout_command as rollout
from rollmill.cli.environments import task_commands as tasks
from rollmill.cli.experience import session_commands as sessions
from rollmill.cli.experience import trajectory_commands as trajectories
from rollmill.cli.serving import cycle_commands as cycle
from rollmill.cli.serving import gate_command as gate
from rollmill.cli.serving import key_commands as keys
from rollmill.cli.serving import serve
from rollmill.errors import RollmillError

HELP = """Train your own agent model inside your own product.

Start with the demo: mid-training, RL, evaluation and a report, on this machine's CPU in a few minutes.

\b
  rollmill doctor                               # can this machine run it?
  rollmill demo                                 # leaves runs/demo/report.html
  rollmill train examples/micro.toml --dry-run  # the settings, explained
  rollmill train examples/micro.toml            # a run of your own
  rollmill serve runs/micro                     # talk to the result

`--help` after a command explains it, and `rollmill config` explains the settings.
"""


class Group(TyperGroup):
    """Lists its commands with the whole first sentence of each, where typer would cut it."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        rows = [(name, each.get_short_help_str(1000)) for name, each in self.commands.items() if not each.hidden]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


app = typer.Typer(
    name="rollmill",
    cls=Group,
    help=HELP,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # typer's boxes of rich need 170 modules more, most of them for Markdown
)
app.command("demo")(demo.demo)
app.command("train")(train.train)
app.command("eval")(evaluate.evaluate)
app.command("gate")(gate.gate)
app.command("rollout")(rollout.rollout)
app.command("serve")(serve.serve)
app.command("plan")(plan.plan_run)
app.command("runs")(runs.runs)
app.command("status")(runs.status)
app.command("dashboard")(dashboard.dashboard)
app.command("logs")(runs.logs)
app.command("stop")(runs.stop)
app.command("scale")(runs.scale)
app.command("rm")(runs.remove)
app.command("init")(init.init)
app.add_typer(cycle.app, name="cycle")
app.add_typer(tasks.app, name="tasks")
app.add_typer(images.app, name="images")
app.add_typer(machines.app, name="machines")
app.add_typer(model.app, name="model")
app.add_typer(weights.app, name="weights")
app.add_typer(trajectories.app, name="trajectories")
app.add_typer(sessions.app, name="sessions")
app.add_typer(rewards.app, name="rewards")
app.add_typer(keys.app, name="keys")
app.command("config")(config.show_settings)
app.command("doctor")(doctor.doctor)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"rollmill {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="print the version and exit")
    ] = False,
) -> None:
    """Options of `rollmill` itself."""


def _folded(code: str) -> str:
    """Examples that fit 80 columns and still work when they are copied: long lines go on after a backslash."""
    fold = TextWrapper(74, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    return "\n".join(" \\\n".join(fold.wrap(line)) for line in dedent(code).strip().splitlines())


def _keep_examples(group: typer.Typer) -> None:
    """Mark the indented examples in docstrings: typer would join their lines."""
    for command in group.registered_commands:
        text = inspect.cleandoc(command.help or (command.callback.__doc__ if command.callback else "") or "")
        command.help = re.sub(
            r"(?m)(?:^ {4}.*(?:\n|\Z))+", lambda code: f"\b\n{indent(_folded(code[0]), '  ')}\n", text
        )
    for below in group.registered_groups:
        if below.typer_instance is not None:
            below.typer_instance.info.cls = Group
            _keep_examples(below.typer_instance)


_keep_examples(app)


# What a user can do about an error of the operating system. Any other one is a fault of ours, with its traceback.
_NOT_ALLOWED = "this user may not do that; check the owner and the permissions"
_FULL = "make room there; what was written before is kept"
_REMEDIES = {
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), _NOT_ALLOWED),
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), _FULL),
}


def main() -> None:
    try:
        app()
    except RollmillError as error:
        # The message says what went wrong and what to do: no traceback.
        print(f"error: {error}", file=sys.stderr)
    except OSError as error:
        if error.errno not in _REMEDIES:
            raise
        where = f"{error.filename}: " if error.filename else ""
        print(f"error: system: {where}{error.strerror}\nhint: {_REMEDIES[error.errno]}", file=sys.stderr)
    else:
        return
    sys.exit(1)
