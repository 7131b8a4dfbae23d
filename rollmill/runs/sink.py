"""Sink: gets the figures of a run as they grow, for a tool that draws them. `[[sinks]] kind` names one.

The events of a run are the truth. A supervisor that starts again reads them from the beginning, so a sink begins anew
each time it is opened. Sinks only read: one that fails is closed with a warning, and the run goes on.

The process that drives a run feeds them. If that is in a cluster, the command that watches the run does, where its
events are collected; `rollmill train --resume RUN` watches a run that goes on.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from rollmill import telemetry
from rollmill.kinds import KindSection, Slot, build

if TYPE_CHECKING:
    from rollmill.runs.run import RunDirectory

POLL_S = 1.0
_BOOKKEEPING = frozenset({"at", "kind", "process", "stage", "step", "steps", "version"})


class Scalar(NamedTuple):
    tag: str  # GROUP/FIGURE; what is before the last slash has one axis of steps
    step: int
    value: float
    at: float  # seconds since the epoch


class Sink(Protocol):
    """Constructed with its settings. Before a run begins, `preflight()` of a sink that has it raises ConfigError if
    something it needs is missing, such as a package."""

    def open(self, directory: Path, name: str) -> None:
        """Begin anew. `directory`: of the run, where a sink may write. `name`: of the run."""
        ...

    def write(self, scalars: Sequence[Scalar]) -> None: ...

    def close(self) -> None: ...


class SinkSection(KindSection):
    _slot: ClassVar[Slot] = Slot(
        "sinks",
        Sink,
        {
            "tensorboard": "rollmill.runs.sinks.tensorboard:TensorBoard",
            "wandb": "rollmill.runs.sinks.wandb:WeightsAndBiases",
            "prometheus": "rollmill.runs.sinks.prometheus:Prometheus",
        },
        "rollmill.sinks",
    )


def scalars_of(event: Mapping[str, Any]) -> list[Scalar]:
    """The figures of an event that belong to a step or a version."""
    kind, at = event["kind"], float(event["at"])
    if kind in ("step", "document_step"):
        group, step = str(event.get("stage") or kind), event.get("step")
        figures = {name: value for name, value in event.items() if name not in _BOOKKEEPING}
    elif kind == "heldout_loss":
        group, step = f"{event.get('stage')}/heldout_loss", event.get("step")
        figures = {str(event.get("source")): event.get("loss")}
    elif kind == "eval":
        group, step = f"eval/{event.get('split')}/{event.get('mode')}", event.get("version")
        figures = {name: event.get(name) for name in ("rate", "low", "high", "reward", "solved_once")}
    elif kind == "publish":
        group, step = f"weights/{event.get('line')}", event.get("version")
        figures = {name: event.get(name) for name in ("bytes", "delta_bytes", "density", "seconds")}
    else:
        return []
    if not isinstance(step, int) or isinstance(step, bool):
        return []
    return [
        Scalar(f"{group}/{name}", step, float(value), at)
        for name, value in figures.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    ]


class Sinks:
    """The sinks of a run. `poll` is called again and again, and never raises. If not `fed`, another process does it."""

    def __init__(self, run: RunDirectory, *, fed: bool = True) -> None:
        self._tail = telemetry.EventTail(run.events)
        self._polled_at = 0.0
        self.problems: list[str] = []  # of sinks that were closed
        self._open: list[tuple[str, Sink]] = []
        for section in run.config.sinks if fed else ():
            with self._guarded(section.kind):
                sink: Sink = build(section)
                sink.open(run.path, run.config.name)
                self._open.append((section.kind, sink))

    def poll(self, *, now: bool = False) -> None:
        if not self._open or (not now and time.monotonic() - self._polled_at < POLL_S):
            return
        self._polled_at = time.monotonic()
        found = [scalar for event in self._tail.poll() for scalar in scalars_of(event)]
        for kind, sink in list(self._open) if found else ():
            with self._guarded(kind):
                sink.write(found)

    def close(self) -> None:
        self.poll(now=True)
        for kind, sink in self._open:
            with self._guarded(kind):
                sink.close()
        self._open = []

    @contextlib.contextmanager
    def _guarded(self, kind: str) -> Iterator[None]:
        """A sink may be code of the user, or of a package that is not there."""
        try:
            yield
        except Exception as error:
            self._open = [each for each in self._open if each[0] != kind]
            self.problems.append(f"the sink {kind!r} is closed: {error}")
            telemetry.emit("warning", text=self.problems[-1])
