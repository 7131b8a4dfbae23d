"""The bound on staleness: how many groups a run may have, open at once and started in all. The dispatcher and the
trainer use the same rules; ledger.py checks them in the transaction that starts a group, admission.py applies them to
groups of other runs, training/rl/deadlines.py orders groups by them, and training/batching.py masks single tokens that
are older.

    open      at most groups_per_step · (max_staleness + 1): every open group can meet its deadline
              at most groups_per_step · (steps − committed): the steps that are left can take every open group
    started   at most replacement · groups_per_step · (committed + max_staleness + 1)

So trained plus open groups never exceed steps · groups_per_step. The trainer closes a group that it cannot learn from,
and another one is started in its place. The limit on started groups bounds this: each step has `replacement` times the
groups it needs, and later steps may use what it left over. A step that still finds too few groups runs short. It leaves
groups running that fit into the steps after it (training/rl/deadlines.py). So with max_staleness > 0 engines stay busy.
Where a step would find no group at all, training ends: without a commit no further group may start.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Pace:
    """How much experience a step takes and how old it may be."""

    groups_per_step: int
    group_size: int
    max_staleness: int
    steps: int | None = None  # None: the run has no end
    starts: bool = True  # False: no group is started, all are admitted
    replacement: float = 2.0  # groups started per group that steps train on

    def deadline(self, version: int) -> int:
        """The last step that may train on a group that was admitted when `version` was committed."""
        deadline = version + self.max_staleness + 1
        return deadline if self.steps is None else min(deadline, self.steps)

    def is_last(self, committed: int) -> bool:
        return self.steps is not None and committed >= self.steps

    def is_spent(self, started: int, open_groups: int, committed: int) -> bool:
        """Whether no step can follow `committed`, because nothing is left to take and nothing more may start. Stages
        that start no groups take empty steps instead. The counts are read in this order, each one later."""
        return self.starts and not open_groups and started >= self.most_started(committed)

    def is_full(self, started: int, open_groups: int, committed: int) -> bool:
        """Whether no further group may start."""
        return open_groups >= self.most_open(committed) or started >= self.most_started(committed)

    def most_open(self, committed: int) -> int:
        """How many groups may be running, waiting or leased when step `committed` is the newest committed one."""
        ahead = self.max_staleness + 1
        if self.steps is not None:
            ahead = min(ahead, max(0, self.steps - committed))
        return ahead * self.groups_per_step

    def most_started(self, committed: int) -> int:
        """How many groups may have been started by then, closed ones included."""
        if not self.starts:
            return 0
        return int(self.replacement * self.groups_per_step * (committed + self.max_staleness + 1))
