"""A reward sees the state in which the agent left its machine; the hidden tests still run on a clean one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from rollmill.environments.episode import Episode
from rollmill.environments.reward import Reward
from rollmill.environments.rewards.weighted import WeightedRewards
from rollmill.errors import RewardError
from rollmill.machines.machine import Capabilities, Machine, MachineHost, Snapshot
from rollmill.rollouts import hand_in
from rollmill.rollouts.hand_in import load_hand_in
from rollmill.rollouts.rollout_context import RolloutContext
from rollmill.types import Grade
from tests.machines.stand_ins import StandInHost
from tests.rollouts.world import RUN, World, make_task, regrade

pytestmark = pytest.mark.asyncio(loop_scope="module")
NOTES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("write", {"path": "notes.txt", "content": "main.py was wrong\n"}),  # is not handed in
    ("write", {"path": "main.py", "content": "def f(x):\n    return x + 7\n"}),
    ("done", {}),
)


@dataclass
class Diary(Reward):
    """1 if the agent left notes. They are not handed in."""

    name = "diary"
    wants_final_state = True
    seen: list[Episode] = field(default_factory=list)

    async def grade(self, episode: Episode) -> Grade:
        self.seen.append(episode)
        if episode.state_refused is not None:
            return Grade(0.0, evidence={"why": episode.state_refused})
        machine = await episode.open_final_state()
        try:
            notes = await machine.read("notes.txt")
        except FileNotFoundError:
            return Grade(0.0)
        finally:
            await machine.close()
        return Grade(float(b"wrong" in notes), evidence={"notes": notes.decode("utf-8", "replace")})


class Clean(Reward):
    """What a machine for grading has beside the hand-in."""

    name = "clean"

    async def grade(self, episode: Episode) -> Grade:
        machine = await episode.machines.create(episode.task.image, episode.task.files)
        try:
            listed = await machine.exec(["ls"])
        finally:
            await machine.close()
        return Grade(float(b"notes" not in listed.output))


@dataclass
class Counting(StandInHost):
    """The real host. Counts what is saved and released; `snapshot` may change what its machines say they can."""

    host: MachineHost
    snapshot: Any = None  # replaces that of its machines
    saved: list[Snapshot] = field(default_factory=list)
    released: list[Snapshot] = field(default_factory=list)

    async def create(
        self, image: str, files: Mapping[str, bytes] | None = None, *, snapshot: Snapshot | None = None
    ) -> Machine:
        machine: Any = await self.host.create(image, files, snapshot=snapshot)
        save = self.snapshot or machine.snapshot

        async def counted() -> Snapshot:
            made: Snapshot = await save()
            self.saved.append(made)
            return made

        machine.snapshot = counted
        found: Machine = machine
        return found

    async def export(self, snapshot: Snapshot) -> Snapshot | None:
        return await self.host.export(snapshot)

    async def release(self, snapshot: Snapshot) -> None:
        self.released.append(snapshot)
        raise RuntimeError("a host of the user that fails breaks no episode")

    async def close(self) -> None: ...


def with_rewards(world: World, host: Counting, *graders: Any) -> RolloutContext:
    grader = WeightedRewards([(1.0, each) for each in (world.context.grader, *graders)])
    return replace(world.context, machines=host, grading_machines=host, grader=grader)


async def test_a_reward_looks_at_a_file_that_was_not_handed_in(world: World) -> None:
    world.says(*NOTES)
    host, diary = Counting(world.context.machines), Diary()
    outcome = await world.play(context=with_rewards(world, host, diary, Clean()))
    assert outcome.reward is not None and outcome.reward.parts == {
        "solved": 1.0,
        "calls": 1.0,
        "diary": 1.0,
        "clean": 1.0,
        **{name: part for name, part in outcome.reward.parts.items() if name.startswith("calls.")},
    }
    assert outcome.reward.evidence["diary"] == {"notes": "main.py was wrong\n"}
    assert len(host.saved) == 1 and host.released == host.saved
    key = world.row().submission_key
    assert key is not None
    facts: dict[str, Any] = {"run": RUN, "group_id": "g"}
    again = await regrade(with_rewards(world, host, diary), make_task(), "t0", key, facts=facts)
    assert again.reward is not None and again.reward.parts["diary"] == 1.0, "a later process has the state"


async def test_a_large_state_is_not_kept(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hand_in, "_MOST_STATE", 10)
    world.says(*NOTES)
    context = with_rewards(world, Counting(world.context.machines), Diary())
    outcome = await world.play(context=context)
    assert outcome.reward is not None and outcome.reward.parts["diary"] == 1.0
    key = world.row().submission_key
    assert key is not None and load_hand_in(world.context.objects, key).final_state is None
    later = await regrade(context, make_task(), "t0", key, facts={"run": RUN, "group_id": "g"})
    assert later.reward is None and "the final state of the machine is not there" in str(later.reason), "and no zero"
    assert "play the task again" in str(later.reason)


async def test_no_state_is_saved_if_no_reward_wants_it(world: World) -> None:
    host = Counting(world.context.machines)
    outcome = await world.play(context=with_rewards(world, host, Clean()))
    assert outcome.solved and host.saved == host.released == []


async def test_machines_that_cannot_save_their_state(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    host, diary = Counting(world.context.machines), Diary()
    machine = await host.create(make_task().image)
    await machine.close()
    monkeypatch.setattr(type(machine), "capabilities", Capabilities(kernel="shared", snapshot="none"))
    outcome = await world.play(context=with_rewards(world, host, diary))
    assert host.saved == [] and diary.seen[0].final_state is None and outcome.reward is None
    with pytest.raises(RewardError, match="the machines cannot save it"):
        await diary.seen[0].open_final_state()


async def test_a_state_that_does_not_fit_is_the_agents_doing(world: World) -> None:
    async def too_large() -> Snapshot:
        raise OSError(27, "File too large")

    host, diary = Counting(world.context.machines, snapshot=too_large), Diary()
    outcome = await world.play(context=with_rewards(world, host, diary))
    assert outcome.reward is not None and outcome.reward.parts["diary"] == 0.0
    assert "File too large" in outcome.reward.evidence["diary"]["why"] and host.released == []
