"""The channel `live` of a run with a gate takes only versions that passed it."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from rollmill import telemetry
from rollmill.cli.target import find_target
from rollmill.errors import WeightsError
from rollmill.evals.evaluation import Conduct, EvalResult
from rollmill.evals.gate import GateVerdict
from rollmill.evals.gate_config import GateConfig
from rollmill.evals.suite import EvalConfig
from rollmill.launch.services import Target
from rollmill.realtime.gate_run import record_verdict, require_gate, run_gate, suite_digest
from rollmill.runs.run import RunDirectory
from rollmill.storage.objects import Objects
from rollmill.types import Version
from rollmill.weights.reading.channels import Channels
from tests.cli.conftest import Told, rollmill  # noqa: F401
from tests.launch.served import published_run

SET = ("weights", "channel", "set")
FEW = ("gate.least_tasks=1", "gate.alpha=0.5")


def verdict(word: str, version: str, live: str) -> GateVerdict:
    assert word in ("promote", "hold")
    return GateVerdict("promote" if word == "promote" else "hold", version, live, 1, 1, (), ("malformed: too many",))


def test_live_of_a_run_with_a_gate_needs_a_promotion(tmp_path: Path, rollmill: Callable[..., Told]) -> None:  # noqa: F811
    run = published_run(tmp_path, 3, "gate.offline_bar=0.2")
    objects = Objects.open(run.home_store)
    told = rollmill(*SET, run.path, "live", "rl@1")
    assert told.code == 1 and "rl@1 has not passed the gate" in told.err and "`rollmill gate RUN rl@1`" in told.err
    record_verdict(objects, Version("rl", 1), verdict("hold", "rl@1", "rl@1"))
    told = rollmill(*SET, run.path, "live", "rl@1")
    assert told.code == 1 and "the gate holds rl@1: malformed: too many" in told.err
    assert Channels(objects).get("live") is None
    record_verdict(objects, Version("rl", 1), verdict("promote", "rl@1", "rl@1"))
    assert rollmill(*SET, run.path, "live", "rl@1").code == 0
    # other channels are free; a rollback goes to what was live before, and nowhere else
    assert rollmill(*SET, run.path, "candidate", "rl@2").code == 0
    assert rollmill("weights", "rollback", run.path, "live", "--to", "rl@2").code == 1
    record_verdict(objects, Version("rl", 2), verdict("promote", "rl@2", "rl@1"))
    assert rollmill(*SET, run.path, "live", "rl@2").code == 0
    record_verdict(objects, Version("rl", 1), verdict("hold", "rl@1", "rl@2"))
    assert rollmill("weights", "rollback", run.path, "live").code == 0
    assert Channels(objects).get("live") == Version("rl", 1)


def test_a_verdict_is_about_the_version_that_was_live(tmp_path: Path, rollmill: Callable[..., Told]) -> None:  # noqa: F811
    run = published_run(tmp_path, 3, "gate.offline_bar=0.2")
    objects = Objects.open(run.home_store)
    record_verdict(objects, Version("rl", 1), verdict("promote", "rl@1", "rl@0"))
    told = rollmill(*SET, run.path, "live", "rl@1")
    assert told.code == 1, "nothing is live, so it had to be compared with itself"
    for version in ("rl@0", "rl@1"):
        record_verdict(objects, Version("rl", int(version[-1])), verdict("promote", version, "rl@0"))
        assert rollmill(*SET, run.path, "live", version).code == 0
    record_verdict(objects, Version("rl", 2), verdict("promote", "rl@2", "rl@0"))
    told = rollmill(*SET, run.path, "live", "rl@2")
    assert told.code == 1 and "rl@2 passed the gate against rl@0, and rl@1 is live now" in told.err
    assert "`rollmill gate RUN rl@2` compares it with rl@1" in told.err
    record_verdict(objects, Version("rl", 2), verdict("promote", "rl@2", "rl@1"))
    assert rollmill(*SET, run.path, "live", "rl@2").code == 0


def test_a_store_can_have_a_gate_without_its_run(tmp_path: Path, rollmill: Callable[..., Told]) -> None:  # noqa: F811
    run = published_run(tmp_path, 1)
    assert rollmill(*SET, run.path, "live", "rl@0").code == 0
    second = published_run(tmp_path / "second", 1)
    require_gate(Objects.open(second.home_store))
    assert rollmill(*SET, second.home_store, "live", "rl@0").code == 1


def test_a_verdict_counts_with_the_whole_suite_against_what_is_live(
    tmp_path: Path,
    rollmill: Callable[..., Told],  # noqa: F811
) -> None:
    run = published_run(tmp_path, 3, "gate.offline_bar=0.2", "gate.beside=false", *FEW)
    objects, suite = Objects.open(run.home_store), run.config.evals.model_copy(update={"greedy": False})
    conduct = {"heldout a": [asdict(Conduct(True, 10, 1.0, 1, 0, False))]}
    for number in range(3):  # what is measured already is not measured again
        attempts = json.dumps({"moment": "1" if number else "0", "attempts": conduct}).encode()
        for change in ({}, {"attempts": 1}):
            digest = suite_digest(run, suite.model_copy(update=change))
            objects.put(f"gates/measured/rl@{number}-{digest}.json", attempts)
    uncounted = "this verdict does not count for `live`"
    told = rollmill("gate", run.path, "rl@1", "--attempts", 1)
    assert told.code == 0 and uncounted in told.err
    assert rollmill(*SET, run.path, "live", "rl@1").code == 1
    told = rollmill("gate", run.path, "rl@1")
    assert told.code == 0 and uncounted not in told.err
    assert rollmill(*SET, run.path, "live", "rl@1").code == 0
    for against, code in (("rl@2", 1), ("rl@0", 1), ("rl@1", 0)):
        told = rollmill("gate", run.path, "rl@2", "--against", against)
        assert told.code == 0 and (uncounted in told.err) == (code == 1)
        assert ("were not measured at the same time" in told.out) == (against == "rl@0")
        assert rollmill(*SET, run.path, "live", "rl@2").code == code


def test_the_command_holds_with_exit_code_3_and_says_why(tmp_path: Path, rollmill: Callable[..., Told]) -> None:  # noqa: F811
    run = published_run(tmp_path, 2, *FEW)
    objects, suite = Objects.open(run.home_store), run.config.evals.model_copy(update={"greedy": False})
    for number in range(2):  # both were measured at the same time; rl@1 makes one call of two malformed
        conduct = asdict(Conduct(True, 10, 1.0, 2, number, False, engine_seconds=0.5))
        measured = json.dumps({"moment": "0", "attempts": {"heldout a": [conduct]}}).encode()
        objects.put(f"gates/measured/rl@{number}-{suite_digest(run, suite)}.json", measured)
    told = rollmill("gate", run.path, "rl@1", "--against", "rl@0")
    assert told.code == 3 and "hold: malformed: difference 0.5, must be at most 0.03" in told.out
    rows = {line.split()[0]: line for line in told.out.splitlines() if line.rstrip().endswith(("ok", "FAILS"))}
    assert [name for name, row in rows.items() if "FAILS" in row] == ["malformed"] and len(rows) == 7
    assert "…" not in told.out, "80 columns are enough"
    told = rollmill("gate", run.path, "rl@1", "--against", "rl@0", "--json")
    tree = json.loads(told.out)
    assert told.code == 3 and (tree["verdict"], tree["candidate"], tree["live"]) == ("hold", "rl@1", "rl@0")
    assert [metric["name"] for metric in tree["metrics"] if not metric["holds"]] == ["malformed"]
    assert len(tree["reasons"]) == 1 and tree["reasons"][0].startswith("malformed: ")
    told = rollmill("gate", run.path, "rl@0", "--against", "rl@0", "--json")
    assert told.code == 0 and json.loads(told.out)["verdict"] == "promote"


def test_live_that_was_measured_beside_another_candidate_is_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a candidate that was held for its latency would be judged without it."""
    run = published_run(tmp_path, 2)
    objects, suite = Objects.open(run.home_store), run.config.evals.model_copy(update={"greedy": False})
    attempts = {"heldout a": [asdict(Conduct(True, 10, 1.0, 1, 0, False))]}
    for number in range(2):
        key = f"gates/measured/rl@{number}-{suite_digest(run, suite)}.json"
        objects.put(key, json.dumps({"moment": str(number), "attempts": attempts}).encode())
    asked: list[str] = []

    def measure(run: object, targets: list[Target], *rest: object) -> None:
        asked.extend(str(target.version) for target in targets)
        raise KeyboardInterrupt

    monkeypatch.setattr("rollmill.realtime.gate_run._measure", measure)
    with pytest.raises(KeyboardInterrupt):
        run_gate(run, find_target(run, "rl@0"), find_target(run, "rl@1"), run.config.evals, GateConfig())
    assert asked == ["rl@0", "rl@1"]


class StandInCluster:
    """Its engine tells when it worked as it ends, as a real one does with its last seconds."""

    def __init__(self, service: RunDirectory, seconds: float) -> None:
        self._service, self._seconds = service, seconds

    def watch(self) -> None: ...

    def stop(self) -> None:
        for process, what in (("engine-home", "decode"), ("engine-home", "apply"), ("gateway", "decode")):
            told = {"at": 1.0, "kind": "busy", "what": what, "start": 1.0, "end": 1.0 + self._seconds}
            telemetry.append_events(self._service.events, process, [told])


def test_attempts_share_the_seconds_that_their_engines_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """rl@1 solves as much with as many tokens, and its engine computes for twice as long."""
    run = published_run(tmp_path, 2)
    made = {"a": [Conduct(True, 10, 1.0, 1, 0, False), Conduct(False, 30, 1.0, 1, 0, False)]}

    @contextlib.contextmanager
    def serving(run: RunDirectory, target: Target, kind: str) -> Iterator[tuple[RunDirectory, StandInCluster]]:
        service = replace(run, path=run.path / "services" / f"{kind}-{target.version.number}", service_of=run.path)
        yield service, StandInCluster(service, 4.0 * (1 + target.version.number))

    async def evaluation(*_: object) -> list[EvalResult]:
        rates = (0.5, 0.0, 1.0)
        return [EvalResult("l", "heldout", "sampled", 0, 1, 2, 0, *rates, *rates, 2, 1.0, 1.0, {}, conduct=made)]

    monkeypatch.setattr("rollmill.realtime.gate_run.serving", serving)
    monkeypatch.setattr("rollmill.realtime.gate_run.evaluation", evaluation)
    targets = find_target(run, "rl@0"), find_target(run, "rl@1")
    found = run_gate(run, *targets, run.config.evals, GateConfig(least_tasks=1, alpha=0.5))
    metric = next(each for each in found.metrics if each.name == "engine_seconds")
    assert (metric.live, metric.candidate, metric.change.value) == (4.0, 8.0, 2.0), "per solved task"
    assert [reason.partition(":")[0] for reason in found.reasons] == ["engine_seconds"]
    (key,) = [key for key in Objects.open(run.home_store).list("gates/measured") if "rl@0" in key]
    kept = json.loads(Objects.open(run.home_store).get(key))["attempts"]["heldout a"]
    assert [each["engine_seconds"] for each in kept] == [1.0, 3.0], "by their tokens"


def test_other_contents_of_a_task_are_another_measurement(tmp_path: Path) -> None:
    """The settings are the same: the file has the same name."""
    tasks = tmp_path / "tasks.jsonl"
    settings = ("tasks.kind=jsonl", f'tasks.path="{tasks}"', "evals.tasks=1", "evals.family_tasks=0")
    digests = []
    for answer in ("x + 3", "x + 4", "x + 4"):
        one = {"id": "add", "split": "heldout", "instruction": f"Write f(x): {answer}", "submission": ["main.py"]}
        tasks.write_text(
            "".join(json.dumps({**one, "id": id, "split": of}) + "\n" for id, of in (("a", "train"), ("b", "heldout")))
        )
        run = published_run(tmp_path / str(len(digests)), 1, *settings)
        digests.append(suite_digest(run, run.config.evals))
    assert digests[0] != digests[1] == digests[2]


def test_another_machine_or_form_is_another_measurement(tmp_path: Path) -> None:
    settings = ((), ("machine.processes=77",), ('form="fp8"',))
    runs = [published_run(tmp_path / str(number), 1, *each) for number, each in enumerate(settings)]
    assert len({suite_digest(run, run.config.evals) for run in runs}) == 3


def measure(run: RunDirectory, **rates: float) -> None:
    """Write measurements of 1000 tasks: `rl_1=0.7` says that rl@1 solves 70 % of them."""
    objects, suite = Objects.open(run.home_store), run.config.evals.model_copy(update={"greedy": False})
    for name, rate in rates.items():
        made = {f"heldout {task}": [asdict(Conduct(task < 1000 * rate, 10, 1.0, 1, 0, False))] for task in range(1000)}
        key = f"gates/measured/{name.replace('_', '@')}-{suite_digest(run, suite)}.json"
        objects.put(key, json.dumps({"moment": "0", "attempts": made}).encode())


def test_many_small_losses_are_held_by_the_best_version_that_was_live(
    tmp_path: Path,
    rollmill: Callable[..., Told],  # noqa: F811
) -> None:
    """rl@2 is a little worse than rl@1, and rl@3 than rl@2. What a gate of another suite measured does not count."""
    run = published_run(tmp_path, 4, "gate.max_quality_loss=0.05", "gate.max_more_tokens=1.0")
    measure(run, rl_0=0.6, rl_1=0.7, rl_2=0.67, rl_3=0.64)
    for version, code, yardstick in (("rl@0", 0, ""), ("rl@1", 0, ""), ("rl@2", 0, ""), ("rl@3", 3, "rl@1")):
        told = rollmill("gate", run.path, version)
        assert told.code == code, told.out
        assert ("the yardstick is" in told.out) == bool(yardstick) and yardstick in told.out
        assert rollmill(*SET, run.path, "live", version).code == (code != 0)
    assert "hold: yardstick: difference -0.06, must be at least -0.05" in told.out
    assert "quality: " not in told.out, "against live alone it is within its bound"
    verdicts = Objects.open(run.home_store)
    assert json.loads(verdicts.get("gates/yardstick.json")) == {"version": "rl@1"}


def test_a_live_version_that_seems_a_little_better_does_not_become_the_yardstick(tmp_path: Path) -> None:
    run = published_run(tmp_path, 3)
    measure(run, rl_0=0.6, rl_1=0.602, rl_2=0.602)
    objects, config = Objects.open(run.home_store), GateConfig()
    for live, candidate in (("rl@0", "rl@1"), ("rl@1", "rl@2")):
        assert run_gate(run, find_target(run, live), find_target(run, candidate), run.config.evals, config).promotes
        assert json.loads(objects.get("gates/yardstick.json")) == {"version": "rl@0"}


def test_a_yardstick_can_be_pinned_and_is_measured_where_it_was_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = published_run(tmp_path, 3)
    measure(run, rl_1=0.6, rl_2=0.6)
    asked: list[str] = []

    def measured(run: object, targets: list[Target], *rest: object) -> list[dict[str, list[Conduct]]]:
        asked.extend(str(target.version) for target in targets)
        return [{f"heldout {task}": [Conduct(True, 10, 1.0, 1, 0, False)] for task in range(1000)}]

    monkeypatch.setattr("rollmill.realtime.gate_run._measure", measured)
    targets, config = (find_target(run, "rl@1"), find_target(run, "rl@2")), GateConfig(yardstick="rl@0")
    for _ in range(2):  # the second time it is measured already
        verdict = run_gate(run, *targets, run.config.evals, config)
        assert [metric.name for metric in verdict.metrics if metric.holds is False] == ["yardstick"]
    assert asked == ["rl@0"]
    with pytest.raises(WeightsError, match="yardstick is rl@9, whose weights are not"):
        run_gate(run, *targets, run.config.evals, GateConfig(yardstick="rl@9"))


def test_a_candidate_that_is_close_gets_more_attempts_and_others_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """rl@1 is equal, but 128 tasks with 4 attempts do not show it; rl@2 is clearly worse. The yardstick is rl@0."""
    run = published_run(tmp_path, 3, "evals.attempts=4")
    rates, asked = {0: 0.5, 1: 0.5, 2: 0.3}, list[tuple[str, int, int]]()

    def measured(
        run: object, targets: list[Target], suite: EvalConfig, rounds: range, *rest: object
    ) -> list[dict[str, list[Conduct]]]:
        made, attempts = suite.attempts * rounds.start, suite.attempts * rounds.stop
        asked.extend((str(target.version), made, attempts) for target in targets)
        found = []
        for number in (target.version.number for target in targets):
            draw = random.Random(f"59 {number} {made}")
            shares = [
                draw.choices((True, False), (rates[number], 1 - rates[number]), k=attempts - made) for _ in range(128)
            ]
            found.append(
                {f"heldout {t}": [Conduct(s, 10, 1.0, 1, 0, False) for s in of] for t, of in enumerate(shares)}
            )
        return found

    monkeypatch.setattr("rollmill.realtime.gate_run._measure", measured)
    config = GateConfig(max_more_tokens=9.0)
    live, equal, worse = (find_target(run, f"rl@{number}") for number in range(3))
    verdict = run_gate(run, live, worse, run.config.evals, config)
    assert not verdict.promotes and asked == [("rl@0", 0, 4), ("rl@2", 0, 4)]
    asked.clear()
    verdict = run_gate(run, live, equal, run.config.evals, config)
    assert verdict.promotes and verdict.attempts == 128 * 16
    rounds = ((0, 4), (4, 8), (8, 16))
    assert asked == [(name, *each) for each in rounds for name in ("rl@0", "rl@1")], "both at the same time"
    asked.clear()
    assert run_gate(run, live, equal, run.config.evals, config) == verdict and not asked
