"""`rollmill weights gc | mirror`: what a store keeps, and how a region's store stays up to date."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollmill.cli.weights.places import Forms, Line, Token, Where, chosen, open_place

if TYPE_CHECKING:
    from rollmill.weights.reading.store import WeightStore
    from rollmill.weights.regions.collect import Collected

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kMGTP]?)(i?)B?", re.IGNORECASE)


def gc(
    where: Where,
    keep: Annotated[int, typer.Option(min=1, help="the newest versions of a line that stay")] = 50,
    budget: Annotated[
        str | None, typer.Option(help="at most this much, as 200GB: fewer than --keep stay if need be")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="only say what would go")] = False,
    line: Line = None,
    form: Forms = None,
    token: Token = None,
) -> None:
    """Remove versions that nobody needs any more, and what attempts that died left behind an hour ago or more.

    The head, what channels point at and what engines hold by lease always stay, and so do the deltas on the way there
    from the nearest snapshot.

    For example:

        rollmill weights gc runs/demo --keep 20 --dry-run
    """
    from rollmill.cli.weights import display
    from rollmill.errors import WeightsError
    from rollmill.weights.regions.collect import collect, collect_companions

    store = open_place(where, token).store
    limit = None if budget is None else _parse_size(budget)
    lines = chosen(store, line, form)
    if limit is not None and len(lines) > 1:
        these = ", ".join(f"{name} ({one})" for name, one in lines)
        raise WeightsError("a budget is for one line in one form", hint=f"--line and --form say which: {these}")
    out = display.console()
    for name, one in lines:
        with out.status(f"{name} ({one})"):
            done = collect(store, name, one, keep, limit, dry_run)
        for words in _describe(name, one, done, dry_run):
            out.print(words, soft_wrap=True)
        for words in _holders(store, name, one, done):
            out.print(display.safe(f"  {words}", "dim"), soft_wrap=True)
    stray = collect_companions(store, dry_run) if line is None and form is None else {}
    for name, size in stray.items():
        verb = "would go" if dry_run else "went"
        told = f"{name}: no version, and its companions {verb}, {display.size(size)}"
        out.print(display.safe(told), soft_wrap=True)
    if not lines and not stray:
        out.print("no version yet")


def _describe(line: str, form: str, done: Collected, dry_run: bool) -> list[object]:
    from rollmill.cli.weights import display

    gone = display.count(len(done.removed), "version")
    if done.abandoned:
        gone += f" and {display.count(done.abandoned, 'object')} that no version names"
    verb = "would go" if dry_run else "went" if done.removed or done.abandoned else "had to go"
    left = f"{display.count(len(done.kept), 'version')} with {display.size(done.bytes)}"
    freed = f", {display.size(done.freed)}" if done.freed else ""
    words: list[object] = [display.safe(f"{line} ({form}): {gone} {verb}{freed}; {left} stay")]
    if done.removed:
        words.append(display.safe(f"  {'would go' if dry_run else 'gone'}: {_ranges(line, done.removed)}"))
    if done.kept:
        words.append(display.safe(f"  stay: {_ranges(line, done.kept)}"))
    if done.problem:
        words.append(display.safe("  the budget is not met: these, and the way to them, stay whatever it is", "yellow"))
    return words


def _holders(store: WeightStore, line: str, form: str, done: Collected) -> list[str]:
    """Who keeps what, beside the number of versions that was asked for."""
    from rollmill.cli.weights import display
    from rollmill.weights.reading.channels import Channels
    from rollmill.weights.reading.leases import Leases

    told = [f"{line}@{done.kept[-1]}: the head"] if done.kept else []
    channels = Channels(store.objects)
    for name in channels.names():
        entries = {f"channel {name}": channels.entry(name), f"a rollback of channel {name}": channels.before(name)}
        for who, entry in entries.items():
            if entry is not None and entry.version.line == line and entry.version.number in done.kept:
                told.append(f"{entry.version}: {who}")
    for lease in Leases(store.objects, line, form).held():
        place = lease.about.get("region")
        where = f" in {place}" if place else ""
        told.append(f"{line}@{lease.number}: {lease.holder}{where} holds a lease, {display.seconds(lease.left)} left")
    return told


def _ranges(line: str, numbers: tuple[int, ...]) -> str:
    """`main@0–6, 8`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1][-1:] = [number] if len(runs[-1]) > 1 else [runs[-1][0], number]
        else:
            runs.append([number])
    return f"{line}@" + ", ".join("–".join(map(str, run)) for run in runs)


def _parse_size(text: str) -> int:
    from rollmill.errors import ConfigError

    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise ConfigError(f"{text!r} is not a size", hint="for example 200GB, 1.5TiB or 500000000")
    power = "kmgtp".find(found[2].lower()) + 1 if found[2] else 0
    return int(float(found[1]) * (1024 if found[3] else 1000) ** power)


def mirror(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="the store to copy from: directory or URL")],
    target: Annotated[str, typer.Argument(metavar="TARGET", help="this region's store: directory or URL")],
    line: Annotated[str, typer.Option("--line", help="the line to follow, and those that take over from it")] = "main",
    form: Annotated[str, typer.Option("--form", help="the form to copy")] = "bf16",
    channel: Annotated[list[str] | None, typer.Option("--channel", help="bring this one too; may be repeated")] = None,
    anchor_every: Annotated[
        int, typer.Option(min=0, help="make a snapshot here after every N versions; 0: never")
    ] = 32,
    keep: Annotated[int, typer.Option(min=1, help="the newest versions that stay here")] = 50,
    budget: Annotated[str | None, typer.Option(help="fewer stay if they have more bytes, for example 200GB")] = None,
    once: Annotated[bool, typer.Option("--once", help="stop when everything is here")] = False,
    region: Annotated[str, typer.Option(help="the name of this region, for events")] = "",
    events: Annotated[Path | None, typer.Option(help="write events (arrivals, anchors) into this directory")] = None,
    token: Token = None,
) -> None:
    """Keep a region's store up to date: copy versions and channels as they appear, make anchors, remove what is old.

    Deltas cross once for all engines of the region, which read TARGET alone. Ctrl-C stops it; so may a power cut.

    For example:

        rollmill weights mirror http://home:8000 /data/store --channel live
    """
    from rollmill.cli.weights.keeping import ToldKeeper, keep_region
    from rollmill.telemetry import open_events

    if events is not None:
        open_events(events, f"mirror-{region}" if region else "mirror")
    there, here = open_place(source, token).objects, open_place(target, token, create=True).objects
    limit = None if budget is None else _parse_size(budget)
    keep_region(ToldKeeper(there, here, line, form, channel or [], anchor_every, keep, limit, region=region), once)
