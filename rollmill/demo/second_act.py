"""The second act of the demo: a small window with summaries, and one whole cycle of real-time RL.

The model of walks.toml is mid-trained and becomes live; this first version passes no gate. Simulated users ask for
walks through nine files, in a window that holds one: so every conversation is a chain of summaries. What they report is
distilled, a candidate is trained, and it passes the gate and a canary, or it does not. Their true acceptance is
measured before and after on the same tasks, by users who report nothing.

    runs/NAME/live/                  a run of its own, inside the demo's
    runs/NAME/live/before.json       the number of the cycle; by task: was the work truly accepted before it
    runs/NAME/live/acceptance.json   the same before and after it

It may be killed at any moment, and goes on where it was: what was measured before the cycle is not measured again, and
a cycle that is over is not followed by another one.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rollmill.config import load_config
from rollmill.dashboard.report_run import ACCEPTANCE, SECOND_ACT
from rollmill.demo.production import open_production, set_live
from rollmill.demo.simulated_users import load_population
from rollmill.launch.supervise import drive
from rollmill.runs.cycle_journal import Journal
from rollmill.runs.run import RunConfig, RunDirectory
from rollmill.types import Version

WALKS = Path(__file__).with_name("walks.toml")
MIDTRAIN = "midtrain"
POPULATION = "walkers"
SETTINGS = (
    f'name="{SECOND_ACT}"',
    f"stages.{MIDTRAIN}.sources.0.keeps=0.8",  # a teacher that users can live with
    "gateway.seal_idle_s=2.0",
    'gateway.consent="train"',  # its users are simulated
    "cycle.enough=320",
    "cycle.steps=8",
    "cycle.lr=5e-4",  # with 8e-4 and more, calls become malformed
    "cycle.settle_s=1.0",
    "cycle.share=0.5",
    "cycle.canary_sessions=64",  # few: the canary stops only a great loss, and proves no gain
    "cycle.max_loss=0.5",
    "evals.tasks=32",
    "evals.attempts=1",
    # few attempts, for a short demo: the bounds are as wide as their noise
    "gate.max_quality_loss=0.15",
    "gate.alpha=0.5",
    "gate.max_more_tokens=1.0",
    "gate.max_more_engine_seconds=1.5",
    "gate.max_more_seconds=1.0",
    "gate.max_more_malformed=0.05",
    "gate.max_more_questions=0.05",
)
BEFORE = "before.json"  # what was measured before the cycle
MEASURED = 96  # users of a measurement
BATCH = 64  # users who come together


def make_run(demo: RunDirectory) -> RunDirectory:
    """The run of the second act, with the demo's seed. One that was interrupted goes on."""
    if (demo.path / SECOND_ACT / "run.json").exists():
        return RunDirectory.open(demo.path / SECOND_ACT)
    config = load_config(RunConfig, WALKS, [*SETTINGS, f"seed={demo.config.seed}"])
    return RunDirectory.create(demo.path, config)


def midtrain(run: RunDirectory, on_tick: Callable[[], None]) -> None:
    """Train the version that is live first."""
    drive(run, on_tick, last=MIDTRAIN)
    head = run.weights().head(MIDTRAIN, run.config.form)
    assert head is not None
    set_live(run, Version(MIDTRAIN, head))


def live_cycle(run: RunDirectory, tell: Callable[[str], None], *, measured: int = MEASURED, batch: int = BATCH) -> None:
    """One cycle, with the true acceptance before and after it."""
    if (run.path / ACCEPTANCE).exists():
        return tell("the cycle of the second act is over, and measured")
    population = load_population(POPULATION)
    with open_production(run, batch, meanwhile=0) as production:
        if not (run.path / BEFORE).exists():
            tell(f"{measured} simulated users measure the live version")
            number = _next_cycle(production.journal)
            _write(run.path / BEFORE, {"cycle": number, "before": production.measure(population, measured)})
        known = json.loads((run.path / BEFORE).read_text())
        cycle = production.journal.get(known["cycle"])
        if cycle is None or not cycle.is_over:
            production.drive(1, lambda state: population)
        tell(f"the same {measured} simulated users measure the version that is live now")
        after = production.measure(population, measured)
    facts = {"users": "simulated", "population": POPULATION, "before": known["before"], "after": after}
    _write(run.path / ACCEPTANCE, facts)


def _next_cycle(journal: Journal) -> int:
    """The number of the cycle that is driven next: one that is not over goes on."""
    cycle = journal.current()
    return 1 if cycle is None else cycle.number + cycle.is_over


def _write(path: Path, tree: dict[str, Any]) -> None:
    """The file appears whole or not at all."""
    draft = path.with_suffix(".new")
    draft.write_text(json.dumps(tree))
    draft.rename(path)
