"""Runs the gate: evaluates a candidate and the live version on the same suite, and keeps measurements and verdicts.

    gates/measured/VERSION-SUITE.json   attempts of a version, and with which others it was measured at the same time
    gates/verdicts/VERSION.json         the newest verdict about a version: what `live` is checked against
    gates/yardstick.json                the best version that was live when a candidate came: the next ones must not
                                        lose more against it than [gate] allows
    gates/required.json                 this store has a gate

Whoever moves the channel `live` of a store with a gate asks `check_live` first.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import secrets
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

from rollmill import telemetry
from rollmill.environments.environment import build_tasks, each_environment
from rollmill.errors import WeightsError
from rollmill.evals.evaluation import Conduct, EvalResult
from rollmill.evals.gate import GateVerdict, surely_better
from rollmill.evals.gate_config import BY_ESTIMATE, GateConfig
from rollmill.evals.gate_suites import judge_suites, own
from rollmill.evals.suite import EvalConfig
from rollmill.kinds import code_of
from rollmill.launch.roles.dispatcher import evaluate as evaluation
from rollmill.launch.services import Target, serving, while_watching
from rollmill.runs.run import RunDirectory
from rollmill.storage.objects import Objects
from rollmill.types import Version
from rollmill.weights.reading.channels import Channels
from rollmill.weights.reading.weight_store import WeightStore

LIVE = "live"
_REQUIRED = "gates/required.json"
_YARDSTICK = "gates/yardstick.json"


def run_gate(
    run: RunDirectory,
    live: Target,
    candidate: Target,
    suite: EvalConfig,
    config: GateConfig,
    *,
    again: bool = False,
    record: bool = True,
    on_tick: Callable[[], None] = lambda: None,
) -> GateVerdict:
    """Measure both versions, unless they are measured already, and record the verdict about the candidate. Record only
    what `live` may rely on: a comparison with the live version on the whole suite of the run."""
    bounded = tuple(each for each in suite.suites if each.bounds is not None)
    suite = suite.model_copy(update={"greedy": False, "suites": bounded})  # one greedy attempt says little of behaviour
    measuring = _Measuring(run, run.objects(), suite, suite_digest(run, suite), on_tick)
    targets = [live.pinned(), candidate.pinned()]
    names = (str(live.version), str(candidate.version))
    for look in range(config.looks):
        rounds = 1 << look
        measured = measuring.both(targets, rounds, beside=config.beside, again=again and not look)
        yardstick = None
        if record and names[0] != names[1]:
            yardstick = measuring.yardstick(live.version, config.yardstick, rounds)
        verdict, by_estimate = (
            judge_suites(
                measured[0].attempts,
                measured[1].attempts,
                rule,
                names,
                bounded,
                beside=measured[0].moment == measured[1].moment,
                yardstick=yardstick,
            )
            for rule in (config, config.model_copy(update={"alpha": BY_ESTIMATE}))
        )
        if verdict.promotes or not by_estimate.promotes:
            break
    if record:
        record_verdict(measuring.objects, candidate.version, verdict)
    return verdict


@dataclass(frozen=True)
class _Measuring:
    """Measures versions on one suite of a run, and keeps what was measured."""

    run: RunDirectory
    objects: Objects
    suite: EvalConfig
    digest: str  # of the suite
    on_tick: Callable[[], None]

    def both(self, targets: Sequence[Target], rounds: int, *, beside: bool, again: bool) -> list[_Measured]:
        """Measures both versions, with the attempts of `rounds` rounds of the suite. Missing attempts of both are made
        at the same time."""
        by_version = {target.version: target for target in targets}  # the first live version is its own candidate
        known = {version: _Measured("", {}) if again else self._read(version) for version in by_version}
        if beside and len({measured.moment for measured in known.values()}) > 1:
            known = dict.fromkeys(by_version, _Measured("", {}))  # live was measured since, beside another candidate
        moment, lacking = secrets.token_hex(8), defaultdict[int, list[Target]](list)
        for version, measured in known.items():
            if self._lacks(measured, rounds):
                lacking[self._rounds(measured)].append(by_version[version])
        for made, wanted in lacking.items():
            more = _measure(self.run, wanted, self.suite, range(made, rounds), self.on_tick)
            for target, found in zip(wanted, more, strict=True):
                self._write(target.version, known[target.version].with_more(found, moment))
        return [self._read(target.version) for target in targets]

    def yardstick(self, live: Version, wanted: str | None, rounds: int) -> tuple[str, dict[str, list[Conduct]]] | None:
        """The version that is `wanted`, or the best of those that were live, with its attempts; None if it is live now.
        It is measured on its own where this suite has not measured it: its seconds are not compared."""
        objects, weights = self.objects, WeightStore(self.objects)
        known = None if wanted or objects.head(_YARDSTICK) is None else json.loads(objects.get(_YARDSTICK))["version"]
        line, _, number = (wanted or known or str(live)).rpartition("@")
        version = Version(line, int(number))
        target = target_of(weights, version, self.run.config.form)
        lost = objects.head(self._key(version)) is None and not weights.exists(version, target.form)
        if lost and wanted:
            hint = "set gate.yardstick to a version that is there, or leave it out"
            raise WeightsError(f"gate.yardstick is {version}, whose weights are not in the store", hint=hint)
        if version != live and not lost:
            measured = self._read(version)
            if self._lacks(measured, rounds):
                made = range(self._rounds(measured), rounds)
                (more,) = _measure(self.run, [target], self.suite, made, self.on_tick)
                self._write(version, measured.with_more(more, "yardstick"))
            found, of_live = (self._read(each).attempts for each in (version, live))
            if wanted or not surely_better(own(found, self.suite.suites), own(of_live, self.suite.suites)):
                return str(version), found
        if not wanted and known != str(live):
            objects.put(_YARDSTICK, json.dumps({"version": str(live)}).encode())
        return None

    def _lacks(self, measured: _Measured, rounds: int) -> bool:
        return self._rounds(measured) < rounds

    def _rounds(self, measured: _Measured) -> int:
        """How often the attempts of the suite were made."""
        most = max(map(len, own(measured.attempts, self.suite.suites).values()), default=0)
        return -(-most // self.suite.attempts)

    def _key(self, version: Version) -> str:
        return f"gates/measured/{version}-{self.digest}.json"

    def _read(self, version: Version) -> _Measured:
        if self.objects.head(self._key(version)) is None:
            return _Measured("", {})
        tree = json.loads(self.objects.get(self._key(version)))
        by_task = {task: [Conduct(**each) for each in attempts] for task, attempts in tree["attempts"].items()}
        return _Measured(tree["moment"], by_task)

    def _write(self, version: Version, measured: _Measured) -> None:
        self.objects.put(self._key(version), json.dumps(asdict(measured)).encode())


def target_of(weights: WeightStore, version: Version, form: str) -> Target:
    held = form if weights.exists(version, form) else "bf16"  # imported weights have no other form
    return Target("version", str(version), version, held)


def record_verdict(objects: Objects, version: Version, verdict: GateVerdict) -> None:
    objects.put(_verdict_key(version), json.dumps(verdict.describe()).encode())


def require_gate(objects: Objects) -> None:
    """From now on, the channel `live` of this store takes only versions that passed the gate."""
    if objects.head(_REQUIRED) is None:
        objects.put(_REQUIRED, b"{}")


def check_live(objects: Objects, channel: str, version: Version, *, required: bool = False) -> None:
    """Raise WeightsError if the version must not become live: its newest verdict is no promotion, is about another live
    version, or is not there. `required`: the run has a gate, whether its store says so or not."""
    if channel != LIVE or not (required or objects.head(_REQUIRED) is not None):
        return
    key = _verdict_key(version)
    if objects.head(key) is None:
        raise WeightsError(
            f"{version} has not passed the gate of this store, so it cannot become live",
            hint=f"`rollmill gate RUN {version}` measures it against the live version",
        )
    said = json.loads(objects.get(key))
    if said["verdict"] != "promote":
        raise WeightsError(
            f"the gate holds {version}: {'; '.join(said['reasons'])}",
            hint="change the bounds in [gate] if they are wrong, and run `rollmill gate` again",
        )
    live = Channels(objects).get(LIVE) or version  # the first live version was compared with itself
    if said["live"] != str(live):
        raise WeightsError(
            f"{version} passed the gate against {said['live']}, and {live} is live now",
            hint=f"`rollmill gate RUN {version}` compares it with {live}",
        )


@dataclass(frozen=True)
class _Measured:
    moment: str  # versions that were measured at the same time have the same
    attempts: dict[str, list[Conduct]]

    def with_more(self, attempts: dict[str, list[Conduct]], moment: str) -> _Measured:
        tasks = self.attempts.keys() | attempts.keys()
        return _Measured(moment, {task: [*self.attempts.get(task, []), *attempts.get(task, [])] for task in tasks})


def _measure(
    run: RunDirectory,
    targets: Sequence[Target],
    suite: EvalConfig,
    rounds: range,
    on_tick: Callable[[], None],
) -> list[dict[str, list[Conduct]]]:
    """Evaluate versions at the same time, each with a gateway and engines of its own. Returns the attempts of each in
    these rounds of the suite."""
    with contextlib.ExitStack() as held:
        services = [held.enter_context(serving(run, target, "eval")) for target in targets]

        def tick() -> None:
            for _, cluster in services:
                cluster.watch()
            on_tick()

        async def both() -> list[list[EvalResult]]:
            work = [
                evaluation(service, suite, target.version, rounds)
                for (service, _), target in zip(services, targets, strict=True)
            ]
            return list(await asyncio.gather(*work))

        found = asyncio.run(while_watching(services[0][1], both(), tick))
        for _, cluster in services:
            cluster.stop()  # an engine tells its last seconds when it ends
        return [
            _share(_by_task(results), engine_seconds(service))
            for results, (service, _) in zip(found, services, strict=True)
        ]


def _by_task(results: list[EvalResult]) -> dict[str, list[Conduct]]:
    """The attempts of all splits and suites. The same task in two of them stays two."""
    return {f"{result.split} {task}": made for result in results for task, made in result.conduct.items()}


def engine_seconds(service: RunDirectory) -> float:
    """The seconds in which the engines of a service computed, times the GPUs of each."""
    gpus = {spec.role: max(spec.section.gpus or 1, 1) for spec in service.config.engine_specs}
    worked = [event for event in telemetry.read_events(service.events) if event["kind"] == "busy"]
    decoded = [event for event in worked if event["process"] in gpus and event.get("what") == "decode"]
    return sum(gpus[event["process"]] * max(event["end"] - event["start"], 0.0) for event in decoded)


def _share(attempts: dict[str, list[Conduct]], seconds: float) -> dict[str, list[Conduct]]:
    """Every attempt bears the seconds of the engines by its tokens."""
    tokens = max(sum(each.tokens for made in attempts.values() for each in made), 1)
    return {
        task: [replace(each, engine_seconds=seconds * each.tokens / tokens) for each in made]
        for task, made in attempts.items()
    }


def suite_digest(run: RunDirectory, suite: EvalConfig) -> str:
    """What else the attempts depend on: other tasks, machines, limits, draws or code are another measurement."""
    config, tasks = run.config, build_tasks(run.config)
    contents = [[cell.split, cell.attempts, *(task.digest for task in cell.held(tasks))] for cell in suite.cells(tasks)]
    environments = each_environment(config)
    measured = suite.model_dump(mode="json", exclude={"suites": {"__all__": {"bounds"}}})  # a bound changes no attempt
    if not measured["suites"]:
        del measured["suites"]  # as in measurements of before there were any
    settings = [measured, *(part.model_dump(mode="json") for part in (config.rollouts, *environments))]
    code = [code_of(section) for each in environments for section in (each.harness, each.machine, *each.rewards)]
    text = json.dumps([config.seed, *config.forms, contents, settings, code])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _verdict_key(version: Version) -> str:
    return f"gates/verdicts/{version}.json"
