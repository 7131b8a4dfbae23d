"""`rollmill weights …`: the versions in a run directory or a store: look at them, move them, keep them right."""

from __future__ import annotations

import typer

from rollmill.cli.weights import channel, difference, events, files, upkeep, versions

app = typer.Typer(
    help="Versions of the weights: what was published, where it went, and whether every byte of it is still right.",
    no_args_is_help=True,
)
app.command("log")(versions.log)
app.command("show")(versions.show)
app.command("diff")(difference.diff)
app.command("verify")(versions.verify)
app.command("export")(files.export)
app.command("import")(files.import_)
app.add_typer(channel.app, name="channel")
app.command("rollback")(channel.rollback)
app.command("gc")(upkeep.gc)
app.command("mirror")(upkeep.mirror)
app.command("events")(events.events)
