"""`rollmill machines setup | doctor`: which kinds of machines work on this host."""

from __future__ import annotations

import typer

app = typer.Typer(help="Set up virtual machines, and see which kinds of machines work here.", no_args_is_help=True)


@app.command("setup")
def setup() -> None:
    """Get what virtual machines need: QEMU and a Linux kernel, from Debian packages. For example:

        rollmill machines setup

    QEMU is installed with apt-get, which needs root. Without root, this prints the command to run. The kernel is only
    unpacked into your cache directory. What is already there stays as it is.
    """
    from rollmill.environments.machines.qemu.setup import set_up

    set_up(typer.echo)
    typer.echo("`rollmill machines doctor` tries it")


@app.command("doctor")
def doctor() -> None:
    """Try every kind of machine: start, run a command, snapshot, restore. For example:

        rollmill machines doctor

    The exit code is 1 if no kind works.
    """
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from rollmill.cli.doctor import probe_machines

    table = Table("", "kind", "kernel", "snapshot keeps", "slowdown", "start", "restore", "why not")
    works = False
    for kind, found in probe_machines().items():
        if isinstance(found, str):
            table.add_row("[yellow]no[/]", kind, "", "", "", "", "", escape(found))
            continue
        works = True
        able = found.capabilities
        times = (f"{found.start_s * 1000:.0f} ms", f"{found.restore_s * 1000:.0f} ms")
        kept = "memory and files" if able.snapshot == "full" else able.snapshot
        table.add_row("[green]ok[/]", kind, able.kernel, kept, f"{able.slowdown:.1f}", *times, "")
    Console().print(table)
    if not works:
        raise typer.Exit(1)
