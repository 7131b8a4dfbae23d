"""Placement over hosts, and the simulation of bursts that runs on it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from rollmill.environments.burst import Burst, MeasuredStarts, Simulation
from rollmill.errors import NoCapacity
from rollmill.machines.host_choice import Place, Placement
from tests.cli.conftest import Told, rollmill  # noqa: F401

MEASURED = MeasuredStarts(cores=2, first_s=[0.5], start_s={1: [0.01, 0.02], 4: [0.04], 8: [0.1]})


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


@pytest.mark.parametrize("lost", [0, 3])
def test_a_simulated_burst_ends_with_every_machine_running(lost: int) -> None:
    burst = Burst(machines=2000, hosts=20, cores=4, capacity=150, images=3, failing=0.02, lost_hosts=lost, seed=4)
    simulation = Simulation(burst, MEASURED)
    found = simulation.run()
    assert found.running == 2000 and found.failed > 0 and (found.lost > 0) == bool(lost)
    assert found.starts >= 2000 and sum(found.by_second) == found.starts and 0 < found.utilisation <= 1
    assert 3 <= found.templates <= 20 * 3
    running = [len(host.running) for host in simulation._hosts.values()]
    assert sum(running) == 2000 and max(running) <= 150 and running.count(0) <= lost
    again = Simulation(burst, MEASURED).run()
    assert (again.seconds, again.waits) == (found.seconds, found.waits)  # the same seed, the same burst


def test_the_command_labels_what_is_simulated(rollmill: Callable[..., Told], tmp_path: Path) -> None:  # noqa: F811
    recording = {"what": "a test", "host": {}, "kinds": {"namespace": MEASURED.model_dump(mode="json")}}
    (tmp_path / "starts.json").write_text(json.dumps(recording))
    arguments = ("simulate", "burst", "--machines", 500, "--latencies", tmp_path / "starts.json")
    told = rollmill(*arguments, "--hosts", 10, "--lost-hosts", 1)
    assert told.code == 0 and told.out.startswith("SIMULATION: 500 namespace machines"), told
    assert "all running after" in told.out and "Composer 2 reports 500 starts/s" in told.out
    told = rollmill(*arguments, "--hosts", 2, "--lost-hosts", 1)
    assert told.code == 1 and "cannot hold 500 machines" in told.err
    told = rollmill(*arguments, "--kind", "qemu")
    assert told.code == 1 and "it has: namespace" in told.err
    told = rollmill("simulate", "burst", "--latencies", tmp_path / "none.json")
    assert told.code == 1 and "benchmarks.record_machine_starts" in told.err and "Traceback" not in told.err
