"""Mismatch is measured under the exact weights that sampled a token, whatever has been trained since."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollmill import telemetry
from rollmill.errors import TrainingError
from rollmill.models.decoder import Decoder
from rollmill.models.host_tensors import load_host, to_host
from rollmill.training.batching import TokenRule
from rollmill.training.lineage import Lineage
from rollmill.training.numerics.logprob_check import (
    BUSY,
    EVERY,
    FAILED,
    MIXED,
    MOST_TRAJECTORIES,
    UNAVAILABLE,
    HeldReport,
    MismatchMeter,
    Sample,
    ServedWeights,
    choose_sample,
)
from rollmill.training.single import SINGLE
from rollmill.trajectories.staleness import Pace
from rollmill.types import Segment, Version
from rollmill.weights.reading.weight_store import WeightStore
from tests.training.world import MODEL, PACE, STEPS, World, honest_segment, make_segment, policy, record_as

RULE = TokenRule(Lineage("main", {"main": 0}), base=2, max_staleness=2)
ANSWERS = [0, 0, 0, 1, 1, 1, 0, 1, 1]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Versions 0, 1 and 2, which differ enough to be distinguished."""
    world = World(tmp_path_factory.mktemp("trained"))
    world.add_steps(2)
    world.trainer().run(2)
    return world


def meter(world: World) -> MismatchMeter:
    found = MismatchMeter(ServedWeights(world.weights, 3), budget=48, router_replay=True)
    found.compute_like(SINGLE, Decoder(MODEL))
    return found


def measure(world: World, *segments: Segment) -> tuple[np.ndarray, Counter[str]]:
    return meter(world).measure(3, choose_sample(0, [[segment] for segment in segments], RULE))


def two_versions(world: World, *, oldest: tuple[int, int] = (0, 1), policy_of: str = "...000.11") -> Segment:
    """Two answers sampled by versions 0 and 1. `oldest`: the oldest weights in the KV cache of each."""
    (old, first), (new, second) = world.version(0), world.version(1)
    indices = [0 if each == "." else int(each) for each in policy_of]
    segment = make_segment(ANSWERS, policies=[first, second], policy_of=indices)
    for span, number in zip(segment.spans, oldest, strict=True):
        span.oldest_kv_policy = number
    return record_as(record_as(segment, old, 3, 6), new, 7, 9)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_the_weights_that_sampled_give_the_same_log_probs(trained: World, number: int):
    model, by = trained.version(number)
    deltas, left_out = measure(trained, honest_segment(model, seed=1, temperature=0.7, by=by))
    assert deltas.size == 5 and np.abs(deltas).max() < 1e-5 and not +left_out


def test_other_weights_than_the_named_ones_show_up(trained: World):
    model, _ = trained.version(0)
    _, named = trained.version(1)
    deltas, _ = measure(trained, honest_segment(model, seed=1, by=named))
    assert np.abs(deltas).max() > 0.1


def test_each_token_is_measured_under_its_own_version(trained: World):
    sample = choose_sample(0, [[two_versions(trained)]], RULE)
    assert [(probe.policy.number, probe.tokens, len(probe.sequence.tokens)) for probe in sample.probes] == [
        (0, 3, 5),
        (1, 2, 8),
    ]
    deltas, left_out = meter(trained).measure(3, sample)
    assert deltas.size == 5 and np.abs(deltas).max() < 1e-5 and not +left_out


def test_routes_that_other_weights_recorded_are_not_replayed(trained: World):
    """The context of the second answer was computed again by version 1, but its recorded routes are version 0's."""
    segment = two_versions(trained)
    assert segment.routes is not None
    live = segment.routes[:5].copy()
    segment.routes[:5] = (live + 1) % MODEL.experts
    segment.spans[0].finish = "abort"  # so that only the second answer is measured
    deltas, left_out = measure(trained, segment)
    assert deltas.size == 2 and np.abs(deltas).max() < 1e-5 and left_out[MIXED] == 3


def test_recorded_routes_of_the_same_weights_are_replayed(trained: World):
    model, by = trained.version(1)
    segment = honest_segment(model, seed=1, by=by)
    assert segment.routes is not None
    segment.routes[:] = (segment.routes + 1) % MODEL.experts
    deltas, _ = measure(trained, segment)
    assert np.abs(deltas).max() > 1e-2, "an engine that records other routes than it used is detected"


@pytest.mark.parametrize(
    ("policy_of", "oldest", "measured"),
    [
        ("...000.11", (0, 0), 3),  # the second answer continued with the first one's cache
        ("...001.11", (0, 1), 4),  # the weights changed before the last token of the first answer
        ("...000.11", (1, 1), 2),  # half-way, the first answer was computed again under other weights
    ],
)
def test_tokens_on_keys_of_other_weights_are_left_out_and_counted(
    trained: World, policy_of: str, oldest: tuple[int, int], measured: int
):
    sample = choose_sample(0, [[two_versions(trained, oldest=oldest, policy_of=policy_of)]], RULE)
    assert sum(probe.tokens for probe in sample.probes) == measured
    assert sample.left_out == Counter({MIXED: 5 - measured})


def test_missing_weights_cost_only_the_figure(trained: World, tmp_path: Path):
    telemetry.open_events(tmp_path, "trainer")
    model, by = trained.version(0)
    forged, gone = replace(by, digest="0" * 64), policy(99)
    rule = replace(RULE, base=99, max_staleness=99)
    segments = [[honest_segment(model, seed, by=each)] for seed, each in enumerate((by, forged, gone))]
    probes = [probe for each in segments for probe in choose_sample(0, [each], rule).probes]
    deltas, left_out = meter(trained).measure(3, Sample(probes, Counter()))
    assert deltas.size == 5 and left_out[UNAVAILABLE] == 10
    texts = [event["text"] for event in telemetry.read_events(tmp_path) if event["kind"] == "warning"]
    assert len(texts) == 2 and "main@0 with digest 0000" in texts[0] and "main@99" in texts[1]


def test_tokens_of_another_form_are_measured_against_the_trainers(tmp_path: Path):
    """An engine served fp8, the trainer has bf16: the difference of the forms is the figure, apart from the own."""
    world = World(tmp_path, forms=("bf16", "fp8"))
    world.add_steps(2)
    world.trainer().run(2)
    model, own = world.version(1)
    coded = Decoder(MODEL)
    load_host(coded, world.weights.load(Version("main", 1), "fp8"))
    by = world.weights.manifest(Version("main", 1), "fp8").policy
    segments = [honest_segment(model, 0, by=own), honest_segment(coded, 1, by=by)]
    probes = [probe for each in segments for probe in choose_sample(0, [[each]], RULE).probes]
    told: list[dict[str, Any]] = []
    held = HeldReport(meter(world))
    held.hold(3, Sample(probes, Counter({MIXED: 2})), told.append)
    held.release(idle=True)
    [figures] = told
    assert figures["mismatch_tokens"] == 5 and figures["mismatch_max"] < 1e-5
    assert figures["mismatch_left_out"] == {MIXED: 2} and figures["mismatch_by_form"].keys() == {"fp8"}
    other = figures["mismatch_by_form"]["fp8"]
    theirs = segments[1].logprobs[4:9].copy()
    expected = record_as(segments[1], model, 4, 9).logprobs[4:9] - theirs
    assert other["tokens"] == 5 and other["max"] == pytest.approx(float(np.abs(expected).max()), rel=1e-3)
    assert other["max"] > 1e-4
    # a token that names other bytes of that form is not measured
    forged = replace(by, digest="0" * 64)
    deltas, left_out = measure(world, honest_segment(coded, 1, by=forged))
    assert deltas.size == 0 and left_out[UNAVAILABLE] == 5


def test_versions_in_memory_need_no_store(trained: World, tmp_path: Path):
    model, by = trained.version(2)
    served = ServedWeights(WeightStore(World(tmp_path).objects), keep=1)
    served.remember(by.digest, to_host(model.state_dict()))
    kept = MismatchMeter(served, budget=48, router_replay=True)
    kept.compute_like(SINGLE, model)
    deltas, _ = kept.measure(3, choose_sample(0, [[honest_segment(model, 1, by=by)]], RULE))
    assert deltas.size == 5 and np.abs(deltas).max() < 1e-5


def test_the_sample_is_small_and_the_same_every_time(trained: World):
    model, by = trained.version(2)
    for count, wanted in ((0, 0), (1, 1), (10, 1), (11, 2), (200, MOST_TRAJECTORIES)):
        members = [[honest_segment(model, seed, by=by)] for seed in range(min(count, 12))] * -(-count // 12)
        chosen, again = (choose_sample(7, members[:count], RULE).probes for _ in range(2))
        assert len(chosen) == wanted
        for one, other in zip(chosen, again, strict=True):
            np.testing.assert_array_equal(one.sequence.targets, other.sequence.targets)


def honest_step(world: World, trainer: Any, step: int, by: int) -> dict[str, Any]:
    """Trains one more step on tokens of version `by`. Returns its event."""
    model, named = world.version(by)
    members = [honest_segment(model, 10 * step + index, by=named) for index in range(2)]
    world.add_group(f"group-{step}", members, [1.0, 0.0])
    trainer.run(step)
    events = telemetry.read_events(world.path / "events")
    return [event for event in events if event["kind"] == "step"][-1]


def test_a_stale_step_shows_drift_and_no_mismatch(tmp_path: Path):
    telemetry.open_events(tmp_path / "events", "trainer")
    world, pace = World(tmp_path), Pace(1, 2, max_staleness=2)
    trainer = world.trainer(pace=pace)
    trainer.run(0)
    for step in (1, 2, 3):
        event = honest_step(world, trainer, step, by=0)
        assert event["mismatch_tokens"] == 5 and event["mismatch_max"] < 1e-5, step
        assert (event["drift_k3"] > 1e-3) == (step > 1) and event["staleness_max"] == step - 1
    resumed = World(tmp_path).trainer(pace=pace)  # nothing in memory: the weights come from the store
    event = honest_step(world, resumed, 4, by=1)
    assert event["mismatch_tokens"] == 5 and event["mismatch_max"] < 1e-5 and event["drift_k3"] > 1e-3


def trained_chain(path: Path) -> tuple[list[tuple[int, str]], list[int]]:
    """Digests of a run on tokens that can be measured, and its final random state."""
    world = World(path)
    trainer = world.trainer()
    trainer.run(0)
    model, by = world.version(0)
    for index in range(STEPS * PACE.groups_per_step):
        members = [honest_segment(model, 10 * index + member, by=by) for member in range(3)]
        world.add_group(f"group-{index:03d}", members, [1.0, 0.0, 0.0])
    trainer.run(STEPS)
    return world.chain(), torch.get_rng_state().tolist()


def test_measuring_does_not_change_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    measured = trained_chain(tmp_path / "measured")
    monkeypatch.setattr(MismatchMeter, "measure", lambda *_: (np.empty(0, np.float32), Counter()))
    monkeypatch.setattr(ServedWeights, "remember", lambda *_: None)
    assert trained_chain(tmp_path / "unmeasured") == measured


def test_a_report_waits_until_there_is_time_to_measure(trained: World) -> None:
    held, emitted = HeldReport(meter(trained)), list[dict[str, Any]]()
    sample = choose_sample(0, [[two_versions(trained)]], RULE)
    tokens = sum(probe.tokens for probe in sample.probes)
    held.hold(1, sample, emitted.append)
    assert not emitted
    held.release(idle=True)
    held.release(idle=True)  # there is no second one
    assert [each["mismatch_tokens"] for each in emitted] == [tokens]
    for number in range(EVERY + 1):  # groups are always ready: each step ends the wait of the one before
        held.hold(number, sample, emitted.append)
    held.release(idle=False)
    measured = [each["mismatch_tokens"] > 0 for each in emitted[1:]]
    assert measured == [False] * (EVERY - 1) + [True, False]
    assert emitted[1]["mismatch_left_out"][BUSY] == tokens and emitted[1]["mismatch_k3"] is None
    for number in range(EVERY):  # after an error nothing is measured, also if it is time to
        held.hold(number, sample, emitted.append)
        held.release(idle=True, failed=True)
    assert emitted[-1]["mismatch_tokens"] == 0 and emitted[-1]["mismatch_left_out"][FAILED] == tokens


def test_memory_that_runs_out_while_mismatch_is_measured_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise MemoryError

    world = World(tmp_path)
    trainer = world.trainer(pace=Pace(1, 2, max_staleness=2))
    trainer.run(0)
    monkeypatch.setattr(MismatchMeter, "measure", full)
    with pytest.raises(TrainingError, match="after step 1, the trainer ran out of memory: its micro-batch") as found:
        honest_step(world, trainer, 1, by=0)
    assert "tokens_per_microbatch" in (found.value.hint or "")
