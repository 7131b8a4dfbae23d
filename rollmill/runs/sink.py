"""Sink: gets the figures of a run as they grow, for a tool that draws them. `[[sinks]] kind` names one.

The events of a run are the truth. A supervisor that starts again reads them from the beginning, so a sink begins anew
each time it is opened. Sinks only read: one that fails is closed with a warning, and the run goes on.

The process that drives a run feeds them. If that is in a cluster, the command that watches the run does, where its
events are collected; `rollmill train --resume RUN` watches a run that goes on.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from rollmill.kinds import KindSection, Slot

_BOOKKEEPING = frozenset({"at", "kind", "process", "stage", "step", "steps", "version"})


class Scalar(NamedTuple):
    tag: str  # GROUP/FIGURE; what is before the last slash has one axis of steps
    step: int
    value: float
    at: float  # seconds since the epoch


class Sink(ABC):
    """Base class of sinks. Constructed with its settings."""

    @abstractmethod
    def open(self, directory: Path, name: str) -> None:
        """Begin anew. `directory`: of the run, where a sink may write. `name`: of the run."""

    @abstractmethod
    def write(self, scalars: Sequence[Scalar]) -> None: ...

    @abstractmethod
    def close(self) -> None: ...

    def preflight(self) -> None:
        """Called before a run begins. ConfigError if something it needs is missing, such as a package."""


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
