"""Live progress of a run, read from its events: a display that redraws in a terminal, lines elsewhere.

`Progress` only reads: the run does not need it. Events are folded into a `State`, and drawing reads nothing else.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rollmill.runs.stages import DURING
from rollmill.telemetry import EventTail

LINE_EVERY = 5.0  # seconds between plain lines
FRESH = 5.0  # seconds for which a reported speed is shown
SPARKS = "▁▂▃▄▅▆▇█"
SPLITS = {"heldout": "held out", "fresh": "fresh held out", "heldout_family": "held-out family"}


@dataclass
class Phase:
    """`done` and `total` count steps, or the attempts of an evaluation."""

    name: str
    start: float | None = None
    end: float | None = None
    done: int = 0
    total: int | None = None
    first: tuple[float, int] | None = None  # (time, count) of the first count: the pace is measured from there
    last: float = 0.0  # time of the last count

    def count(self, done: int, total: int | None, at: float) -> None:
        self.first = self.first or (at, done)
        self.done, self.total, self.last = done, total, at

    def seconds(self, now: float) -> float:
        return 0.0 if self.start is None else max(0.0, (self.end or now) - self.start)

    def seconds_left(self, now: float) -> float | None:
        """At the pace up to the last count. None before there is one, and when less than a second would be left.

        It falls between two counts, by one at most.
        """
        if not self.total or self.first is None or self.done <= self.first[1]:
            return None
        pace = (self.last - self.first[0]) / (self.done - self.first[1])
        left = pace * (self.total - self.done) - min(now - self.last, pace)
        return left if left >= 1 else None


@dataclass
class Engine:
    version: int | None = None
    tokens_per_s: float = 0.0
    at: float = 0.0  # when the speed was reported


@dataclass
class State:
    """What the events so far add up to."""

    phases: list[Phase]
    step: dict[str, Any] = field(default_factory=dict)  # the newest event of kind step or document_step
    solve_rates: deque[float] = field(default_factory=lambda: deque(maxlen=32))
    engines: dict[str, Engine] = field(default_factory=dict)
    evals: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # by phase
    heldout: dict[str, float] = field(default_factory=dict)  # the newest loss by source, in stages that measure it
    due: dict[str, Any] = field(default_factory=dict)  # the newest event of kind due
    restarts: int = 0
    warning: str = ""

    @property
    def current(self) -> Phase | None:
        return next((phase for phase in self.phases if phase.start is not None and phase.end is None), None)

    def pause(self) -> None:
        """The processes that wrote these events are gone: what is done stays, the rest begins again."""
        self.step, self.heldout, self.due, self.restarts, self.warning = {}, {}, {}, 0, ""
        self.engines.clear()
        self.phases = [phase if phase.end is not None else Phase(phase.name) for phase in self.phases]

    def fold(self, event: dict[str, Any]) -> None:
        handler = getattr(self, f"_on_{event['kind']}", None)
        if handler is not None:
            handler(event)

    def tokens_per_s(self, now: float) -> float:
        return sum(engine.tokens_per_s for engine in self.engines.values() if now - engine.at < FRESH)

    def _on_phase(self, event: dict[str, Any]) -> None:
        name = str(event.get("phase"))
        phase = next((phase for phase in self.phases if phase.name == name), None)
        if phase is None:
            phase = Phase(name)
            self.phases.append(phase)
        if event.get("state") == "start":
            self.step, self.heldout, phase.start, phase.end = {}, {}, event["at"], None
            phase.done, phase.total, phase.first = 0, None, None
        else:
            phase.end = event["at"]

    def _on_step(self, event: dict[str, Any]) -> None:
        self.solve_rates.append(float(event.get("solve_rate") or 0.0))
        self._on_document_step(event)

    def _on_due(self, event: dict[str, Any]) -> None:
        self.due = event

    def _on_document_step(self, event: dict[str, Any]) -> None:
        self.step = event
        if self.current is not None:
            self.current.count(int(event.get("step", 0)), event.get("steps"), event["at"])

    def _on_heldout_loss(self, event: dict[str, Any]) -> None:
        self.heldout[str(event.get("source"))] = float(event.get("loss") or 0.0)

    def _on_eval_progress(self, event: dict[str, Any]) -> None:
        if self.current is not None and not str(event.get("label")).startswith(DURING):
            self.current.count(int(event.get("done", 0)), event.get("total"), event["at"])

    def _on_engine(self, event: dict[str, Any]) -> None:
        engine = self.engines.setdefault(str(event.get("engine")), Engine())
        engine.tokens_per_s, engine.at = float(event.get("tokens_per_s") or 0.0), event["at"]

    def _on_apply(self, event: dict[str, Any]) -> None:
        self.engines.setdefault(str(event.get("engine")), Engine()).version = event.get("version")

    def _on_eval(self, event: dict[str, Any]) -> None:
        self.evals.setdefault(self.current.name if self.current else "", []).append(event)

    def _on_restart(self, event: dict[str, Any]) -> None:
        self.restarts += 1
        self.warning = f"{event.get('target')} was restarted (exit code {event.get('exit_code')})"

    def _on_warning(self, event: dict[str, Any]) -> None:
        self.warning = str(event.get("text"))


class Progress:
    """Shows how far a run is. Call `update()` a few times per second; it never blocks.

    With `continues`, older events are of a run that was stopped; else they are of one that is going on.
    """

    def __init__(
        self,
        events_dir: Path,
        phases: list[str],
        title: str,
        console: Console | None = None,
        *,
        continues: bool = False,
    ) -> None:
        self._tail = EventTail(events_dir)
        self._state = State([Phase(name) for name in phases])
        self._title = title
        self._console = console or Console(highlight=False)
        self._live: Live | None = None
        self._started = time.time()
        self._line_at = 0.0
        self._failed = False
        self._continues = continues

    def __enter__(self) -> Progress:
        self._started = self._line_at = time.time()
        if self._continues:
            for event in self._tail.poll():
                self._state.fold(event)
            self._state.pause()
        if self._console.is_terminal:
            self._live = Live(self._draw(self._started), console=self._console, auto_refresh=False)
            self._live.start()
        else:
            self._console.print(self._title)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._failed = kind is not None
        self.update()
        if self._live is not None:
            self._live.stop()
            self._live = None

    def update(self) -> None:
        now = time.time()
        for event in self._tail.poll():
            self._state.fold(event)
            if self._live is None:
                self._say(event)
        if self._live is not None:
            self._live.update(self._draw(now), refresh=True)
        elif now - self._line_at >= LINE_EVERY and self._state.current is not None:
            self._line_at = now
            self._print(now, plain_line(self._state, now))

    def _say(self, event: dict[str, Any]) -> None:
        """Print a line for an event that a log should show at once."""
        if event["kind"] == "phase":
            phase = next(phase for phase in self._state.phases if phase.name == str(event.get("phase")))
            ended = event.get("state") != "start"
            self._print(
                event["at"], f"{phase.name}: " + (f"done in {clock(phase.seconds(0.0))}" if ended else "started")
            )
        elif event["kind"] == "eval":
            self._print(event["at"], describe_eval(event))
        elif event["kind"] == "heldout_loss":
            words = f"held-out loss of {event.get('source')} after step {event.get('step')}"
            self._print(event["at"], f"{words}: {float(event.get('loss') or 0.0):.3f}")
        elif event["kind"] in ("restart", "warning"):
            self._print(event["at"], self._state.warning)

    def _print(self, at: float, words: str) -> None:
        self._console.print(f"[{clock(at - self._started):>5}] {words}", markup=False, soft_wrap=True)

    def _draw(self, now: float) -> RenderableType:
        return draw(self._state, self._title, now - self._started, now, self._failed)


def clock(seconds: float) -> str:
    whole = max(0, round(seconds))
    minutes = f"{whole // 60 % 60:02}" if whole >= 3600 else f"{whole // 60}"
    return (f"{whole // 3600}:" if whole >= 3600 else "") + f"{minutes}:{whole % 60:02}"


def describe_eval(event: dict[str, Any]) -> str:
    place = f"{SPLITS.get(str(event.get('split')), event.get('split'))}, {event.get('mode')}"
    rate, low, high = (100 * float(event.get(key) or 0.0) for key in ("rate", "low", "high"))
    reward = event.get("reward")
    graded = "" if reward is None or 100 * reward == rate else f", mean reward {reward:.3f}"
    solved = f"{rate:.1f} % solved ({low:.1f}–{high:.1f}, {event.get('attempts')} attempts){graded}"
    return f"{event.get('label')}: {place}: {solved}"


def facts(state: State, now: float) -> list[tuple[str, str]]:
    """Names and values of the current phase's figures, most important first."""
    step, found = state.step, []
    if "reward_mean" in step:
        found.append(("reward", f"{float(step['reward_mean'] or 0.0):.2f}"))
    if "solve_rate" in step:
        found.append(("solved", f"{100 * float(step['solve_rate'] or 0.0):.0f} %"))
    if step.get("staleness_mean") is not None:
        found.append(("staleness", f"{float(step['staleness_mean']):.1f} (max {step.get('staleness_max', 0)})"))
    if state.due and int(state.due.get("step", 0)) == int(step.get("step", 0)) + 1:
        found.append(("waits for", f"{len(state.due.get('groups', []))} due groups"))
    if step.get("kind") == "document_step" and step.get("loss") is not None:
        found.append(("loss", f"{float(step['loss']):.3f}"))
    if state.heldout:
        found.append(("held-out loss", " · ".join(f"{name} {loss:.3f}" for name, loss in state.heldout.items())))
    speed = state.tokens_per_s(now)
    if not speed and now - step.get("at", 0.0) < FRESH:
        speed = float(step.get("tokens_per_s") or 0.0)
    if speed:
        found.append(("tokens/s", f"{speed:,.0f}"))
    versions = [
        f"{name} v{engine.version}" for name, engine in sorted(state.engines.items()) if engine.version is not None
    ]
    if versions:
        found.append(("engines", " · ".join(versions)))
    return found


def plain_line(state: State, now: float) -> str:
    phase = state.current
    if phase is None:
        return "waiting"
    words = [phase.name, _counted(phase)]
    words += [f"{name} {value}" for name, value in facts(state, now)]
    left = phase.seconds_left(now)
    words.append(f"about {clock(left)} left" if left is not None else "")
    return "  ".join(word for word in words if word)


def draw(state: State, title: str, elapsed: float, now: float, failed: bool = False) -> RenderableType:
    head = Table.grid(expand=True)
    head.add_column()
    head.add_column(justify="right")
    head.add_row(Text(title, "bold"), Text(clock(elapsed), "dim"))
    rows: list[RenderableType] = [head, _phases(state, now, failed)]
    if state.current is not None and not failed:
        rows.append(Padding(_bar(state.current, now), (1, 0, 0, 0)))
        rows.append(_figures(state, now))
    if state.warning:
        rows.append(Text(f"! {state.warning}", "yellow", no_wrap=True, overflow="ellipsis"))
    return Padding(Group(*rows), (1, 2))


def _phases(state: State, now: float, failed: bool) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    for phase in state.phases:
        if phase.end is not None:
            mark, style = Text("✓", "green"), ""
        elif phase.start is not None:
            mark, style = (Text("✗", "red"), "red") if failed else (Text("●", "cyan"), "bold")
        else:
            mark, style = Text("○", "dim"), "dim"
        spent = Text(clock(phase.seconds(now)) if phase.start is not None else "", "dim", justify="right")
        table.add_row(
            mark, Text(phase.name, style), spent, Text(_result(state, phase), no_wrap=True, overflow="ellipsis")
        )
    return table


def _result(state: State, phase: Phase) -> str:
    """The results of an evaluation phase."""
    words = []
    found = state.evals.get(phase.name, [])
    newest = [event for event in found if event.get("version") == found[-1].get("version")]
    for event in newest:  # while it trains, a phase has several
        greedy = ", greedy" if event.get("mode") == "greedy" else ""
        place = SPLITS.get(str(event.get("split")), str(event.get("split")))
        at = f" at version {event.get('version')}" if str(event.get("label")).startswith(DURING) else ""
        words.append(f"{place}{greedy} {100 * float(event.get('rate') or 0.0):.0f} %{at}")
    return " · ".join(words)


def _bar(phase: Phase, now: float) -> Table:
    left = phase.seconds_left(now)
    row = Table.grid(padding=(0, 2, 0, 0), expand=True)
    row.add_column(ratio=1)
    row.add_column(no_wrap=True)
    row.add_column(no_wrap=True, justify="right")
    bar = ProgressBar(
        total=phase.total,
        completed=min(phase.done, phase.total or 0),
        pulse=not phase.total,
        complete_style="cyan",
        pulse_style="cyan",
    )
    row.add_row(bar, _counted(phase), Text(f"about {clock(left)} left" if left is not None else "", "dim"))
    return row


def _counted(phase: Phase) -> str:
    if not phase.total:
        return f"{phase.done}" if phase.done else ""
    return f"{min(phase.done, phase.total)}/{phase.total}"


def _figures(state: State, now: float) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    for name, value in facts(state, now):
        spark = _sparkline(state.solve_rates) if name == "solved" and len(state.solve_rates) > 1 else ""
        table.add_row(Text(name, "dim"), Text.assemble((value, "bold"), "  ", (spark, "cyan")))
    return table


def _sparkline(values: deque[float]) -> str:
    """Values from 0 to 1; each height stands for a fixed value."""
    return "".join(SPARKS[min(len(SPARKS) - 1, max(0, int(value * len(SPARKS))))] for value in values)
