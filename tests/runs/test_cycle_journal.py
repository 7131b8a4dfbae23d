"""The states of a cycle: in the database, moved by one process, never lost."""

from __future__ import annotations

import pytest

from rollmill.errors import RollmillError
from rollmill.gateway.routing.traffic_splits import STALE_S, Renewals, SplitStore
from rollmill.runs.cycle_journal import FINAL, TRANSITIONS, Journal
from rollmill.storage.database import open_database


def test_a_cycle_goes_from_state_to_state_with_reasons(database_url: str) -> None:
    journal = Journal(open_database(database_url), "r")
    assert journal.current() is None and journal.history() == []
    cycle = journal.begin({"since": 1.5}, "waiting")
    assert journal.begin({"since": 9.0}, "again") == journal.current() == cycle, "a cycle that is not over goes on"
    moved = journal.move(cycle, "distilling", "enough", live="rl@3")
    assert moved.facts == {"since": 1.5, "live": "rl@3"} and journal.current() == moved
    with pytest.raises(RollmillError, match="cycle 1 is no longer collecting"):
        journal.move(cycle, "distilling", "another process")
    held = journal.move(moved, "held", "nothing to train on")
    assert held.is_over and [move.state for move in journal.history(1)] == ["collecting", "distilling", "held"]
    assert journal.begin({}, "next").number == 2
    assert journal.get(1) == held and journal.get(3) is None
    assert Journal(open_database(database_url), "other").current() is None


def test_every_state_leads_to_an_end() -> None:
    def ends(state: str) -> set[str]:
        return {state} if state in FINAL else set().union(*(ends(each) for each in TRANSITIONS[state]))

    assert {state for targets in TRANSITIONS.values() for state in targets} | {"collecting"} == TRANSITIONS.keys()
    assert ends("collecting") == set(FINAL)


def test_the_split_of_production_can_change(database_url: str) -> None:
    splits = SplitStore(open_database(database_url), "r")
    assert splits.get() == {}
    splits.put("rollmill", {"live": 0.9, "candidate": 0.1})
    splits.put("rollmill", {"live": 1.0})
    splits.put("other", {"a": 1.0})
    assert splits.get() == {"rollmill": {"live": 1.0}, "other": {"a": 1.0}}
    assert SplitStore(open_database(database_url), "another").get() == {}


def test_a_split_that_nobody_renews_ends(database_url: str) -> None:
    """The driver of a canary may be killed, and its clock may be wrong."""
    splits, renewals = SplitStore(open_database(database_url), "r"), Renewals()
    canary, main = {"rollmill": {"live": 0.5, "candidate": 0.5}}, {"rollmill": {"live": 1.0}}
    splits.put("rollmill", canary["rollmill"])
    assert renewals.current(splits.written(), 7.0) == canary
    assert renewals.current(splits.written(), 6.0 + STALE_S) == canary
    assert renewals.current(splits.written(), 7.0 + STALE_S) == main
    splits.put("rollmill", canary["rollmill"])
    assert renewals.current(splits.written(), 8.0 + STALE_S) == canary, "the driver is back"
    assert renewals.current(splits.written(), 8.0 + 2 * STALE_S) == main
