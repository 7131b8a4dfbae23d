"""Takes a run through its stages. Every stage asks the stores what is already done, so `drive` also resumes a run.

learns from documents   trainer, until its last step is published; then its evaluation, if it has one
learns from rollouts    trainer, engines on the stage's line, gateway and dispatcher: the evaluation before, groups of
                        rollouts until the last step is committed, the evaluation after
"""

from __future__ import annotations

import time
from collections.abc import Callable

from rollmill import telemetry
from rollmill.cluster.local import LocalCluster, terminable
from rollmill.cluster.lock import exclusive
from rollmill.cluster.prepare import restore_tokenizer
from rollmill.cluster.ranks import outside_world
from rollmill.cluster.run import RunDirectory, phase
from rollmill.cluster.stages import IMPORT, is_trained, left_to_evaluate
from rollmill.training.stage import RolloutSettings, StageSection

TICK_S = 0.2
IMPORT_PATIENCE_S = 600.0  # for another process that imports the same checkpoint
OnTick = Callable[[], None]


def drive(run: RunDirectory, on_tick: OnTick = lambda: None) -> None:
    """Run all stages to their end. Raises RollmillError when a process cannot be kept alive."""
    telemetry.open_events(run.events, "supervisor")
    with exclusive(run.path, "supervisor", patience_s=5.0), terminable():
        cluster = LocalCluster(run)
        try:
            for stage in run.config.stages:
                trained = is_trained(run, stage)
                if trained and not run.tokenizer.exists():
                    restore_tokenizer(run)
                if not trained or left_to_evaluate(run, stage):
                    _drive_stage(run, stage, trained, cluster, on_tick)
                    cluster.stop_roles()  # the next stage has engines on another line
        finally:
            cluster.stop()
            on_tick()


def _drive_stage(run: RunDirectory, stage: StageSection, trained: bool, cluster: LocalCluster, on_tick: OnTick) -> None:
    plays = isinstance(stage, RolloutSettings)
    if plays and not run.tokenizer.exists():  # the first stage: the gateway needs the tokenizer
        with phase(IMPORT):
            cluster.start("trainer")
            _until_ended(cluster, "trainer", on_tick)
    if not plays and not trained:
        with phase(stage.name):
            _start_trainer(cluster, stage)
            _until_ended(cluster, "trainer", on_tick)
    if plays or left_to_evaluate(run, stage):
        _start_serving(cluster, run, stage)
        if plays and not trained:
            _start_trainer(cluster, stage)
        cluster.start("dispatcher", stage.name)
        _until_ended(cluster, "dispatcher", on_tick)


def follow(run: RunDirectory) -> None:
    """What ranks above 0 do that torchrun started: their part of the training. Rank 0 drives the run."""
    cluster = LocalCluster(run)
    try:
        for stage in run.config.stages:
            if not is_trained(run, stage):
                _start_trainer(cluster, stage)
                _until_ended(cluster, "trainer", lambda: None)
    finally:
        cluster.stop()


def import_weights(run: RunDirectory) -> None:
    """Import the weights and the tokenizer that a run starts from, unless they are there; nothing else."""
    with exclusive(run.path, "supervisor", patience_s=IMPORT_PATIENCE_S), terminable():
        cluster = LocalCluster(run)
        try:
            cluster.start("trainer")
            _until_ended(cluster, "trainer", lambda: None)
        finally:
            cluster.stop()


def _start_serving(cluster: LocalCluster, run: RunDirectory, stage: StageSection) -> None:
    if run.config.store is None:
        cluster.start("store", service=True)  # other regions read the directory over HTTP
    cluster.start("gateway", service=True)
    for region in run.config.regions:
        target = ("line", stage.name, run.config.form)
        cluster.start(f"engine-{region}", *target, threads=run.config.engine.threads, service=True)


def _start_trainer(cluster: LocalCluster, stage: StageSection) -> None:
    # torchrun starts the other ranks itself
    ranks = 1 if outside_world() else stage.training.ranks
    cluster.start("trainer", stage.name, threads=stage.training.threads, ranks=ranks)


def _until_ended(cluster: LocalCluster, role: str, on_tick: OnTick) -> None:
    while not cluster.ended(role):
        cluster.watch()
        on_tick()
        time.sleep(TICK_S)
