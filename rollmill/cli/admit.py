"""What `rollmill trajectories admit` looks at and prints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from rich.console import Console

from rollmill.trajectories.admission import Verdict
from rollmill.trajectories.query import TrajectoryQuery
from rollmill.trajectories.table_rows import TrajectoryRow
from rollmill.trajectories.trajectory_store import TrajectoryStore

PRODUCTION = "production"  # what the gateway lists live traffic under
_WORDS = {"admitted": "admitted", "stale": "stale", "no_room": "no room", "refused": "refused"}


def select(store: TrajectoryStore, query: TrajectoryQuery, run_id: str) -> list[TrajectoryRow]:
    """The rollouts of a run and its production traffic, as far as the query asks for them. Runs may share a database:
    a conversation that names another run, or none, is not taken."""
    rows = store.find(replace(query, of_run=run_id))
    production = store.find(replace(query, run=PRODUCTION, limit=None))
    rows += [row for row in production if row.provenance.get("run") == run_id]
    return rows[: query.limit]


def print_verdicts(verdicts: Sequence[Verdict], dry_run: bool) -> None:
    """One line per decision and reason; every trajectory is in one of them."""
    console = Console(highlight=False, markup=False, soft_wrap=True)
    groups: Counter[tuple[str, str]] = Counter()
    trajectories: Counter[tuple[str, str]] = Counter()
    for each in verdicts:
        groups[each.decision, each.reason] += 1
        trajectories[each.decision, each.reason] += len(each.ids)
    for decision, word in _WORDS.items():
        for key, count in sorted(groups.items()):
            if key[0] == decision:
                console.print(f"{word}: {count} groups, {trajectories[key]} trajectories: {key[1]}")
    total = sum(1 for each in verdicts if each.decision == "admitted")
    verb = "would be admitted" if dry_run else "admitted"
    console.print(f"{total} of {len(verdicts)} groups {verb}" if verdicts else "no graded trajectory matches")
