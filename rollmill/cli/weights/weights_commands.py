"""`rollmill weights …`: show, move, check and clean up the versions in a run directory or a store."""

from __future__ import annotations

import typer

from rollmill.cli.weights import channel, difference, events_command, files, upkeep, versions

app = typer.Typer()
app.command("log")(versions.log)
app.command("show")(versions.show)
app.command("diff")(difference.diff)
app.command("verify")(versions.verify)
app.command("export")(files.export)
app.command("push")(files.push)
app.command("import")(files.import_)
app.add_typer(channel.app, name="channel")
app.command("rollback")(channel.rollback)
app.command("gc")(upkeep.gc)
app.command("mirror")(upkeep.mirror)
app.command("events")(events_command.events)
