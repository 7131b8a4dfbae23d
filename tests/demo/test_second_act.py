"""The second act goes on where it was killed. The service and its users are a stand-in here; the journal and the files
are real. tests/e2e/test_second_act.py plays it with real processes."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from rollmill.dashboard.report_run import ACCEPTANCE
from rollmill.demo import second_act
from rollmill.demo.simulated_users import PopulationFile
from rollmill.runs.cycle_journal import Journal
from rollmill.runs.run import RunDirectory
from rollmill.storage.database import open_database
from tests.runs.conftest import make_config

STATES = ("distilling", "training", "gating", "canary", "promoting", "promoted")


class StandInProduction:
    """A measurement finds the version that is live. `kill`: what it does not come back from."""

    def __init__(self, run: RunDirectory) -> None:
        self.journal = Journal(open_database(run.database_url), run.id)
        self.did: list[str] = []
        self.live, self.kill = "midtrain@1", ""

    def measure(self, population: PopulationFile, count: int) -> dict[str, list[bool]]:
        self._do(f"measure {self.live}")
        return {f"{self.live} {number}": [True] for number in range(count)}

    def drive(self, cycles: int, population: Callable[[str], PopulationFile]) -> None:
        cycle = self.journal.begin({}, "test")
        self._do(f"drive cycle {cycle.number}")
        for state in STATES:
            cycle = self.journal.move(cycle, state, "test")
        self.live = f"cycle-{cycle.number}@4"

    def _do(self, what: str) -> None:
        self.did.append(what)
        if what == self.kill:
            self.kill = ""
            raise KeyboardInterrupt


@pytest.mark.parametrize("kill", ["measure midtrain@1", "drive cycle 1", "measure cycle-1@4", "nothing"])
def test_a_second_act_that_was_killed_has_one_cycle_and_measures_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kill: str
) -> None:
    run = RunDirectory.create(tmp_path, make_config())
    production = StandInProduction(run)
    production.kill = kill
    monkeypatch.setattr(second_act, "open_production", lambda *_, **__: contextlib.nullcontext(production))
    with contextlib.suppress(KeyboardInterrupt):
        second_act.live_cycle(run, print, measured=2)
    for _ in range(2):  # the second time there is nothing left to do
        second_act.live_cycle(run, print, measured=2)
    whole = ["measure midtrain@1", "drive cycle 1", "measure cycle-1@4"]
    assert production.did == sorted(whole + [kill] * (kill in whole), key=whole.index), "what was killed is done again"
    kept = json.loads((run.path / ACCEPTANCE).read_text())
    assert kept["before"] == {"midtrain@1 0": [True], "midtrain@1 1": [True]}
    assert kept["after"] == {"cycle-1@4 0": [True], "cycle-1@4 1": [True]}
    assert kept["users"] == "simulated" and len(production.journal.history()) == 1 + len(STATES)


def test_an_act_that_is_played_after_an_earlier_cycle_drives_one_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDirectory.create(tmp_path, make_config())
    production = StandInProduction(run)
    production.drive(1, lambda state: pytest.fail("nobody comes"))
    monkeypatch.setattr(second_act, "open_production", lambda *_, **__: contextlib.nullcontext(production))
    second_act.live_cycle(run, print, measured=1)
    assert production.did == ["drive cycle 1", "measure cycle-1@4", "drive cycle 2", "measure cycle-2@4"]
