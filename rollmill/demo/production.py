"""A served run that simulated users visit while `rollmill cycle run` drives its cycles. All but the users is real."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from rollmill.demo.simulated_users import PopulationFile, Visit, visit
from rollmill.environments.environment import build_tasks, open_environments
from rollmill.errors import RollmillError
from rollmill.launch.launchers.local import COMMAND, LocalLauncher
from rollmill.launch.parent_death import SUPERVISOR
from rollmill.launch.services import TICK_S, Target, health, serving, wait_until_ready, while_watching
from rollmill.runs.cycle_journal import FINAL, Journal
from rollmill.runs.run import RunDirectory
from rollmill.storage.database import open_database
from rollmill.storage.objects import Objects
from rollmill.trajectories.query import TrajectoryQuery
from rollmill.trajectories.trajectory_store import TrajectoryStore
from rollmill.types import Version
from rollmill.weights.reading.channels import Channels

MEASURE = 7  # seed of the tasks and draws of a measurement: every version meets the same ones
_FIRST = 1000  # seeds of the users who are learnt from
_SPLIT_S = 2.0  # gateways look at the split of production once per second
# without users a driver would wait for ever, with the lock of the cycle: so it dies with this process
_DRIVER = f"from rollmill.launch.parent_death import end_with_parent; end_with_parent(); {COMMAND}"


@dataclass
class Production:
    run: RunDirectory
    service: RunDirectory
    cluster: LocalLauncher
    batch: int  # users who come while a cycle collects or has a canary
    meanwhile: int = 4  # and while a candidate is trained and examined: nothing is learnt from them
    visits: list[Visit] = field(default_factory=list)
    seed: int = _FIRST

    @property
    def journal(self) -> Journal:
        return Journal(open_database(self.run.database_url), self.run.id)

    def drive(self, cycles: int, population: Callable[[str], PopulationFile]) -> list[str]:
        """Drive cycles to their end. `population`: who visits while a cycle is in a state. Returns how each ended."""
        before = len(self._ends())
        command = [sys.executable, "-c", _DRIVER, "cycle", "run", str(self.run.path), "--cycles", str(cycles)]
        driver = subprocess.Popen(command, env={**os.environ, SUPERVISOR: str(os.getpid())})
        try:
            while driver.poll() is None:
                cycle = self.journal.current()
                state = cycle.state if cycle is not None and not cycle.is_over else "collecting"
                count = self.batch if state in ("collecting", "canary") else self.meanwhile
                self.seed += 1
                self.visits += self.receive(population(state), count, self.seed)
        finally:
            driver.terminate()
            code = driver.wait()
        if code != 0:
            raise RollmillError(f"`rollmill cycle run` ended with exit code {code}", hint="it has printed why")
        ends = self._ends()[before:]
        if len(ends) < cycles:
            raise RollmillError(
                f"`rollmill cycle run` was stopped: {len(ends)} of {cycles} cycles are over",
                hint="the same command goes on from here",
            )
        return ends

    def _ends(self) -> list[str]:
        return [move.state for move in self.journal.history() if move.state in FINAL]

    def receive(self, population: PopulationFile, count: int, seed: int, *, silent: bool = False) -> list[Visit]:
        """Users of `count` training tasks, which follow from `seed`."""

        async def users() -> list[Visit]:
            if count == 0:
                await asyncio.sleep(TICK_S)
                return []
            tasks = list(itertools.islice(build_tasks(self.run.config).train(seed), count))
            url, key = self.service.url("gateway"), self.service.secrets["production_key"]
            limits = self.run.config.rollouts
            async with open_environments(self.run.config) as environments:
                return await visit(environments, url, key, tasks, population, limits, seed=seed, silent=silent)

        return asyncio.run(while_watching(self.cluster, users(), lambda: None))

    def measure(self, population: PopulationFile, count: int) -> dict[str, list[bool]]:
        """By task: whether the work of the version that is live now is truly accepted. Nothing is learnt from it: these
        users report nothing."""
        self._until_live()
        found = self.receive(population, count, MEASURE, silent=True)
        truth: dict[str, list[bool]] = {each.task: [] for each in found}
        for each in found:
            truth[each.task].append(each.truth)
        return truth

    def _until_live(self) -> None:
        """Every engine of the channel serves the version that it points at, and no session goes to a canary."""
        wanted = str(live_target(self.run).version)
        while True:
            engines = [each for each in (health(self.service) or {}).get("engines", []) if each["channel"] == "live"]
            served = {f"{each['policy']['line']}@{each['policy']['number']}" for each in engines if each["policy"]}
            if served == {wanted}:
                break
            self.cluster.watch()
            time.sleep(TICK_S)
        time.sleep(_SPLIT_S)

    def share_of(self, line: str, since: float, until: float) -> tuple[int, int]:
        """Production sessions of a line, and of all, that began in a time."""
        store = TrajectoryStore(open_database(self.run.database_url), Objects.open(self.run.home_store))
        rows = [row for row in store.find(TrajectoryQuery(run="production")) if since <= row.created_at <= until]
        return sum(row.line == line for row in rows), len(rows)


@contextlib.contextmanager
def open_production(run: RunDirectory, batch: int, meanwhile: int = 4) -> Iterator[Production]:
    """Serve the channel `live` of a run, with an engine for canaries."""
    with serving(run, live_target(run), canary=True) as (service, cluster):
        wait_until_ready(service, cluster)
        yield Production(run, service, cluster, batch, meanwhile)


def live_target(run: RunDirectory) -> Target:
    version = Channels(run.objects()).get("live")
    assert version is not None
    return Target("channel", "live", version, "bf16")


def set_live(run: RunDirectory, version: Version) -> None:
    """The first live version. It passes no gate, which `rollmill weights channel set` would ask for: users are
    simulated, so nobody is harmed. All later versions do."""
    channels = Channels(run.objects())
    if channels.get("live") is None:
        channels.move("live", version)
