"""`rollmill weights channel list | history | set` and `rollmill weights rollback`: read and move named pointers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from rollmill.cli import display
from rollmill.cli.display import console, safe
from rollmill.cli.weights.places import LineOfNumber, Place, Token, Where, Which, find_version, open_place
from rollmill.errors import WeightsError

if TYPE_CHECKING:
    from rollmill.types import Version
    from rollmill.weights.reading.channels import ChannelEntry

app = typer.Typer(
    help="Channels: named pointers to versions. Moving one adds an entry; old entries stay.", no_args_is_help=True
)
Name = Annotated[str, typer.Argument(metavar="CHANNEL", help="for example live")]


@app.command("list")
def list_channels(where: Where, token: Token = None) -> None:
    """List the channels and the version each points at.

    For example:

        rollmill weights channel list runs/demo
    """
    from rollmill.weights import Channels

    channels = Channels(open_place(where, token).objects)
    made = display.table("channel", "version", "entry", "when", numbers=("entry",))
    for name in channels.names():
        entry = channels.entry(name)
        if entry is not None:
            made.add_row(display.safe(name), display.safe(entry.version), str(entry.number), display.when(entry.at))
    display.console().print(made if made.row_count else "no channels")


@app.command()
def history(where: Where, name: Name, token: Token = None) -> None:
    """Show the version a channel points at, and those before.

    For example:

        rollmill weights channel history runs/demo live
    """
    entries = _entries(open_place(where, token), name)
    made = display.table("entry", "version", "when", title=f"channel {name}", numbers=("entry",))
    for entry in reversed(entries):
        made.add_row(str(entry.number), display.safe(entry.version), display.when(entry.at))
    display.console().print(made)


@app.command("set")
def set_channel(
    where: Where,
    name: Name,
    version: Which,
    expect: Annotated[
        int | None, typer.Option(min=0, help="only if this entry is still the newest (0: the channel is new)")
    ] = None,
    line: LineOfNumber = None,
    token: Token = None,
) -> None:
    """Point a channel at a version, after checking that all objects of that version exist.

    Where the run has a section [gate], `live` takes only versions that passed it: see `rollmill gate`.

    For example:

        rollmill weights channel set runs/demo live rl@7
    """
    from rollmill.weights import Channels

    place = open_place(where, token)
    wanted = find_version(place, version, line)
    before = Channels(place.objects).entry(name)
    if before is None or before.version != wanted:
        _check_gate(place, name, wanted)
    _say(name, before, wanted, _move(place, name, wanted, expect))


def rollback(
    where: Where,
    channel: Name,
    to: Annotated[
        str | None, typer.Option(help="the version to go back to; default: the one before the current one")
    ] = None,
    line: LineOfNumber = None,
    token: Token = None,
) -> None:
    """Point a channel back at the version before its current one. This adds a new entry; the history stays.

    Rolling back twice goes back two versions. A version that was rolled back from is used again only if --to names it.

    For example:

        rollmill weights rollback runs/demo live
        rollmill weights rollback runs/demo live --to rl@3
    """
    from rollmill.weights import Channels

    place = open_place(where, token)
    entries = _entries(place, channel)
    now = entries[-1]
    if to is not None:
        wanted = find_version(place, to, line)
        if wanted not in [entry.version for entry in entries]:
            _check_gate(place, channel, wanted)
    else:
        before = Channels(place.objects).before(channel)
        if before is None:
            raise WeightsError(
                f"channel {channel!r} points at {now.version} and has no version before that",
                hint="`rollmill weights channel history` shows its entries; --to names a version",
            )
        wanted = before.version
    # if another process moved it meanwhile, do not overrule that
    _say(channel, now, wanted, _move(place, channel, wanted, now.number))


def _entries(place: Place, name: str) -> list[ChannelEntry]:
    from rollmill.weights import Channels

    channels = Channels(place.objects)
    entries = channels.history(name)
    if not entries:
        raise WeightsError(f"no channel {name!r}", hint=f"channels here: {', '.join(channels.names()) or 'none'}")
    return entries


def _move(place: Place, name: str, wanted: Version, expect: int | None) -> int:
    from rollmill.weights import Channels

    for form in place.store.forms(wanted.line):
        if place.store.exists(wanted, form):
            place.store.check_present(wanted, form)
    return Channels(place.objects).move(name, wanted, expect)


def _check_gate(place: Place, name: str, wanted: Version) -> None:
    from rollmill.realtime.gate_run import check_live
    from rollmill.runs.opening import open_run

    has_run = place.run is not None and (place.run / "run.json").is_file()
    required = has_run and place.run is not None and open_run(place.run).config.gate is not None
    check_live(place.objects, name, wanted, required=required)


def _say(name: str, before: ChannelEntry | None, wanted: Version, number: int) -> None:
    was = f", it was {before.version}" if before else ", a new channel"
    console().print(safe(f"{name} → {wanted} (entry {number}{was})"), soft_wrap=True)
