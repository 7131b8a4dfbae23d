"""A run whose regions serve different forms, with every process real; the trainer is killed on the way."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from rollmill.cli.target import find_target
from rollmill.evals.suite import EvalConfig
from rollmill.launch.services import evaluate, serving
from rollmill.runs.run import RunDirectory
from rollmill.storage.objects import Objects
from rollmill.telemetry import read_events
from rollmill.types import Version
from rollmill.weights.reading.weight_store import WeightStore
from tests.e2e.small_run import BRIEF_EVALS, small_run
from tests.e2e.test_kill import check_stores, digests, finished_ids, pid_of, start, stores, wait_for

FORMS = {"engine-home": "bf16", "engine-home-2": "fp8", "engine-away": "fp8"}
ENGINES = 'engines=[{region="home"},{region="home",form="fp8"},{region="away",form="fp8"}]'


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_each_region_has_the_versions_in_its_form(tmp_path: Path, midtrained: RunDirectory) -> None:
    run = small_run(tmp_path, "forms", ENGINES, "stages.rl.steps=4", *BRIEF_EVALS, base=midtrained)
    weights, _, trajectories = stores(run)
    process = start(run)
    try:
        wait_for(lambda: weights.exists(Version("rl", 1), "bf16"), process, run)
        pid = pid_of(run, "trainer")
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        seen = digests(weights, "rl"), finished_ids(trajectories, run)
        assert process.wait() == 0, (run.path / "train.out").read_text()[-3000:]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    check_stores(run, *seen)
    # every version in both forms; mid-training was over before the second form was asked for, and has its last version
    published = {form: {each.number: each.digest for each in weights.versions("rl", form)} for form in ("bf16", "fp8")}
    assert sorted(published["fp8"]) == sorted(published["bf16"]) == list(range(5))
    assert all(ok for _, ok, _ in weights.verify("rl", "fp8"))
    assert weights.numbers("midtrain", "fp8") == weights.numbers("midtrain")[-1:]
    # the other region has its own form alone, and every engine served bytes of its form
    away = WeightStore(Objects.open(run.store_path("away")))
    assert away.forms("rl") == ["fp8"] and away.head("rl", "fp8") == 4
    applied = [event for event in read_events(run.events) if event["kind"] == "apply"]
    assert {event["engine"] for event in applied} == FORMS.keys()
    for event in applied:
        assert event["digest"] == published[FORMS[event["engine"]]][event["version"]], event
    # tokens name the form that sampled them
    rows = trajectories.list(limit=100_000)
    policies = {policy for row in rows for each in trajectories.load(row.id).segments for policy in each.policies}
    assert "fp8" in {policy.form for policy in policies}
    assert all(policy.digest == published[policy.form][policy.number] for policy in policies)
    # a service has the forms of its engines too
    suite, target = EvalConfig(tasks=1, attempts=1, family_tasks=0, greedy=False), find_target(run, "3")
    with serving(run, target, "eval") as (service, cluster):
        evaluate(service, cluster, suite, target.version)
        served = [event for event in read_events(service.events) if event["kind"] == "apply"]
    assert served
    for event in served:
        assert event["digest"] == published[FORMS[event["engine"].removeprefix(f"{service.path.name}-")]][3], event
