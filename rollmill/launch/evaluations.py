"""Evaluates each Nth version of a stage while it trains, as `evals.every` says.

    supervisor  ── sees that a version is due ──►  role `evaluator` for this version, one at a time
                └─ `evals.engines = "own"` ──►  a service with one engine that serves this version, for as long

A version that becomes due while another one is evaluated waits. If several wait, the newest is evaluated and the others
are left out, with an event that says so. Results and attempts are objects of the run: after a restart, an evaluation on
an engine of its own goes on with the same version, and one on the engines of the run too, unless it is late by now.
"""

from __future__ import annotations

import contextlib
import time

from rollmill import telemetry
from rollmill.errors import ConfigError, RollmillError, StorageError
from rollmill.launch.launcher import Launcher
from rollmill.launch.launchers.local import LocalLauncher
from rollmill.launch.services import Target, one_engine
from rollmill.runs.run import RunDirectory
from rollmill.runs.stages import attempts_begun, during, last_version, leave_out, recorded
from rollmill.training.stage import RolloutSettings, StageSection
from rollmill.types import Version

ROLE = "evaluator"
LOOK_S = 1.0


class Evaluations(contextlib.AbstractContextManager["Evaluations"]):
    """Those of one stage."""

    def __init__(self, run: RunDirectory, launcher: Launcher, stage: StageSection) -> None:
        self._run, self._launcher, self._stage = run, launcher, stage
        self._config = run.config.evals
        self._considered = 0  # the newest due version that was looked at
        self._service = contextlib.ExitStack()
        self._cluster: LocalLauncher | None = None  # of the service, while there is one
        self._looked = float("-inf")

    def __exit__(self, *_: object) -> None:
        self._service.close()

    @property
    def busy(self) -> bool:
        return ROLE in self._launcher.running()

    def adjust(self, *, ending: bool = False) -> bool:
        """Call it again and again. `ending`: nothing is trained any more, so no evaluation begins, and those that wait
        are left out. Returns whether it has to be called again then."""
        if not self._config.every or not isinstance(self._stage, RolloutSettings):
            return False
        self._watch()
        if self.busy or time.monotonic() - self._looked < LOOK_S:
            return True
        self._looked = time.monotonic()
        self._stop_service()
        version = None
        try:
            version = self._due(ending=ending)
            if version is not None:
                self._start(version)
                self._considered = version.number
        except (StorageError, ConfigError) as error:  # the store does not answer now, or an engine has no place
            telemetry.emit("warning", text=f"no version can be evaluated now: {error}")
        return version is not None

    def _due(self, *, ending: bool) -> Version | None:
        """The version to evaluate next; those before it that have no results are left out."""
        head = last_version(self._run.weights(), self._stage, self._run.config.form)
        every, last = self._config.every, self._stage.steps - 1  # the last version has an evaluation of its own
        newest = 0 if head is None else min(head.number, last) // every * every
        if head is None or newest <= self._considered:
            return None
        done, begun = recorded(self._run), attempts_begun(self._run)
        labels = {number: during(self._stage, number) for number in range(every, newest + 1, every)}
        waiting = [number for number, label in labels.items() if label not in done]
        goes_on = [number for number in waiting if labels[number] in begun]
        chosen = goes_on[:1] if ending or self._config.engines == "own" else []
        chosen = chosen or ([] if ending else waiting[-1:])
        for number in waiting:
            if ending and number not in goes_on:
                leave_out(self._run, labels[number], number, "training ended before it could be evaluated")
            elif chosen and number < chosen[0]:
                leave_out(self._run, labels[number], number, f"version {chosen[0]} was there before it was evaluated")
        if not chosen:
            self._considered = newest
        return Version(head.line, chosen[0]) if chosen else None

    def _start(self, version: Version) -> None:
        arguments = [self._stage.name, str(version.number)]
        if self._config.engines == "own":
            target = Target("version", str(version), version, self._run.config.form)
            service, self._cluster = self._service.enter_context(one_engine(self._run, target))
            arguments.append(service.path.name)
        self._launcher.start(ROLE, *arguments)

    def _watch(self) -> None:
        try:
            if self._cluster is not None:
                self._cluster.watch()
        except RollmillError as error:  # training goes on; the evaluator gives up when nothing answers it
            telemetry.emit("warning", text=f"the engine of an evaluation: {error}")
            self._stop_service()

    def _stop_service(self) -> None:
        self._service.close()
        self._cluster = None
