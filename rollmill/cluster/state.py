"""How a run is doing, read from its directory: from locks, stores and files. Needs no running process.

training   a process drives it now
finished   its last step is published and evaluated, and the report is written
stopped    anything else; `rollmill train --resume RUN` continues it
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rollmill.cluster.lock import Holder, holder
from rollmill.cluster.run import RunDirectory
from rollmill.storage.objects import Objects
from rollmill.weights.reading.store import WeightStore


@dataclass(frozen=True)
class RunState:
    word: Literal["training", "finished", "stopped"]
    driver: Holder | None  # the process that drives the run
    services: dict[str, Holder]  # by name: what `serve` and `eval` run beside it
    step: int | None  # the newest version of its line; None before the first one
    steps: int
    result: str  # solve rates on held-out tasks, as far as they are known
    age_s: float

    @property
    def processes(self) -> dict[str, Holder]:
        """Every process that uses the run, by what it does."""
        return {**({"train": self.driver} if self.driver else {}), **self.services}


def state_of(run: RunDirectory) -> RunState:
    driver, step = holder(run.path, "supervisor"), _newest_step(run)
    services = {path.name: by for path in service_paths(run) if (by := holder(path, "supervisor")) is not None}
    return RunState(
        word="training" if driver else "finished" if is_finished(run) else "stopped",
        driver=driver,
        services=services,
        step=step,
        steps=run.config.steps,
        result=" → ".join(_rate(results) for label in ("before", "after") if (results := _evaluation(run, label))),
        age_s=time.time() - (run.path / "run.json").stat().st_mtime,
    )


def is_finished(run: RunDirectory) -> bool:
    """Whether `drive` has nothing left to do, and the report is there."""
    results = _evaluation(run, "after" if run.config.steps else "before")
    if not (run.path / "report.json").exists() or not results:
        return False
    return bool(_newest_step(run) == run.config.steps == results[0]["version"])


def service_paths(run: RunDirectory) -> list[Path]:
    return sorted((run.path / "services").glob("*/"))


def bytes_of(directory: Path) -> int:
    """Disk space of a directory. Files that vanish meanwhile do not count."""
    return sum(_sizes(directory))


def _sizes(directory: Path) -> Iterator[int]:
    for path in directory.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            status = path.lstat()
            yield status.st_blocks * 512


def _newest_step(run: RunDirectory) -> int | None:
    if not run.home_store.is_dir():
        return None
    return WeightStore(Objects.open(run.home_store)).head(run.config.line, run.config.form)


def _evaluation(run: RunDirectory, label: str) -> list[dict[str, Any]]:
    """The recorded results of an evaluation of the run; empty if there are none."""
    file = run.home_store / "evals" / run.id / f"{label}.json"
    try:
        return list(json.loads(file.read_bytes()))
    except (OSError, ValueError, TypeError):
        return []


def _rate(results: list[dict[str, Any]]) -> str:
    return f"{100 * float(results[0]['rate']):.0f} %"
