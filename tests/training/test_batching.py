from collections import Counter

import numpy as np
import pytest

from rollmill.errors import TrajectoryError
from rollmill.training.batching import (
    FOREIGN,
    GRAMMAR,
    GREEDY,
    NO_CONTEXT,
    STALE,
    TRUNCATED,
    PackedSequence,
    TokenRule,
    check_fits,
    pack,
    segment_sequence,
)
from rollmill.training.lineage import Lineage
from rollmill.types import Sampling
from tests.training.world import MODEL, make_segment, policy

MAIN = Lineage("main", {"main": 0, "base": -500})


def rule(base: int = 0, max_staleness: int = 0) -> TokenRule:
    return TokenRule(MAIN, base, max_staleness)


def test_targets_are_the_sampled_tokens_and_rows_the_inputs_before_them():
    segment = make_segment([0, 0, 1, 1, 0, 1, 0])
    masked: Counter[str] = Counter()
    sequence = segment_sequence(segment, 0.5, rule(), masked)
    assert sequence is not None and sequence.facts is not None
    assert sequence.rows.tolist() == [1, 2, 4]
    assert sequence.targets.tolist() == segment.tokens[[2, 3, 5]].tolist()
    assert sequence.tokens.tolist() == segment.tokens[:5].tolist()  # nothing after the last row
    assert sequence.routes is not None and len(sequence.routes) == 5
    assert sequence.facts.logprobs.tolist() == segment.logprobs[[2, 3, 5]].tolist()
    assert sequence.facts.advantages.tolist() == [0.5] * 3
    assert +masked == Counter()


def test_tokens_over_the_staleness_bound_are_masked_one_by_one():
    # weights changed twice in the middle of the answer: versions 3, 4, 5; trained from 6
    segment = make_segment([0, 1, 1, 1, 1], policies=[policy(3), policy(4), policy(5)], policy_of=[0, 0, 1, 2, 2])
    masked: Counter[str] = Counter()
    sequence = segment_sequence(segment, 1.0, rule(base=6, max_staleness=2), masked)
    assert sequence is not None and sequence.facts is not None
    assert sequence.rows.tolist() == [1, 2, 3] and masked[STALE] == 1
    assert sequence.facts.staleness.tolist() == [2, 1, 1]
    assert segment_sequence(segment, 1.0, rule(base=9, max_staleness=2), masked) is None
    assert masked[STALE] == 1 + 4


def test_staleness_counts_across_lines():
    segment = make_segment(
        [0, 1, 1, 1], policies=[policy(500, "base"), policy(0), policy(9, "other")], policy_of=[0, 0, 1, 2]
    )
    masked: Counter[str] = Counter()
    sequence = segment_sequence(segment, 1.0, rule(), masked)
    assert sequence is not None and sequence.facts is not None
    assert sequence.facts.staleness.tolist() == [0, 0]  # base@500 became main@0
    assert masked[FOREIGN] == 1


@pytest.mark.parametrize(
    ("sampling", "reason"),
    [
        (Sampling(temperature=0.0), GREEDY),
        (Sampling(top_p=0.9), TRUNCATED),
        (Sampling(top_k=5), TRUNCATED),
        (Sampling(grammar="start: /a+/"), GRAMMAR),
    ],
)
def test_spans_that_cannot_be_reconstructed_are_left_out(sampling: Sampling, reason: str):
    masked: Counter[str] = Counter()
    assert segment_sequence(make_segment([0, 1, 1], sampling=sampling), 1.0, rule(), masked) is None
    assert +masked == Counter({reason: 2})


def test_each_token_keeps_its_temperature():
    sequence = segment_sequence(make_segment([0, 1], sampling=Sampling(temperature=0.7)), 1.0, rule(), Counter())
    assert sequence is not None and sequence.facts is not None
    assert sequence.facts.temperatures.tolist() == pytest.approx([0.7])


def test_a_first_token_cannot_be_a_target():
    masked: Counter[str] = Counter()
    sequence = segment_sequence(make_segment([1, 1]), 1.0, rule(), masked)
    assert sequence is not None and sequence.rows.tolist() == [0] and masked[NO_CONTEXT] == 1


def test_pack_keeps_to_the_budget_and_loses_nothing():
    sequences = [
        segment_sequence(make_segment([0] * n + [1, 1], seed=n), 1.0, rule(), Counter()) for n in (3, 9, 5, 30, 4)
    ]
    batches = pack([each for each in sequences if each is not None], budget=16)
    assert [batch.lengths for batch in batches] == [[31], [10, 6], [5, 4]]
    for batch in batches:
        assert batch.facts is not None and batch.routes is not None and batch.routes_valid is not None
        assert (
            len(batch.tokens_N)
            == len(batch.positions_N)
            == len(batch.routes)
            == len(batch.routes_valid)
            == sum(batch.lengths)
        )
        assert len(batch.rows_M) == len(batch.targets_M) == len(batch.facts.logprobs) == 2 * len(batch.lengths)
    second = batches[1]
    assert second.positions_N.tolist() == [*range(10), *range(6)]
    assert second.rows_M.tolist() == [8, 9, 10 + 4, 10 + 5]


def test_sequences_without_routes_share_a_batch_with_ones_that_have_them():
    plain = PackedSequence(np.arange(3), np.array([1]), np.array([2]))
    routed = PackedSequence(
        np.arange(2), np.array([0]), np.array([1]), np.ones((2, 2, 2), np.uint8), np.ones(2, np.bool_)
    )
    (batch,) = pack([plain, routed], 100)
    assert batch.routes_valid is not None and batch.routes_valid.tolist() == [False] * 3 + [True] * 2


def test_payloads_of_another_model_are_refused():
    check_fits([make_segment([0, 1, 1])], MODEL)
    cases = {
        "vocabulary": {"vocab_size": 3},
        "context": {"max_context": 2},
        "expert": {"experts": 2},
        "layers": {"layers": 3},
    }
    for what, change in cases.items():
        with pytest.raises(TrajectoryError, match=what):
            check_fits([make_segment([0, 1, 1], seed=4)], MODEL.model_copy(update=change))
    twice = make_segment([0, 1, 1])
    assert twice.routes is not None and twice.routes_valid is not None
    twice.routes[:], twice.routes_valid[:] = 1, True
    with pytest.raises(TrajectoryError, match="twice"):
        check_fits([twice], MODEL)
