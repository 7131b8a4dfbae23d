"""The RL objective on a real ledger: which trajectories are trained on, which not and why, and the gradient."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollmill import telemetry
from rollmill.errors import StorageError, TrainingError
from rollmill.models.decoder import Decoder
from rollmill.training.batching import STALE, TokenRule, pack
from rollmill.training.config import OptimizerConfig, RLConfig, TrainingConfig
from rollmill.training.lineage import Lineage
from rollmill.training.rl.rl_objective import RolloutBatch
from rollmill.training.rl.selection import trainable_sequences
from rollmill.trajectories.admission import Experience, Member
from rollmill.trajectories.ledger import Ledger
from rollmill.trajectories.staleness import Pace
from rollmill.types import Grade, LedgerState, Sampling, Segment, StepRecord, Version
from rollmill.weights.writing.publisher import Publisher
from tests.training.world import MODEL, STEPS, TRAINING, World, honest_segment, make_segment, policy

MAIN = Lineage("main", {"main": 0})
ANSWER = [0, 0, 0, 1, 1, 1]


def never() -> bool:
    return False


def segments(count: int, **named: object) -> list[Segment]:
    return [make_segment(ANSWER, seed=seed, **named) for seed in range(count)]  # type: ignore[arg-type]


def next_batch(world: World, number: int, pace: Pace) -> RolloutBatch:
    batch = world.objective(pace=pace).next_batch(number, 0.0, MAIN, never)
    assert batch is not None
    return batch


def test_every_trajectory_of_a_step_is_trained_or_excluded_with_a_reason(tmp_path: Path):
    world = World(tmp_path)
    world.add_group("a", segments(4), [1.0, 0.0, None, 0.0])
    world.add_group("b", segments(3), [1.0, 1.0, 1.0])
    greedy = make_segment(ANSWER, sampling=Sampling(temperature=0.0))
    wide = make_segment(ANSWER)
    wide.tokens[0] = MODEL.vocab_size
    world.add_group("c", [*segments(2), greedy, wide], [1.0, 0.0, 0.0, 1.0])
    batch = next_batch(world, 1, Pace(2, 4, max_staleness=0))
    record = batch.record
    assert record.groups == ("a", "c") and batch.closed == ("b",), "nothing can be learned from b"
    advantages = {id: advantage for id, (_, _, advantage) in record.trajectories.items()}
    third = 1 / 3  # the failed one does not count towards the mean
    assert advantages == pytest.approx({"a-0": 2 * third, "a-1": -third, "a-3": -third, "c-0": 0.5, "c-1": -0.5})
    states = {id: state for id, (state, _) in record.excluded.items()}
    assert states == {"a-2": LedgerState.dropped, "c-2": LedgerState.dropped, "c-3": LedgerState.dropped}
    assert "machine was lost" in record.excluded["a-2"][1]
    assert "temperature 0" in record.excluded["c-2"][1]
    assert "vocabulary" in record.excluded["c-3"][1]
    assert world.ledger.step(1) == record, "written before anything is trained"
    counts = world.ledger.counts()
    assert (counts["leased"], counts["dropped"], counts["no_signal"], counts["admitted"]) == (5, 3, 3, 0)


def played_elsewhere(world: World, name: str, oldest: int) -> Experience:
    """A group that another run has played."""
    own, world.ledger = world.ledger, Ledger(world.ledger._engine, "other")
    world.add_group(name, segments(2), [1.0, 0.0])
    members = [Member(row.id, {}, Grade(0.0)) for row in world.ledger.entered(name)]
    world.ledger = own
    return Experience(name, "task", "other", members, oldest)


def test_a_step_trains_on_a_group_that_another_run_played(tmp_path: Path):
    """Two groups of another run are admitted; the one with the earlier deadline is trained on first."""
    world, pace = World(tmp_path), Pace(1, 2, max_staleness=2)
    found = [played_elsewhere(world, "late", 0), played_elsewhere(world, "early", -1)]
    assert [verdict.decision for verdict in world.ledger.admit(found, pace=pace)] == ["admitted", "admitted"]
    batch = next_batch(world, 1, pace)
    assert batch.record.groups == ("early",) and set(batch.record.trajectories) == {"early-0", "early-1"}
    assert batch.solved == 0.5 and batch.masked[STALE] == 0


def test_a_group_that_is_admitted_while_a_step_chooses_is_not_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """It is due in this step. The step has read which groups there are, and has not written which it takes."""
    world, pace = World(tmp_path), Pace(1, 2, max_staleness=2)
    world.add_group("own", segments(2), [1.0, 0.0])
    waiting = [played_elsewhere(world, "due", -2)]
    members = world.ledger.members

    def admit_first(groups: Sequence[str]) -> Any:
        while waiting:
            assert world.ledger.admit([waiting.pop()], pace=pace)[0].decision == "admitted"
        return members(groups)

    monkeypatch.setattr(world.ledger, "members", admit_first)
    assert next_batch(world, 1, pace).record.groups == ("due",)


def test_a_step_waits_for_the_group_that_is_due(tmp_path: Path):
    """`long` is the oldest and finishes last. One step may go before it; the next one would make it too old."""
    telemetry.open_events(tmp_path / "events", "trainer")
    world = World(tmp_path)
    objective = world.objective(pace=Pace(1, 2, max_staleness=1))
    world.start_group("long", 2)
    world.add_group("short", segments(2), [1.0, 0.0])
    first = objective.next_batch(1, 0.0, MAIN, never)
    assert first is not None and first.record.groups == ("short",)
    objective.commit(1, Version("main", 1), "digest")
    world.add_group("younger", segments(2), [1.0, 0.0])
    asked = 0

    def finish_while_it_waits() -> bool:
        nonlocal asked
        asked += 1
        if asked == 3:
            world.finish_group("long", segments(2), [1.0, 0.0])
        return False

    second = objective.next_batch(2, 0.0, MAIN, finish_while_it_waits)
    assert second is not None and second.record.groups == ("long",)
    assert second.masked[STALE] == 0 and second.due_seconds > 0 == first.due_seconds
    (event,) = [event for event in telemetry.read_events(tmp_path / "events") if event["kind"] == "due"]
    assert (event["step"], event["groups"]) == (2, ["long"])


def test_a_trajectory_is_stale_only_when_no_token_remains(tmp_path: Path):
    world = World(tmp_path)
    old, recent = policy(497, "base"), policy(499, "base")  # three versions and one version before main@0
    mixed = make_segment(ANSWER, policies=[old, recent], policy_of=[0, 0, 0, 0, 0, 1])
    world.add_group("a", [make_segment(ANSWER, policies=[old]), mixed], [1.0, 0.0])
    lineage = Lineage("main", {"main": 0, "base": -500})
    batch = world.objective(pace=Pace(1, 2, max_staleness=1)).next_batch(1, 0.0, lineage, never)
    assert batch is not None and list(batch.record.trajectories) == ["a-1"]
    state, reason = batch.record.excluded["a-0"]
    assert state == LedgerState.stale and "more than 1 versions before 0" in reason
    assert batch.masked[STALE] == 2 and [len(part.targets_M) for part in batch.microbatches] == [1]


def test_a_trajectory_deleted_while_the_step_is_chosen_ends_only_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Somebody deletes it after its payload was read and before the step is written."""
    world = World(tmp_path)
    world.add_group("a", segments(3), [1.0, 0.0, 0.5])
    write_step = world.ledger.write_step

    def delete_first(record: StepRecord, considered: set[str]) -> None:
        if world.trajectories.get("a-2").state == "graded":
            world.trajectories.delete("a-2")
        write_step(record, considered)

    monkeypatch.setattr(world.ledger, "write_step", delete_first)
    record = next_batch(world, 1, Pace(1, 3, max_staleness=0)).record
    assert set(record.trajectories) == {"a-0", "a-1"} and set(record.excluded) == {"a-2"}


def test_a_recorded_step_is_given_again_as_it_was(tmp_path: Path):
    world = World(tmp_path)
    world.add_steps(2)
    pace = Pace(2, 3, 100)
    first = next_batch(world, 1, pace)
    again = next_batch(World(tmp_path), 1, pace)
    assert again.record == first.record
    for before, after in zip(first.microbatches, again.microbatches, strict=True):
        assert torch.equal(before.tokens_N, after.tokens_N) and torch.equal(before.targets_M, after.targets_M)
        assert before.facts is not None and after.facts is not None
        np.testing.assert_array_equal(before.facts.advantages, after.facts.advantages)
    assert set(next_batch(world, 2, pace).record.groups).isdisjoint(first.record.groups)


def test_waiting_ends_when_asked_to_stop(tmp_path: Path):
    assert World(tmp_path).objective().next_batch(1, 0.0, MAIN, lambda: True) is None


def gradients_and_figures(
    world: World, budget: int, config: RLConfig
) -> tuple[dict[str, torch.Tensor], dict[str, object]]:
    rule = TokenRule(MAIN, 0, 0)
    sequences = [
        each
        for seed in range(5)
        for each in trainable_sequences(
            [make_segment([0] * (seed + 1) + [1] * 3, seed=seed)], seed - 2.0, rule, config, trajectory=seed
        )[0]
    ]
    model = Decoder(MODEL)
    model.initialise(0)
    nothing: Any = None
    batch = RolloutBatch(nothing, pack(sequences, budget), nothing, nothing, nothing, lr=0.0, wait_seconds=0)
    figures = world.objective(config).backward(model, batch)
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, figures


def test_microbatches_add_up_to_the_gradient_of_one_batch(tmp_path: Path):
    world = World(tmp_path)
    whole, figures = gradients_and_figures(world, 1000, RLConfig())
    parts, parts_figures = gradients_and_figures(world, 8, RLConfig())
    assert whole.keys() == parts.keys()
    for name in whole:
        torch.testing.assert_close(parts[name], whole[name], rtol=1e-4, atol=1e-7)
    assert parts_figures["loss"] == pytest.approx(figures["loss"])
    assert parts_figures["trained_tokens"] == figures["trained_tokens"] == 15


def test_routes_are_replayed_and_disagreement_is_counted(tmp_path: Path):
    world = World(tmp_path)
    replayed, figures = gradients_and_figures(world, 1000, RLConfig())
    live, live_figures = gradients_and_figures(world, 1000, RLConfig(router_replay=False))
    assert not torch.equal(replayed["layers.0.mlp.gate_up"], live["layers.0.mlp.gate_up"])
    # random routes: two of four experts agree as a set one time in six, and have nothing in common as often
    assert 0.5 < figures["router_flip_rate"] < 1 and 0 < figures["router_zero_overlap"] < 0.5  # type: ignore[operator]
    assert live_figures["router_flip_rate"] is None


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_same_weights_mean_no_mismatch(tmp_path: Path, temperature: float):
    """The loop's own model, its version and the sampled log-probs agree: no mismatch, no drift, all weights one."""
    telemetry.open_events(tmp_path / "events", "trainer")
    world = World(tmp_path)
    trainer = world.trainer(pace=Pace(1, 2, 0))
    trainer.run(0)
    model, current = world.version(0)
    members = [honest_segment(model, seed, temperature, current) for seed in range(2)]
    world.add_group("a", members, [1.0, 0.0])
    world.trajectories.grade("a-0", Grade(1.0, {"solved": 0.0}))  # several rewards: the first one decides
    assert trainer.run(1) == Version("main", 1)
    (event,) = [event for event in telemetry.read_events(tmp_path / "events") if event["kind"] == "step"]
    assert event["mismatch_max"] < 1e-5 and event["mismatch_tokens"] == 5, "one trajectory of two is measured"
    assert event["drift_max"] < 1e-5 and event["ess"] == pytest.approx(1)
    assert event["router_flip_rate"] == 0 and event["router_zero_overlap"] == 0
    assert (event["staleness_max"], event["staleness_counts"]) == (0, {"0": 10})
    assert (event["reward_mean"], event["solve_rate"], event["groups"], event["trajectories"]) == (0.5, 0.0, 1, 2)
    assert event["grad_norm"] > 0 and event["lr"] == TRAINING.optimizer.lr / 2


def test_the_better_answer_becomes_likelier(tmp_path: Path):
    world = World(tmp_path)
    trainer = world.trainer(pace=Pace(1, 2, 100))
    trainer.run(0)
    good, bad = (honest_segment(trainer._model, seed, 1.0) for seed in range(2))
    for step in range(1, 4):
        world.add_group(f"group-{step}", [good, bad], [1.0, 0.0])
        trainer.run(step)
    for segment, better in ((good, True), (bad, False)):
        assert (
            honest_segment(trainer._model, 0 if better else 1, 1.0).logprobs[4:].sum() > segment.logprobs[4:].sum()
        ) == better


def test_groups_that_teach_nothing_do_not_fill_a_step(tmp_path: Path):
    """Equal rewards, one graded trajectory, none, and tokens that cannot be trained on: all are closed."""
    telemetry.open_events(tmp_path / "events", "trainer")
    world = World(tmp_path)
    greedy = [make_segment(ANSWER, sampling=Sampling(temperature=0.0)) for _ in range(2)]
    world.add_group("equal", segments(2), [1.0, 1.0])
    world.add_group("alone", segments(2), [1.0, None])
    world.add_group("lost", segments(2), [None, None])
    world.add_group("greedy", greedy, [1.0, 0.0])
    for name in ("good", "better"):
        world.add_group(name, segments(2), [1.0, 0.0])
    batch = next_batch(world, 1, Pace(2, 2, max_staleness=3))
    assert batch.record.groups == ("good", "better") and set(batch.closed) == {"equal", "alone", "lost", "greedy"}
    assert sorted(batch.rewards) == [0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0], "figures are of all that was graded"
    assert world.ledger.open_groups() == 2, "closed groups make room for others"
    closed = {
        event["group"]: event for event in telemetry.read_events(tmp_path / "events") if event["kind"] == "closed"
    }
    assert closed["alone"]["reasons"] == {
        "no other trajectory of its group is graded": 1,
        "failed: the machine was lost": 1,
    }
    assert "temperature 0" in next(iter(closed["greedy"]["reasons"]))


def test_a_step_runs_short_and_one_without_any_group_ends_training(tmp_path: Path):
    """No version and no budget for it; whoever starts again comes to the same end, or goes on with more groups."""
    telemetry.open_events(tmp_path / "events", "trainer")
    world = World(tmp_path)
    pace = Pace(2, 2, max_staleness=1)
    world.add_group("a", segments(2), [1.0, 0.0])
    for index in range(pace.most_started(1) - 1):
        world.add_group(f"b{index}", segments(2), [1.0, 1.0])
    for _ in range(2):
        trainer = world.trainer(pace=pace)
        assert trainer.run(3) == Version("main", 1) and trainer.step == 1 and world.ledger.is_spent(pace)
    assert [number for number, _ in world.chain()] == [0, 1]
    assert [step.groups for step in world.ledger.steps()] == [("a",)] and world.ledger.committed() == 1
    events = telemetry.read_events(tmp_path / "events")
    [step] = (event for event in events if event["kind"] == "step")
    assert (step["groups"], step["groups_missing"], step["groups_closed"]) == (1, 1, 11)
    texts = [event["text"] for event in events if event["kind"] == "warning"]
    assert sum("the step ran short" in text for text in texts) == 1
    ends = [text for text in texts if "training ends before its last step" in text]
    assert len(ends) == 1 and all("replacement" in text for text in ends)

    more = Pace(2, 2, max_staleness=1, replacement=2.5)
    assert not world.ledger.is_spent(more)
    world.add_group("c", segments(2), [1.0, 0.0])
    world.add_group("d", segments(2), [1.0, 0.0])
    assert world.trainer(pace=more).run(2) == Version("main", 2) and world.ledger.step(2).groups == ("c", "d")


@pytest.mark.parametrize(
    ("reward", "why"),
    [(0.0, "0% of the last 8 graded attempts"), (1.0, "choose harder tasks"), (None, "no attempt was graded")],
)
def test_a_first_step_without_any_group_is_an_error(tmp_path: Path, reward: float | None, why: str):
    world = World(tmp_path)
    pace = Pace(2, 2, max_staleness=0)
    for index in range(pace.most_started(0)):
        world.add_group(f"equal-{index}", segments(2), [reward, reward])
    for _ in range(2):
        with pytest.raises(TrainingError, match=f"{why}(.|\n)*`replacement`"):
            world.trainer(pace=pace).run(2)
    assert world.ledger.steps() == [] and [number for number, _ in world.chain()] == [0]
    assert not world.ledger.is_spent(pace), "a run without any step has not begun"


def test_a_stage_that_starts_no_groups_takes_steps_without_any(tmp_path: Path):
    """Those of real-time RL: momentum alone must not move the weights."""
    world, pace = World(tmp_path), Pace(2, 2, max_staleness=0, starts=False)
    world.add_group("a", segments(2), [1.0, 0.0])
    world.trainer(pace=pace).run(2)
    chain = dict(world.chain())
    assert chain[0] != chain[1] == chain[2] and [step.groups for step in world.ledger.steps()] == [("a",), ()]
    assert world.weights.manifest(Version("main", 2)).metadata["unchanged"] == "there was nothing to learn from"


def test_the_expected_tokens_are_those_of_the_first_step_that_has_any(tmp_path: Path):
    """Pinned in what the first step recorded: restarts, and later steps with longer answers, divide alike."""
    world, pace = World(tmp_path), Pace(1, 2, max_staleness=3)
    world.add_group("short", [make_segment([0, 0, *[1] * n]) for n in (2, 5)], [1.0, 0.0])
    world.add_group("long", [make_segment([0, 0, *[1] * 9]) for _ in range(2)], [1.0, 0.0])
    assert world.ledger.first_tokens() is None
    assert next_batch(world, 1, pace).expected_tokens == 3.5
    world.ledger.commit_step(1, Version("main", 1), "digest")
    for _ in range(2):  # the second time it runs again
        assert next_batch(world, 2, pace).expected_tokens == 3.5
        world.trajectories.delete("short-0")
    objective = world.objective(RLConfig(expected_tokens=24.0), pace)
    named = objective.next_batch(2, 0.0, MAIN, lambda: False)
    assert named is not None and named.expected_tokens == 24.0
    model = Decoder(MODEL)
    model.initialise(0)
    half, whole = (objective.backward(model, replace(named, expected_tokens=each))["loss"] for each in (48.0, 24.0))
    assert half == pytest.approx(whole / 2) != 0


def test_a_short_step_leaves_running_groups_to_the_next_one(tmp_path: Path):
    """Few groups have signal, and no further one may start: the step does not wait for those that fit into the next."""
    telemetry.open_events(tmp_path / "events", "trainer")
    world, pace = World(tmp_path), Pace(2, 2, max_staleness=1)
    trainer = world.trainer(pace=pace)
    trainer.run(0)
    _, current = world.version(0)
    members = [make_segment(ANSWER, seed=seed, policies=[current]) for seed in range(2)]
    for index in range(pace.most_started(0) - 3):
        world.add_group(f"equal-{index}", members, [1.0, 1.0])
    for name in ("b", "c"):
        world.start_group(name, 2)
    world.add_group("a", members, [1.0, 0.0])
    trainer.run(1)
    assert world.ledger.steps()[0].groups == ("a",) and world.ledger.open_groups() == 2
    for name in ("b", "c"):
        world.finish_group(name, members, [1.0, 0.0])
    trainer.run(2)
    assert world.ledger.steps()[1].groups == ("b", "c")
    steps = [event for event in telemetry.read_events(tmp_path / "events") if event["kind"] == "step"]
    assert [step["staleness_mean"] for step in steps] == [0.0, 1.0]


def test_a_version_that_cannot_be_written_ends_the_run_although_no_group_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    world, original = World(tmp_path), Publisher.publish

    def publish(self: Publisher, number: int, *rest: Any) -> Any:
        if number == 1:
            raise StorageError("the disk is full")
        return original(self, number, *rest)

    monkeypatch.setattr(Publisher, "publish", publish)
    world.add_group("a", segments(2), [1.0, 0.0])
    with pytest.raises(StorageError, match="the disk is full"):
        world.trainer(pace=Pace(1, 2, 1)).run(2)
    assert len(world.ledger.steps()) == 1 and world.ledger.committed() == 0
    monkeypatch.undo()
    assert world.trainer(pace=Pace(1, 2, 1)).run(1) == Version("main", 1) and world.ledger.committed() == 1


def test_steps_that_are_not_finite_are_skipped_and_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    world = World(tmp_path)
    world.add_steps()
    objective = world.objective()
    broken = {2, 4, 5, 6}

    def backward(model: Decoder, batch: RolloutBatch, *rest: Any) -> dict[str, object]:
        figures = type(objective).backward(objective, model, batch, *rest)
        if batch.record.number in broken:
            next(model.parameters()).grad.fill_(torch.nan)  # type: ignore[union-attr]
        return figures

    training = TrainingConfig(max_bad_steps=2, checkpoint_every=2, optimizer=OptimizerConfig(lr=0.02))
    trainer = world.trainer(training)
    monkeypatch.setattr(objective, "backward", backward)
    monkeypatch.setattr(trainer, "_objective", objective)
    with pytest.raises(TrainingError, match="last 2 steps, up to step 5"):
        trainer.run(STEPS)
    chain = dict(world.chain())
    assert chain[1] == chain[2] != chain[3] == chain[4] == chain[5]
    assert world.ledger.committed() == 5, "a skipped step is settled like any other"
    with pytest.raises(
        TrainingError, match="up to step 6"
    ):  # what runs again does not stop it: settings may have changed
        resumed = world.trainer(training)
        monkeypatch.setattr(resumed, "_objective", objective)
        resumed.run(STEPS)
