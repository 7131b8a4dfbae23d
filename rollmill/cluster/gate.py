"""Runs the gate: evaluates a candidate and the live version on the same suite, and keeps measurements and verdicts.

    gates/measured/VERSION-SUITE.json   attempts of a version; a gate that was interrupted goes on from them
    gates/verdicts/VERSION.json         the newest verdict about a version: what `live` is checked against
    gates/required.json                 this store has a gate

Whoever moves the channel `live` of a store with a gate asks `check_live` first.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from rollmill.cluster.run import RunDirectory
from rollmill.cluster.service import Target, evaluate, serving
from rollmill.errors import WeightsError
from rollmill.evals.gate import GateConfig, GateVerdict, judge
from rollmill.evals.run import Conduct, EvalResult
from rollmill.evals.suite import EvalConfig
from rollmill.storage.objects import Objects
from rollmill.types import Version
from rollmill.weights.reading.channels import Channels

LIVE = "live"
_REQUIRED = "gates/required.json"


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
    objects = Objects.open(run.home_store)
    suite = suite.model_copy(update={"greedy": False})  # one attempt per task says little about behaviour
    measured = [_measure(run, target.pinned(), suite, objects, again, on_tick) for target in (live, candidate)]
    verdict = judge(measured[0], measured[1], config, (str(live.version), str(candidate.version)))
    if record:
        record_verdict(objects, candidate.version, verdict)
    return verdict


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


def _measure(
    run: RunDirectory,
    target: Target,
    suite: EvalConfig,
    objects: Objects,
    again: bool,
    on_tick: Callable[[], None],
) -> dict[str, list[Conduct]]:
    key = f"gates/measured/{target.version}-{_digest(run, suite)}.json"
    if again or objects.head(key) is None:
        with serving(run, target, "eval") as (service, cluster):
            results = evaluate(service, cluster, suite, target.version, on_tick)
        objects.put(key, json.dumps(_by_task(results)).encode())
    tree = json.loads(objects.get(key))
    return {task: [Conduct(**attempt) for attempt in attempts] for task, attempts in tree.items()}


def _by_task(results: list[EvalResult]) -> dict[str, list[dict[str, Any]]]:
    """The attempts of all splits. The same task in two splits stays two."""
    return {
        f"{result.split} {task}": [asdict(attempt) for attempt in attempts]
        for result in results
        for task, attempts in result.conduct.items()
    }


def _digest(run: RunDirectory, suite: EvalConfig) -> str:
    """What else the attempts depend on: other tasks, machines, limits or draws are another measurement."""
    config = run.config
    parts = [suite, config.rollouts, config.harness, config.machine, config.tasks, *config.rewards]
    text = json.dumps(
        [config.seed, config.form, *(part.model_dump(mode="json") if part is not None else None for part in parts)]
    )
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _verdict_key(version: Version) -> str:
    return f"gates/verdicts/{version}.json"
