"""Several dispatchers and one ledger: no group is started twice, and none is left when its dispatcher dies."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import sqlalchemy as sa

from rollmill.errors import TrajectoryError
from rollmill.trajectories.claims import Claims
from rollmill.trajectories.ledger import Ledger, NewGroup
from rollmill.trajectories.staleness import Pace
from rollmill.trajectories.trajectory_store import TrajectoryStore
from rollmill.types import Grade
from tests.trajectories.build import start_group

PACE = Pace(1000, 1, 0)


def start(ledger: Ledger, index: int, holder: str | None) -> int | None:
    return start_group(ledger, f"g-{index}", "task", 1, pace=PACE, ids=[f"g-{index}-0"], holder=holder)


def numbered(index: int) -> NewGroup:
    return NewGroup(f"g-{index}", "task", [f"g-{index}-0"])


def test_many_dispatchers_never_want_the_same_group(engine: sa.Engine, ledger: Ledger) -> None:
    def work(holder: str) -> list[str]:
        own, won = Ledger(engine, "run"), []
        while (started := own.start_group(numbered, pace=Pace(30, 1, 0), holder=holder)) is not None:
            won.append(started[0].id)
        return won

    with ThreadPoolExecutor(3) as pool:
        won = list(pool.map(work, ("dispatcher", "dispatcher-2", "dispatcher-3")))
    assert sorted(id for mine in won for id in mine) == sorted(f"g-{index}" for index in range(30))
    assert ledger.groups_started() == ledger.open_groups() == ledger.counts()["admitted"] == 30


def test_a_group_is_taken_over_when_its_holder_has_no_lease(
    engine: sa.Engine, ledger: Ledger, store: TrajectoryStore
) -> None:
    first, second = Claims(engine, "run", "dispatcher"), Claims(engine, "run", "dispatcher-2", lease_s=-1.0)
    assert start(ledger, 9, None) == 0  # of a release without claims: whoever comes first takes it
    first.hold()
    assert first.take_over(own=True) == ["g-9"] and first.take_over() == []
    second.hold()  # its lease has expired at once
    assert start(ledger, 0, "dispatcher-2") == start(ledger, 1, "dispatcher-2") == 0
    store.finish("g-1-0", "p", None, tokens=1, sampled_tokens=1, segments=1)
    store.grade("g-1-0", Grade(1.0))
    ledger.group_ready("g-1")
    assert second.renew() and second.left_s() < 0, "it is late, and nobody has taken anything"
    assert second.plays("g-0") and not second.plays("g-1")
    assert first.take_over() == ["g-0"] and first.take_over() == []
    assert first.plays("g-0") and not second.plays("g-0")
    assert first.renew() and not second.renew() and second.take_over(own=True) == []
    second.hold()
    assert second.renew()

    again = Claims(engine, "run", "dispatcher")  # its process was started again
    again.hold()
    assert not first.renew() and again.renew()
    assert again.take_over() == [] and again.take_over(own=True) == ["g-9", "g-0"]
    # another run, or another stage, is another ledger
    other = Claims(engine, "other", "dispatcher")
    other.hold()
    assert other.take_over(own=True) == [] and again.renew()
    with pytest.raises(TrajectoryError, match="already exists"):  # a trajectory of this name, in no group of this name
        start_group(ledger, "new", "task", 1, pace=PACE, ids=["g-0-0"], holder="dispatcher")
