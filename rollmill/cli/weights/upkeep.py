"""`rollmill weights gc | mirror`: removes old versions, and keeps a region's store up to date."""

from __future__ import annotations

import contextlib
import re
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.status import Status

from rollmill.cli import display
from rollmill.cli.weights.places import Forms, Line, Token, Where, chosen, open_place
from rollmill.errors import ConfigError, WeightsError
from rollmill.telemetry import open_events
from rollmill.types import Version
from rollmill.weights.reading.channels import Channels
from rollmill.weights.reading.leases import Leases
from rollmill.weights.reading.weight_store import WeightStore
from rollmill.weights.regions.collection import CollectionResult, collect, collect_companions
from rollmill.weights.regions.keeper import RegionKeeper, Round

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
    if events is not None:
        open_events(events, f"mirror-{region}" if region else "mirror")
    there, here = open_place(source, token).objects, open_place(target, token, create=True).objects
    limit = None if budget is None else _parse_size(budget)
    if line is None:
        line = "main" if WeightStore(there).begun("main") else "rl"
    keep_region(ReportingKeeper(there, here, line, form, channel or [], anchor_every, keep, limit, region=region), once)


class ReportingKeeper(RegionKeeper):
    """A keeper that reports what each round did."""

    tell: Callable[[Round], object] | None = None

    def step(self) -> Round:
        done = super().step()
        if self.tell is not None:
            with _uninterrupted():
                self.tell(done)
        return done


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ctrl-C takes effect after the block: in the middle of it, a line would be printed twice or not be counted."""
    pressed: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: pressed.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed:
        raise KeyboardInterrupt


def keep_region(keeper: ReportingKeeper, once: bool) -> None:
    """Keep a region until Ctrl-C, or with `once` until nothing is left to copy. Exits with 1 if that fails."""
    out = display.console()
    with out.status("looking") as status:
        shown = _MirrorDisplay(keeper, out, status)
        keeper.tell = shown.tell
        with contextlib.suppress(KeyboardInterrupt):
            while once and keeper.step().versions:
                pass
            if not once:
                keeper.run(threading.Event())
    out.print(display.safe(shown.sum()), soft_wrap=True)
    missing = [name for name in keeper.channels if Channels(keeper.mirror.target.objects).entry(name) is None]
    for name in missing if once and keeper.problem is None else ():
        out.print(display.labelled("note", "yellow", f"there is no channel {name} to copy"), soft_wrap=True)
    if once and keeper.problem is not None:
        raise typer.Exit(1)
    if once and keeper.mirror.target.head(keeper.line, keeper.form) is None:
        lines = ", ".join(keeper.mirror.source.lines()) or "none"
        raise WeightsError(
            f"no line {keeper.line!r} ({keeper.form}) in {keeper.mirror.source.objects.url}",
            hint=f"lines there: {lines}",
        )


class _MirrorDisplay:
    """Prints a line per copied version, and a status line."""

    def __init__(self, keeper: RegionKeeper, out: Console, status: Status) -> None:
        self._keeper, self._out, self._status = keeper, out, status
        self._versions = self._bytes = self._anchors = self._removed = 0
        self._newest: Version | None = None
        self._problem = ""

    def tell(self, done: Round) -> None:
        if done.versions:
            self._newest = done.versions[-1]
            few = ", ".join(map(str, done.versions)) if len(done.versions) < 4 else None
            names = few or f"{done.versions[0]} to {done.versions[-1]}"
            self._out.print(display.safe(f"{names}: {display.size(done.bytes)}"), soft_wrap=True)
        if done.anchored is not None:
            self._out.print(display.safe(f"{self._keeper.line}@{done.anchored}: anchor made"))
        if self._newest is None or self._newest.line != self._keeper.line:  # nothing copied yet of this line
            head = self._keeper.mirror.target.head(self._keeper.line, self._keeper.form)
            self._newest = self._newest if head is None else Version(self._keeper.line, head)
        self._versions += len(done.versions)
        self._bytes += done.bytes
        self._anchors += done.anchored is not None
        self._removed += done.removed
        problem = self._keeper.problem or ""
        if problem and problem != self._problem:
            for line in problem.splitlines():
                self._out.print(display.safe(line, "yellow"), soft_wrap=True)
        self._problem = problem
        self._status.update(display.safe(f"{self.sum()} · {'retrying' if problem else 'waiting for the next version'}"))

    def sum(self) -> str:
        words = [f"{self._keeper.line}: {display.count(self._versions, 'version')}, {display.size(self._bytes)} copied"]
        if self._newest is not None:
            words.append(f"at {self._newest}")
        if self._anchors:
            words.append(display.count(self._anchors, "anchor"))
        if self._removed:
            words.append(f"{display.count(self._removed, 'old version')} removed")
        return " · ".join(words)
