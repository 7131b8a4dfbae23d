"""The link between two regions is cut for fifty versions, then restored."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.relay import Relay
from tests.faults.roles import FULL_BYTES, LINE
from tests.faults.world import World, manifest_of, open_weights

CUT_AT, BACK_AT = 2, 52


@pytest.fixture
def relay(world: World) -> Iterator[Relay]:
    _, port = world.server()
    with Relay(("127.0.0.1", port), mbit=1000, rtt_ms=4) as relay:
        yield relay
        world.close()  # so that nobody is connected when the relay stops


@pytest.mark.parametrize("drop", [False, True], ids=["silent", "refused"])
def test_a_link_that_is_cut_for_fifty_versions(world: World, relay: Relay, drop: bool) -> None:
    """One region has a keeper and two engines. Another has an engine that copies by itself."""
    far = f"http://127.0.0.1:{relay.port}"
    trainer = world.trainer(snapshot_every=20)
    keeper = world.keeper(far, anchor_every=10)
    engines = [world.follower(f"engine-{n}", world.folder / "away") for n in range(2)]
    alone = world.follower("engine-alone", world.folder / "island", region="island", source=far)
    world.publish_to(CUT_AT)
    world.converge(CUT_AT)

    relay.cut(drop)
    world.publish_to(BACK_AT)
    world.until(lambda: trainer.number == BACK_AT)  # a region that is cut off does not delay the trainer
    world.until_problem(keeper, "the other region cannot be copied from", far)
    problem = world.until_problem(alone, "the other region cannot be copied from", far)
    assert "hint: " in problem
    assert [engine.number for engine in (*engines, alone)] == [CUT_AT] * 3
    updates, told, before = alone.last["updates"], len(keeper.reports), relay.carried[1]

    relay.restore()
    world.converge(BACK_AT)
    world.check()
    assert alone.last["updates"] == updates + 1, "one update, and one pause, for all of them"
    world.until(lambda: keeper.problem is None)
    rounds = [report["copied"] for report in keeper.reports[told:] if report["copied"]]
    assert rounds == [list(range(CUT_AT + 1, BACK_AT + 1))], "one round for all of them"
    # The trainer made snapshots at 20 and 40. The deltas are cheaper, and the region makes its own.
    snapshots = {manifest_of(world.home, number).encoding("snapshot").packs[0].digest for number in (20, 40)}
    for region in ("away", "island"):
        packs = open_weights(world.folder / region).objects.list(f"weights/{LINE}/bf16/packs")
        assert not any(key.endswith(digest) for key in packs for digest in snapshots)
    deltas = sum(manifest_of(world.home, number).encoding("delta").bytes for number in range(CUT_AT + 1, BACK_AT + 1))
    manifests = sum(
        open_weights(world.home).objects.head(f"weights/{LINE}/bf16/manifests/{number:010d}.manifest") or 0
        for number in range(CUT_AT + 1, BACK_AT + 1)
    )
    carried = relay.carried[1] - before
    assert 2 * (deltas + manifests) < carried < 2 * (deltas + manifests) + FULL_BYTES // 2
    world.until(lambda: open_weights(world.folder / "away").anchors(LINE) == [50])


def test_a_link_that_is_cut_repeatedly(world: World, relay: Relay) -> None:
    """Whatever is interrupted is continued later."""
    far = f"http://127.0.0.1:{relay.port}"
    world.trainer(snapshot_every=10)
    world.keeper(far)
    engine = world.follower("engine", world.folder / "away")
    alone = world.follower("engine-alone", world.folder / "island", region="island", source=far)
    for last in range(3, 31, 3):
        world.publish_to(last)
        world.until(lambda last=last: (engine.number or 0) >= last - 2 or (alone.number or 0) >= last - 2)
        relay.cut(drop=last % 2 == 0)
        world.publish_to(last + 1)
        relay.restore()
    world.converge(31)
    world.check()
