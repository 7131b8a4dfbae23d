"""The balance: what is decided from shares of the time, and that the run follows."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any, NamedTuple

import pytest

from rollmill import telemetry
from rollmill.config import Config
from rollmill.errors import ConfigError
from rollmill.launch.autoscaler import Balance, has_room, read_decisions
from rollmill.launch.launcher import Launcher
from rollmill.launch.rescale import read_scale
from rollmill.runs.configuration.autoscale_rule import BalanceConfig, Balancer, Sample, Shares, decide, describe
from rollmill.runs.run import RunConfig, RunDirectory
from rollmill.runs.shared.addresses import key_of
from rollmill.storage.database import open_database
from rollmill.storage.objects import Objects
from rollmill.trajectories.ledger import Ledger
from rollmill.trajectories.staleness import Pace
from tests.trajectories.build import start_group

CONFIG = BalanceConfig(least=1, most=8)


@pytest.mark.parametrize(
    ("shares", "engines", "wanted", "said"),
    [
        (Shares(0.5, 0.0, 0.9), 2, 4, "more engines keep the trainer busy"),
        (Shares(0.9, 0.0, 0.9), 2, 4, "more engines"),  # at most twice as many at once
        (Shares(0.5, 0.0, 0.9), 8, 8, "balance.most is 8"),
        (Shares(0.5, 0.0, 0.1), 2, 2, "batches are 10% full"),
        (Shares(0.0, 0.6, 0.9), 4, 2, "fewer engines are enough"),
        (Shares(0.0, 0.9, 0.9), 8, 4, "fewer engines"),  # at least half as many
        (Shares(0.0, 0.9, 0.9), 1, 1, "in balance"),
        (Shares(0.5, 0.6, 0.9), 4, 4, "rollouts themselves are slow"),
        (Shares(0.05, 0.2, 0.9), 4, 4, "in balance"),
        (Shares(1.0, 0.0, 1.0), 1, 2, "more engines"),
        (Shares(0.0, 1.0, 0.0), 4, 2, "fewer engines"),
    ],
)
def test_decisions(shares: Shares, engines: int, wanted: int, said: str) -> None:
    decision = decide(shares, engines, CONFIG)
    assert decision.engines == wanted and said in decision.reason, decision


def test_no_engine_is_added_where_it_would_take_the_cores_of_others(
    make_run: Callable[..., RunDirectory], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_run("engines=[{count=2}]", "device=cpu", "engine.threads=2", "stages.rl.training.threads=4").config
    for cores, room in ((9, False), (10, True)):
        monkeypatch.setattr("os.sched_getaffinity", lambda _, cores=cores: range(cores))
        assert has_room(config) is room
    gpus = config.model_copy(update={"device": "cuda"})
    for devices, room in (("0,1,2", False), ("0,1,2,3", True)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", devices)
        assert has_room(gpus) is room
    decision = decide(Shares(0.5, 0.0, 0.9), 2, CONFIG, room=False)
    assert decision.engines == 2 and "no core or GPU is left" in decision.reason


def test_a_decision_needs_a_window_and_is_said_once() -> None:
    balancer = Balancer(BalanceConfig(window_s=4), capacity=8)
    busy, starved = Sample(True, [8, 8]), Sample(False, [8, 8])
    assert [balancer.add(busy, 2) for _ in range(3)] == [None] * 3
    told = balancer.add(busy, 2)
    assert told is not None and told["engines"] == 2 and "in balance" in told["reason"]
    assert all(balancer.add(busy, 2) is None for _ in range(20))
    [change] = [told for _ in range(20) if (told := balancer.add(starved, 2)) is not None]
    assert change["before"] == 2 and change["engines"] > 2 and change["waits"] > 0
    assert balancer.add(starved, 4) is None  # two of the four engines are not there yet


def test_what_is_done_by_itself_is_done_again_if_somebody_undoes_it() -> None:
    balancer = Balancer(BalanceConfig(window_s=4, scale="auto"), capacity=8)
    starved = Sample(False, [8, 8])
    changes = [told for _ in range(20) if (told := balancer.add(starved, 2)) is not None]
    assert len(changes) == 5 and {change["engines"] for change in changes} == {4}


def test_engines_that_do_not_come_are_not_waited_for_for_ever() -> None:
    balancer = Balancer(BalanceConfig(window_s=4), capacity=8)
    starved, idle = Sample(False, [8, 8]), Sample(True, [0, 0])

    def told(sample: Sample, looks: int) -> list[str]:
        return [describe(told) for _ in range(looks) if (told := balancer.add(sample, 4)) is not None]

    assert told(starved, 5 * 4) == [], "they may still start"
    [said] = told(starved, 40)
    assert said.startswith("2 engines: 4 engines are asked for, 2 run; the trainer waits 100%")
    assert said.endswith("more engines would help, but no core or GPU is left for one")
    assert told(Sample(False, [8, 8, 8]), 5 * 4) == [], "one came: the next may too"
    assert told(idle, 5 * 4) == []
    assert told(idle, 4)[0].startswith("2 → 1 engines (advice): 4 engines are asked for, 2 run; ")
    assert told(Sample(False, []), 100) == []


# a trainer takes 10 s per step of 16 groups; engines work while fewer than 32 groups are there, and take 20 s to join
CAPACITY, GROUPS_PER_STEP, STEP_S, MOST_GROUPS, JOIN_S = 8, 16, 10, 32, 20
STRETCH_S = 1000
LOADS = (2.0, 5.0, 1.0)  # seconds of an engine per group, in each stretch


class Second(NamedTuple):
    computes: bool  # the trainer
    engines: int
    idle: bool  # the engines
    reason: str | None = None  # of a change


def load(now: int) -> float:
    return LOADS[min(now // STRETCH_S, len(LOADS) - 1)]


def simulate(config: BalanceConfig, seconds: int) -> list[Second]:
    """Virtual time: what a trainer and its engines do, whose number the code that runs decides."""
    balancer, engines = Balancer(config, CAPACITY), 1
    joining, working, groups, left, found = 0, engines, 0.0, 0, []
    for now in range(seconds):
        room = groups < MOST_GROUPS
        working = engines if joining == 0 else min(working, engines)
        groups += working / load(now) if room else 0.0
        if left == 0 and groups >= GROUPS_PER_STEP:
            groups, left = groups - GROUPS_PER_STEP, STEP_S
        computes, left = left > 0, max(0, left - 1)
        joining = max(0, joining - 1)
        told = balancer.add(Sample(computes, [CAPACITY if room else 0] * working), engines)
        changed = told is not None and told["engines"] != engines
        found.append(Second(computes, engines, not room, told["reason"] if changed and told else None))
        if changed and told:
            engines, joining = told["engines"], JOIN_S
    return found


def test_the_number_of_engines_follows_a_simulated_load_that_shifts() -> None:
    """SIMULATED: groups take 2 s of an engine, then 5 s, then 1 s. In balance are 3.2, 8 and 1.6 engines."""
    run = simulate(BalanceConfig(window_s=60, most=12), 3000)
    for start, end, fewest, most in ((500, 1000, 3, 5), (1500, 2000, 8, 11), (2700, 3000, 2, 3)):
        stretch = run[start:end]
        assert all(fewest <= second.engines <= most for second in stretch), {second.engines for second in stretch}
        assert sum(second.computes for second in stretch) > 0.8 * len(stretch)
    assert sum(second.reason is not None for second in run) <= 12  # it does not swing


@contextmanager
def health(port: int, tree: Any) -> Iterator[None]:
    """A stand-in for the gateway that only says what its engines do."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(tree).encode())

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", port), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield
        server.shutdown()


@pytest.mark.parametrize("mode", ["auto", "advise", "off"])
def test_a_run_does_what_was_decided_if_it_may_and_keeps_the_reason(
    make_run: Callable[..., RunDirectory], monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.setattr("rollmill.launch.autoscaler.LOOK_S", 0.01)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(64))
    run = make_run(f"balance.scale={mode}", "balance.window_s=0.1", "balance.most=2")
    stage = run.config.stages[-1]
    telemetry.open_events(run.events, "supervisor")
    ledger = Ledger(open_database(run.database_url), run.stage_key(stage))
    full = run.config.engine.max_batch
    engine = {"region": "home", "alive": True, "queued": full}
    engines = [engine, {**engine, "region": "away"}, {**engine, "alive": False}, {**engine, "lent": "main"}]
    with health(run.ports["gateway"], {"engines": engines}), Balance(run, stage) as balance:
        assert balance.look() is None  # no group yet
        start_group(ledger, "g", "task", 1, pace=Pace(4, 1, 0), ids=["g-0"])
        assert balance.look() == Sample(False, [full])
        while mode != "off" and not read_decisions(run):
            time.sleep(0.01)
    decided = [describe(each) for each in read_decisions(run)]
    events = [event for event in telemetry.read_events(run.events) if event["kind"] == "balance"]
    assert [event["engines"] for event in events[:1]] == ([] if mode == "off" else [2])
    assert read_scale(run) == ({"home": 2} if mode == "auto" else {})
    if mode != "off":
        word = "(done)" if mode == "auto" else "(advice)"
        assert decided[0].startswith(f"1 → 2 engines {word}: the trainer waits 100% of the time")


class SmallConfig(Config):
    places: int


class Small:
    """`[cluster] kind = "tests.runs.configuration.test_autoscale_rule:Small"`: a cluster with `places` for engines,
    so it says."""

    elsewhere = True

    def __init__(self, config: SmallConfig) -> None:
        self._places = config.places

    def check(self, config: RunConfig) -> None:
        if len(config.engine_specs) > self._places:
            raise ConfigError(f"the cluster has {self._places} places")

    def open(self, run: RunDirectory) -> Launcher:
        raise NotImplementedError

    def submit(self, run: RunDirectory) -> None: ...

    def collect(self, run: RunDirectory) -> str | None:
        return None

    def halt(self, run: RunDirectory) -> None: ...


@pytest.mark.parametrize(
    ("places", "asked", "said"),
    [
        (2, {}, ["2 engines: *: more engines would help, but no core or GPU is left for one"]),
        (3, {}, ["2 → 4 engines (advice): *; not done: the cluster has 3 places"]),
        (4, {"home": 4}, ["2 → 4 engines (done): *", "2 engines: 4 engines are asked for, 2 run; *"]),
    ],
)
def test_a_cluster_without_room_and_engines_that_never_come(
    make_run: Callable[..., RunDirectory],
    monkeypatch: pytest.MonkeyPatch,
    places: int,
    asked: dict[str, int],
    said: list[str],
) -> None:
    monkeypatch.setattr("rollmill.launch.autoscaler.LOOK_S", 0.01)
    cluster = f"cluster={{kind='tests.runs.configuration.test_autoscale_rule:Small',places={places}}}"
    run = make_run(cluster, "engines=[{count=2}]", "balance.scale=auto", "balance.window_s=1")
    telemetry.open_events(run.events, "supervisor")
    Objects.open(run.home_store).put(key_of("gateway"), json.dumps({"url": run.url("gateway")}).encode())
    stage = run.config.stages[-1]
    ledger = Ledger(open_database(run.database_url), run.stage_key(stage))
    start_group(ledger, "g", "task", 1, pace=Pace(4, 1, 0), ids=["g-0"])
    engine = {"region": "home", "alive": True, "queued": run.config.engine.max_batch}
    with health(run.ports["gateway"], {"engines": [engine] * 2}), Balance(run, stage):
        while len(read_decisions(run)) < len(said):
            time.sleep(0.01)
    decided = [describe(each) for each in read_decisions(run)]
    for told, pattern in zip(decided, said, strict=False):
        assert re.fullmatch(re.escape(pattern).replace(r"\*", ".*"), told), told
    assert read_scale(run) == asked
