import itertools
import json
import random
from typing import Any

import pytest

from rollmill.weights.regions.arrivals import Arrivals

Event = dict[str, Any]


def publish(version: int, at: float, **more: Any) -> Event:
    facts = {"encoding": "delta", "bytes": 100, "delta_bytes": 100, "full_bytes": 5000, "density": 0.01}
    return {
        "kind": "publish",
        "at": at,
        "line": "main",
        "version": version,
        "step": version,
        **facts,
        "seconds": 0.5,
        **more,
    }


def arrive(version: int, at: float, region: str, **more: Any) -> Event:
    return {"kind": "arrive", "at": at, "line": "main", "version": version, "region": region, "bytes": 90, **more}


def apply(version: int, at: float, engine: str, region: str, **more: Any) -> Event:
    place = {"engine": engine, "region": region, "bytes": 40, "pause_seconds": 0.002}
    return {"kind": "apply", "at": at, "line": "main", "version": version, **place, **more}


EVENTS = [
    publish(1, 1000.0, digest="ab" * 32),
    arrive(1, 1001.5, "away"),
    apply(1, 1000.25, "e0", "home", pause_seconds=0.004),
    apply(1, 1000.75, "e1", "home"),
    apply(1, 1002.0, "e2", "away"),
    apply(1, 1060.0, "e0", "home", pause_seconds=0.2),  # restarted a minute later
    publish(2, 1010.0, encoding="snapshot", bytes=4000),
    {"kind": "busy", "at": 1000.0, "what": "publish"},
]


def test_one_row_per_version() -> None:
    rows = Arrivals().fold(EVENTS)
    assert [row["version"] for row in rows] == [1, 2]
    first = rows[0]
    assert first.pop("regions") == {
        "away": {
            "arrived_seconds": 1.5,
            "serving_seconds": 2.0,
            "all_serving_seconds": 2.0,
            "engines": 1,
            "pause_ms_max": 2.0,
            "bytes": 90,
            "skewed": False,
        },
        "home": {
            "arrived_seconds": None,
            "serving_seconds": 0.25,
            "all_serving_seconds": 0.75,
            "engines": 2,
            "pause_ms_max": 200.0,
            "bytes": 80,
            "skewed": False,
        },
    }
    assert first == {
        "line": "main",
        "version": 1,
        "step": 1,
        "digest": "ab" * 32,
        "encoding": "delta",
        "bytes": 100,
        "delta_bytes": 100,
        "full_bytes": 5000,
        "ratio": 50.0,
        "density": 0.01,
        "published_at": 1000.0,
        "publish_seconds": 0.5,
    }
    # if a snapshot has a delta beside it, an engine that is up to date downloads only the delta
    assert rows[1]["bytes"] == 4000 and rows[1]["ratio"] == 50.0 and rows[1]["regions"] == {}
    json.dumps(rows, allow_nan=False)


def test_order_and_repetition_do_not_matter() -> None:
    expected = Arrivals().fold(EVENTS)
    for seed in range(200):
        shuffled = random.Random(seed)
        events = EVENTS + shuffled.choices(EVENTS, k=4)
        shuffled.shuffle(events)
        arrivals = Arrivals()
        cut = shuffled.randrange(len(events))
        arrivals.fold(events[:cut])
        arrivals.fold(events[cut:])
        assert arrivals.rows() == expected


def test_a_row_is_returned_again_only_when_it_changes() -> None:
    arrivals = Arrivals()
    told = [(row["version"], sorted(row["regions"])) for event in EVENTS for row in arrivals.fold([event])]
    assert told == [(1, []), (1, ["away"]), *[(1, ["away", "home"])] * 4, (2, [])]
    assert [row for event in EVENTS for row in arrivals.fold([event])] == []


def test_clocks_that_run_behind_are_marked() -> None:
    rows = Arrivals().fold([publish(1, 1000.0), apply(1, 997.0, "e0", "away"), apply(1, 1004.0, "e1", "away")])
    away = rows[0]["regions"]["away"]
    assert (away["serving_seconds"], away["all_serving_seconds"], away["skewed"]) == (0.0, 4.0, True)
    told = Arrivals().fold([publish(1, 1000.0), arrive(1, 1500.0, "away", since_publish_seconds=-0.25)])
    assert told[0]["regions"]["away"]["arrived_seconds"] == 0.0 and told[0]["regions"]["away"]["skewed"]


def test_missing_figures_are_null() -> None:
    """The trainer died between the commit and its event: the engines' figures are still used."""
    (row,) = Arrivals().fold([apply(3, 2000.0, "e0", "home", since_publish_seconds=1.5, digest="cd" * 32)])
    assert row["bytes"] is None and row["ratio"] is None and row["step"] is None
    assert row["published_at"] == 1998.5 and row["digest"] == "cd" * 32
    assert row["regions"]["home"]["serving_seconds"] == 1.5
    (row,) = Arrivals().fold([apply(3, 2000.0, "e0", "home")])
    assert row["published_at"] is None and row["regions"]["home"]["serving_seconds"] is None
    assert row["regions"]["home"]["engines"] == 1


@pytest.mark.parametrize(
    "broken",
    [
        {"kind": "publish", "at": 1.0, "line": None, "version": 1},
        {"kind": "publish", "at": 1.0, "line": "main", "version": "1"},
        {"kind": "apply", "at": 1.0, "line": "main", "version": True},
        {"kind": "apply", "at": float("inf"), "line": "main", "version": 1},
    ],
)
def test_events_that_name_no_version_or_time_are_left_out(broken: Event) -> None:
    assert Arrivals().fold([broken]) == []


def test_values_that_are_not_numbers_are_null() -> None:
    (row,) = Arrivals().fold([publish(1, 1000.0, bytes="many", delta_bytes=None, density=float("nan"), step=True)])
    assert row["bytes"] is None and row["ratio"] is None and row["density"] is None and row["step"] is None
    (row,) = Arrivals().fold([publish(1, 1000.0, bytes=10**400, full_bytes=float("inf"), step=-(10**400))])
    assert row["bytes"] is None and row["full_bytes"] is None and row["step"] is None
    assert Arrivals().fold([publish(1, 10**400)]) == []


def test_lines_keep_together_and_memory_is_bounded() -> None:
    base = [publish(number, 10.0 + number, line="base") for number in range(3)]
    later = [publish(number, 5000.0 - number) for number in range(8)]  # a clock that was set back
    arrivals = Arrivals(keep=6)
    for event in itertools.chain(later, base):
        arrivals.fold([event])
    assert [(row["line"], row["version"]) for row in arrivals.rows()][-3:] == [("main", 5), ("main", 6), ("main", 7)]
    assert len(arrivals.rows()) == 6
