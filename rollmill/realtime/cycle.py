"""Drives real-time RL: collect → distil → train → gate → canary → promote, hold or roll back.

Each method does the work of one state and moves the cycle to the next (runs/cycle_journal.py has the states). The work
of a state may be repeated: what is in a store already is not done again. Production runs in other processes: `rollmill
serve RUN --version live --canary`. They meet in the database and in the store.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from typing import Any

from rollmill.errors import WeightsError
from rollmill.evals.gate_config import GateConfig
from rollmill.feedback.collect import Conversations
from rollmill.feedback.distil import TRAINABLE, WITHOUT_CONSENT, Conversation, Distilled, Lag, distil
from rollmill.feedback.rule import reward_of
from rollmill.gateway.routing.traffic_splits import SplitStore
from rollmill.launch.launchers.local import LocalLauncher, terminable
from rollmill.launch.services import CANDIDATE, TICK_S
from rollmill.realtime.canary import Arm, decide
from rollmill.realtime.cycle_stage import cycle_run
from rollmill.realtime.gate_run import LIVE, check_live, require_gate, run_gate, target_of
from rollmill.runs.admit_experience import admit_trajectories
from rollmill.runs.cycle_journal import Cycle, Journal
from rollmill.runs.lock import exclusive
from rollmill.runs.run import RunDirectory
from rollmill.runs.stages import last_version
from rollmill.telemetry import read_events
from rollmill.training.lineage import trace_lineage
from rollmill.trajectories.ledger import Ledger
from rollmill.trajectories.trajectory_store import TrajectoryStore
from rollmill.types import Version
from rollmill.weights.reading.channels import Channels
from rollmill.weights.reading.weight_store import WeightStore

LOOK_S = 1.0  # between two looks at the conversations
OnTick = Callable[[Cycle], None]


class CycleDriver:
    """The cycles of one run. One process at a time drives them."""

    def __init__(self, run: RunDirectory, on_tick: OnTick = lambda cycle: None) -> None:
        self._run = run
        self._config = run.config.cycle
        self._engine = run.database()
        self._weights = run.weights()
        self._objects = self._weights.objects
        self._channels = Channels(self._objects)
        self._trajectories = TrajectoryStore(self._engine, self._objects)
        self._splits = SplitStore(self._engine, run.id)
        self._on_tick = on_tick
        self.journal = Journal(self._engine, run.id)
        self.found: Counter[str] = Counter()  # conversations of the cycle that collects: trainable, or why not

    def run_cycle(self) -> Cycle:
        """Take the cycle that is not over, or a new one, to its end."""
        with exclusive(self._run.path, "cycle", patience_s=5.0), terminable():
            live = self._live()
            before = self.journal.current()
            since = before.facts.get("until", before.started_at) if before is not None else 0.0
            number = before.number + before.is_over if before is not None else 1
            cycle_run(self._run, number, str(live), self._config.enough)  # raises now for settings it cannot train with
            cycle = self.journal.begin({"since": since}, f"waiting for {self._config.enough} conversations of {live}")
            while not cycle.is_over:
                self._on_tick(cycle)
                cycle = self._step(cycle)
            self._on_tick(cycle)
            return cycle

    def _step(self, cycle: Cycle) -> Cycle:
        work: dict[str, Callable[[Cycle], Cycle]] = {
            "collecting": self._collect,
            "distilling": self._distil,
            "training": self._train,
            "gating": self._gate,
            "canary": self._canary,
            "promoting": self._promote,
            "rolling_back": self._roll_back,
        }
        return work[cycle.state](cycle)

    def _collect(self, cycle: Cycle) -> Cycle:
        """Wait until enough conversations can be trained on."""
        ended, known = self._conversations(ended_after=cycle.facts["since"]), None
        while True:
            live, until = self._live(), time.time() - self._config.settle_s
            if ended.look(until) or live != known:
                self.found, known = self._distilled(ended.found, live).counts, live
            if self.found[TRAINABLE] >= self._config.enough:
                reason = f"{self.found[TRAINABLE]} conversations of {live} can be trained on"
                return self.journal.move(cycle, "distilling", reason, live=str(live), until=until)
            self._wait(cycle)

    def _distil(self, cycle: Cycle) -> Cycle:
        """Store the rewards, and which conversations are trained on."""
        ended = self._conversations(ended_after=cycle.facts["since"])
        ended.look(cycle.facts["until"])
        found = self._distilled(ended.found, _version(cycle.facts["live"]))
        for id, reward in found.rewards.items():
            self._trajectories.grade(id, reward)
        facts = {
            "counts": dict(found.counts),
            "populations": [asdict(population) for population in found.populations],
            "rule": {"version": self._config.rule.version, "digest": self._config.rule.digest},
        }
        if not found.rewards:
            return self.journal.move(cycle, "held", f"nothing can be trained on: {_told(found.counts)}", **facts)
        self._objects.put(self._key(cycle, "distilled"), json.dumps({"ids": list(found.rewards), **facts}).encode())
        reason = f"{len(found.rewards)} conversations have a reward: {_told(found.counts)}"
        return self.journal.move(cycle, "training", reason, **facts)

    def _train(self, cycle: Cycle) -> Cycle:
        """Train a line of its own from the live version, and point `candidate` at its last version."""
        ids = json.loads(self._objects.get(self._key(cycle, "distilled")))["ids"]
        run, stage = cycle_run(self._run, cycle.number, cycle.facts["live"], len(ids))
        if self._weights.head(stage.name, run.config.form) is None:
            self._run_trainer(cycle_run(self._run, cycle.number, cycle.facts["live"], len(ids), begin=True)[0], cycle)
        ledger = Ledger(self._engine, run.stage_key(stage))
        if not ledger.groups():
            rows = [self._trajectories.get(id) for id in ids]
            verdicts = admit_trajectories(run, stage.name, rows)
            self._objects.put(self._key(cycle, "admitted"), json.dumps([asdict(each) for each in verdicts]).encode())
        if not ledger.groups():
            reasons = Counter(each["reason"] for each in json.loads(self._objects.get(self._key(cycle, "admitted"))))
            return self.journal.move(cycle, "held", f"no conversation was admitted: {_told(reasons)}")
        self._run_trainer(run, cycle)
        candidate = last_version(self._weights, stage, run.config.form)
        assert candidate is not None, "the trainer has ended"
        if self._channels.get(CANDIDATE) != candidate:
            self._channels.move(CANDIDATE, candidate)
        states = {state: count for state, count in ledger.counts().items() if count}
        tokens = learnt_tokens(read_events(run.events))
        told = f"{_told(states)}; of their sampled tokens {_told(tokens)}"
        reason = f"{candidate} is the candidate: {stage.steps} steps from {cycle.facts['live']}, {told}"
        return self.journal.move(cycle, "gating", reason, candidate=str(candidate), ledger=states, tokens=tokens)

    def _run_trainer(self, run: RunDirectory, cycle: Cycle) -> None:
        """The trainer's own records say what is left to do."""
        stage = run.config.stages[-1]
        cluster = LocalLauncher(run)
        try:
            cluster.start("trainer", stage.name, threads=stage.training.threads, ranks=stage.training.ranks)
            while not cluster.ended("trainer"):
                cluster.watch()
                self._on_tick(cycle)
                time.sleep(TICK_S)
        finally:
            cluster.stop()

    def _gate(self, cycle: Cycle) -> Cycle:
        live, candidate = (
            target_of(self._weights, _version(cycle.facts[name]), self._run.config.form) for name in ("live", CANDIDATE)
        )
        config, suite = self._run.config.gate or GateConfig(), self._run.config.evals
        if self._run.config.gate is not None:
            require_gate(self._objects)
        verdict = run_gate(self._run, live, candidate, suite, config, on_tick=lambda: self._on_tick(cycle))
        reason = f"the gate says {verdict.verdict}: {'; '.join(verdict.reasons)}"
        state = "canary" if verdict.promotes else "held"
        return self.journal.move(cycle, state, reason, gate=verdict.describe())

    def _canary(self, cycle: Cycle) -> Cycle:
        """Give a share of production to the candidate until it is decided. However this ends, nobody watches the
        canary any more, so all goes to the live version; of a process that is killed, gateways find out themselves."""
        config, since = self._config, cycle.updated_at
        ended = self._conversations(ended_after=since, begun_at=since)
        try:
            while True:
                self._splits.put(config.model, {LIVE: 1 - config.share, CANDIDATE: config.share})
                ended.look(time.time() - config.settle_s)
                arms = [self._arm(ended.found, _version(cycle.facts[name])) for name in ("live", CANDIDATE)]
                verdict = decide(arms[0], arms[1], max_loss=config.max_loss, sessions=config.canary_sessions)
                if verdict.decision != "go on":
                    break
                self._wait(cycle)
        finally:
            self._all_to_live()
        state = {"promote": "promoting", "hold": "held", "roll back": "rolling_back"}[verdict.decision]
        facts = {"canary": {**asdict(verdict), "live": arms[0]._asdict(), "candidate": arms[1]._asdict()}}
        return self.journal.move(cycle, state, f"{verdict.decision}: {verdict.reason}", **facts)

    def _arm(self, conversations: list[Conversation], version: Version) -> Arm:
        """Consent to training is not needed to count who accepts what."""
        rule = self._config.rule
        sampled = (version.line, version.number, version.number)
        said = (
            (each.user, None if (raw := reward_of(rule, each.signals)) is None else rule.accepts(raw))
            for each in conversations
            if (each.line, each.oldest, each.newest) == sampled and each.state in ("finished", "graded")
        )
        return Arm.of(said, self._config.canary_per_user)

    def _promote(self, cycle: Cycle) -> Cycle:
        live, candidate = _version(cycle.facts["live"]), _version(cycle.facts[CANDIDATE])
        entry = self._channels.entry(LIVE)
        assert entry is not None
        if entry.version not in (live, candidate):
            return self.journal.move(cycle, "held", f"live was moved to {entry.version} by somebody else")
        if entry.version == live:
            check_live(self._objects, LIVE, candidate, required=self._run.config.gate is not None)
            self._channels.move(LIVE, candidate, expect=entry.number)
        return self.journal.move(cycle, "promoted", f"{candidate} is live; before it was {live}{_users_said(cycle)}")

    def _roll_back(self, cycle: Cycle) -> Cycle:
        live = _version(cycle.facts["live"])
        self._all_to_live()
        if self._channels.get(CANDIDATE) != live:
            self._channels.move(CANDIDATE, live)
        reason = f"all of production is on {live}, which it never left{_users_said(cycle)}"
        return self.journal.move(cycle, "rolled_back", reason)

    def _all_to_live(self) -> None:
        self._splits.put(self._config.model, {LIVE: 1.0})

    def _live(self) -> Version:
        version = self._channels.get(LIVE)
        if version is None:
            raise WeightsError(
                f"{self._run.path} has no channel 'live'",
                hint="`rollmill weights channel set RUN live VERSION` makes it; real-time RL starts from a good model",
            )
        return version

    def _conversations(self, **bounds: float) -> Conversations:
        return Conversations(self._engine, self._run.id, settle_s=self._config.settle_s, **bounds)

    def _distilled(self, found: list[Conversation], live: Version) -> Distilled:
        lag = lag_behind(self._weights, live, self._run.config.form)
        return distil(found, lag, self._config.rule, self._config.max_lag, self._config.most_of_user)

    def _key(self, cycle: Cycle, what: str) -> str:
        return f"cycles/{self._run.id}/{cycle.number}/{what}.json"

    def _wait(self, cycle: Cycle) -> None:
        self._on_tick(cycle)
        time.sleep(LOOK_S)


def lag_behind(weights: WeightStore, live: Version, form: str) -> Lag:
    """How many versions older than `live` another one is. A promotion begins a new line; its ancestors count too."""
    lineage = trace_lineage(weights, live.line, form)

    def lag(line: str, number: int) -> int | None:
        position = lineage.position(line, number)
        return None if position is None else live.number - position

    return lag


def learnt_tokens(events: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """How many sampled tokens the steps of a cycle trained on, and how many they left out, by reason: some ways of
    sampling have no probabilities to learn from. A step that was repeated after a crash counts once."""
    steps = {event["step"]: event for event in events if event["kind"] == "step"}
    found = Counter({"trained on": sum(event.get("trained_tokens", 0) for event in steps.values())})
    for event in steps.values():
        found.update({f"left out ({why})": count for why, count in event.get("masked", {}).items() if count})
    return dict(found)


def left_out(counts: Mapping[str, int]) -> str:
    """What a cycle that collects has found, with the way to consent if that is missing."""
    told = _told(counts) or "none has ended yet"
    if not counts.get(WITHOUT_CONSENT):
        return f"conversations so far: {told}"
    hint = 'nobody agreed to training: a key with `rollmill keys create --consent train`, or gateway.consent = "train"'
    return f"conversations so far: {told} ({hint})"


def _users_said(cycle: Cycle) -> str:
    """Why a cycle ended as it did: who reads its end alone should know."""
    return f": {cycle.facts['canary']['reason']}" if "canary" in cycle.facts else ""


def _version(text: str) -> Version:
    line, _, number = text.rpartition("@")
    return Version(line, int(number))


def _told(counts: Any) -> str:
    return ", ".join(f"{count} {what}" for what, count in sorted(counts.items(), key=lambda item: -item[1]))
