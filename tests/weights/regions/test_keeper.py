"""A region keeps itself up to date: over HTTP, over S3, behind a cut link, with a faulty home store."""

import json
import threading
import time
from pathlib import Path

import pytest

from benchmarks.relay import Relay
from rollmill import telemetry
from rollmill.storage.object_server import object_app
from rollmill.storage.objects import Objects
from rollmill.types import Version
from rollmill.weights import Channels, LineFollower, Publisher, WeightStore
from rollmill.weights.regions import keeper as region_module
from rollmill.weights.regions.keeper import RegionKeeper
from tests.storage.serving import new_bucket, port_of, s3_options, s3_server, served
from tests.weights.build import delta_pack, history, publish_line, same


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(region_module, "_RETRY_SECONDS", (0.001, 0.001))
    monkeypatch.setattr(region_module, "_SUCCESSOR_SECONDS", 0.0)


def wait_until(condition, seconds: float = 20.0) -> None:  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def test_a_region_keeps_up_makes_anchors_and_collects(tmp_path: Path) -> None:
    versions = history(14)
    home, away = Objects.open(tmp_path / "home"), Objects.open(tmp_path / "away")
    publisher = Publisher(WeightStore(home), "rl", snapshot_every=100)
    keeper = RegionKeeper(home, away, "rl", anchor_every=4, keep=3, collect_seconds=0)
    assert keeper.step() == region_module.Round()
    anchored = []
    for number, tensors in enumerate(versions):
        publisher.publish(number, tensors)
        done = keeper.step()
        assert done.versions == (Version("rl", number),) and keeper.problem is None
        assert done.bytes > 0
        anchored.append(done.anchored)
        assert same(WeightStore(away).load(Version("rl", number)), tensors)
    assert [number for number in anchored if number is not None] == [4, 8, 12]
    assert WeightStore(away).numbers("rl")[0] >= 8  # the first snapshot and the versions after it were collected
    assert WeightStore(home).numbers("rl") == list(range(14))
    assert all(ok for _, ok, _ in WeightStore(away).verify("rl"))
    fresh = LineFollower(WeightStore(away), "rl").poll()  # an engine that starts now reads nothing from home
    assert fresh is not None and same(fresh.tensors, versions[13])


def test_over_http_from_one_s3_to_the_events_a_dashboard_shows(tmp_path: Path) -> None:
    """The home store is a bucket served over HTTP; the region's store is another bucket."""
    home = Objects.open(new_bucket(), options=s3_options(s3_server()))
    away = Objects.open(new_bucket(), options=s3_options(s3_server()))
    versions = history(3)
    publisher = Publisher(WeightStore(home), "rl")
    telemetry.open_events(tmp_path / "events", "keeper")
    try:
        with served(object_app(home)) as url:
            keeper = RegionKeeper(Objects.open(url), away, "rl", region="far")
            for number, tensors in enumerate(versions):
                publisher.publish(number, tensors)
                assert keeper.step().versions == (Version("rl", number),)
    finally:
        telemetry._file = None
    assert same(WeightStore(away).load(Version("rl", 2)), versions[2])
    arrived = [event for event in telemetry.read_events(tmp_path / "events") if event["kind"] == "arrive"]
    assert [(event["region"], event["line"], event["version"]) for event in arrived] == [
        ("far", "rl", number) for number in range(3)
    ]
    packs = [away.head(key) or 0 for key in away.list("weights/rl/bf16/packs")]
    assert sum(event["bytes"] for event in arrived) == sum(packs) > 0
    assert all(0 <= event["seconds"] <= event["since_publish_seconds"] for event in arrived)


def test_a_running_keeper_gets_what_is_published_and_stops_when_told(tmp_path: Path) -> None:
    versions = history(4)
    home, away = Objects.open(tmp_path / "home"), Objects.open(tmp_path / "away")
    publisher = Publisher(WeightStore(home), "rl")
    stop = threading.Event()
    with served(object_app(home)) as url:
        keeper = RegionKeeper(Objects.open(url), away, "rl", channels=["live"])
        thread = threading.Thread(target=keeper.run, args=(stop,))
        thread.start()
        try:
            for number, tensors in enumerate(versions):
                publisher.publish(number, tensors)
                wait_until(lambda number=number: WeightStore(away).head("rl") == number)
            Channels(home).move("live", Version("rl", 2))
            wait_until(lambda: Channels(away).get("live") == Version("rl", 2))
        finally:
            stop.set()
            thread.join(20)
        assert not thread.is_alive() and keeper.problem is None
    assert same(WeightStore(away).load(Version("rl", 3)), versions[3])


def test_a_link_that_was_cut_for_fifty_versions(tmp_path: Path) -> None:
    """The keeper reports it, and is soon up to date after the link is back."""
    versions = history(52)
    home, away = Objects.open(tmp_path / "home"), Objects.open(tmp_path / "away")
    publisher = Publisher(WeightStore(home), "rl", snapshot_every=1000)
    publisher.publish(0, versions[0])
    publisher.publish(1, versions[1])
    with served(object_app(home)) as url, Relay(("127.0.0.1", port_of(url)), mbit=1000, rtt_ms=10) as relay:
        source = Objects.open(f"http://127.0.0.1:{relay.port}", patience=0.6)
        keeper = RegionKeeper(source, away, "rl", channels=["live"], anchor_every=10)
        assert keeper.step().versions == (Version("rl", 0), Version("rl", 1))
        relay.cut()
        for number in range(2, 52):
            publisher.publish(number, versions[number])
        for _ in range(2):
            assert keeper.step().versions == ()
            assert keeper.problem and "cannot be copied from" in keeper.problem
            time.sleep(0.002)
        relay.restore()
        wait_until(lambda: keeper.step().versions and keeper.problem is None)
        assert WeightStore(away).head("rl") == 51
        assert keeper.step().versions == () and keeper.problem is None
    assert same(WeightStore(away).load(Version("rl", 51)), versions[51])
    assert WeightStore(away).anchors("rl") == [50]


def test_the_line_that_takes_over_is_followed(tmp_path: Path) -> None:
    versions = history(4)
    home, away = Objects.open(tmp_path / "home"), Objects.open(tmp_path / "away")
    first = Publisher(WeightStore(home), "rl")
    first.publish(0, versions[0])
    first.publish(1, versions[1])
    keeper = RegionKeeper(home, away, "rl", anchor_every=1, keep=5, collect_seconds=0)
    keeper.step()
    second = Publisher(WeightStore(home), "rl.2")
    second.publish(1, versions[2], parent=Version("rl", 0))
    second.publish(2, versions[3])
    keeper.step()
    keeper.step()
    assert keeper.line == "rl.2" and keeper.problem is None
    assert WeightStore(away).head("rl.2") == 2
    assert same(WeightStore(away).load(Version("rl.2", 2)), versions[3])
    assert WeightStore(away).head("rl") == 1  # the head of the old line stays

    late = RegionKeeper(home, Objects.open(tmp_path / "late"), "rl")
    late.step()
    assert late.mirror.target.lines() == ["rl.2"]  # the abandoned line was never requested


def test_a_damaged_or_empty_home_is_reported_as_a_problem(tmp_path: Path) -> None:
    home, away = tmp_path / "home", Objects.open(tmp_path / "away")
    keeper = RegionKeeper(Objects.open(home), away, "rl", channels=["live"], anchor_every=1)
    keeper.step()
    assert keeper.problem is None
    versions = publish_line(home, 3)
    pack = delta_pack(home, 2)
    whole = pack.read_bytes()
    pack.write_bytes(whole[:-1])
    (home / "channels" / "live").mkdir(parents=True)
    (home / "channels" / "live" / "0000000001.json").write_text(json.dumps({"line": 7}))
    for _ in range(2):
        keeper.step()
        assert keeper.problem and "rl@2" in keeper.problem and "channel live" in keeper.problem
        assert WeightStore(away).numbers("rl") == [0, 1]
        time.sleep(0.002)
    pack.write_bytes(whole)
    (home / "channels" / "live" / "0000000001.json").unlink()
    keeper.step()
    assert keeper.problem is None
    assert same(WeightStore(away).load(Version("rl", 2)), versions[2])


def test_local_failures_do_not_stop_copies(tmp_path: Path) -> None:
    """A pack of this region is lost and is fetched again for the next anchor. Until that works, it is reported as a
    separate problem."""
    versions = history(5)
    home, away = Objects.open(tmp_path / "home"), Objects.open(tmp_path / "away")
    publisher = Publisher(WeightStore(home), "rl")
    keeper = RegionKeeper(home, away, "rl", anchor_every=3)
    for number, tensors in enumerate(versions[:3]):
        publisher.publish(number, tensors)
        keeper.step()
    delta_pack(tmp_path / "away", 1).unlink()
    pack = delta_pack(tmp_path / "home", 1)
    whole = pack.read_bytes()
    pack.unlink()
    publisher.publish(3, versions[3])
    done = keeper.step()
    assert done.versions == (Version("rl", 3),) and done.anchored is None
    assert keeper.problem and "no anchor can be made" in keeper.problem
    pack.write_bytes(whole)
    time.sleep(0.002)
    assert keeper.step().anchored == 3 and keeper.problem is None
    assert delta_pack(tmp_path / "away", 1).read_bytes() == whole


def test_a_budget_holds_or_is_reported_as_missed(tmp_path: Path) -> None:
    home, away = Objects.open(tmp_path / "home"), Objects.open(tmp_path / "away")
    publish_line(tmp_path / "home", 13, snapshot_every=100)
    whole = sum(home.head(key) or 0 for key in home.list())
    keeper = RegionKeeper(home, away, "rl", anchor_every=4, keep=50, budget=whole, collect_seconds=0)
    for _ in range(3):
        keeper.step()
    assert keeper.problem is None
    assert sum(away.head(key) or 0 for key in away.list("weights")) <= whole
    assert WeightStore(away).numbers("rl")[-1] == 12
    keeper = RegionKeeper(home, away, "rl", anchor_every=4, keep=50, budget=1, collect_seconds=0)
    keeper.step()
    assert keeper.problem is not None and "a budget of 1" in keeper.problem and "rl@12" in keeper.problem
    assert all(ok for _, ok, _ in WeightStore(away).verify("rl"))
