"""The `rollmill` command. Wiring only: each command has its own module, imported when it is called.

A module of commands imports what they run inside its functions, so that a help needs none of it and comes at once.
"""

from __future__ import annotations

import errno
import functools
import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from textwrap import TextWrapper, dedent, indent
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from rollmill import __version__
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


# name → the function of the command or the group of commands, and what it does
COMMANDS = {
    "demo": (
        "demo:demo",
        "Mid-train a small mixture of experts, train it with RL on coding tasks, and report what it learned.",
    ),
    "train": ("train:train", "Train a model: every stage of the run in order, then a report."),
    "eval": (
        "evaluate:evaluate",
        "Evaluate a version on held-out tasks: pass@1 and mean reward with 95 % intervals, pass@k, by family and by "
        "task.",
    ),
    "gate": (
        "serving.gate_command:gate",
        "Compare a version with the live one on held-out tasks, and say whether it may become live.",
    ),
    "rollout": (
        "environments.rollout_command:rollout",
        "Play one episode, and print its transcript, reward and evidence.",
    ),
    "serve": (
        "serving.serve:serve",
        "Serve a model: production traffic through a gateway, every conversation recorded.",
    ),
    "plan": (
        "plan_command:plan_run",
        "Estimate memory, tokens per second and weight traffic of a run's RL stage on GPUs, and divide them.",
    ),
    "runs": ("runs:runs", "List the runs: state, stage and step, result, age and size."),
    "status": ("runs:status", "Show one run: its state, the processes that use it, its figures and files."),
    "dashboard": (
        "dashboard:dashboard",
        "Show a run, or a store, as a live page: figures, processes, queues, costs, versions, trajectories.",
    ),
    "logs": ("runs:logs", "Print the end of a role's log."),
    "stop": ("runs:stop", "Stop everything that uses a run: its training, and what `serve` and `eval` run beside it."),
    "scale": ("runs:scale", "Change how many engines a run has, while it trains."),
    "rm": ("runs:remove", "Delete a run directory with all its weights and trajectories."),
    "init": ("init_command:init", "Write a working start for tasks and a reward of your own: change it step by step."),
    "config": ("config:show_settings", "Explain the settings of a RUN.toml: type, default, and what each one does."),
    "doctor": ("doctor:doctor", "Check what this machine has, what it lacks, and what to do about it."),
    "cycle": (
        "serving.cycle_commands:app",
        "Real-time RL: collect, distil, train, gate, canary, then promote, hold or roll back.",
    ),
    "tasks": (
        "environments.task_commands:app",
        "Look at the tasks of a run, check them on real machines, make more.",
    ),
    "images": ("environments.image_commands:app", "Build, list, share and remove machine images."),
    "machines": (
        "environments.machine_commands:app",
        "Set up virtual machines, and see which kinds of machines work here.",
    ),
    "model": ("model_commands:app", "Models: get one, look at one, turn a dense one into a mixture of experts."),
    "weights": (
        "weights.weights_commands:app",
        "Versions of the weights: list, compare, verify, export, import, copy and clean up.",
    ),
    "trajectories": (
        "experience.trajectory_commands:app",
        "Read and export what agents did, which weights sampled it, and how it was graded.",
    ),
    "sessions": ("experience.session_commands:app", "Look at the sessions of a run's gateways."),
    "rewards": ("environments.reward_commands:app", "Grade stored trajectories again, and measure judges."),
    "keys": ("serving.key_commands:app", "Make, list and revoke API keys of a run's gateway."),
}


class Loaded(Mapping[str, Any]):
    """The commands by name. The module of one is imported when it is looked up, and not for a list of their names."""

    def __getitem__(self, name: str) -> Any:
        return _load(name)

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)


@functools.cache
def _load(name: str) -> Any:
    place, meaning = COMMANDS[name]
    module, _, attribute = place.partition(":")
    found = getattr(import_module(f"rollmill.cli.{module}"), attribute)
    alone = typer.Typer(rich_markup_mode=None)
    if isinstance(found, typer.Typer):
        alone.add_typer(found, name=name, help=meaning, no_args_is_help=True)
    else:
        alone.command(name)(found)
    _keep_examples(alone)
    return typer.main.get_group(alone).commands[name]


class Rollmill(Group):
    """The whole command: it has no other commands than those of the table."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands: Any = Loaded()

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, meaning) for name, (_, meaning) in COMMANDS.items()])


app = typer.Typer(
    name="rollmill",
    cls=Rollmill,
    help=HELP,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # typer's boxes of rich need 170 modules more, most of them for Markdown
)


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
