"""What `rollmill weights mirror` prints while it keeps a region's store up to date."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator

import typer
from rich.console import Console
from rich.status import Status

from rollmill.cli import display
from rollmill.errors import WeightsError
from rollmill.types import Version
from rollmill.weights.reading.channels import Channels
from rollmill.weights.regions.keeper import RegionKeeper, Round


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
