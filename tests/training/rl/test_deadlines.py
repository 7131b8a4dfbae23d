"""Promise 4: no group is trained on after its deadline, and nothing waits for ever.

Runs are simulated: groups are admitted by the rule of promise 4 and take some ticks; a step takes one tick.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hypothesis import example, given, settings
from hypothesis import strategies as st

from rollmill.training.rl.deadlines import Candidate, Choice, choose_groups
from rollmill.trajectories.staleness import Pace

Rule = Callable[[Sequence[Candidate], int, int], Choice]
EPISODES = st.lists(st.integers(0, 12), min_size=1, max_size=60)


def finished_first(groups: Sequence[Candidate], step: int, groups_per_step: int) -> Choice:
    """The rule switched off: a step takes whatever is ready."""
    ready = [group.id for group in groups if group.ready][:groups_per_step]
    return Choice(ready if len(ready) == groups_per_step else None)


@dataclass
class Group:
    id: str
    deadline: int
    ready_at: int
    episode: int


@dataclass
class Run:
    """A dispatcher that starts every group it may, and a trainer. `late`: trained on after their deadline."""

    episodes: list[int]  # how many ticks each group takes
    groups_per_step: int
    max_staleness: int
    untaken: list[Group] = field(default_factory=list)
    leased: list[Group] = field(default_factory=list)
    late: list[Group] = field(default_factory=list)
    started: int = 0
    version: int = 0
    ticks: int = 0

    def admit(self) -> None:
        bound = (self.max_staleness + 1) * self.groups_per_step
        while self.started < len(self.episodes) and len(self.untaken) + len(self.leased) < bound:
            episode = self.episodes[self.started]
            deadline = self.version + self.max_staleness + 1
            self.untaken.append(Group(f"{self.started}", deadline, self.ticks + episode, episode))
            self.started += 1

    def commit(self) -> None:
        if self.leased:
            self.version += 1
            self.late += [group for group in self.leased if group.deadline < self.version]
            self.leased = []

    def lease(self, rule: Rule) -> None:
        candidates = [Candidate(group.id, group.deadline, group.ready_at <= self.ticks) for group in self.untaken]
        taken = set(rule(candidates, self.version + 1, self.groups_per_step).take or [])
        self.leased = [group for group in self.untaken if group.id in taken]
        self.untaken = [group for group in self.untaken if group.id not in taken]

    def play(self, rule: Rule) -> Run:
        most = sum(self.episodes) + 2 * len(self.episodes) + 2
        while self.version * self.groups_per_step < len(self.episodes):
            assert self.ticks < most, "nothing moves any more"
            self.admit()  # while the step runs, and after it
            self.commit()
            self.admit()
            self.lease(rule)
            self.ticks += 1
        return self


def simulate(rule: Rule, episodes: list[int], groups_per_step: int, max_staleness: int) -> Run:
    episodes = episodes[: len(episodes) // groups_per_step * groups_per_step]
    return Run(episodes, groups_per_step, max_staleness).play(rule)


@settings(max_examples=300, deadline=None)
@given(EPISODES, st.integers(1, 4), st.integers(0, 3))
@example([9, 0, 0, 0, 0, 0, 0, 0], 1, 1)
def test_no_group_is_over_its_deadline_and_every_run_ends(
    episodes: list[int], groups_per_step: int, max_staleness: int
) -> None:
    assert simulate(choose_groups, episodes, groups_per_step, max_staleness).late == []


def test_without_the_rule_long_episodes_get_too_old() -> None:
    """One episode in eight takes ten times as long. The rule costs time, and only without it groups are late."""
    episodes = [10 if index % 8 == 3 else 1 for index in range(160)]
    off, on = (simulate(rule, episodes, 4, 2) for rule in (finished_first, choose_groups))
    assert on.late == [] and on.started == off.started == 160
    assert len(off.late) > 10 and {group.episode for group in off.late} == {10}
    assert on.ticks > off.ticks


def fits(deadlines: Sequence[int], first: int, groups_per_step: int) -> bool:
    """Brute force: is there any way to put these groups into steps from `first` on?"""
    room: dict[int, int] = {}

    def place(index: int) -> bool:
        if index == len(deadlines):
            return True
        for step in range(first, deadlines[index] + 1):
            if room.get(step, 0) < groups_per_step:
                room[step] = room.get(step, 0) + 1
                if place(index + 1):
                    return True
                room[step] -= 1
        return False

    return place(0)


def best_by_brute_force(groups: Sequence[Candidate], step: int, groups_per_step: int) -> list[str]:
    """The oldest ready groups that can be taken while the others still fit; nothing if there is no such choice."""
    ready = [group for group in sorted(groups, key=lambda group: group.deadline) if group.ready]
    for picked in itertools.combinations(ready, groups_per_step):  # oldest first
        left = [group.deadline for group in groups if group not in picked]
        if fits(left, step + 1, groups_per_step):
            return [group.id for group in picked]
    return []


@settings(max_examples=400, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 4), st.booleans()), max_size=7), st.integers(1, 3))
def test_a_step_takes_the_same_groups_as_a_search_of_all_choices(
    drawn: list[tuple[int, bool]], groups_per_step: int
) -> None:
    groups = [Candidate(f"{index}", deadline, ready) for index, (deadline, ready) in enumerate(drawn)]
    choice = choose_groups(groups, 1, groups_per_step)
    if fits([group.deadline for group in groups], 1, groups_per_step):  # admission sees to that
        assert (choice.take or []) == best_by_brute_force(groups, 1, groups_per_step)
    ready = {group.id for group in groups if group.ready}
    assert set(choice.take or []) <= ready and ready.isdisjoint(choice.due)
    assert bool(choice.take) + bool(choice.due) == (len(ready) >= groups_per_step)  # it knows what it waits for


def test_a_younger_group_may_overtake_until_the_older_one_is_due() -> None:
    groups = [Candidate("a", 4, False), Candidate("b", 4, True), Candidate("c", 5, True)]
    assert choose_groups(groups, 3, 1) == Choice(["b"])
    assert choose_groups([groups[0], groups[2]], 4, 1) == Choice(None, ["a"])
    assert choose_groups([Candidate("a", 4, True), groups[2]], 4, 1) == Choice(["a"])
    assert choose_groups(groups[:1], 4, 1) == Choice(None)  # nothing else is ready: an ordinary wait


def test_groups_that_are_already_late_do_not_stop_the_run() -> None:
    """A run that began under another rule may have them. They go first."""
    late = [Candidate("a", 2, True), Candidate("b", 2, True), Candidate("c", 9, True)]
    assert choose_groups(reversed(late), 5, 1) == Choice(["b"])
    assert choose_groups([Candidate("a", 2, False), late[2]], 5, 1) == Choice(None, ["a"])


def test_a_step_runs_short_only_when_no_other_group_can_come() -> None:
    groups = [Candidate("a", 4, True), Candidate("b", 4, False)]
    assert choose_groups(groups[:1], 3, 2) == Choice(None)
    assert choose_groups(groups, 3, 2, more=False) == Choice(["a"])  # b fits into step 4
    assert choose_groups(groups, 4, 2, more=False) == Choice(None)  # b is due
    assert choose_groups(groups[1:], 3, 2, more=False) == Choice(None)  # b may have signal
    assert choose_groups([], 3, 2, more=False) == Choice([])


@dataclass
class Sparse:
    """A run by the rules of trajectories/staleness.py in which some groups have no signal: the trainer closes them."""

    pace: Pace
    episodes: list[tuple[int, bool]]  # ticks, and whether there is signal; repeated
    running: dict[int, tuple[int, int]] = field(default_factory=dict)  # group → its deadline, the tick of its end
    ready: dict[int, int] = field(default_factory=dict)  # group → its deadline; only those with signal
    staleness: list[int] = field(default_factory=list)  # of each group that was trained on
    left: list[int] = field(default_factory=list)  # groups that ran while each step was trained
    started: int = 0
    committed: int = 0
    leased: int = 0

    def tick(self, now: int) -> None:
        for group, (deadline, end) in list(self.running.items()):
            if end <= now:
                del self.running[group]
                if self.episodes[group % len(self.episodes)][1]:
                    self.ready[group] = deadline
        self.admit(now)
        more = self.started < self.pace.most_started(self.committed)
        untaken = {group: Candidate(str(group), deadline, False) for group, (deadline, _) in self.running.items()}
        untaken |= {group: Candidate(str(group), deadline, True) for group, deadline in self.ready.items()}
        queue = [untaken[group] for group in sorted(untaken)]
        take = choose_groups(queue, self.committed + 1, self.pace.groups_per_step, more).take
        if take is not None:
            self.train([int(group) for group in take], now)

    def admit(self, now: int) -> None:
        while self.started < self.pace.most_started(self.committed) and len(self.running) + len(
            self.ready
        ) + self.leased < self.pace.most_open(self.committed):
            ticks, _ = self.episodes[self.started % len(self.episodes)]
            self.running[self.started] = self.pace.deadline(self.committed), now + 1 + ticks
            self.started += 1

    def train(self, groups: list[int], now: int) -> None:
        deadlines = [self.ready.pop(group) for group in groups]
        step = self.committed + 1
        assert all(deadline >= step for deadline in deadlines)
        self.staleness += [step + self.pace.max_staleness - deadline for deadline in deadlines]
        self.leased = len(groups)
        self.admit(now)  # while the step runs
        self.left.append(len(self.running))
        self.leased, self.committed = 0, step


def play(pace: Pace, episodes: list[tuple[int, bool]]) -> Sparse:
    run, steps = Sparse(pace, episodes), pace.steps
    assert steps is not None
    for now in range(20 * steps * pace.groups_per_step * (1 + max(ticks for ticks, _ in episodes))):
        if run.committed == steps:
            return run
        run.tick(now)
    raise AssertionError("nothing moves any more")


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.booleans()), min_size=1, max_size=24),
    st.integers(1, 4),
    st.integers(0, 3),
    st.integers(1, 12),
)
def test_groups_without_signal_make_no_token_too_old_and_leave_nothing_behind(
    episodes: list[tuple[int, bool]], groups_per_step: int, max_staleness: int, steps: int
) -> None:
    run = play(Pace(groups_per_step, 2, max_staleness, steps), episodes)
    assert run.running == {} and run.ready == {}, "the last step waits for what is open"


def test_engines_are_busy_while_a_step_trains_although_few_groups_have_signal() -> None:
    """One group in six has signal, as in the first steps on hard tasks. Every step runs short."""
    episodes = [(2 + index % 5, index % 6 == 0) for index in range(30)]
    run = play(Pace(16, 16, max_staleness=2, steps=40), episodes)
    assert min(run.left[:-2]) >= 24, "of 48 that may be open"
    assert max(run.staleness) in (1, 2) and statistics.mean(run.staleness) > 0.5
    assert play(Pace(16, 16, max_staleness=0, steps=40), episodes).left == [0] * 40, "0 is synchronous"
