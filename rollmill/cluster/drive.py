"""Take a run through its phases. Every phase asks the stores what is already done, so `drive` also resumes a run.

mid-train   the base line: the checkpoint imported, trained to its last step      (skipped when published)
evaluate    the engines come up on version 0 of the line; held-out tasks          (skipped when recorded)
reinforce   dispatcher and trainer until the last step is committed
evaluate    the same held-out tasks on the last version
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

from rollmill import telemetry
from rollmill.cluster.local import LocalCluster
from rollmill.cluster.lock import exclusive
from rollmill.cluster.ranks import outside_world
from rollmill.cluster.run import RunDirectory
from rollmill.errors import WeightsError
from rollmill.evals.run import EvalResult
from rollmill.evals.suite import EvalConfig
from rollmill.training.config import TrainingConfig
from rollmill.types import Version

TICK_S = 0.2
T = TypeVar("T")


def drive(run: RunDirectory, on_tick: Callable[[], None] = lambda: None) -> None:
    """Run all phases to their end. Raises RollmillError when a process cannot be kept alive."""
    telemetry.open_events(run.events, "supervisor")
    with exclusive(run.path, "supervisor", patience_s=5.0):
        cluster = LocalCluster(run)
        try:
            with run.phase("mid-train"):
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
    """What a rank that torchrun started does while the first one drives: its part of the training, and nothing else."""
    cluster = LocalCluster(run)
    try:
        if run.config.midtrain is not None:
            _start_midtrain(cluster, run)
            _until_ended(cluster, "midtrain", lambda: None)
        _start_trainer(cluster, run)
        _until_ended(cluster, "trainer", lambda: None)
    finally:
        cluster.stop()


@contextlib.contextmanager
def serving(run: RunDirectory, version: int | None = None) -> Iterator[LocalCluster]:
    """Gateway and engines of a run alone, following its line or pinned to one version of it."""
    published_version(run, version)
    with exclusive(run.path, "supervisor", patience_s=5.0):
        cluster = LocalCluster(run)
        try:
            _start_serving(cluster, run, *([] if version is None else [str(version)]))
            yield cluster
        finally:
            cluster.stop()


def evaluate_version(run: RunDirectory, suite: EvalConfig, version: int | None) -> list[EvalResult]:
    """Evaluate one version of the run's line, by default its newest."""
    from rollmill.cluster.roles.dispatcher import evaluate

    number = published_version(run, version)
    with serving(run, number) as cluster:
        return asyncio.run(_while_watching(cluster, evaluate(run, suite, number)))


def published_version(run: RunDirectory, version: int | None) -> int:
    """The number itself if the run's line has it, the newest one for None; WeightsError if there is none."""
    from rollmill.storage.objects import Objects
    from rollmill.weights.reading.store import WeightStore

    store = WeightStore(Objects.open(run.home_store))
    number = store.head(run.config.line, run.config.form) if version is None else version
    if number is None:
        raise WeightsError(
            f"line {run.config.line!r} has no version yet", hint=f"`rollmill train --resume {run.path}` trains it"
        )
    store.manifest(Version(run.config.line, number), run.config.form)  # says so if there is no such version
    return number


async def _while_watching(cluster: LocalCluster, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which needs the processes of the cluster alive."""
    task = asyncio.create_task(work)
    while not task.done():
        cluster.watch()
        await asyncio.wait([task], timeout=TICK_S)
    return task.result()


def _start_serving(cluster: LocalCluster, run: RunDirectory, *pinned: str) -> None:
    cluster.start("store", service=True)
    cluster.start("gateway", service=True)
    for region in run.config.regions:
        cluster.start(f"engine-{region}", *pinned, threads=run.config.engine.threads, service=True)


def _start_midtrain(cluster: LocalCluster, run: RunDirectory) -> None:
    midtrain = run.config.midtrain
    training = midtrain.training if midtrain else TrainingConfig()
    cluster.start("midtrain", threads=training.threads, ranks=_local_ranks(training))


def _start_trainer(cluster: LocalCluster, run: RunDirectory) -> None:
    training = run.config.training
    cluster.start("trainer", threads=training.threads, ranks=_local_ranks(training))


def _local_ranks(training: TrainingConfig) -> int:
    """How many ranks to start here: all of them, or this one of those that were started from outside."""
    return 1 if outside_world() else training.ranks


def _until_ended(cluster: LocalCluster, role: str, on_tick: Callable[[], None]) -> None:
    while not cluster.ended(role):
        cluster.watch()
        on_tick()
        time.sleep(TICK_S)
