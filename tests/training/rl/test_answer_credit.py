"""What users said about an answer reaches that answer's tokens, and no others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rollmill.feedback.distil import Conversation, distil
from rollmill.feedback.rule import RuleConfig, Signal
from rollmill.training.batching import UNSAID, TokenRule
from rollmill.training.config import RLConfig
from rollmill.training.lineage import Lineage
from rollmill.training.rl.answer_credit import answer_advantages
from rollmill.types import Grade, Segment
from tests.training.rl.test_credit import segment
from tests.training.world import World, make_segment


def numbered(made: Segment, *after_tools: int) -> Segment:
    """With the numbers of its answers, as the gateway writes them; `after_tools` are those that answer tool results."""
    spans = [replace(span, answer=at, after_tools=at in after_tools) for at, span in enumerate(made.spans)]
    return replace(made, spans=spans)


def learnt(segments: list[Segment], **said: float) -> dict[str, list[float]]:
    """The advantage of each answer. `said`: a0 is the first answer of segment a, a all of them, _ the conversation."""
    names = {"" if name == "_" else name if name.isalpha() else f"{name[0]}/{name[1:]}": said[name] for name in said}
    reward = Grade(9.0, {f"answer.{name}": value for name, value in names.items()})
    found = answer_advantages(segments, reward)
    return {
        each.id: [float(advantage_T[span.start]) for span in each.spans]
        for each, advantage_T in zip(segments, found, strict=True)
    }


def test_a_refused_answer_is_punished_and_the_accepted_retry_is_not() -> None:
    a = numbered(segment("a", [0, 0, 1, 1, 1], at=[1]))
    b = numbered(segment("b", [0, 0, 1, 1], at=[2], parent=(a, 2), cause="retry"))
    plain = [
        Conversation(f"c{i}", "finished", "rl", 0, 0, "train", [Signal("accepted", float(i % 10 < 8))])
        for i in range(200)
    ]
    said = [Signal("retried", 1.0, None, "a/0"), Signal("accepted", 1.0, None, "b/0")]
    both = Conversation("retry", "finished", "rl", 0, 0, "train", said)
    reward = distil([*plain, both], lambda line, number: 0, RuleConfig(), 0).rewards["retry"]
    (refused, accepted) = answer_advantages([a, b], reward)
    assert refused[a.sampled].tolist() == pytest.approx([-1.3] * 3, abs=0.01)
    assert accepted[b.sampled].tolist() == pytest.approx([0.2] * 2, abs=0.01)


def test_an_abandoned_answer_learns_from_negative_signals_only() -> None:
    a = numbered(segment("a", [0, 1, 0, 1], at=[1, 2]), 1)
    b = numbered(segment("b", [0, 0, 0, 1], at=[3], parent=(a, 3), cause="retry"), 0)
    assert learnt([a, b], a1=0.5, b0=1.0) == {"a": [1.0, 0.0], "b": [1.0]}
    # the call before it led to the accepted answer too
    assert learnt([a, b], a1=-0.5, b0=1.0) == {"a": [1.0, -0.5], "b": [1.0]}
    assert learnt([a, b], a1=-0.5) == {"a": [0.0, -0.5], "b": [0.0]}


def test_a_signal_reaches_the_work_since_its_user_last_asked() -> None:
    a = numbered(segment("a", [0, 1, 0, 1, 0, 1, 0, 1, 0, 1], at=[1, 2, 3, 4, 5]), 1, 4)
    assert learnt([a], a1=0.5) == {"a": [0.5, 0.5, 0.0, 0.0, 0.0]}
    assert learnt([a], a1=0.5, a2=-1.0, a4=0.25) == {"a": [0.5, 0.5, -1.0, 0.25, 0.25]}
    assert learnt([a], a3=-1.0, a4=0.25) == {"a": [0.0, 0.0, 0.0, -1.0, 0.25]}, "its own signal counts"
    assert learnt([a], a=0.5) == {"a": [0.5] * 5}
    assert learnt([a], a2=-1.0, _=0.5) == {"a": [0.5, 0.5, -1.0, 0.5, 0.5]}
    assert learnt([a], z0=1.0) == {"a": [0.0] * 5}, "an answer that is not in the record"
    assert learnt([a]) == {"a": [9.0] * 5}, "a reward that no cycle gave is that of the outcome"


def test_work_goes_through_summaries_and_sub_agents_and_not_into_asides() -> None:
    a = numbered(segment("a", [0, 1, 0, 1, 0, 1], at=[1, 2, 3]), 1)
    sub = numbered(segment("sub", [0, 0, 1], at=[1.2], parent=(a, 0), cause="sub_agent", seed=3))
    b = numbered(segment("b", [0, 0, 1, 0, 1], at=[4, 5], parent=(a, 1), cause="summary", seed=4), 1)
    title = numbered(segment("title", [0, 0, 1], at=[6], parent=(a, 0), cause="edit", seed=5))
    everything = [a, sub, b, title]
    assert learnt(everything, b1=1.0) == {"a": [1.0] * 3, "sub": [1.0], "b": [1.0] * 2, "title": [0.0]}
    said = Grade(1.0, {"answer.title/0": 1.0})
    assert [float(found.max()) for found in answer_advantages(everything, said)] == [0, 0, 0, 1], "no abandoned answer"


def test_an_answer_that_two_engines_sampled_is_one() -> None:
    made = make_segment([0, 1, 1, 1, 0, 1])
    first, second = made.spans
    parts = [replace(first, end=2), replace(first, start=2, answered=1), replace(second, answer=1)]
    (found,) = answer_advantages([replace(made, id="a", spans=parts)], Grade(1.0, {"answer.a/0": 1.0}))
    assert found.tolist() == [0, 1, 1, 1, 0, 0]


def test_a_step_trains_on_what_users_said_and_counts_the_rest(tmp_path: Path) -> None:
    """Also where the advantages of the answers add up to nothing."""
    world = World(tmp_path)
    config = RLConfig(credit="answers", baseline="none")
    world.add_steps(1)
    rule = TokenRule(Lineage("main", {"main": 0}), base=0, max_staleness=100)
    for row in world.trajectories.list():
        first = world.trajectories.load(row.id).segments[0]
        parts = {f"answer.{first.id}/0": 0.5 if row.id.endswith("0") else -0.5}
        world.trajectories.grade(row.id, Grade(0.0, parts))
    batch = world.objective(config).next_batch(1, 1e-3, rule.lineage, lambda: False)
    again = world.objective(config).next_batch(1, 1e-3, rule.lineage, lambda: False)
    assert batch is not None and again is not None and batch.record.trajectories
    for one, two in zip(batch.microbatches, again.microbatches, strict=True):
        assert one.facts is not None and two.facts is not None
        assert set(one.facts.advantages.tolist()) <= {0.5, -0.5}
        np.testing.assert_array_equal(one.facts.advantages, two.facts.advantages)
    assert batch.masked[UNSAID] >= 0
