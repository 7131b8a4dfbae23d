import math

from rollmill.backoff import Backoff


def test_pauses_double_up_to_the_longest_and_start_again_after_a_success() -> None:
    backoff = Backoff(0.5, 3.0)
    assert [backoff.failed() for _ in range(5)] == [0.5, 1.0, 2.0, 3.0, 3.0]
    assert backoff.failures == 5
    backoff.reset()
    assert backoff.failures == 0 and backoff.failed() == 0.5


def test_a_store_that_is_away_for_days_does_not_overflow() -> None:
    """2**1024 is no float: a pause computed as first * 2**failures raised after about nine hours of failures."""
    backoff = Backoff(0.5, 30.0)
    assert [backoff.failed() for _ in range(5000)][-1] == 30.0


def test_the_first_pause_may_not_be_longer_than_the_longest() -> None:
    assert Backoff(5.0, 1.0).failed() == 1.0


def test_waiting_ends_with_a_success() -> None:
    backoff = Backoff(1000.0, 1000.0)
    assert not backoff.waiting()
    backoff.failed()
    assert backoff.waiting()
    backoff.reset()
    assert not backoff.waiting()


def test_patience_counts_down_and_is_endless_unless_given() -> None:
    assert Backoff(0.1, 1.0).left() == math.inf
    assert Backoff(0.1, 1.0, patience=0.0).left() == 0.0
    assert 0 < Backoff(0.1, 1.0, patience=1000.0).left() <= 1000.0


def test_jitter_shortens_a_pause_at_random() -> None:
    pauses = [Backoff(1.0, 1.0, jitter=0.5).failed() for _ in range(100)]
    assert all(0.5 <= pause <= 1.0 for pause in pauses) and len(set(pauses)) > 1
