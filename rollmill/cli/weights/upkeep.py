"""`rollmill weights gc | mirror`: removes old versions, and keeps a region's store up to date."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollmill.cli import display
from rollmill.cli.weights.places import Forms, Line, Token, Where, chosen, open_place
from rollmill.errors import ConfigError, WeightsError
from rollmill.telemetry import open_events

if TYPE_CHECKING:
    from rollmill.weights.reading.weight_store import WeightStore
    from rollmill.weights.regions.collection import CollectionResult

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kMGTP]?)(i?)B?", re.IGNORECASE)


def gc(
    where: Where,
    keep: Annotated[int, typer.Option(min=1, help="number of newest versions of a line that stay")] = 50,
    budget: Annotated[
        str | None, typer.Option(help="largest size, for example 200GB; fewer than --keep versions stay if necessary")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="only print what would be removed")] = False,
    line: Line = None,
    form: Forms = None,
    token: Token = None,
) -> None:
    """Remove versions that nobody needs, and objects that died attempts left at least an hour ago.

    The head, the versions that channels point at and the versions that engines hold by lease always stay, with the
    deltas from the nearest snapshot to them.

    For example:

        rollmill weights gc runs/demo --keep 20 --dry-run
    """
    from rollmill.weights.regions.collection import collect, collect_companions

    store = open_place(where, token).store
    limit = None if budget is None else _parse_size(budget)
    lines = chosen(store, line, form)
    if limit is not None and len(lines) > 1:
        these = ", ".join(f"{name} ({one})" for name, one in lines)
        raise WeightsError("--budget applies to one line in one form", hint=f"choose with --line and --form: {these}")
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
        verb = "would be removed" if dry_run else "were removed"
        told = f"{name}: no version; its companions {verb}, {display.size(size)}"
        out.print(display.safe(told), soft_wrap=True)
    if not lines and not stray:
        out.print("no version yet")


def _describe(line: str, form: str, done: CollectionResult, dry_run: bool) -> list[object]:
    gone = display.count(len(done.removed), "version")
    if done.abandoned:
        gone += f" and {display.count(done.abandoned, 'object')} that no version names"
    verb = "would be removed" if dry_run else "removed"
    left = f"{display.count(len(done.kept), 'version')} with {display.size(done.bytes)}"
    freed = f", {display.size(done.freed)}" if done.freed else ""
    words: list[object] = [display.safe(f"{line} ({form}): {gone} {verb}{freed}; {left} stay")]
    if done.removed:
        words.append(display.safe(f"  {'would be removed' if dry_run else 'removed'}: {_ranges(line, done.removed)}"))
    if done.kept:
        words.append(display.safe(f"  stay: {_ranges(line, done.kept)}"))
    if done.problem:
        words.append(
            display.safe("  the budget is not met: these versions, and the deltas to them, always stay", "yellow")
        )
    return words


def _holders(store: WeightStore, line: str, form: str, done: CollectionResult) -> list[str]:
    """What holds versions, apart from `--keep`."""
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
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise ConfigError(f"{text!r} is not a size", hint="for example 200GB, 1.5TiB or 500000000")
    power = "kmgtp".find(found[2].lower()) + 1 if found[2] else 0
    return int(float(found[1]) * (1024 if found[3] else 1000) ** power)


def mirror(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="the store to copy from: directory or URL")],
    target: Annotated[str, typer.Argument(metavar="TARGET", help="this region's store: directory or URL")],
    line: Annotated[
        str | None,
        typer.Option(
            "--line", help="the line to follow, with its successors", show_default="rl, or main if there is one"
        ),
    ] = None,
    form: Annotated[str, typer.Option("--form", help="the form to copy")] = "bf16",
    channel: Annotated[
        list[str] | None, typer.Option("--channel", help="copy this channel too; may be repeated")
    ] = None,
    anchor_every: Annotated[
        int, typer.Option(min=0, help="make a snapshot here after every N versions; 0: never")
    ] = 32,
    keep: Annotated[int, typer.Option(min=1, help="number of newest versions that stay here")] = 50,
    budget: Annotated[
        str | None, typer.Option(help="largest size, for example 200GB; fewer versions stay if necessary")
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="stop when everything is copied")] = False,
    region: Annotated[str, typer.Option(help="the name of this region, for events")] = "",
    events: Annotated[Path | None, typer.Option(help="write events (arrivals, anchors) into this directory")] = None,
    token: Token = None,
) -> None:
    """Keep a region's store up to date: copy versions and channels as they appear, make anchors, remove old versions.

    Each delta is copied once for all engines of the region, which read only TARGET. It can be killed at any time and
    started again; Ctrl-C stops it.

    For example:

        rollmill weights mirror http://home:8000 /data/store --channel live
    """
    from rollmill.cli.weights.mirroring import ReportingKeeper, keep_region
    from rollmill.weights.reading.weight_store import WeightStore

    if events is not None:
        open_events(events, f"mirror-{region}" if region else "mirror")
    there, here = open_place(source, token).objects, open_place(target, token, create=True).objects
    limit = None if budget is None else _parse_size(budget)
    if line is None:
        line = "main" if WeightStore(there).begun("main") else "rl"
    keep_region(ReportingKeeper(there, here, line, form, channel or [], anchor_every, keep, limit, region=region), once)
