"""Credit: tokens that led to the outcome learn, abandoned ones do not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmill.models.decoder import Decoder
from rollmill.training.batching import ABANDONED, TokenRule, pack
from rollmill.training.config import RLConfig
from rollmill.training.lineage import Lineage
from rollmill.training.rl.credit import credit_of
from rollmill.training.rl.rl_objective import RolloutBatch
from rollmill.training.rl.selection import segment_sequences
from rollmill.types import Cause, Segment
from tests.training.world import MODEL, World, make_segment

RULE = TokenRule(Lineage("main", {"main": 0}), base=0, max_staleness=0)


def segment(
    name: str,
    sampled: Sequence[int],
    at: Sequence[float],
    parent: tuple[Segment, int] | None = None,
    cause: Cause = "start",
    seed: int = 0,
) -> Segment:
    """A segment whose answers were sampled at these times; each took half a second."""
    made = make_segment(list(sampled), seed=seed)
    spans = [replace(span, started_at=start, ended_at=start + 0.5) for span, start in zip(made.spans, at, strict=True)]
    link = None if parent is None else (parent[0].id, parent[1])
    if parent is not None:
        made.tokens[: parent[1]] = parent[0].tokens[: parent[1]]
    return replace(made, id=name, spans=spans, parent=link, cause=cause)


def credits(segments: list[Segment], policy: Any = "path", decay: float = 1.0) -> dict[str, list[float]]:
    """The credit of each segment's sampled tokens."""
    found = credit_of(segments, policy, decay)
    return {each.id: credit_T[each.sampled].tolist() for each, credit_T in zip(segments, found, strict=True)}


def test_abandoned_retries_and_edits_learn_nothing() -> None:
    a = segment("a", [0, 1, 1, 0, 1], at=[1, 2])
    b = segment("b", [0, 0, 0, 0, 1, 0, 1], at=[3, 4], parent=(a, 4), cause="retry")
    c = segment("c", [0, 0, 0, 0, 0, 0, 1], at=[5], parent=(b, 5), cause="edit")
    assert credits([a, b]) == {"a": [1, 1, 0], "b": [1, 1]}
    assert credits([a, b, c]) == {"a": [1, 1, 0], "b": [1, 0], "c": [1]}
    assert credits([a, b, c], "all") == {"a": [1, 1, 1], "b": [1, 1], "c": [1]}
    # a second edit shares less with b than b shares with a
    d = segment("d", [0, 0, 1], at=[6], parent=(b, 1), cause="edit")
    assert credits([a, b, c, d]) == {"a": [0, 0, 0], "b": [0, 0], "c": [0], "d": [1]}
    # the client went back to b after its edit: the last answer decides
    again = replace(b, spans=[b.spans[0], replace(b.spans[1], started_at=9.0)])
    assert credits([a, again, c]) == {"a": [1, 1, 0], "b": [1, 1], "c": [0]}


def test_a_chain_of_summaries_learns_as_a_whole() -> None:
    a = segment("a", [0, 1, 0, 1], at=[1, 2])
    b = segment("b", [0, 0, 1, 0, 1], at=[3, 4], parent=(a, 1), cause="summary")
    c = segment("c", [0, 0, 1], at=[5], parent=(b, 1), cause="summary")
    assert credits([a, b, c]) == {"a": [1, 1], "b": [1, 1], "c": [1]}


def test_answers_that_the_template_writes_differently_later_learn_too() -> None:
    a = segment("a", [0, 1, 0, 1], at=[1, 2])
    b = segment("b", [0, 0, 1], at=[3], parent=(a, 1), cause="template")
    assert credits([a, b]) == {"a": [1, 1], "b": [1]}
    later = replace(a, spans=[a.spans[0], replace(a.spans[1], started_at=9.0)])  # another request went back to a
    assert credits([later, b]) == {"a": [1, 1], "b": [0]}


def test_sub_agents_learn_if_their_result_was_used() -> None:
    a = segment("a", [0, 1, 0, 1, 0, 1], at=[1, 4, 7])
    used = segment("used", [0, 1, 0, 1], at=[2, 2.5], parent=(a, 0), cause="sub_agent")
    nested = segment("nested", [0, 1], at=[2.2], parent=(used, 0), cause="sub_agent")
    nested.spans[0].ended_at = 2.3
    summed = segment("summed", [0, 1], at=[3], parent=(used, 0), cause="summary")
    late = segment("late", [0, 1], at=[6.9], parent=(a, 0), cause="sub_agent")  # ends when nobody reads it any more
    everything = [a, used, nested, summed, late]
    assert credits(everything) == {"a": [1, 1, 1], "used": [1, 1], "nested": [1], "summed": [1], "late": [0]}
    # the answer that called it was asked again: its sub-agent went with it
    b = segment("b", [0, 1], at=[8], parent=(a, 1), cause="retry")
    assert credits([*everything, b]) == {
        "a": [0, 0, 0], "used": [0, 0], "nested": [0], "summed": [0], "late": [0], "b": [1]
    }  # fmt: skip


def test_a_request_aside_takes_no_credit_whenever_it_comes() -> None:
    """A title, a classifier or a note: a context of its own that nobody quotes."""
    a = segment("a", [0, 0, 1, 1, 0, 1, 1, 0, 1], at=[1, 4, 7])
    title = segment("title", [0, 0, 0, 1], at=[8], parent=(a, 1), cause="edit", seed=5)
    assert credits([a, title]) == {"a": [1] * 5, "title": [0]}
    begun = segment("begun", [0, 0, 1], at=[9], parent=(a, 1), cause="fork", seed=6)  # beside the first request
    assert credits([a, title, begun]) == {"a": [1] * 5, "title": [0], "begun": [0]}
    # it came first, so the agent's own conversation is a branch of it
    quota = segment("quota", [0, 0, 1], at=[0], seed=7)
    main = segment("main", [0, 0, 1, 1, 0, 1], at=[1, 2], parent=(quota, 0), cause="edit", seed=8)
    assert credits([quota, main]) == {"quota": [0], "main": [1, 1, 1]}
    late = segment("late", [0, 0, 1], at=[9], parent=(main, 0), cause="edit", seed=9)
    assert credits([quota, main, late]) == {"quota": [0], "main": [1, 1, 1], "late": [0]}


def test_answers_to_one_prompt_are_one_conversation() -> None:
    a = segment("a", [0, 0, 1], at=[1])
    b = segment("b", [0, 0, 1, 0, 1], at=[2, 3], parent=(a, 2), cause="fork", seed=4)
    assert credits([a, b]) == {"a": [0], "b": [1, 1]}


def test_a_sub_agent_is_never_the_outcome() -> None:
    a = segment("a", [0, 1, 1, 0, 1], at=[1, 7])
    straggler = segment("straggler", [0, 1, 0, 1], at=[2, 7.2], parent=(a, 0), cause="sub_agent", seed=6)
    assert credits([a, straggler]) == {"a": [1, 1, 1], "straggler": [0, 0]}
    alone = segment("alone", [0, 1], at=[1], cause="sub_agent")
    assert credits([alone]) == {"alone": [0]}


def test_a_client_declares_the_outcome() -> None:
    a = segment("a", [0, 1, 0, 1, 0, 1], at=[1, 2, 3])
    other = segment("other", [0, 0, 1], at=[4], parent=(a, 0), cause="edit", seed=5)
    assert credits([a, other]) == {"a": [1, 1, 1], "other": [0]}
    other.spans[0].outcome = True
    assert credits([a, other]) == {"a": [0, 0, 0], "other": [1]}
    other.spans[0].outcome, a.spans[1].outcome = False, True
    assert credits([a, other]) == {"a": [1, 1, 0], "other": [0]}


def test_decayed_credit_counts_the_answers_that_follow() -> None:
    a = segment("a", [0, 1, 1, 0, 1], at=[1, 2])
    b = segment("b", [0, 0, 0, 0, 1, 0, 1], at=[3, 4], parent=(a, 4), cause="edit")
    assert credits([a, b], "decayed", 0.5) == {"a": [0.25, 0.25, 0], "b": [0.5, 1]}


def test_credit_per_segment_shares_equally() -> None:
    """Six tokens on the way in three segments: each segment gets 2, whatever its length."""
    a = segment("a", [0, 1, 1, 1, 0, 1], at=[1, 2])
    b = segment("b", [0, 0, 1], at=[3], parent=(a, 1), cause="summary")
    c = segment("c", [0, 0, 1], at=[4], parent=(b, 1), cause="summary")
    assert credits([a, b, c], "per_segment") == {"a": [0.5] * 4, "b": [2], "c": [2]}
    # an abandoned retry takes no share
    d = segment("d", [0, 0, 0, 0, 0, 1], at=[5], parent=(a, 5), cause="retry")
    assert credits([a, d], "per_segment") == {"a": [pytest.approx(4 / 6)] * 3 + [0], "d": [2]}
    assert credits([a], "per_segment") == {"a": [1] * 4} and credits([], "per_segment") == {}


@st.composite
def chains(draw: st.DrawFn) -> list[Segment]:
    """A chain of summaries; the answers of each segment may have any length."""
    made: list[Segment] = []
    for number in range(draw(st.integers(1, 8))):
        answers = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
        sampled = [each for length in answers for each in (0, *[1] * length)]
        at = [10.0 * number + index for index in range(len(answers))]
        parent = (made[-1], 1) if made else None
        made.append(segment(f"s{number}", sampled, at, parent, "summary" if made else "start", seed=number))
    return made


@settings(max_examples=60, deadline=None)
@given(chain=chains(), decay=st.floats(0.5, 1.0))
def test_the_sums_of_credit_in_a_chain(chain: list[Segment], decay: float) -> None:
    tokens = sum(int(each.sampled.sum()) for each in chain)
    path, decayed, shared = (credits(chain, policy, decay) for policy in ("path", "decayed", "per_segment"))
    assert all(set(values) == {1} for values in path.values()), "every model token of the chain, summaries included"
    assert sum(map(sum, shared.values())) == pytest.approx(tokens, rel=1e-5)
    assert [sum(values) for values in shared.values()] == pytest.approx([tokens / len(chain)] * len(chain), rel=1e-5)
    lengths = [span.end - span.start for each in chain for span in each.spans]
    expected = sum(length * decay**later for later, length in enumerate(reversed(lengths)))
    assert sum(map(sum, decayed.values())) == pytest.approx(expected, rel=1e-4)


def quote(segment: Segment, at: int, answer: np.ndarray) -> None:
    """Put an answer into the context of a segment, as text that was not sampled there."""
    assert not segment.sampled[at : at + len(answer)].any()
    segment.tokens[at : at + len(answer)] = answer


def test_answers_that_an_edited_context_still_quotes_led_to_the_outcome() -> None:
    """The program shortened a tool result: the answers behind it are repeated as text, all but the last."""
    a = segment("a", [0, 1, 0, *[1] * 4, 0, *[1] * 4], at=[1, 2, 3], seed=3)
    b = segment("b", [0] * 9 + [1], at=[4], parent=(a, 2), cause="edit", seed=4)
    assert credits([a, b]) == {"a": [1] + [0] * 8, "b": [1]}
    quote(b, 3, a.tokens[3:7])
    assert credits([a, b]) == {"a": [1] * 5 + [0] * 4, "b": [1]}
    # a second edit quotes what b had inherited from a
    c = segment("c", [0] * 9 + [1], at=[5], parent=(b, 0), cause="edit", seed=5)
    quote(c, 2, a.tokens[3:7])
    assert credits([a, b, c])["b"] == [0] and credits([a, b, c])["a"] == [0] * 9, "b is what c was edited from"
    d = segment("d", [0] * 9 + [1], at=[6], parent=(a, 0), cause="edit", seed=6)
    quote(d, 2, a.tokens[3:7])
    assert credits([a, b, d]) == {"a": [1] * 5 + [0] * 4, "b": [0], "d": [1]}


def test_a_program_that_summarises_on_its_own_is_credited_for_the_summary() -> None:
    a = segment("a", [0, 1, 0, *[1] * 16], at=[1, 2], seed=3)
    b = segment("b", [0] * 20 + [1], at=[3], parent=(a, 1), cause="edit", seed=4)
    quote(b, 4, a.tokens[5:17])  # its first and last tokens are others there
    assert credits([a, b]) == {"a": [1] * 17, "b": [1]}


def test_a_sub_agent_of_a_program_is_credited_if_its_answer_is_quoted() -> None:
    a = segment("a", [0, 1, *[0] * 8, 1], at=[1, 4], seed=3)
    used = segment("used", [0, 1, 0, *[1] * 5], at=[2, 3], parent=(a, 0), cause="edit", seed=4)
    other = segment("other", [0, 0, *[1] * 5], at=[3.5], parent=(a, 0), cause="edit", seed=5)
    assert credits([a, used, other])["used"] == [0] * 6
    quote(a, 4, used.tokens[3:])
    assert credits([a, used, other]) == {"a": [1, 1], "used": [1] * 6, "other": [0] * 5}


def test_segments_without_an_answer_or_a_parent_are_no_obstacle() -> None:
    a, empty = segment("a", [0, 1], at=[1]), segment("empty", [0, 0], at=[])
    orphan = segment("orphan", [0, 1], at=[0.5], cause="sub_agent")
    assert credits([empty, orphan, a]) == {"empty": [], "orphan": [0], "a": [1]}
    assert credits([empty]) == {"empty": []} and credits([]) == {}


def gradient(world: World, config: RLConfig, trajectories: list[list[Segment]], budget: int = 1000) -> np.ndarray:
    sequences = []
    for index, segments in enumerate(trajectories):
        sequences += filter(None, segment_sequences(segments, 0.5 - index, RULE, config, trajectory=index)[0])
    model = Decoder(MODEL)
    model.initialise(0)
    nothing: Any = None
    batch = RolloutBatch(nothing, pack(sequences, budget), nothing, nothing, nothing, lr=0.0, wait_seconds=0)
    world.objective(config).backward(model, batch)
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).numpy()


def test_an_abandoned_retry_gets_a_gradient_only_with_credit_for_all(tmp_path: Path) -> None:
    world = World(tmp_path)
    a = segment("a", [0, 0, 1, 1], at=[1])
    b = segment("b", [0, 0, 1, 1], at=[2], parent=(a, 2), cause="retry", seed=1)
    clean = gradient(world, RLConfig(), [[replace(b, parent=None, cause="start")]])
    np.testing.assert_array_equal(gradient(world, RLConfig(), [[a, b]]), clean)
    biased = gradient(world, RLConfig(credit="all"), [[a, b]])
    assert np.abs(biased - clean).max() > 1e-4, "the abandoned answer is rewarded for what another one did"
    _, masked = segment_sequences([a, b], 1.0, RULE, RLConfig())
    assert masked[ABANDONED] == 2


@pytest.mark.parametrize("budget", [1000, 6])
def test_a_chain_of_summaries_is_one_sample(tmp_path: Path, budget: int) -> None:
    """With means per trajectory, one that was summarised weighs as much as one that was not."""
    world, config = World(tmp_path), RLConfig(aggregation="sequence_mean", loss="policy_gradient")
    a = segment("a", [0, 0, 1, 1, 1], at=[1])
    b = segment("b", [0, 0, 1], at=[2], parent=(a, 1), cause="summary", seed=1)
    other = segment("other", [0, 0, 1], at=[1], seed=2)
    found = gradient(world, config, [[a, b], [other]], budget)
    parts = [gradient(world, config, [[replace(each, parent=None)], []]) for each in (a, b)]
    alone = -gradient(world, config, [[other], []])
    np.testing.assert_allclose(found, (0.75 * parts[0] + 0.25 * parts[1] + alone) / 2, atol=2e-6)


@pytest.mark.parametrize("aggregation", ["constant", "token_mean"])
def test_a_chain_weighs_by_its_tokens_if_declared_so(tmp_path: Path, aggregation: Any) -> None:
    world, config = World(tmp_path), RLConfig(aggregation=aggregation, loss="policy_gradient")
    a = segment("a", [0, 0, 1, 1, 1], at=[1])
    b = segment("b", [0, 0, 1], at=[2], parent=(a, 1), cause="summary", seed=1)
    other = segment("other", [0, 0, 1], at=[1], seed=2)
    found = gradient(world, config, [[a, b], [other]])
    parts = [gradient(world, config, [[replace(each, parent=None)], []]) for each in (a, b)]
    alone = -gradient(world, config, [[other], []])
    weights = (1, 1, 1) if aggregation == "constant" else (3 / 5, 1 / 5, 1 / 5)
    expected = weights[0] * parts[0] + weights[1] * parts[1] + weights[2] * alone
    np.testing.assert_allclose(found, expected, atol=2e-6)
