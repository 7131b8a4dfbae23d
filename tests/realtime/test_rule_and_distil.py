"""Signals become rewards by a declared rule; a conversation is compared with its population; everything is counted."""

from __future__ import annotations

import numpy as np
import pytest

from rollmill.feedback.distil import TRAINABLE, WITHOUT_CONSENT, Conversation, distil
from rollmill.feedback.rule import RuleConfig, Signal, answer_rewards, distilled_reward, kind_of_task, reward_of

RULE = RuleConfig()


def lag(line: str, number: int) -> int | None:
    """rl@7 is live. It began as base@20, which counts as rl@0."""
    position = {"rl": number, "base": number - 20}.get(line)
    return None if position is None else 7 - position


def conversation(id: str, *signals: Signal, **changes: object) -> Conversation:
    facts = {"state": "finished", "line": "rl", "oldest": 7, "newest": 7, "consent": "train", **changes}
    return Conversation(id=id, signals=signals, **facts)  # type: ignore[arg-type]


def said(accepted: bool, kind: str = "") -> tuple[Signal, ...]:
    return (Signal("accepted" if accepted else "reverted", 1.0), *((Signal("task", None, kind),) if kind else ()))


@pytest.mark.parametrize(
    ("signals", "reward"),
    [
        ([("accepted", 1.0)], 1.0),
        ([("accepted", 1.0), ("reverted", 1.0)], 0.0),
        ([("edited", 0.8)], 0.8),
        ([("thumbs", -1.0), ("thumbs", 1.0)], 0.0),
        ([("accepted", 1.0)] * 9 + [("reverted", 1.0)], 1.0),  # counts, not means of kinds
        ([("accepted", 1.0)] + [("reverted", 1.0)] * 9, -1.0),
        ([("reverted", 1.0), ("retried", 1.0), ("thumbs", -1.0)], -1.0),  # bounded
        ([("latency", 3.0)], None),  # has no weight
        ([], None),
    ],
)
def test_the_reward_of_a_conversation(signals: list[tuple[str, float]], reward: float | None) -> None:
    assert reward_of(RULE, [Signal(*signal) for signal in signals]) == reward


def test_nine_accepted_answers_and_one_that_was_undone() -> None:
    """Each answer has its own reward; what is said again about an answer replaces what was said before."""
    accepted = [Signal("accepted", 1.0, None, f"s/{number}") for number in range(9)]
    signals = [*accepted, Signal("reverted", 1.0, None, "s/9")]
    assert answer_rewards(RULE, signals) == {**{f"s/{number}": 1.0 for number in range(9)}, "s/9": -1.0}
    assert reward_of(RULE, signals) == pytest.approx(0.8)
    changed = [Signal("edited", share, None, "s/0") for share in (0.9, 0.4)]
    assert answer_rewards(RULE, changed) == {"s/0": 0.4}
    assert answer_rewards(RULE, [Signal("thumbs", 1.0), Signal("task", None, "fix", "s/0")]) == {"": 0.5}


def test_what_counts_as_accepted() -> None:
    assert not RULE.accepts(0.05), "5 % of an edited answer survived"
    assert not RULE.accepts(0.0) and RULE.accepts(1.0)
    assert RULE.accepts(RULE.weights["thumbs"]), "a thumb up alone"


def test_a_reward_names_its_rule() -> None:
    other = RuleConfig(version="2", weights={"accepted": 2.0})
    assert RULE.digest != other.digest == RuleConfig(version="2", weights={"accepted": 2.0}).digest
    reward = distilled_reward(RULE, said(True), {"": 1.0}, {"": 0.75})
    assert reward.value == 0.75 and reward.solved and reward.parts["baseline"] == 0.25
    assert reward.evidence == {"rule": "1", "digest": RULE.digest}
    assert not distilled_reward(RULE, said(False), {"": -1.0}, {"": 1.0}).solved, (
        "better than others, and still not accepted"
    )


def test_a_conversation_is_compared_with_others_of_its_kind_and_version() -> None:
    """Bug fixes are accepted half of the time, questions always: a fix is not blamed for being a fix."""
    fixes = [conversation(f"fix-{number}", *said(number % 2 == 0, "fix")) for number in range(10)]
    questions = [conversation(f"question-{number}", *said(True, "question")) for number in range(10)]
    found = distil([*fixes, *questions], lag, RULE, 0)
    assert found.counts == {TRAINABLE: 10, "like its population: nothing to learn": 10}
    assert found.rewards["fix-0"].value == pytest.approx(1.0 - (4 - 5) / 9)  # the mean of the nine others
    assert {(each.kind, each.count, each.mean) for each in found.populations} == {
        ("fix", 10, 0.0),
        ("question", 10, 1.0),
    }
    assert next(each for each in found.populations if each.kind == "fix").variance == 1.0


def test_few_of_a_kind_are_compared_with_all_of_their_version() -> None:
    rare = conversation("rare", *said(True, "rare"))
    others = [conversation(f"fix-{number}", *said(False, "fix")) for number in range(9)]
    assert distil([rare, *others], lag, RULE, 0).rewards["rare"].value == 2.0
    assert distil([rare, *others[:3]], lag, RULE, 0).counts == {"too few to compare with": 4}


def test_every_conversation_is_counted_once_with_the_reason() -> None:
    usable = [conversation(f"ok-{number}", *said(number < 4)) for number in range(8)]
    others = [
        conversation("silent"),
        conversation("private", *said(True), consent="store"),
        conversation("open", *said(True), state="running"),
        conversation("gone", *said(True), state="deleted"),
        conversation("old", *said(True), oldest=6),
        conversation("new", *said(True), newest=8),
        conversation("stranger", *said(True), line="other"),
    ]
    found = distil([*usable, *others], lag, RULE, 0)
    assert sum(found.counts.values()) == 15 and found.counts[TRAINABLE] == 8 == len(found.rewards)
    assert found.counts["of another version"] == 3 and found.counts[WITHOUT_CONSENT] == 1
    assert found.counts["no signal"] == found.counts["running, not sealed"] == found.counts["deleted"] == 1
    assert distil([*usable, *others], lag, RULE, 1).counts["of another version"] == 2, "the one before is near"


def test_near_versions_of_the_line_before_count_after_a_promotion() -> None:
    """Each version is a population of its own, also if two lines have the same numbers."""
    old = [conversation(f"old-{number}", *said(number < 4), line="base", oldest=20, newest=20) for number in range(8)]
    new = [conversation(f"new-{number}", *said(number < 6)) for number in range(8)]
    assert distil([*old, *new], lag, RULE, 6).counts == {TRAINABLE: 8, "of another version": 8}
    found = distil([*old, *new], lag, RULE, 7)
    assert found.counts == {TRAINABLE: 16}
    assert [(each.version, each.mean) for each in found.populations] == [("base@20", 0.0), ("rl@7", 0.5)]


def test_rewards_of_a_population_add_up_to_nothing() -> None:
    random = np.random.default_rng(0)
    many = [conversation(str(number), Signal("edited", float(random.random()))) for number in range(50)]
    assert abs(sum(reward.value for reward in distil(many, lag, RULE, 0).rewards.values())) < 1e-9


def test_the_last_word_on_the_kind_of_task_counts() -> None:
    assert kind_of_task([Signal("task", None, "a"), Signal("task", None, "b")]) == "b"
    assert kind_of_task([Signal("accepted", 1.0)]) == ""
    answers = [Signal("task", None, "a", "s/0"), Signal("task", None, "b", "s/1")]
    assert (kind_of_task(answers, "s/0"), kind_of_task(answers, "s/2")) == ("a", "b")


def test_each_answer_is_compared_with_those_of_other_conversations() -> None:
    """A conversation counts once in its population, however many of its answers have a signal."""
    others = [conversation(f"c-{number}", *said(number < 8)) for number in range(10)]  # mean 0.6
    much = [Signal("accepted", 1.0, None, f"s/{number}") for number in range(500)]
    found = distil([*others, conversation("much", *much, Signal("reverted", 1.0, None, "s/7"))], lag, RULE, 0)
    parts = found.rewards["much"].parts
    assert parts["answer.s/6"] == pytest.approx(0.4) and parts["answer.s/7"] == pytest.approx(-0.6)
    assert found.rewards["much"].value == pytest.approx(np.mean([0.4] * 499 + [-0.6]))
    (population,) = found.populations
    assert population.count == 11 and population.mean == pytest.approx((6 + 499 / 500) / 11)


def test_one_user_does_not_speak_for_all() -> None:
    loud = [conversation(f"loud-{number}", *said(False), user="u-1") for number in range(50)]
    others = [conversation(f"c-{number}", *said(number % 2 == 0)) for number in range(10)]
    named = [conversation(f"n-{number}", *said(True), user=f"u-{10 + number}") for number in range(10)]
    found = distil([*loud, *others, *named], lag, RULE, 0, 5)
    assert found.counts == {TRAINABLE: 25, "of a user with enough others": 45}
    assert found.populations[0].count == 25 and {id for id in found.rewards if "loud" in id} == {
        f"loud-{number}" for number in range(5)
    }
    silent = [conversation(f"s-{number}", user="u-1") for number in range(9)]
    assert distil([*silent, *loud[:5], *others], lag, RULE, 0, 5).counts[TRAINABLE] == 15, "silence uses up nothing"
