"""Watches the balance of a run while it learns from rollouts, records what autoscale_rule.py decides, and does it if
asked to.

Every decision is a `balance` event and an entry of the object cluster/balance.json, which `rollmill status` shows from
any host. With `balance.scale = "auto"` the number is asked for as `rollmill scale` does (rescale.py): the supervisor
starts and stops engines. A decision that cannot be done, because there are too few GPUs, says so. If engines that were
asked for do not come, because a cluster has no place for them, the next decision says so.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rollmill import telemetry
from rollmill.errors import ConfigError, StorageError
from rollmill.kinds import build
from rollmill.launch.devices import present_gpus
from rollmill.launch.launcher import Cluster
from rollmill.launch.rescale import ask_scale, read_scale, scaled, with_counts
from rollmill.runs.configuration.autoscale_rule import LOOK_S, Balancer, Sample
from rollmill.runs.run import RunConfig, RunDirectory
from rollmill.runs.shared.addresses import gateway_finders
from rollmill.runs.trust import ask
from rollmill.training.stage import RolloutSettings, StageSection
from rollmill.trajectories.ledger import Ledger
from rollmill.types import GroupState

log = logging.getLogger(__name__)
KEY = "cluster/balance.json"
MOST_KEPT = 100  # decisions in the store


class Balance(contextlib.AbstractContextManager["Balance"]):
    """The balancer of a stage while it learns from rollouts: a thread of the supervisor. It never raises: a run without
    advice goes on."""

    def __init__(self, run: RunDirectory, stage: StageSection) -> None:
        self._cluster: Cluster = build(run.config.cluster)
        elsewhere = self._cluster.elsewhere  # then the store says where the gateways are
        self._run = replace(run, ports={}) if elsewhere else run
        self._stage, self._config = stage, run.config.balance
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True, name="balance")

    def __enter__(self) -> Balance:
        if self._config.scale != "off":
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(2 * LOOK_S)

    def _follow(self) -> None:
        balancer, region = Balancer(self._config, self._run.config.engine.max_batch), self._run.config.regions[0]
        while not self._stop.wait(LOOK_S):
            try:
                sample = self.look()
                if sample is None:
                    continue
                now = scaled(self._run, read_scale(self._run)).config
                count = sum(spec.region == region for spec in now.engine_specs)
                decided = balancer.add(sample, count, has_room=functools.partial(self._has_room, now))
                if decided is not None:
                    self._record(decided)
            except Exception as error:  # the next look may succeed
                log.debug("no look at the balance: %r", error)

    def _has_room(self, now: RunConfig) -> bool:
        """Whether there is a place for one more engine. A cluster only says what it has, not what is free: whether the
        engine came is seen later."""
        if not self._cluster.elsewhere:
            return has_room(now)
        try:
            self._check(now.engines[0].count + 1)  # the first table is of the home region
            return True
        except ConfigError:
            return False

    def _check(self, count: int) -> None:
        """Raises ConfigError if the cluster has too little for `count` engines in the first table. Only a supervisor
        may ask: `rollmill scale` is given on hosts that do not reach the cluster."""
        home = self._run.config.regions[0]
        self._cluster.check(with_counts(self._run.config, {**read_scale(self._run), home: count}))

    @functools.cached_property
    def _ledger(self) -> Ledger:
        return self._run.ledger(self._stage)

    def look(self) -> Sample | None:
        """What trainer and engines do now; None before the first group and after the last step."""
        ledger, stage = self._ledger, self._stage
        assert isinstance(stage, RolloutSettings), "only stages with rollouts are balanced"
        if ledger.committed() >= stage.steps or not ledger.groups_started() or ledger.is_spent(stage.pace(stage.steps)):
            return None
        engines = _health(self._run)["engines"]
        home = [each for each in engines if each["region"] == self._run.config.regions[0] and each["alive"]]
        ours = [each for each in home if each.get("lent") is None]  # guests come and go: `count` has none of them
        return Sample(bool(ledger.groups(GroupState.leased)), [int(each["queued"]) for each in ours])

    def _record(self, decided: Mapping[str, Any]) -> None:
        done = self._config.scale == "auto" and decided["engines"] != decided["before"]
        told = {**decided, "done": done}
        if done:
            try:
                count = self._count(decided)
                if self._cluster.elsewhere and decided["engines"] > decided["before"]:
                    self._check(count)
                ask_scale(self._run, [f"engines={count}"])
            except ConfigError as error:  # there are too few GPUs
                told |= {"done": False, "reason": f"{decided['reason']}; not done: {error.message}"}
        telemetry.emit("balance", **told)
        objects = self._run.objects()
        kept = [*read_decisions(self._run), {"at": time.time(), **told}][-MOST_KEPT:]
        objects.put(KEY, json.dumps(kept).encode())

    def _count(self, decided: Mapping[str, Any]) -> int:
        """What the first table of the home region gets: other tables of it keep their number."""
        tables = [table for table in self._run.config.engines if table.region == self._run.config.regions[0]]
        return max(1, int(decided["engines"]) - sum(table.count for table in tables[1:]))


def has_room(config: RunConfig) -> bool:
    """Whether one more engine would have a GPU of this host for itself, or, where nothing computes on GPUs, cores."""
    ranks = max((stage.training.ranks for stage in config.stages), default=0)
    gpus = [] if config.device == "cpu" else present_gpus()
    if gpus:
        return len(gpus) > ranks + len(config.engine_specs)
    threads = max((stage.training.ranks * stage.training.threads for stage in config.stages), default=0)
    cores = len(os.sched_getaffinity(0))
    return cores >= threads + config.engine.threads * (len(config.engine_specs) + 1)


def read_decisions(run: RunDirectory) -> list[dict[str, Any]]:
    """What was decided, oldest first; empty if nothing was, or if the store does not answer."""
    home = run.existing_home()
    try:
        tree = json.loads(home.get(KEY)) if home is not None and home.head(KEY) is not None else []
        return [dict(each) for each in tree]
    except (StorageError, ValueError, TypeError, RecursionError):
        return []


def _health(run: RunDirectory) -> dict[str, Any]:
    """What the first gateway that answers says about itself and the engines. Raises OSError if none does."""
    problem: Exception = ConnectionError("no gateway has said where it is")
    for find in gateway_finders(run):
        if (url := find()) is None:
            continue
        try:
            status, body = ask(run, f"{url}/health", LOOK_S)
            if status == 200:  # 503: no engine is alive
                return dict(json.loads(body))
            problem = ConnectionError(f"{url} answers {status}")
        except (OSError, ValueError) as error:
            problem = error
    raise ConnectionError(str(problem))
