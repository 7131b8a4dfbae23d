"""Takes a run through its stages. Every stage asks the stores what is already done, so `drive` also resumes a run.

learns from documents   trainer, until its last step is published; then its evaluation, if it has one
learns from rollouts    trainer, engines on the stage's line, gateway and dispatcher: the evaluation before, groups of
                        rollouts until the last step is committed, the evaluation after; meanwhile an evaluator for each
                        version that `evals.every` names
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace

from rollmill import telemetry
from rollmill.errors import RollmillError
from rollmill.kinds import build
from rollmill.launch.autoscaler import Balance
from rollmill.launch.evaluations import Evaluations
from rollmill.launch.launcher import FINAL, Cluster, Launcher
from rollmill.launch.launchers.local import LocalLauncher, terminable
from rollmill.launch.launchers.node_process import SEND_S
from rollmill.launch.launchers.supervisor import STOPPED
from rollmill.launch.parent_death import end_with_parent
from rollmill.launch.rank_processes import outside_world
from rollmill.launch.rescale import Engines
from rollmill.launch.role_inputs import take
from rollmill.runs.lock import exclusive
from rollmill.runs.open_sinks import Sinks
from rollmill.runs.prepare import need_tokenizer
from rollmill.runs.run import RunDirectory, phase
from rollmill.runs.shared.beacon import Beacon
from rollmill.runs.shared.outbox import bring
from rollmill.runs.stages import DURING, IMPORT, attempts_begun, is_trained, left_to_evaluate, recorded
from rollmill.training.stage import RolloutSettings, StageSection

TICK_S = 0.2
IMPORT_PATIENCE_S = 600.0  # for another process that imports the same checkpoint
OnTick = Callable[[], None]


def drive(run: RunDirectory, on_tick: OnTick = lambda: None, *, last: str = "") -> None:
    """Run all stages to their end, or those up to stage `last`. Raises RollmillError when a process cannot be kept
    alive."""
    telemetry.open_events(run.events, "supervisor")
    cluster: Cluster = build(run.config.cluster)
    remote = run.config.store is not None and not cluster.elsewhere
    with (
        exclusive(run.path, "supervisor", patience_s=5.0),
        terminable(),
        Beacon(run) if remote else contextlib.nullcontext(),
    ):
        launcher = cluster.open(run)
        sinks = Sinks(run, fed=not cluster.elsewhere)  # else the command that watches the run feeds them

        def tick() -> None:
            sinks.poll()
            on_tick()

        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # from here on a stop is orderly
            for stage in run.config.stages:
                trained = is_trained(run, stage)
                need_tokenizer(run)
                begun = {label for label in attempts_begun(run) if label.startswith(f"{DURING}{stage.name}-")}
                if not trained or left_to_evaluate(run, stage) or begun - recorded(run):
                    _drive_stage(run, stage, trained, launcher, tick)
                    launcher.stop_roles()  # the next stage has engines on another line
                if stage.name == last:
                    break
        finally:
            launcher.stop()
            sinks.close()
            on_tick()


def _drive_stage(run: RunDirectory, stage: StageSection, trained: bool, launcher: Launcher, on_tick: OnTick) -> None:
    plays = isinstance(stage, RolloutSettings)
    if plays and not run.tokenizer.exists():  # the first stage: the gateway needs the tokenizer
        with phase(IMPORT):
            launcher.start("trainer")
            _until_ended(launcher, "trainer", on_tick)
    if not plays and not trained:
        with phase(stage.name):
            _start_trainer(launcher, stage)
            _until_ended(launcher, "trainer", on_tick)
    if plays or left_to_evaluate(run, stage):
        _play(run, stage, launcher, on_tick, trains=plays and not trained)


def _play(run: RunDirectory, stage: StageSection, launcher: Launcher, on_tick: OnTick, *, trains: bool) -> None:
    """Until the dispatcher has played and evaluated the stage, and no evaluation of `evals.every` is in progress."""
    engines = _start_serving(launcher, run, stage)
    if trains:
        _start_trainer(launcher, stage)
    for role in run.config.dispatchers:
        launcher.start(role, stage.name)
    with (
        Balance(run, stage) if trains else contextlib.nullcontext(),
        Evaluations(run, launcher, stage) as evaluations,
    ):

        def tick() -> None:
            engines.adjust()
            evaluations.adjust()
            on_tick()

        _until_ended(launcher, "dispatcher", tick)
        while evaluations.adjust(ending=True):
            launcher.watch()
            on_tick()
            time.sleep(TICK_S)


def follow(run: RunDirectory) -> None:
    """What ranks above 0 do that torchrun started: their part of the training. Rank 0 drives the run."""
    launcher = LocalLauncher(run)
    try:
        for stage in run.config.stages:
            if not is_trained(run, stage):
                _start_trainer(launcher, stage)
                _until_ended(launcher, "trainer", lambda: None)
    finally:
        launcher.stop()


def import_weights(run: RunDirectory) -> None:
    """Import the weights and the tokenizer that a run starts from, unless they are there; nothing else."""
    with exclusive(run.path, "supervisor", patience_s=IMPORT_PATIENCE_S), terminable():
        launcher = LocalLauncher(run)
        try:
            launcher.start("trainer")
            _until_ended(launcher, "trainer", lambda: None)
        finally:
            launcher.stop()


def _start_serving(launcher: Launcher, run: RunDirectory, stage: StageSection) -> Engines:
    if run.config.store is None:
        launcher.start("store", service=True)  # other regions read the directory over HTTP
    for role in run.config.gateways:
        launcher.start(role, service=True)
    engines = Engines(run, launcher, ("line", stage.name))
    engines.adjust()
    return engines


def _start_trainer(launcher: Launcher, stage: StageSection) -> None:
    # torchrun starts the other ranks itself
    ranks = 1 if outside_world() else stage.training.ranks
    launcher.start("trainer", stage.name, threads=stage.training.threads, ranks=ranks)


def _until_ended(launcher: Launcher, role: str, on_tick: OnTick) -> None:
    while not launcher.ended(role):
        launcher.watch()
        on_tick()
        time.sleep(TICK_S)


def drive_given() -> None:
    """The process of a supervisor: drives the run that it is handed on stdin, and writes its report."""
    from rollmill.dashboard.report_run import report_run

    end_with_parent()
    run = take(json.load(sys.stdin))
    objects = run.objects()
    try:
        drive(run)
        everything = replace(run, path=run.path / "report", service_of=run.path)  # events of all nodes
        time.sleep(SEND_S)  # the supervisor's own last ones are on their way
        bring(objects, everything.path)
        need_tokenizer(run)
        report_run(everything)
    except KeyboardInterrupt:
        sys.exit(STOPPED)
    except RollmillError as error:
        print(error, file=sys.stderr)
        sys.exit(FINAL)
