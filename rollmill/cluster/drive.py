"""Take a run through its phases. Every phase asks the stores what is already done, so `drive` also resumes a run.

mid-train   the base line: the checkpoint imported, trained to its last step      (skipped when published)
evaluate    the engines come up on version 0 of the line; held-out tasks          (skipped when recorded)
reinforce   dispatcher and trainer until the last step is committed
evaluate    the same held-out tasks on the last version
"""

from __future__ import annotations

import time
from collections.abc import Callable

from rollmill import telemetry
from rollmill.cluster.local import LocalCluster, terminable
from rollmill.cluster.lock import exclusive
from rollmill.cluster.ranks import outside_world
from rollmill.cluster.run import RunDirectory, phase
from rollmill.training.config import TrainingConfig

TICK_S = 0.2
IMPORT_PATIENCE_S = 600.0  # for another process that imports the same checkpoint


def drive(run: RunDirectory, on_tick: Callable[[], None] = lambda: None) -> None:
    """Run all phases to their end. Raises RollmillError when a process cannot be kept alive."""
    telemetry.open_events(run.events, "supervisor")
    with exclusive(run.path, "supervisor", patience_s=5.0), terminable():
        cluster = LocalCluster(run)
        try:
            with phase("mid-train"):
                _start_midtrain(cluster, run)
                _until_ended(cluster, "midtrain", on_tick)
            _start_serving(cluster, run)
            _start_trainer(cluster, run)
            cluster.start("dispatcher")
            _until_ended(cluster, "dispatcher", on_tick)
        finally:
            cluster.stop()
            on_tick()


def follow(run: RunDirectory) -> None:
    """What ranks above 0 do that torchrun started: their part of the training. Rank 0 drives the run."""
    cluster = LocalCluster(run)
    try:
        if run.config.midtrain is not None:
            _start_midtrain(cluster, run)
            _until_ended(cluster, "midtrain", lambda: None)
        _start_trainer(cluster, run)
        _until_ended(cluster, "trainer", lambda: None)
    finally:
        cluster.stop()


def _start_serving(cluster: LocalCluster, run: RunDirectory) -> None:
    cluster.start("store", service=True)
    cluster.start("gateway", service=True)
    for region in run.config.regions:
        cluster.start(f"engine-{region}", threads=run.config.engine.threads, service=True)


def import_weights(run: RunDirectory) -> None:
    """Make the base line and the tokenizer of a run, unless they are there; nothing else."""
    with exclusive(run.path, "supervisor", patience_s=IMPORT_PATIENCE_S), terminable():
        cluster = LocalCluster(run)
        try:
            _start_midtrain(cluster, run)
            _until_ended(cluster, "midtrain", lambda: None)
        finally:
            cluster.stop()


def _start_midtrain(cluster: LocalCluster, run: RunDirectory) -> None:
    midtrain = run.config.midtrain
    training = midtrain.training if midtrain else TrainingConfig()
    cluster.start("midtrain", threads=training.threads, ranks=_local_ranks(training))


def _start_trainer(cluster: LocalCluster, run: RunDirectory) -> None:
    training = run.config.training
    cluster.start("trainer", threads=training.threads, ranks=_local_ranks(training))


def _local_ranks(training: TrainingConfig) -> int:
    """How many ranks to start here: all of them, or one if torchrun started this process."""
    return 1 if outside_world() else training.ranks


def _until_ended(cluster: LocalCluster, role: str, on_tick: Callable[[], None]) -> None:
    while not cluster.ended(role):
        cluster.watch()
        on_tick()
        time.sleep(TICK_S)
