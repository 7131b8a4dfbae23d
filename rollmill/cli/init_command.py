"""`rollmill init`: write a small package of one's own that works: tasks, a reward, a run, a test."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Annotated

import typer

from rollmill.errors import ConfigError

_SUFFIX = ".txt"  # of the templates, so that no tool takes them for modules of Rollmill


def init(
    directory: Annotated[Path, typer.Argument(metavar="DIRECTORY", help="the directory to create", show_default=False)],
) -> None:
    """Write a working start for tasks and a reward of your own: change it step by step.

    For example:

        rollmill init my-env
    """
    files = templates()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        taken = sorted(name for name in files if (directory / name).exists())
        if taken:
            raise ConfigError(f"{directory / taken[0]} exists already", hint="name a new directory")
        if (directory / "run.json").exists():
            raise ConfigError(f"{directory} holds a run", hint="name a new directory")
        for name, text in files.items():
            (directory / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{directory} cannot be written: {error.strerror}", hint="name another directory") from None
    typer.echo(f"wrote {', '.join(sorted(files))}\nnext: cd {directory} && rollmill train run.toml")


def templates() -> dict[str, str]:
    """What is written: name → text."""
    found = resources.files("rollmill.cli").joinpath("templates").iterdir()
    return {each.name.removesuffix(_SUFFIX): each.read_text("utf-8") for each in found if each.name.endswith(_SUFFIX)}
