"""Placement over hosts."""

from __future__ import annotations

import contextlib
import random

import pytest

from rollmill.errors import NoCapacity
from rollmill.machines.host_choice import Place, Placement


def test_a_warm_host_is_preferred_until_it_is_much_fuller() -> None:
    warm, cold = Place("warm", 8), Place("cold", 8)
    placement = Placement([warm, cold])
    if placement.take("shop", 0.0) is cold:
        warm, cold = cold, warm
    placement.started(warm, 0.1)
    taken = [placement.take("shop", 0.0) for _ in range(6)]
    assert taken[:2] == [warm, warm] and cold in taken
    assert abs(warm.load - cold.load) <= 0.5
    least = min((warm, cold), key=lambda place: place.load)
    assert placement.take("other", 0.0) is least


def test_full_hosts_refuse_and_say_when_to_ask_again() -> None:
    place = Place("a", 3, starts=2)
    placement = Placement([place])
    for _ in range(2):
        assert placement.take("x", 0.0) is place
    with pytest.raises(NoCapacity, match="2 machines are being started") as error:
        placement.take("x", 0.0)
    assert error.value.retry_after_s > 0 and not placement.has_room(0.0)
    placement.started(place, 0.2)
    placement.started(place, 0.2)
    assert placement.take("x", 0.0) is place
    placement.failed(place, 0.0, host_is_down=False)
    assert placement.take("x", 0.0) is place
    placement.started(place, 0.2)
    with pytest.raises(NoCapacity, match="1 of 1 hosts are full"):
        placement.take("x", 0.0)
    placement.ended(place)
    assert placement.take("x", 0.0) is place


def test_a_host_that_failed_gets_nothing_until_its_pause_is_over() -> None:
    broken = Place("broken", 100)
    placement = Placement([broken])
    pauses, now = [], 0.0
    for _ in range(8):
        placement.take("x", now)
        placement.failed(broken, now, host_is_down=True)
        with pytest.raises(NoCapacity, match="none of 1 hosts answers") as error:
            placement.take("x", now)
        pauses.append(error.value.retry_after_s)
        now += error.value.retry_after_s
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60] and not broken.images
    broken.position, broken.failures = -1, 0
    both = Placement([broken, Place("good", 1)])
    broken.down_until = None
    both.lost(broken, now)
    assert both.take("x", now).name == "good"  # which is full, while the other one is down
    with pytest.raises(NoCapacity):
        both.take("x", now)
    assert both.take("x", now + 2.0) is broken


def test_no_host_holds_more_than_it_can_whatever_fails() -> None:
    draw, places = random.Random(4), [Place(str(number), 150, starts=8) for number in range(20)]
    placement, starting, running = Placement(places), [], 0
    for now in range(6000):
        with contextlib.suppress(NoCapacity):
            starting.append(placement.take(str(now % 3), float(now)))
        assert all(place.running + place.starting <= 150 and place.starting <= 8 for place in places)
        if len(starting) > 20:
            place = starting.pop(draw.randrange(len(starting)))
            if draw.random() < 0.02:
                placement.failed(place, float(now), host_is_down=False)
            else:
                placement.started(place, 0.1)
                running += 1
    assert running + len(starting) == 20 * 150 == sum(place.running + place.starting for place in places)
