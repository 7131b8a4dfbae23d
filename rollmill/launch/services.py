"""Serve or evaluate a run's weights, also while the run trains.

A service is a gateway with engines that nothing else uses. Its ports, session log, events, logs and locks are in a
directory of its own: RUN/services/serve-1, serve-2, eval-1 … It reads the stores of the run and records into its
database.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import shutil
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from rollmill import telemetry
from rollmill.evals.evaluation import EvalResult
from rollmill.evals.suite import EvalConfig
from rollmill.inference.engine_sections import EngineSpec
from rollmill.launch.launchers.local import LocalLauncher, terminable
from rollmill.launch.lending import lending
from rollmill.runs.free_ports import held_port
from rollmill.runs.lock import LockTaken, exclusive
from rollmill.runs.run import CANARY, RunDirectory
from rollmill.runs.trust import ask
from rollmill.types import Version
from rollmill.weights.reading.channels import Channels

TICK_S = 0.2
CANDIDATE = "candidate"  # the channel that canaries follow
T = TypeVar("T")


@dataclass(frozen=True)
class Target:
    """What a service serves: one version, or the version that a channel or the head of a line points at."""

    kind: Literal["version", "channel", "line"]
    name: str
    version: Version  # the one it is now
    form: str

    def __str__(self) -> str:
        return self.name if self.kind == "version" else f"{self.version}, following {self.kind} {self.name}"

    def pinned(self) -> Target:
        """The version it is now, and no other later."""
        return Target("version", str(self.version), self.version, self.form)


@contextlib.contextmanager
def serving(
    run: RunDirectory,
    target: Target,
    kind: str = "serve",
    host: str = "127.0.0.1",
    port: int | None = None,
    *,
    canary: bool = False,
) -> Iterator[tuple[RunDirectory, LocalLauncher]]:
    """Start a service of the run. Yields its directory and its processes, which the caller watches. The caller holds
    the port, if it gives one. With `canary`, one engine more follows the channel `candidate`. Production reaches it
    only as far as the split in the database says. With [lending], engines of a channel work for the run's training
    while production needs few of them."""
    with contextlib.ExitStack() as held:
        port = port or held.enter_context(held_port(host, None))
        service = held.enter_context(_claim(run, kind, host, port, canary=canary))
        if canary:
            _prepare_canary(run, target)
        held.enter_context(terminable())
        telemetry.open_events(service.events, "supervisor")
        cluster = LocalLauncher(service)
        try:
            _start(cluster, run, target, run.config.engine_specs)
            if canary:
                role = f"engine-{run.config.regions[0]}{CANARY}"
                arguments = ("channel", CANDIDATE, _form_of(run, target, run.config.engine_specs[0]))
                cluster.start(role, *arguments, threads=run.config.engine.threads, service=True)
            with lending(service, target.name) if target.kind == "channel" else contextlib.nullcontext():
                yield service, cluster
        finally:
            cluster.stop()


@contextlib.contextmanager
def one_engine(run: RunDirectory, target: Target) -> Iterator[tuple[RunDirectory, LocalLauncher]]:
    """As `serving`, with one engine for evaluations, as a part of the process that drives the run."""
    with held_port("127.0.0.1", None) as port, _claim(run, "eval", "127.0.0.1", port, canary=False) as service:
        cluster = LocalLauncher(service)
        try:
            _start(cluster, run, target, run.config.engine_specs[:1])
            yield service, cluster
        finally:
            cluster.stop()


def _start(cluster: LocalLauncher, run: RunDirectory, target: Target, engines: Sequence[EngineSpec]) -> None:
    for role in run.config.gateways:
        cluster.start(role, service=True)
    for spec in engines:
        arguments = (target.kind, target.name, _form_of(run, target, spec))
        cluster.start(spec.role, *arguments, threads=run.config.engine.threads, service=True)


def _form_of(run: RunDirectory, target: Target, engine: EngineSpec) -> str:
    """The engine's own form, or that of the target if it has no other: imported weights, versions of before."""
    form = run.config.form_of(engine)
    return form if run.weights().exists(target.version, form) else target.form


def _prepare_canary(run: RunDirectory, target: Target) -> None:
    """The channel that the second engine follows exists, and until a cycle says otherwise, production stays away."""
    from rollmill.gateway.routing.traffic_splits import SplitStore

    channels = Channels(run.objects())
    if channels.get(CANDIDATE) is None:
        channels.move(CANDIDATE, target.version)
    splits, model = SplitStore(run.database(), run.id), run.config.cycle.model
    if model not in splits.get():
        splits.put(model, {target.name: 1.0})


@contextlib.contextmanager
def _claim(run: RunDirectory, kind: str, host: str, port: int, *, canary: bool) -> Iterator[RunDirectory]:
    """The first directory of that kind that no process uses. What an earlier `serve` left in its session log is taken
    over; rollouts of an earlier evaluation are not needed."""
    for number in itertools.count(1):
        path = run.path / "services" / f"{kind}-{number}"
        with contextlib.ExitStack() as held:
            try:
                held.enter_context(exclusive(path, "supervisor", patience_s=0.0))
            except LockTaken:
                continue
            for stale in ("events", *([*run.config.gateways, "logs"] if kind == "eval" else [])):
                shutil.rmtree(path / stale, ignore_errors=True)
            yield run.make_service(path.name, host, port, canary=canary)
            return


def health(service: RunDirectory) -> dict[str, Any] | None:
    """What the gateway of a service says about itself; None while it does not answer."""
    with contextlib.suppress(OSError, ValueError):
        _, body = ask(service, f"{service.url('gateway')}/health", 5.0)  # 503: no engine is ready
        tree = json.loads(body)
        return tree if isinstance(tree, dict) else None
    return None


def served_versions(service: RunDirectory) -> list[str]:
    """The versions that its engines serve now, lent ones aside; empty until one is ready."""
    engines = (health(service) or {}).get("engines", [])
    policies = [each["policy"] for each in engines if each["alive"] and each["policy"] and not each["lent"]]
    return sorted({str(Version(policy["line"], policy["number"])) for policy in policies})


def wait_until_ready(
    service: RunDirectory, cluster: LocalLauncher, tell: Callable[[str], object] = lambda waits_for: None
) -> None:
    """Return when an engine serves; one for canaries does not count. Raises RollmillError when a process cannot be kept
    alive. `tell` gets what it waits for, each time that changes."""
    told = ""
    while True:
        found = health(service)
        if any(each["alive"] and each["channel"] != CANDIDATE for each in (found or {}).get("engines", [])):
            return
        waits_for = "starting the gateway" if found is None else "the gateway answers; an engine loads the weights"
        if waits_for != told:
            tell(told := waits_for)
        cluster.watch()
        time.sleep(TICK_S)


def evaluate(
    service: RunDirectory,
    cluster: LocalLauncher,
    suite: EvalConfig,
    version: Version,
    on_tick: Callable[[], None] = lambda: None,
) -> list[EvalResult]:
    """Evaluate the version that a service is pinned to. `on_tick` is called a few times per second."""
    from rollmill.launch.roles.dispatcher import evaluate as evaluation

    return asyncio.run(while_watching(cluster, evaluation(service, suite, version), on_tick))


async def while_watching(cluster: LocalLauncher, work: Coroutine[Any, Any, T], on_tick: Callable[[], None]) -> T:
    """The result of `work`, which needs the processes of the cluster alive."""
    task = asyncio.create_task(work)
    while not task.done():
        cluster.watch()
        on_tick()
        await asyncio.wait([task], timeout=TICK_S)
    return task.result()
