"""The next step's documents are read while a step trains: in order, by one thread, one step ahead."""

from __future__ import annotations

import threading

import pytest

from rollmill.errors import TrainingError
from rollmill.training.pretraining.read_ahead import ReadAhead

LONG = 60.0  # seconds until a wait gives up


class Reader:
    """Notes who reads what, and tells when the read of a step has begun."""

    def __init__(self) -> None:
        self.read: list[int] = []
        self.threads: set[int] = set()
        self.begun = {number: threading.Event() for number in range(10)}

    def __call__(self, number: int) -> str:
        self.read.append(number)
        self.threads.add(threading.get_ident())
        self.begun[number].set()
        if number == 4:
            raise TrainingError("a file is gone")
        return f"step {number}"


def test_the_next_step_is_read_before_it_is_asked_for_and_no_further() -> None:
    reader = Reader()
    ahead = ReadAhead(reader)
    assert ahead.take(1) == "step 1"
    assert reader.begun[2].wait(LONG), "while step 1 trains"
    assert ahead.call(lambda: "held out") == "held out"
    assert reader.read == [1, 2] and ahead.take(2) == "step 2"
    ahead.call(lambda: None)
    assert reader.read == [1, 2, 3] and reader.threads.isdisjoint({threading.get_ident()}) and len(reader.threads) == 1


def test_an_error_is_raised_by_the_step_that_it_belongs_to() -> None:
    reader = Reader()
    ahead = ReadAhead(reader)
    assert ahead.take(3) == "step 3" and reader.begun[4].wait(LONG)
    with pytest.raises(TrainingError, match="a file is gone"):
        ahead.take(4)
    assert ahead.take(5) == "step 5", "a step that runs again asks again"


def test_nothing_is_read_after_the_last_step_and_a_step_back_is_read_again() -> None:
    reader = Reader()
    ahead = ReadAhead(reader, last=3)
    assert [ahead.take(number) for number in (1, 2, 3)] == ["step 1", "step 2", "step 3"]
    ahead.call(lambda: None)
    assert reader.read == [1, 2, 3]
    assert ahead.take(1) == "step 1" and ahead.take(3) == "step 3"
    ahead.call(lambda: None)
    assert reader.read == [1, 2, 3, 1, 2, 3], "what was read ahead for another step is dropped"
