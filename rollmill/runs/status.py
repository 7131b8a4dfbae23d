"""How a run is doing, read from its directory and stores: from locks, objects and files. Needs no running process.

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

from rollmill import telemetry
from rollmill.errors import StorageError
from rollmill.kinds import build
from rollmill.runs.lock import Holder, holder
from rollmill.runs.run import RunDirectory
from rollmill.runs.stages import AFTER, during, evaluations, is_last, left_to_evaluate, newest_step, results_key
from rollmill.training.stage import StageSection


@dataclass(frozen=True)
class RunState:
    word: Literal["training", "finished", "stopped"]
    driver: str | None  # who drives the run, in words
    services: dict[str, Holder]  # by name: what `serve` and `eval` run beside it
    stage: str  # the first one that is not done, or the last one
    step: int | None  # the newest one that is trained: a stage on documents publishes only at its end; None before it
    steps: int
    result: str  # solve rates on held-out tasks, as far as they are known
    age_s: float
    environments: dict[str, str]  # where a run has several: the same by name

    @property
    def processes(self) -> dict[str, str]:
        """Every process that uses the run, by what it does."""
        services = {name: str(by) for name, by in self.services.items()}
        return {**({"train": self.driver} if self.driver else {}), **services}


def state_of(run: RunDirectory) -> RunState:
    driver = build(run.config.cluster).collect(run)
    services = {path.name: by for path in service_paths(run) if (by := holder(path, "supervisor")) is not None}
    stage, step = _current_stage(run)
    if stage is not None:
        step = max((each for each in (step, _told_step(run, stage)) if each is not None), default=None)
    labels = [each.label for each in evaluations(run.config)]
    found = [results for label in labels if (results := _evaluation(run, label))]
    rates = [_rate(results) for results in found]
    rates += [_newest_while_training(run, stage)] if stage and not _evaluation(run, AFTER) else []
    return RunState(
        word="training" if driver else "finished" if is_finished(run) else "stopped",
        driver=driver,
        services=services,
        stage=stage.name if stage else "",
        step=step,
        steps=stage.steps if stage else 0,
        result=" → ".join(filter(None, rates)),
        environments=_rates_apart(found),
        age_s=time.time() - (run.path / "run.json").stat().st_mtime,
    )


def _current_stage(run: RunDirectory) -> tuple[StageSection | None, int | None]:
    """The stage that is trained now or next, else the last one; and the step of its newest version."""
    following: StageSection | None = None
    for stage in reversed(run.config.stages):
        step = newest_step(run, stage)
        if step is not None:
            return (following, None) if following and _is_last(run, stage, step) else (stage, step)
        following = stage
    return following, None


def _is_last(run: RunDirectory, stage: StageSection, step: int | None) -> bool:
    try:
        return step == stage.steps or is_last(run, stage, step)
    except StorageError:  # the database does not answer now
        return False


def _told_step(run: RunDirectory, stage: StageSection) -> int | None:
    """The newest step of the stage among the last events of the trainer."""
    for event in reversed(telemetry.last_events(run.events, "trainer")):
        if event["kind"] in ("step", "document_step") and event.get("stage") == stage.name:
            return min(int(event["step"]), stage.steps)
    return None


def is_finished(run: RunDirectory) -> bool:
    """Whether `drive` has nothing left to do, and the report is there."""
    stage, step = _current_stage(run)
    if stage is None or not _is_last(run, stage, step) or not (run.path / "report.json").exists():
        return False
    return not any(left_to_evaluate(run, stage) for stage in run.config.stages)


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


def _evaluation(run: RunDirectory, label: str) -> list[dict[str, Any]]:
    """The recorded results of an evaluation of the run; empty if there are none."""
    home = run.existing_home()
    try:
        return list(json.loads(home.get(results_key(run, label)))) if home else []
    except (StorageError, ValueError, TypeError):
        return []


def _newest_while_training(run: RunDirectory, stage: StageSection) -> str:
    """The newest result of `evals.every`, with its version; empty without one."""
    every = run.config.evals.every
    last = (newest_step(run, stage) or 0) if every else 0
    for number in range(last - last % (every or 1), 0, -(every or 1)):
        if results := _evaluation(run, during(stage, number)):
            return f"{_rate(results)} at {stage.name}@{number}"
    return ""


def _rate(results: list[dict[str, Any]]) -> str:
    return f"{100 * float(results[0]['rate']):.0f} %"


def _rates_apart(found: list[list[dict[str, Any]]]) -> dict[str, str]:
    """By environment, what came of the attempts at its held-out tasks in each evaluation."""
    rates: dict[str, list[str]] = {}
    for results in found:
        attempts: dict[str, list[bool]] = {}
        for task, name in results[0].get("environments", {}).items():
            attempts.setdefault(name, []).extend(results[0]["by_task"].get(task, ()))
        for name, solved in attempts.items():
            rates.setdefault(name, []).append(f"{100 * sum(solved) / len(solved):.0f} %" if solved else "–")
    return {name: " → ".join(own) for name, own in rates.items()}
