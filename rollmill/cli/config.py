"""`rollmill config`: the settings of a run, in the terminal. And a run's whole configuration as TOML, for --dry-run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from rollmill.reference import Section
    from rollmill.runs.run import RunConfig

TASK_FILES = "task-files"


def show_settings(
    section: Annotated[
        str,
        typer.Argument(
            metavar="SETTING",
            help="a section or a setting, dotted: `stages.rl`, `stages.rl.weight_cap`",
            show_default="",
        ),
    ] = "",
    everything: Annotated[bool, typer.Option("--all", help="print every section")] = False,
) -> None:
    """Explain the settings of a RUN.toml: type, default, and what each one does.

    Without a SETTING it explains the settings of the top level and lists the sections. For example:

        rollmill config
        rollmill config stages.rl.training.optimizer
        rollmill config stages.rl.weight_cap
        rollmill config task-files
    """
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from rollmill.cli.environments.task_files import task_files
    from rollmill.reference import find_sections, sections
    from rollmill.runs.run import RunConfig

    console = Console(highlight=False)
    if section == TASK_FILES:
        return print("\n".join(task_files()))
    if section:
        for each in find_sections(RunConfig, section):
            _print_section(console, each)
        if section == "tasks":
            console.print(f"\nThe fields of a task and the kinds of grading: `rollmill config {TASK_FILES}`")
        return
    top, *others = sections(RunConfig)
    _print_section(console, top)
    if everything:
        for each in others:
            _print_section(console, each)
        return
    console.print("\n[bold]sections[/], each explained by `rollmill config SECTION`:\n")
    table = Table.grid(padding=(0, 2))
    for name, (description, kinds) in _outline(others).items():
        told = f"{description} Kinds: {', '.join(kinds)}." if kinds else description
        table.add_row(f"  [bold cyan]{name}[/]", escape(told))
    table.add_row(
        f"  [bold cyan]{TASK_FILES}[/]", "Not a section: the format of files with tasks, and the kinds of grading."
    )
    console.print(table)


def _outline(listed: Sequence[Section]) -> dict[str, tuple[str, list[str]]]:
    """The sections of the top level by name, each once, with its description and the kinds that it has."""
    found: dict[str, tuple[str, list[str]]] = {}
    for each in listed:
        name = each.header.strip("[]")
        if "." not in name:
            _, kinds = found.setdefault(name, (each.description, []))
            kinds += [each.choice.partition(" = ")[2].strip('"')] if each.choice else []
    return found


def _print_section(console: Console, section: Section) -> None:
    from rich.markup import escape
    from rich.padding import Padding

    console.print(f"\n[bold]{escape(section.title)}[/]  {escape(section.description)}")
    if section.same_as:
        console.print(f"  The same settings as [{section.same_as}].", markup=False)
    for setting in section.settings:
        default = setting.default if setting.default in ("needed", "not set") else f"default {setting.default}"
        console.print(f"\n  [bold cyan]{escape(setting.path)}[/]  [dim]{escape(setting.type)}; {escape(default)}[/]")
        console.print(Padding(escape(setting.description), (0, 0, 0, 6), expand=False))


def print_config(config: RunConfig) -> None:
    """Print the resolved configuration as TOML that can be saved and run. A database password is left out."""
    from sqlalchemy import make_url

    from rollmill.reference import to_toml

    if config.database is not None:
        url = make_url(config.database).difference_update_query(["password"])
        config = config.model_copy(update={"database": url._replace(password=None).render_as_string()})
    typer.echo(to_toml(config), nl=False)
