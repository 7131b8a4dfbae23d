"""A stored hand-in is graded as it was handed in, or not at all."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmill.errors import TrajectoryError
from rollmill.rollouts.hand_in import HandIn, load_hand_in, store_hand_in
from rollmill.storage.objects import Objects

HANDED_IN = HandIn(files={"main.py": b"return 7", "notes.txt": b"x" * 40}, deleted=["old.py"], seconds=2.0)


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> Objects:
    return Objects.open(tmp_path_factory.mktemp("store"))


def test_a_hand_in_is_read_back(objects: Objects) -> None:
    key = store_hand_in(objects, "t1", HANDED_IN)
    assert load_hand_in(objects, key) == HANDED_IN
    store_hand_in(objects, "t1", HandIn(files={"main.py": b"return 8"}))  # after a crash
    assert load_hand_in(objects, key) == HANDED_IN, "the first one counts"


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_one_flipped_bit_is_noticed(objects: Objects, data: st.DataObject) -> None:
    """Most bits are in the files. A changed file would be graded as the agent's, and trained on."""
    stored = bytearray(objects.get(store_hand_in(objects, "t2", HANDED_IN)))
    stored[data.draw(st.integers(0, len(stored) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    objects.put("damaged", bytes(stored))
    with pytest.raises(TrajectoryError, match="submission damaged is damaged"):
        load_hand_in(objects, "damaged")


def test_a_shortened_one_too(objects: Objects) -> None:
    stored = objects.get(store_hand_in(objects, "t3", HANDED_IN))
    for length in (0, 10, 65, len(stored) - 1):
        objects.put("short", stored[:length])
        with pytest.raises(TrajectoryError, match="damaged"):
            load_hand_in(objects, "short")
