"""Admission of groups that exist already, of other runs or of production, to the ledger of a run.

A group's deadline follows from its oldest sampled token: that version + max_staleness + 1. The rules, in this order:

    in the ledger already                                        refused: a run decides once about a trajectory
    no step is left                                              refused
    the deadline has passed                                      recorded as `stale`
    as many groups are open as the staleness bound allows        no room now
    the steps up to its deadline are full, or those of another   no room: somebody would get too old
    else                                                         admitted, and ready for the next step

The rule for open groups is that of groups that the dispatcher starts (staleness.py). That one gives each group the
latest deadline of all, so counting is enough. An admitted group may be due at once, so for every deadline d the groups
due by d must fit into the steps up to d. With that, training/rl/deadlines.py can keep every deadline. A step that has
chosen its groups and not written them yet chooses again (`Ledger.write_step`): the new group may be due in it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from rollmill.trajectories.payload import seal_facts
from rollmill.trajectories.staleness import Pace
from rollmill.trajectories.storable import to_object
from rollmill.trajectories.table_rows import TrajectoryRow
from rollmill.types import Grade, PolicyRef, Trajectory, TrajectoryState, Version

Decision = Literal["admitted", "stale", "no_room", "refused"]
Names = Callable[[PolicyRef], Version | None]  # what the admitting run calls these weights; None: unrelated ones


@dataclass(frozen=True)
class Member:
    """A graded trajectory. `row` and `reward` are stored too, unless the run's database has them."""

    id: str
    row: Mapping[str, Any]
    reward: Grade


@dataclass(frozen=True)
class Experience:
    """A group of graded trajectories that exist already."""

    group_id: str
    task_id: str
    origin: str  # the key of the run that it is from
    members: Sequence[Member]
    oldest: int  # the number that the version of its oldest sampled token counts as on the line of the stage

    @property
    def ids(self) -> list[str]:
        return [member.id for member in self.members]


@dataclass(frozen=True)
class Verdict:
    group_id: str
    ids: Sequence[str]
    decision: Decision
    reason: str = ""


@dataclass(frozen=True)
class Room:
    """What a ledger says at one moment, while its run is locked."""

    pace: Pace
    committed: int  # the newest committed step
    written: int  # the newest step that has its groups
    open: int  # groups that are not final
    untaken: Mapping[int, int]  # deadline → how many groups with it no step has taken

    def judge(self, group: Experience) -> tuple[Decision, str]:
        deadline, first = self.pace.deadline(group.oldest), self.written + 1
        if self.pace.is_last(self.written):
            return "refused", f"the stage has no step after {self.written}"
        if deadline < first:
            return "stale", (
                f"its oldest token is of version {group.oldest}, so step {deadline} was the last that could train on "
                f"it; the next one is {first}"
            )
        if self.open >= self.pace.most_open(self.committed):
            return "no_room", f"{self.open} groups are open, as many as the staleness bound allows; try again later"
        if not self._fits(deadline):
            return "no_room", f"the steps up to {deadline}, its deadline, are taken by groups that are as urgent"
        return "admitted", f"by step {deadline}"

    def _fits(self, deadline: int) -> bool:
        due = sorted({*self.untaken, deadline})  # few: nobody is older than the staleness bound
        counts = itertools.accumulate(self.untaken.get(each, 0) + (each == deadline) for each in due)
        size = self.pace.groups_per_step
        return all(
            count <= size * (each - self.written) for each, count in zip(due, counts, strict=True) if each >= deadline
        )

    def with_group(self, group: Experience) -> Room:
        deadline = self.pace.deadline(group.oldest)
        untaken = {**self.untaken, deadline: self.untaken.get(deadline, 0) + 1}
        return replace(self, open=self.open + 1, untaken=untaken)


def oldest_position(trajectory: Trajectory, position: Callable[[PolicyRef], int | None]) -> int | str:
    """The number that its oldest sampled token counts as, or why there is none."""
    positions = []
    for policy in _sampling_policies(trajectory):
        found = position(policy)
        if found is None:
            version = Version(policy.line, policy.number)
            return f"{version} sampled a part of it, which is no ancestor of this stage: its staleness has no bound"
        positions.append(found)
    return min(positions) if positions else "no token of it was sampled"


def renamed(trajectory: Trajectory, names: Names) -> Trajectory:
    """The trajectory with the weights that sampled it named as the admitting run names them. Digests stay."""

    def rename(policy: PolicyRef) -> PolicyRef:
        version = names(policy)
        return policy if version is None else replace(policy, line=version.line, number=version.number)

    segments = [
        replace(segment, policies=[rename(each) for each in segment.policies]) for segment in trajectory.segments
    ]
    return replace(trajectory, segments=segments)


def copied_row(row: TrajectoryRow, trajectory: Trajectory) -> dict[str, Any]:
    """The row for another database. It is graded there in the same transaction; the hand-in stays where it is."""
    own = ("id", "run", "group_id", "task_id", "traffic", "split", "family", "payload_key", "created_at", "finished_at")
    return {
        **{name: getattr(row, name) for name in own},
        **seal_facts(trajectory),
        "state": TrajectoryState.finished.value,
        "provenance": to_object("provenance", row.provenance),
    }


def _sampling_policies(trajectory: Trajectory) -> set[PolicyRef]:
    return {
        segment.policies[index]
        for segment in trajectory.segments
        for index in set(segment.policy[segment.sampled].tolist())
    }
