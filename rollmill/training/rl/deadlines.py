"""Which groups a step takes: earliest deadline first, so that no token gets too old.

A group that is admitted when version v is committed has tokens of version v or newer. Step n trains from version n − 1,
so step v + max_staleness + 1 is the last one that may train on the group: its deadline.

A step takes ready groups, oldest first. A younger group may overtake an unfinished one only while, for every deadline
d, the groups due by d that are left over still fit into the steps up to d. Otherwise the step waits for those that are
due. Without this rule a step takes whatever finishes first. Long episodes then wait until they are too old, and the
policy learns less from them.

    groups_per_step = 1, next step 3     a: due 4, running     b: due 4, ready     c: due 5, ready
    step 3 takes b, because a still fits into step 4. Step 4 waits for a, although c is ready.

This always works out, because of the rule for admission: at most (max_staleness + 1) · groups_per_step groups are open,
so all of them fit into the steps up to the newest group's deadline.

Where few groups have signal, no further group may start before a step has found enough (trajectories/staleness.py). It
then runs short. It does not wait for the groups that still run, if they fit into the steps after it: so engines are
busy while it trains, and the next step finds groups that have ended meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Candidate(NamedTuple):
    id: str
    deadline: int  # the last step that may train on it
    ready: bool


class Choice(NamedTuple):
    take: list[str] | None  # what the step trains on; None: wait
    due: Sequence[str] = ()  # enough groups are ready, but these must not be overtaken any more


def choose_groups(groups: Iterable[Candidate], step: int, groups_per_step: int, more: bool = True) -> Choice:
    """`groups`: all that no step has taken yet, oldest first. `step`: the number of the next step. `more`: whether
    other groups may still start before that step; if not, it takes fewer groups once the others fit into later steps.

    Nothing is taken only if none is left: then training ends (training/rl/rl_objective.py). A group that is over its
    deadline is never left behind: it is waited for, and taken first.
    """
    queue = sorted(groups, key=lambda group: group.deadline)  # stable: the older one first
    picked = [group for group in queue if group.ready][:groups_per_step]
    short = len(picked) < groups_per_step
    if short and (more or (queue and not picked)):
        return Choice(None)
    taken = {group.id for group in picked}
    due = _overtaken([group for group in queue if group.id not in taken], step, groups_per_step)
    if due:
        return Choice(None, () if short else due)
    return Choice([group.id for group in picked])


def _overtaken(left: Sequence[Candidate], step: int, groups_per_step: int) -> list[str]:
    """The running groups among the first that do not fit into the steps after `step`. `left` is in deadline order.

    Picked groups have the earliest deadlines of those that are ready. So if these do not fit, no other pick is better.
    """
    for count, group in enumerate(left, start=1):
        if count > groups_per_step * (group.deadline - step):
            running = [each.id for each in left[:count] if not each.ready]
            if running:
                return running
    return []
